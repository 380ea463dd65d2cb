"""An episode file: an uncompressed zip archive, written front to back in large blocks past the page cache, and checked.

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
import hashlib
import mmap
import os
import struct
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from headrace import files
from headrace.errors import DataError
from headrace.recording.fields import Array

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
UNREADABLE = (zipfile.BadZipFile, KeyError, ValueError, struct.error, EOFError, OSError, RuntimeError)
"""How an archive that is damaged in its directory shows it."""


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
    try:
        with path.open("rb") as raw, zipfile.ZipFile(raw) as archive:
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
    except UNREADABLE as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: not an episode file, or a damaged one ({error}); {_DAMAGED}") from error


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
