"""Which side rows are free: places for frames that the rings cannot hold."""

from __future__ import annotations

import numpy as np

from headrace._kernels.gather import Int64s


class SideTable:
    """Numbers of side rows: single ones for last frames, blocks for the history of trajectories joined midway.

    A freed row is used again only after the write that freed it is complete, so that a crash in between finds every
    row of the last consistent state untouched.
    """

    def __init__(self, block: int) -> None:
        self.block = block
        self.high = 0
        self.singles: list[int] = []
        self._blocks: list[int] = []
        self._waiting: list[int] = []
        self._waiting_blocks: list[int] = []

    @property
    def used(self) -> int:
        """Rows in use."""
        idle = len(self.singles) + len(self._waiting)
        return self.high - idle - self.block * (len(self._blocks) + len(self._waiting_blocks))

    def take(self, count: int) -> Int64s:
        """``count`` single rows."""
        rows = np.empty(count, np.int64)
        for i in range(count):
            rows[i] = self.singles.pop() if self.singles else self._grow(1)
        return rows

    def take_blocks(self, count: int) -> Int64s:
        """The first rows of ``count`` blocks."""
        rows = np.empty(count, np.int64)
        for i in range(count):
            rows[i] = self._blocks.pop() if self._blocks else self._grow(self.block)
        return rows

    def free(self, rows: Int64s, blocks: Int64s) -> None:
        """Give rows and blocks back; NO_ROW entries mean nothing."""
        self._waiting.extend(int(row) for row in rows[rows >= 0])
        self._waiting_blocks.extend(int(row) for row in blocks[blocks >= 0])

    def settle(self) -> None:
        """The write is complete: what it freed may be used."""
        if self._waiting or self._waiting_blocks:
            self.singles += self._waiting
            self._blocks += self._waiting_blocks
            self._waiting, self._waiting_blocks = [], []

    def _grow(self, count: int) -> int:
        self.high += count
        return self.high - count
