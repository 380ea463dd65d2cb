"""One episode, one file: an uncompressed ``.npz`` whose bytes depend on the episode alone.

Every member is a plain ``.npy`` array named by its field; ``episode.json`` says what the episode is. ``numpy.load``
reads it without us. Dates inside the archive are fixed and nothing of the machine, the slot or the time of day gets in,
so equal episodes give equal bytes.

An episode file: an uncompressed zip archive, written front to back in large blocks past the page cache, and checked.

``zipfile`` needs half a millisecond of Python for a small archive, which is time taken from the thread that steps. Here
a member is copied once, into the block that goes to the disk, and its checksum is taken there, while the processor
still has it at hand. Dates are fixed.

Episodes are rarely read right after recording. Copying it into the page cache first takes about a third more of
the processor, which the physics wants. Where the file system has no such writes (some network disks), and for what is
left beside whole blocks, the usual way is taken; the bytes are the same.

The archive's directory has the size and the CRC-32 of every member, and nothing in the file but its members is not
determined by it: the hash of the directory stands for the file. Hashing all bytes would take longer than all the rest
of writing them, and what it would find beside a disk's faults, a forger, could write the journal as well.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import io
import json
import math
import mmap
import os
import struct
import tokenize
import zipfile
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeAlias, cast

import numpy as np
from annotated_types import Ge, Lt

from headrace import files
from headrace.errors import DataError
from headrace.files import open_untrusted, parsing, read_record
from headrace.recording.fields import NUMBERS, Array, Field, Text, is_text

try:
    from isal.isal_zlib import crc32  # a tenth of the time, which the physics wants; the extra "record" brings it
except ImportError:
    from zlib import crc32

ZIP64_FROM = 0xFFFFFFFF
"""Sizes and offsets from here on do not fit the plain records."""
_DATE = 0 << 9 | 1 << 5 | 1  # 1 January 1980, the first that zip has
_TIME = 0
_FLAGS = 0x800  # names are UTF-8
_MODE = 0o100644 << 16
_UNIX = 3 << 8
_CHECKSUM = slice(14, 18)
"""Where a local header has it."""
_DAMAGED = "the file is damaged, restore it from a copy"


@dataclass(frozen=True, slots=True)
class Member:
    """A file of the archive: a header, and after it the elements of arrays of any strides, which are borrowed."""

    name: str
    header: bytes
    arrays: Sequence[Array] = ()


def write_archive(file: BlockFile, members: Iterable[Member]) -> str:
    """Write an archive; returns the SHA-256 of its directory."""
    directory: list[bytes] = []
    for member in members:
        name, offset, arrays = member.name.encode(), file.size, member.arrays
        size = len(member.header) + sum([array.nbytes for array in arrays])
        begin = _local_header(name, size, 0) + member.header
        if place := file.take(len(begin), size - len(member.header)):
            place[:] = begin
            for array in arrays:
                file.write(array)
            checksum = crc32(file.newest(size))
            place[_CHECKSUM] = checksum.to_bytes(4, "little")
        else:
            checksum = crc32(member.header)
            for array in arrays:
                checksum = crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, checksum)
            begin = _local_header(name, size, checksum) + member.header
            for array in (np.frombuffer(begin, np.uint8), *arrays):
                file.write(array)
        directory.append(_directory_entry(name, size, checksum, offset))
    listing = b"".join(directory)
    file.write(np.frombuffer(listing + _end(len(directory), len(listing), file.size), np.uint8))
    return hashlib.sha256(listing).hexdigest()


def check_archive(path: Path) -> str:
    """Compare every byte of an archive of ours with its directory; returns the SHA-256 of the directory."""
    with parsing(path), open_untrusted(path) as raw, zipfile.ZipFile(raw) as archive:
        directory: list[bytes] = []
        offset = 0
        for info in archive.infolist():
            name = info.filename.encode()
            header = _local_header(name, info.file_size, info.CRC)
            raw.seek(offset)
            whole = info.header_offset == offset and raw.read(len(header)) == header
            if not whole or _checksum(raw, info.file_size) != info.CRC:
                raise DataError(f"{path}: the checksum of {info.filename} does not match; {_DAMAGED}")
            directory.append(_directory_entry(name, info.file_size, info.CRC, offset))
            offset += len(header) + info.file_size
        raw.seek(offset)
        listing = b"".join(directory)
        if raw.read() != listing + _end(len(directory), len(listing), offset):
            raise DataError(f"{path}: the directory of the archive is not the one that was written; {_DAMAGED}")
        return hashlib.sha256(listing).hexdigest()


def _checksum(raw: BinaryIO, size: int) -> int:
    """CRC-32 of the next ``size`` bytes, or of those that there are."""
    checksum = 0
    while size and (block := raw.read(min(size, 1 << 20))):
        checksum = crc32(block, checksum)
        size -= len(block)
    return checksum


def _local_header(name: bytes, size: int, checksum: int) -> bytes:
    large = size >= ZIP64_FROM
    extra = struct.pack("<HHQQ", 1, 16, size, size) if large else b""
    shown = 0xFFFFFFFF if large else size
    version = 45 if large else 20
    fields = (version, _FLAGS, 0, _TIME, _DATE, checksum, shown, shown, len(name), len(extra))
    return struct.pack("<IHHHHHIIIHH", 0x04034B50, *fields) + name + extra


def _directory_entry(name: bytes, size: int, checksum: int, offset: int) -> bytes:
    large = size >= ZIP64_FROM or offset >= ZIP64_FROM
    extra = struct.pack("<HHQQQ", 1, 24, size, size, offset) if large else b""
    shown, place = (0xFFFFFFFF, 0xFFFFFFFF) if large else (size, offset)
    version = 45 if large else 20
    head = (_UNIX | version, version, _FLAGS, 0, _TIME, _DATE, checksum, shown, shown, len(name), len(extra))
    return struct.pack("<IHHHHHHIIIHHHHHII", 0x02014B50, *head, 0, 0, 0, _MODE, place) + name + extra


def _end(count: int, size: int, offset: int) -> bytes:
    large = count >= 0xFFFF or size >= ZIP64_FROM or offset >= ZIP64_FROM
    if not large:
        return struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, count, count, size, offset, 0)
    record = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, _UNIX | 45, 45, 0, 0, count, count, size, offset)
    locator = struct.pack("<IIQI", 0x07064B50, 0, offset + size, 1)
    return record + locator + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)


BUFFER_BYTES = 1 << 22
_ALIGNMENT = 4096
_DIRECT_FROM = 1 << 17
"""Below this a write past the page cache saves nothing."""


class BlockBuffer:
    """Aligned memory that files written one after the other share.

    Args:
        nbytes: a multiple of 4096.
    """

    def __init__(self, nbytes: int = BUFFER_BYTES) -> None:
        # a mapping begins at a page, which is what a direct write asks for
        self._mapping = mmap.mmap(-1, nbytes)
        self.bytes = np.frombuffer(self._mapping, np.uint8)
        """uint8 (nbytes,)."""


class BlockFile:
    """A new file, open for writing. Leaving the ``with`` block without an error writes the rest; the caller syncs and
    closes.

    Args:
        handle: borrowed.
        buffer: borrowed; no other file may use it meanwhile.
    """

    def __init__(self, handle: int, buffer: BlockBuffer) -> None:
        self._buffer = buffer.bytes
        self._held = 0
        self._handle = handle
        self.size = 0
        """Bytes written so far."""

    def write(self, piece: Array) -> None:
        """Append the elements of an array in order; they are copied."""
        if piece.nbytes <= len(self._buffer) - self._held:
            self._hold(piece)
            return
        values = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
        while len(values):
            if self._held == len(self._buffer):
                self._write_out(self._held)
            taken = min(len(values), len(self._buffer) - self._held)
            self._hold(values[:taken])
            values = values[taken:]

    def _hold(self, piece: Array) -> None:
        end = self._held + piece.nbytes
        # as elements of their own size: a strided array is copied element by element, not byte by byte
        np.ndarray(piece.shape, piece.dtype, self._buffer.data, self._held)[...] = piece
        self.size += piece.nbytes
        self._held = end

    def take(self, size: int, more: int) -> memoryview | None:
        """Leave ``size`` bytes out, to be filled before ``more`` bytes have been written after them.

        Returns:
            The bytes left out; None if both together are larger than the buffer, and nothing was done.
        """
        if size + more > len(self._buffer) - self._held:
            self._write_out(self._held - self._held % _ALIGNMENT)
        if size + more > len(self._buffer) - self._held:
            return None
        self._held += size
        self.size += size
        return self._buffer.data[self._held - size : self._held]

    def newest(self, size: int) -> memoryview:
        """Return the last bytes written, of those that were taken room for."""
        return self._buffer.data[self._held - size : self._held]

    def __enter__(self) -> BlockFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        if kind is None:
            self._write_out(self._held)

    def _write_out(self, size: int) -> None:
        """Write the first ``size`` bytes of the buffer; the rest moves to its beginning."""
        done = 0
        whole = size - size % _ALIGNMENT
        if whole >= _DIRECT_FROM and self._set_direct(True):
            done = self._write_direct(whole)
            self._set_direct(False)
        while done < size:
            done += files.disk.write(self._handle, self._buffer[done:size].data)
        left = self._held - size
        self._buffer[:left] = self._buffer[size : self._held]
        self._held = left

    def _write_direct(self, size: int) -> int:
        """Write the first ``size`` bytes; returns how many the disk took. The usual way finds out why it took less."""
        try:
            return files.disk.write(self._handle, self._buffer[:size].data)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return 0

    def _set_direct(self, wanted: bool) -> bool:
        flags = fcntl.fcntl(self._handle, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._handle, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        return True


_MOST = 1 << 63
Count: TypeAlias = Annotated[int, Ge(0), Lt(_MOST)]
FORMAT = "headrace-episode"
VERSION = 1
_HEADER = "episode.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeMeta:
    """What an episode is, apart from its arrays."""

    episode_id: Count
    seed: int
    attempt: Count
    """0 unless the same (seed, episode id) was finished before in the same run."""
    length: Annotated[Count, Ge(1)]
    """Steps, T."""
    success: bool | None
    diverged: bool
    episode_return: float
    instruction: Text = ""
    """The task of this episode in words; empty where there is none."""

    @property
    def key(self) -> tuple[int, int, int]:
        """The identity: (seed, episode id, attempt)."""
        return self.seed, self.episode_id, self.attempt

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, as they are written; quicker than ``dataclasses.asdict``."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @property
    def file_name(self) -> str:
        """Name of the episode's file."""
        attempt = f"_try{self.attempt}" if self.attempt else ""
        return f"seed{self.seed}_ep{self.episode_id:08d}{attempt}.npz"


def write_episode_file(
    handle: int, meta: EpisodeMeta, columns: Iterable[tuple[Field, Iterable[Array]]], buffer: BlockBuffer
) -> tuple[int, str]:
    """Write an episode; the caller waits until the disk has it.

    Args:
        handle: of an empty file.
        meta: what the episode is.
        columns: each field with its rows in order, in pieces of any length.
        buffer: borrowed while it is written.

    Returns:
        Size in bytes, and the SHA-256 of the archive's directory, which has the CRC-32 of every member.
    """
    header = {"format": FORMAT, "version": VERSION, **meta.as_dict()}
    members = [Member(_HEADER, json.dumps(header).encode())]
    for field, rows in columns:
        shape = (field.rows(meta.length), *field.shape)
        arrays = [piece for piece in rows if piece.nbytes]
        missing = shape[0] * field.row_bytes - sum([piece.nbytes for piece in arrays])
        if missing:
            raise DataError(f"{field.name}: expected rows for the whole episode, {missing} bytes are missing")
        members.append(Member(f"{field.name}.npy", _array_header(field.dtype, shape), arrays))
    with BlockFile(handle, buffer) as file:
        digest = write_archive(file, members)
    return file.size, digest


@functools.lru_cache(maxsize=256)
def _array_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    content = io.BytesIO()
    # of the array headers that numpy knows, version 1.0 reads everywhere
    description = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(content, description)
    return content.getvalue()


@dataclass(frozen=True, slots=True)
class _Stored:
    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    """Of its header, which the checksum is over, too."""
    checksum: int


_LARGEST_HEADER = 1 << 20
_MOST_DIMENSIONS = 32


class EpisodeFile:
    """An episode on disk, read lazily: opening reads the directory of the archive, an array is read when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stored: dict[str, _Stored] = {}
        with parsing(path), open_untrusted(path) as raw, zipfile.ZipFile(raw) as archive:
            members = {info.filename: info for info in archive.infolist()}
            if len(members) < len(archive.infolist()):
                raise DataError(f"{path}: a name is there twice; the file is damaged")
            self.meta = _read_meta(archive, members[_HEADER], path)
            for info in members.values():
                if info.filename.endswith(".npy"):
                    self._stored[info.filename[:-4]] = _locate(raw, info, path)
        _check_names(self._stored.keys(), path)

    @property
    def names(self) -> list[str]:
        """Paths of the arrays."""
        return list(self._stored)

    def field(self, name: str) -> Field:
        """Dtype and row shape of an array."""
        stored = self._find(name)
        rows = stored.shape[0] - self.meta.length
        if rows not in (0, 1):
            raise DataError(
                f"{self.path}: {name} has {stored.shape[0]} rows, expected {self.meta.length} or one more; "
                "record the episode again"
            )
        return Field(name=name, dtype=stored.dtype, shape=stored.shape[1:], with_first=rows == 1)

    @property
    def fields(self) -> list[Field]:
        """All arrays, in order of name."""
        return [self.field(name) for name in sorted(self._stored)]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Array:
        """Return rows ``start:stop`` of an array, compared with its checksum if they are all; the caller owns them."""
        stored = self._find(name)
        first, last, _ = slice(start, stop).indices(stored.shape[0])
        out = np.empty((max(0, last - first), *stored.shape[1:]), stored.dtype)
        if out.nbytes:
            with open_untrusted(self.path) as raw:
                raw.seek(stored.begin)
                checksum = crc32(raw.read(stored.offset - stored.begin))
                raw.seek(stored.offset + first * (out.nbytes // out.shape[0]))
                content = out.reshape(-1).view(np.uint8).data
                if raw.readinto(content) != out.nbytes:
                    raise DataError(f"{self.path}: {name} ends too early; run 'headrace record verify'")
                if len(out) == stored.shape[0] and crc32(content, checksum) != stored.checksum:
                    raise DataError(f"{self.path}: the checksum of {name} does not match; {_DAMAGED}")
        return out

    def _find(self, name: str) -> _Stored:
        try:
            return self._stored[name]
        except KeyError:
            raise DataError(f"{self.path}: no array {name!r}; it has {', '.join(self._stored)}") from None


def _read_meta(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> EpisodeMeta:
    _check_stored(info, path)
    if info.file_size > _LARGEST_HEADER:
        raise DataError(f"{path}: {_HEADER} has {info.file_size:,} bytes, more than any episode; the file is damaged")
    header: object = json.loads(archive.read(info))
    found = cast("dict[str, Any]", header) if isinstance(header, dict) else {}
    if found.pop("format", None) != FORMAT or found.pop("version", None) != VERSION:
        raise DataError(f"{path}: expected an episode of format {FORMAT} {VERSION}; update headrace")
    return read_record(EpisodeMeta, found, f"{path}: {_HEADER}", strict=True)


def _check_names(names: Collection[str], path: Path) -> None:
    """Refuse paths that mean something to a file system, and arrays that would be inside others."""
    for name in names:
        parts = name.split("/")
        groups = {"/".join(parts[:count]) for count in range(1, len(parts))}
        if not is_text(name) or {"", ".", ".."} & {*parts} or groups & {*names}:
            raise DataError(f"{path}: {name!r} is no name of an array; the file is damaged")


def _check_stored(info: zipfile.ZipInfo, path: Path) -> None:
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.file_size != info.compress_size:
        raise DataError(f"{path}: {info.filename} is compressed or encrypted, which no recorder writes")


def _locate(raw: BinaryIO, info: zipfile.ZipInfo, path: Path) -> _Stored:
    _check_stored(info, path)
    # the archive's directory knows where a member begins; the lengths of its name and extra field stand there
    raw.seek(info.header_offset + 26)
    name, extra = struct.unpack("<HH", raw.read(4))
    begin = info.header_offset + 30 + name + extra
    raw.seek(begin)
    try:
        version = np.lib.format.read_magic(raw)
        if version != (1, 0):
            raise ValueError(f"expected a .npy header of version 1.0, got {version}")
        shape, in_columns, dtype = np.lib.format.read_array_header_1_0(raw)
    # numpy parses the header as Python, and shows how that fails; one that nests too deeply needs too much memory
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError, tokenize.TokenError) as error:
        raise DataError(f"{path}: {info.filename}: not an array ({error}); the file is damaged") from error
    # an empty dimension hides sizes that numpy refuses, and an item without bytes any number of rows
    largest = math.prod(size or 1 for size in shape) * dtype.itemsize
    fits = 0 < largest < _MOST and 0 < len(shape) <= _MOST_DIMENSIONS and min(shape) >= 0
    if dtype.kind not in NUMBERS or in_columns or not fits:
        raise DataError(f"{path}: {info.filename}: expected rows of numbers, got {dtype} {shape}; the file is damaged")
    if raw.tell() - begin + math.prod(shape) * dtype.itemsize != info.file_size:
        raise DataError(
            f"{path}: {info.filename}: {dtype} {shape} does not fill its {info.file_size:,} bytes; the file is damaged"
        )
    return _Stored(raw.tell(), dtype, shape, begin, info.CRC)
