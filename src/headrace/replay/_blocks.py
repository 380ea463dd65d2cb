"""Where the bytes of a store live, and what a directory needs besides them: manifest, commit record, checksums.

A store on disk is consistent after every ``extend``, also if the process is killed in the middle of one: the ring has
a slot that no committed transition refers to, freed side rows rest for one write, and the counters that make a write
count are in a record with two halves, written in turn. This holds for the death of the process. After the loss of
power, pages of files may be older or newer than each other; :class:`Durability` tells
which transitions are whole then.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import shutil
import weakref
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import psutil
from numpy.typing import NDArray

from headrace import files
from headrace.errors import ConfigError, DataError, ShapeError
from headrace.files import FileHash, Lock, Manifest, open_untrusted, read_record, storage_error, write_all
from headrace.history.output import anonymous
from headrace.replay._spec import StoreSpec, ViewSpec

Bytes: TypeAlias = NDArray[np.uint8]
Int64s: TypeAlias = NDArray[np.int64]

COMMIT = "commit"
"""The block whose content makes everything else count."""
KEPT = "kept"
"""The block of :class:`Durability`."""
KEPT_ROWS = 5
MANIFEST = "manifest.json"
MAIN = "main"
"""The sampler that every store has."""
VERSION = 3
_BEFORE_KEPT = 2
"""The version of stores without a block ``kept``, which get one when they are opened to be written."""
_FORMAT = "headrace-replay"
_BLOCK = 1 << 20


class Allocator:
    """Hands out named, zeroed blocks of bytes: anonymous memory, of which untouched pages cost nothing.

    A block lives as long as an array over it.
    """

    def __init__(self, blocks: Mapping[str, Bytes] | None = None) -> None:
        """``blocks``: what blocks of these names begin with, for copies of a buffer."""
        self._blocks = blocks or {}

    def allocate(self, name: str, nbytes: int, /) -> Bytes:
        """Return a block of ``nbytes`` bytes, zeros where nothing was written."""
        block = anonymous(nbytes)
        if name in self._blocks:
            block[:] = self._blocks[name]
        return block

    def stored(self, name: str, /) -> Bytes | None:
        """Return a block of any size that there is already; None where there is none."""
        return self._blocks.get(name)

    def free_bytes(self) -> int:
        """Return how much can still be written."""
        return psutil.virtual_memory().available

    def flush(self) -> None:
        """Write out what a file system keeps in its cache."""


class _DirectoryAllocator(Allocator):
    """Blocks that are files of one directory."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    def path(self, name: str) -> Path:
        """Return the file of a block."""
        return self.directory / f"{name}.bin"

    def check_size(
        self, name: str, size: int, nbytes: int, why: str = "the store was made with another layout"
    ) -> None:
        """Refuse a file of another size than the block's."""
        if size != nbytes:
            raise DataError(f"{self.path(name)}: expected {nbytes} bytes, got {size}; {why}")


class FileAllocator(_DirectoryAllocator):
    """Files in one directory, shared with the page cache: what was written survives the process.

    Space is reserved when a file is made: writing into a mapped file that the disk has no room for would end the
    process. Holds the right to write in the directory until :attr:`release` is called, or the allocator is dropped.
    """

    def __init__(self, directory: Path, held: Lock, *, creates: bool) -> None:
        super().__init__(directory)
        self.release = weakref.finalize(self, held.close)
        self.creates = creates
        """Whether files are made; False while a store that exists is mapped, which has all of its files."""
        self.owner = held.owner
        self._maps: dict[str, mmap.mmap] = {}

    def allocate(self, name: str, nbytes: int, /) -> Bytes:
        """Map the file of this name, with its space reserved; see :class:`Allocator`."""
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if self.creates else 0)
        try:
            descriptor = os.open(self.path(name), flags, 0o644)
        except FileNotFoundError:
            raise DataError(f"{self.path(name)}: the file is missing; the store is damaged") from None
        try:
            size = os.fstat(descriptor).st_size
            self.check_size(name, (size or nbytes) if self.creates else size, nbytes)
            try:
                # also for one that exists: the process that made it may have died in between
                files.disk.reserve(descriptor, nbytes)
            except OSError as error:
                os.ftruncate(descriptor, size)
                hint = f"{nbytes / 1e6:,.0f} MB more are needed; what was stored before is intact"
                raise storage_error(self.path(name), error, hint) from error
            self._maps[name] = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED)
        finally:
            os.close(descriptor)
        return np.frombuffer(self._maps[name], np.uint8)

    def add_kept(self, num_envs: int) -> None:
        """Make the block ``kept`` of a store that 0.2 wrote."""
        self.creates = True
        TwoHalves(self, KEPT, KEPT_ROWS, num_envs)
        self.creates = False

    def free_bytes(self) -> int:
        """Return the free space of the file system."""
        return shutil.disk_usage(self.directory).free

    def flush(self) -> None:
        """Sync every file, the commit record last: it must not refer to data that is not there."""
        for name in sorted(self._maps, key=lambda name: name == COMMIT):
            self.flush_block(name)

    def flush_block(self, name: str) -> None:
        """Sync one file."""
        self._maps[name].flush()


class ReadOnlyAllocator(_DirectoryAllocator):
    """Files that another process writes to, mapped for reading."""

    def __init__(self, directory: Path, *, lacks_kept: bool) -> None:
        super().__init__(directory)
        self._lacks_kept = lacks_kept

    def allocate(self, name: str, nbytes: int, /) -> Bytes:
        """Map the file of this name; see :class:`Allocator`."""
        if name == KEPT and self._lacks_kept:
            return anonymous(nbytes)
        block = _map_file(self.path(name), mmap.ACCESS_READ)
        if not block.size:
            raise FileNotFoundError(errno.ENOENT, "the file is being made", str(self.path(name)))
        self.check_size(name, block.size, nbytes)
        return block


class CheckpointAllocator(_DirectoryAllocator):
    """Files of a saved buffer, mapped copy-on-write: read when touched, never written back."""

    def allocate(self, name: str, nbytes: int, /) -> Bytes:
        """Map the saved block, or anonymous memory where the checkpoint has none; see :class:`Allocator`."""
        block = self.stored(name)
        if block is None:
            return anonymous(nbytes)
        self.check_size(name, block.size, nbytes, "the checkpoint is incomplete")
        return block

    def stored(self, name: str, /) -> Bytes | None:
        """See :class:`Allocator`."""
        return _map_file(self.path(name), mmap.ACCESS_COPY) if self.path(name).exists() else None


def _map_file(path: Path, access: int) -> Bytes:
    """Map a whole file, which may be empty."""
    with open_untrusted(path) as file:
        empty = not os.fstat(file.fileno()).st_size
        return np.empty(0, np.uint8) if empty else np.frombuffer(mmap.mmap(file.fileno(), 0, access=access), np.uint8)


class Namespace:
    """A part of an allocator: block names get a prefix, and what was handed out is known."""

    def __init__(self, memory: Allocator, prefix: str) -> None:
        self._memory, self._prefix = memory, prefix
        self.blocks: dict[str, Bytes] = {}

    def allocate(self, name: str, nbytes: int, /) -> Bytes:
        """Return the block of this name, the same one every time; see :class:`Allocator`.

        An index that is made anew goes on with its state.
        """
        name = self._prefix + name
        if name not in self.blocks:
            self.blocks[name] = self._memory.allocate(name, nbytes)
        return self.blocks[name]

    @property
    def nbytes(self) -> int:
        """Bytes handed out."""
        return sum(block.nbytes for block in self.blocks.values())


class TwoHalves:
    """Two copies of a table of int64 (rows, N), each with a sequence number and a checksum; the newer whole one counts.

    Layout of a half, int64: sequence, the table row by row, crc32 of what precedes.
    """

    def __init__(self, memory: Allocator, name: str, rows: int, num_envs: int) -> None:
        self._shape, self._size = (rows, num_envs), rows * num_envs + 2
        self.block = memory.allocate(name, 2 * self._size * 8)
        self._halves = self.block.view(np.int64).reshape(2, self._size)
        self._latest = np.zeros(self._size, np.int64)
        self.refresh()
        if not self._latest[0] and self.block.any():
            raise DataError(f"{name}: expected a record with a valid checksum, got none; the store is damaged")

    @property
    def sequence(self) -> int:
        """Writes so far."""
        return int(self._latest[0])

    def write(self, *rows: Int64s) -> None:
        """Make these rows, (N,) each, the state that a reopened store has."""
        half = np.empty(self._size, np.int64)
        half[0] = self._latest[0] + 1
        half[1:-1].reshape(self._shape)[:] = rows
        half[-1] = zlib.crc32(half[:-1].tobytes())
        self._halves[half[0] % 2] = half
        self._latest = half

    def refresh(self) -> None:
        """Look for a newer record, which another process may have written."""
        for half in self._halves.copy():
            if half[0] > self._latest[0] and int(half[-1]) == zlib.crc32(half[:-1].tobytes()):
                self._latest = half

    def read(self) -> Int64s:
        """Return the table of the last complete write, (rows, N), fresh; zeros where there was none."""
        return self._latest[1:-1].reshape(self._shape).copy()


_AHEAD = 16
"""A limit is set a sixteenth of the ring ahead, and at least 64 transitions, so that syncing costs nothing."""


class Durability:
    """The floors of the environments, and what a flush made safe; owns the block ``kept``.

    The death of a process loses nothing that was committed. When a machine loses power, the disk has some pages of the
    moment of the last ``flush`` and some that were written later. Two numbers per environment, synced before they are
    needed, bound what may be later: before the ring reaches position ``limit``, a new limit is synced. A transition p
    is then as it was flushed if it was flushed and no write below ``limit`` can have replaced it: ``limit - L <= p``.
    The last flushed transition is given up as well, since a cut replaces the frame after it.

    Rows of its record: floors; counts at the last flush; counts when the limit was set, below which no later commit
    can be; the limit; the boot of the machine that wrote since the last flush, 0 if none did.
    """

    def __init__(self, memory: Allocator, length: int, num_envs: int) -> None:
        self._record = TwoHalves(memory, KEPT, KEPT_ROWS, num_envs)
        self._memory, self._length = memory, length
        self._ahead = max(length // _AHEAD, 64)
        self._floors, self._flushed, self._base, self._limit, self._boot = self._record.read()
        if not self._record.sequence:
            self._limit[:] = length  # writes below it replace nothing

    @property
    def block(self) -> Int64s:
        """The memory of the record."""
        return self._record.block.view(np.int64)

    def floors(self) -> Int64s:
        """Return the positions at which what is stored may begin, (N,), as they were written last."""
        self._record.refresh()
        return self._record.read()[0]

    def set_floors(self, floors: Int64s) -> None:
        """Give up everything below these positions, (N,)."""
        self._floors[:] = floors
        self._write()

    def guard(self, counts: Int64s, stop: Int64s) -> None:
        """Sync a new limit where transitions up to ``stop`` (N,) are about to be written after ``counts``."""
        over = (stop > self._limit).any()
        if over:
            self._base[:], self._limit[:] = counts, stop + self._ahead
        if over or not self._boot[0]:
            self._boot[:] = _boot()
            self._write(sync=True)

    def set_flushed(self, counts: Int64s) -> None:
        """Record that everything below ``counts`` (N,) was synced."""
        self._flushed[:], self._boot[:] = counts, 0
        self._write(sync=True)

    def recover(self, counts: Int64s, trust_unflushed: bool | None, where: Path) -> tuple[Int64s, Int64s] | None:
        """Return which positions are whole, from and to (N,) each, or None for everything that was committed.

        Raises:
            DataError: the machine was restarted since transitions were written that no flush covers, and the caller
                did not decide about them; or the commit record is older than the other files.
        """
        stale = bool((counts < self._base).any())
        restarted = self._boot[0] not in (0, _boot())
        if not stale and (not restarted or trust_unflushed):
            self._boot[:] = _boot() if self._boot[0] else 0
            self._write(sync=True)
            return None
        low, high = np.maximum(self._floors, self._limit - self._length), self._flushed - 1
        low, high = np.where(low < high, (low, high), self._limit)
        if stale and trust_unflushed is not False:
            raise DataError(
                f"{where}: the commit record is older than the other files, as after the loss of power; "
                f"ReplayBuffer.open(…, trust_unflushed=False) keeps {int((high - low).sum())} flushed transitions"
            )
        if trust_unflushed is None:
            raise DataError(
                f"{where}: transitions were written after the last flush() or close(), and the machine was restarted "
                "since. If it was shut down properly, or the "
                "directory moved to another machine, pass ReplayBuffer.open(…, trust_unflushed=True); after the loss "
                f"of power, trust_unflushed=False keeps {int((high - low).sum())} flushed transitions"
            )
        return low, high

    def _write(self, *, sync: bool = False) -> None:
        self._record.write(self._floors, self._flushed, self._base, self._limit, self._boot)
        if sync and isinstance(self._memory, FileAllocator):
            self._memory.flush_block(KEPT)


def _boot() -> int:
    """Return a number that changes when the machine is started."""
    path = Path("/proc/sys/kernel/random/boot_id")
    text = path.read_text() if path.exists() else str(round(psutil.boot_time()))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big") + 1


@dataclass(frozen=True, slots=True)
class _About:
    """What a manifest says of a store."""

    store: StoreSpec
    views: dict[str, ViewSpec]


def write_manifest(
    path: Path, spec: StoreSpec, views: Mapping[str, ViewSpec], files: Mapping[str, FileHash] | None = None
) -> None:
    """Describe a store and the samplers that read it: live if it lists no files, else a checkpoint."""
    about = asdict(_About(spec, dict(views)), dict_factory=_list_dtypes)
    Manifest(format=_FORMAT, version=VERSION, about=about, files=files or {}).write(path / MANIFEST)


def _list_dtypes(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: str(value).removeprefix("torch.") if key == "dtype" else value for key, value in pairs}


def read_manifest(path: Path, *, live: bool) -> tuple[StoreSpec, dict[str, ViewSpec], Manifest]:
    """Read and check a manifest: the store, the samplers that read it, and the saved files (none for a live store)."""
    manifest = Manifest.read(path / MANIFEST, format=_FORMAT, versions=(VERSION, _BEFORE_KEPT))
    if live == bool(manifest.files):
        found, use = ("a checkpoint, not a live store", "load") if live else ("a live store, not a checkpoint", "open")
        raise DataError(f"{path}: this is {found}; use ReplayBuffer.{use}")
    try:
        about = read_record(_About, manifest.about, str(path / MANIFEST))
        about.store.check()
        for view in about.views.values():
            view.check(about.store.num_envs)
    except (ConfigError, ShapeError) as error:
        raise DataError(f"{path / MANIFEST}: {error}") from error
    if MAIN not in about.views:
        raise DataError(f"{path / MANIFEST}: expected a sampler named {MAIN!r}, got {sorted(about.views)}")
    # both become names of files
    wrong = [name for name in about.views if not name.isidentifier()]
    wrong += [name for name in manifest.files if name != Path(name).name]
    if wrong:
        raise DataError(f"{path / MANIFEST}: expected plain names of samplers and files, got {wrong[0]!r}")
    return about.store, about.views, manifest


def lacks_kept(manifest: Manifest) -> bool:
    """Return whether 0.2 wrote a store."""
    return manifest.version == _BEFORE_KEPT


def save_block(path: Path, name: str, block: Bytes) -> FileHash:
    """Write one block as a sparse file, leaving holes for runs of zeros; the caller syncs it."""
    digest = hashlib.sha256()
    handle = os.open(path / f"{name}.bin", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for start in range(0, block.nbytes, _BLOCK):
            piece = block[start : start + _BLOCK]
            digest.update(piece.data)
            if piece.any():
                os.lseek(handle, start, os.SEEK_SET)
                write_all(handle, piece.data)
        os.ftruncate(handle, block.nbytes)
    finally:
        os.close(handle)
    return FileHash(block.nbytes, digest.hexdigest())


def holds_frames(name: str) -> bool:
    """Return whether a saved file has frames: large, and checked only on request."""
    return name.startswith("frames")
