"""A zip archive of stored members, as pieces to be written front to back in one go.

``zipfile`` needs half a millisecond of Python for a small archive, which is time taken from the thread that steps. Here
sizes and checksums are known before the first byte is written, so that nothing is patched later. Dates are fixed.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Piece: TypeAlias = "bytes | memoryview"

ZIP64_FROM = 0xFFFFFFFF
"""Sizes and offsets from here on do not fit the plain records."""
_DATE = 0 << 9 | 1 << 5 | 1  # 1 January 1980, the first that zip has
_TIME = 0
_FLAGS = 0x800  # names are UTF-8
_MODE = 0o100644 << 16
_UNIX = 3 << 8


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
            checksum = zlib.crc32(piece, checksum)
        name = member.name.encode()
        header = _local_header(name, size, checksum)
        directory.append(_directory_entry(name, size, checksum, offset))
        out.append(header)
        out += member.pieces
        offset += len(header) + size
    listing = b"".join(directory)
    return [*out, listing, _end(len(directory), len(listing), offset)]


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
