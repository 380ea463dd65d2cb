"""Which transitions of a store on disk are whole after the loss of power, and where its counting began.

The death of a process loses nothing that was committed. When a machine loses power, the disk has some pages of the
moment of the last ``flush`` and some that were written later. Two numbers per environment, synced before they are
needed, bound what may be later: before the ring reaches position ``limit``, a new limit is synced. A transition p is
then as it was flushed if it was flushed and no write below ``limit`` can have replaced it: ``limit - L <= p``. The last
flushed transition is given up as well, since a cut replaces the frame after it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import psutil

from headrace.errors import DataError
from headrace.replay._blocks import KEPT, KEPT_ROWS, Allocator, FileAllocator, Int64s, TwoHalves

_AHEAD = 16
"""A limit is set a sixteenth of the ring ahead, and at least 64 transitions, so that syncing costs nothing."""


class Durability:
    """The floors of the environments, and what a flush made safe; owns the block ``kept``.

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
