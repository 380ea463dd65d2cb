"""Where the bytes live: anonymous memory, files on disk, or a checkpoint mapped copy-on-write."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import weakref
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from headrace import files
from headrace._kernels.gather import Bytes
from headrace.buffers._output import anonymous
from headrace.errors import CapacityError, DataError
from headrace.files import Lock, storage_error

_SUFFIX = ".bin"
COMMIT = "commit"
"""The block whose content makes everything else count."""


class Memory:
    """Hands out named, zeroed blocks of bytes: anonymous memory, of which untouched pages cost nothing.

    A block lives as long as an array over it.
    """

    def __init__(self, blocks: Mapping[str, Bytes] | None = None) -> None:
        """``blocks``: what blocks of these names begin with, for copies of a buffer."""
        self._blocks = blocks or {}

    def allocate(self, name: str, nbytes: int, /) -> Bytes:
        """A block of ``nbytes`` bytes, zeros where nothing was written."""
        block = anonymous(nbytes)
        if name in self._blocks:
            block[:] = self._blocks[name]
        return block

    def stored(self, name: str, /) -> Bytes | None:
        """A block of any size that there is already; None where there is none."""
        return self._blocks.get(name)

    def free_bytes(self) -> int:
        """How much can still be written."""
        return available_memory()

    def flush(self) -> None:
        """Write out what a file system keeps in its cache."""


class FileMemory(Memory):
    """Files in one directory, shared with the page cache: what was written survives the process.

    Space is reserved when a file is made: writing into a mapped file that the disk has no room for would end the
    process. Holds the right to write in the directory until :attr:`release` is called, or nobody holds the memory.
    """

    def __init__(self, directory: Path, held: Lock) -> None:
        super().__init__()
        self.directory = directory
        self.release = weakref.finalize(self, held.close)
        self._maps: dict[str, mmap.mmap] = {}

    def allocate(self, name: str, nbytes: int, /) -> Bytes:
        """Map the file of this name, with its space reserved; see :class:`Memory`."""
        path = self.directory / (name + _SUFFIX)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if size not in (0, nbytes):
                raise DataError(f"{path}: expected {nbytes} bytes, got {size}; the store was made with another layout")
            try:
                # also for one that exists: the process that made it may have died in between
                files.disk.reserve(descriptor, nbytes)
            except OSError as error:
                os.ftruncate(descriptor, size)
                hint = f"{nbytes / 1e6:,.0f} MB more are needed; what was stored before is intact"
                raise storage_error(path, error, hint) from error
            self._maps[name] = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED)
        finally:
            os.close(descriptor)
        return np.frombuffer(self._maps[name], np.uint8)

    def free_bytes(self) -> int:
        """Free space of the file system."""
        return shutil.disk_usage(self.directory).free

    def flush(self) -> None:
        """Sync every file, the commit record last: it must not speak of data that is not there."""
        for name in sorted(self._maps, key=lambda name: name == COMMIT):
            self._maps[name].flush()


class ReadOnlyMemory(Memory):
    """Files that another process writes to, mapped for reading."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    def allocate(self, name: str, nbytes: int, /) -> Bytes:
        """Map the file of this name; see :class:`Memory`."""
        path = self.directory / (name + _SUFFIX)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise FileNotFoundError(errno.ENOENT, "the file is being made", str(path))
            if size != nbytes:
                raise DataError(f"{path}: expected {nbytes} bytes, got {size}; the store was made with another layout")
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


class Namespace:
    """A part of a memory: block names get a prefix, and what was handed out is known."""

    def __init__(self, memory: Memory, prefix: str) -> None:
        self._memory, self._prefix = memory, prefix
        self.blocks: dict[str, Bytes] = {}

    def allocate(self, name: str, nbytes: int, /) -> Bytes:
        """The block of this name, the same one every time, so that an index that is made anew goes on with its state;
        see :class:`Memory`."""
        name = self._prefix + name
        if name not in self.blocks:
            self.blocks[name] = self._memory.allocate(name, nbytes)
        return self.blocks[name]

    @property
    def nbytes(self) -> int:
        """Bytes handed out."""
        return sum(block.nbytes for block in self.blocks.values())


class CheckpointMemory(Memory):
    """Files of a saved buffer, mapped copy-on-write: read when touched, never written back."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    def allocate(self, name: str, nbytes: int, /) -> Bytes:
        """Map the saved block, or anonymous memory where the checkpoint has none; see :class:`Memory`."""
        block = self.stored(name)
        if block is None:
            return anonymous(nbytes)
        if block.nbytes != nbytes:
            path = self.directory / (name + _SUFFIX)
            raise DataError(f"{path}: expected {nbytes} bytes, got {block.nbytes}; the checkpoint is incomplete")
        return block

    def stored(self, name: str, /) -> Bytes | None:
        """See :class:`Memory`."""
        path = self.directory / (name + _SUFFIX)
        if not path.exists():
            return None
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return np.empty(0, np.uint8)
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)


def available_memory() -> int:
    """Bytes that can be used without swapping, from ``/proc/meminfo``."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise CapacityError("/proc/meminfo: expected a line MemAvailable; cannot tell how much memory is free")
