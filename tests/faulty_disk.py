"""A disk that fails on purpose: full, broken, or torn in the middle of a write."""

from __future__ import annotations

import os
from pathlib import Path

from headrace.files import Buffer, Disk


class FaultyDisk(Disk):
    """Takes ``room`` bytes, and then fails with ``code``; what fits of a write is written, as on a real disk.

    Args:
        code: ``errno.ENOSPC``, ``errno.EIO``, …
        room: bytes that are taken before it fails.
        at: which call fails: ``write`` and ``reserve`` count bytes, ``sync`` and ``rename`` fail at once.
    """

    def __init__(self, code: int, *, room: int = 0, at: str = "write") -> None:
        self.code = code
        self.room = room
        self.at = at
        self.calls = 0

    def write(self, handle: int, content: Buffer) -> int:
        if self.at != "write":
            return super().write(handle, content)
        taken = min(self.room, len(content))
        if taken:
            self.room -= super().write(handle, content[:taken])
            return taken
        return self._fail()

    def reserve(self, handle: int, nbytes: int) -> None:
        if self.at == "reserve":
            wanted = max(nbytes - os.fstat(handle).st_size, 0)
            if wanted > self.room:
                self._fail()
            self.room -= wanted
        super().reserve(handle, nbytes)

    def sync(self, handle: int) -> None:
        if self.at == "sync":
            self._fail()
        super().sync(handle)

    def rename(self, source: Path, target: Path) -> None:
        if self.at == "rename":
            self._fail()
        super().rename(source, target)

    def _fail(self) -> int:
        self.calls += 1
        raise OSError(self.code, os.strerror(self.code))
