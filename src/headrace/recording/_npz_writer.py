"""An episode file: an uncompressed zip archive, written front to back in large blocks past the page cache, and checked.

``zipfile`` needs half a millisecond of Python for a small archive, which is time taken from the thread that steps. Here
sizes and checksums are known before the first byte is written, so that nothing is patched later. Dates are fixed.

Nobody reads an episode right after it was recorded. Copying it into the page cache first takes about a third more of
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
from types import TracebackType
from typing import BinaryIO, TypeAlias

import numpy as np

from headrace import files
from headrace.errors import DataError

try:
    from isal.isal_zlib import crc32  # a tenth of the time, which the physics wants; the extra "record" brings it
except ImportError:
    from zlib import crc32

Piece: TypeAlias = "bytes | memoryview"

ZIP64_FROM = 0xFFFFFFFF
"""Sizes and offsets from here on do not fit the plain records."""
_DATE = 0 << 9 | 1 << 5 | 1  # 1 January 1980, the first that zip has
_TIME = 0
_FLAGS = 0x800  # names are UTF-8
_MODE = 0o100644 << 16
_UNIX = 3 << 8
_DAMAGED = "the file is damaged, restore it from a copy"
UNREADABLE = (zipfile.BadZipFile, KeyError, ValueError, struct.error, EOFError, OSError, RuntimeError)
"""How an archive that is damaged in its directory shows it."""


@dataclass(frozen=True, slots=True)
class Member:
    """A file of the archive; its content in pieces, which are borrowed."""

    name: str
    pieces: Sequence[Piece]


def zip_pieces(members: Iterable[Member]) -> list[Piece]:
    """The bytes of an archive, in order; the members' pieces are among them, not copied."""
    out: list[Piece] = []
    directory: list[bytes] = []
    offset = 0
    for member in members:
        size, checksum = 0, 0
        for piece in member.pieces:
            size += len(piece)
            checksum = crc32(piece, checksum)
        name = member.name.encode()
        header = _local_header(name, size, checksum)
        directory.append(_directory_entry(name, size, checksum, offset))
        out.append(header)
        out += member.pieces
        offset += len(header) + size
    listing = b"".join(directory)
    return [*out, listing, _end(len(directory), len(listing), offset)]


def hash_directory(pieces: Sequence[Piece]) -> str:
    """SHA-256 of the directory among the pieces of :func:`zip_pieces`."""
    return hashlib.sha256(pieces[-2]).hexdigest()


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
    while size and (block := raw.read(min(size, BUFFER_BYTES))):
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


BUFFER_BYTES = 1 << 20
_ALIGNMENT = 4096
_DIRECT_FROM = 1 << 17
"""Below this a write past the page cache saves nothing."""


class BlockBuffer:
    """Aligned memory that files written one after the other share."""

    def __init__(self) -> None:
        # a mapping begins at a page, which is what a direct write asks for
        self._mapping = mmap.mmap(-1, BUFFER_BYTES)
        self.bytes = np.frombuffer(self._mapping, np.uint8)
        """uint8 (BUFFER_BYTES,)."""


class BlockFile:
    """A file that must not exist yet. Leaving the ``with`` block without an error writes the rest; the caller syncs.

    Args:
        path: the file.
        buffer: borrowed; no other file may use it meanwhile.
    """

    def __init__(self, path: Path, buffer: BlockBuffer) -> None:
        self._buffer = buffer.bytes
        self._held = 0
        self._path = path
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self.size = 0
        """Bytes written so far."""

    def write(self, piece: Piece) -> None:
        """Append; ``piece`` is copied."""
        values = np.frombuffer(piece, np.uint8)
        self.size += len(values)
        while len(values):
            taken = min(len(values), BUFFER_BYTES - self._held)
            self._buffer[self._held : self._held + taken] = values[:taken]
            self._held += taken
            values = values[taken:]
            if self._held == BUFFER_BYTES:
                self._write_out()

    def __enter__(self) -> BlockFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._write_out()
        finally:
            os.close(self._handle)

    def _write_out(self) -> None:
        done = 0
        whole = self._held - self._held % _ALIGNMENT
        if whole >= _DIRECT_FROM and self._set_direct(True):
            done = self._write_direct(whole)
            self._set_direct(False)
        while done < self._held:
            done += files.disk.write(self._handle, self._buffer[done : self._held].data)
        self._held = 0

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
