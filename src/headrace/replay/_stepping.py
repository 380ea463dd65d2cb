"""One step of all environments in one call of a kernel: what is stored already is compared, what is new is copied.

Nearly every write is of this kind. Others are left to :meth:`FramePool.write`, with which the tests compare this one:
observations that do not follow, stacks that are interleaved or compressed, and steps so large that several threads pay.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from headrace._kernels.compiled import helper, inline, kernel
from headrace.replay._blocks import Int64s
from headrace.replay._pool import FramePool, Write, Written
from headrace.replay._spec import StoreSpec
from headrace.replay.ring import ENDED, NO_ROW, Float32s, Ring, advance, frame_row
from headrace.replay.row_space import WRITE_SHARE, Bools, RowSpace, memcmp, memcpy

_NONE = np.empty(0, np.int64)
_FIXED = 4
"""Columns of the table before the addresses of shards."""


@inline
def _address(table: Int64s, j: int, row: int) -> int:
    return table[j, _FIXED + (row >> table[j, 0])] + (row & ((1 << table[j, 0]) - 1)) * table[j, 1]


@helper
def _follows(e: int, count: int, starts: bool, sizes: Int64s, ring: Ring, table: Int64s, pointers: Int64s) -> bool:
    """Return whether the observation of environment e is, bit for bit, what is stored, or begins an episode."""
    slots = ring[1].shape[1]
    start = count - 1 - ring[1][e, (count - 1) % slots]
    for j in range(table.shape[0]):
        size, frames, zero = table[j, 1], table[j, 2], table[j, 3] != 0
        here, stack = pointers[0, j] + e * frames * size, (frames, zero, sizes[1], sizes[2])
        for f in range(frames - starts):
            there = sizes[3]
            if not starts:
                p = count - frames + 1 + f
                row = e * slots + p % slots if p >= start else frame_row(e, p, start, NO_ROW, ring, stack)
                there = _address(table, j, row) if row >= 0 else there
            elif not zero:
                there = here + (frames - 1) * size
            if memcmp(there, here + f * size, size) != 0:
                return False
    return True


@kernel()
def _step(
    ids: Int64s, terminated: Bools, truncated: Bools, reward: Float32s, at: int, frame: int,
    sizes: Int64s, heads: Int64s, ring: Ring, rewards: Float32s, table: Int64s, pointers: Int64s,
    marks: Bools, out: Int64s,
) -> int:  # fmt: skip
    """Write a transition of each environment and return 1, or 2 if side rows are freed; or 0, and nothing is written.

    Frame ``frame`` of stack ``at`` is compared with the next observation.

    ```
    sizes     transitions of a ring; frames of history; the first side row; address of a frame of zeros
    table     of each leaf, then of each column: shift; bytes per row; frames, 0 for a column; zero-filled; shards
    pointers  observations, or columns; next observations; last observations where a trajectory ends   (3, J)
    marks     whether a trajectory starts; zeros                                                       (2, n)
    out       positions; freed side rows; freed blocks; rows; rows of last frames; NO_ROW              (6, n)
    ```
    """
    counts, floors, flags = heads[0], heads[2], ring[0]
    slots = flags.shape[1]
    starts, finals = marks[0], out[4]
    for i in range(ids.shape[0]):
        e = ids[i]
        count = int(counts[e])
        starts[i] = count == floors[e] or (flags[e, (count - 1) % slots] & ENDED) != 0
        if not _follows(e, count, starts[i], sizes, ring, table, pointers):
            return 0
    for j in range(table.shape[0]):
        size, frames = table[j, 1], table[j, 2]
        if frames > 1:
            place = (ids[at] * frames + frame % (frames - 1)) * size
            later = pointers[2 if terminated[at] or truncated[at] else 1, j]
            if memcmp(later + place, pointers[0, j] + place + size, size) != 0:
                return 0
    for i in range(ids.shape[0]):
        e = ids[i]
        row, following = e * slots + counts[e] % slots, e * slots + (counts[e] + 1) % slots
        for j in range(table.shape[0]):
            size, frames = table[j, 1], table[j, 2]
            newest = (e * frames + frames - 1) * size
            if frames == 0:
                memcpy(_address(table, j, row), pointers[0, j] + e * size, size)
                continue
            if starts[i]:
                memcpy(_address(table, j, row), pointers[0, j] + newest, size)
            if finals[i] >= 0:
                memcpy(_address(table, j, sizes[2] + finals[i]), pointers[2, j] + newest, size)
            memcpy(_address(table, j, following), pointers[1, j] + newest, size)
        rewards[row] = reward[i]
        out[3, i] = row
    sides = finals, out[5]
    freed = advance(ids, starts, terminated, truncated, marks[1], sides, sizes[0], sizes[1], heads, ring, out)
    return 2 if freed else 1


class Stepping:
    """Writes plain steps of a store."""

    def __init__(
        self, spec: StoreSpec, pool: FramePool, columns: Mapping[str, RowSpace], rewards: NDArray[np.float32]
    ) -> None:
        self._pool, self._columns, self._rewards, self._leaves = pool, columns, rewards, spec.leaves
        observed = sum(leaf.observed.nbytes for leaf in spec.leaves)
        few = spec.num_envs * observed < 2 * WRITE_SHARE
        self.possible = few and spec.codec is None and all(leaf.outer == 1 for leaf in spec.leaves)
        """Whether steps of this store may be plain."""
        self._blank = np.zeros(max(leaf.frame.nbytes for leaf in spec.leaves), np.uint8)
        self._sizes = np.array([pool.length, pool.history, pool.first_side_row, self._blank.ctypes.data])
        self._reserved = 0

    def _make_table(self) -> None:
        """Note where all rows are."""
        spaces = [(self._pool.rows[leaf.name], leaf.frames, leaf.zero_filled) for leaf in self._leaves]
        spaces += [(space, 0, False) for space in self._columns.values()]
        rows = [
            [space.shift, space.row_bytes, frames, zero, *space.addresses.tolist()]
            for space, frames, zero in spaces
            if isinstance(space, RowSpace)
        ]
        self._table = np.array([row + [0] * (max(map(len, rows)) - len(row)) for row in rows])
        self._pointers = np.zeros((3, len(rows)), np.int64)
        self._reserved = self._pool.reserved

    def write(self, write: Write, at: int, frame: int) -> Written | None:
        """Store a transition of each environment; None, and nothing is stored, where this is no plain step.

        Frame ``frame`` of the stack of transition ``at`` is compared with the next observation.
        """
        pool, ids, ended = self._pool, write.ids, write.terminated | write.truncated
        n = ids.shape[0]
        marks, out, taken = np.zeros((2, n), np.bool_), np.empty((6, n), np.int64), _NONE
        out[4:] = NO_ROW
        if count := int(np.count_nonzero(ended)):
            out[4, ended] = taken = pool.side.take(count)
            pool.reserve()
        if pool.reserved != self._reserved:
            self._make_table()
        pointers, following, final = self._pointers, write.next_of(_NONE)[0], write.final_of(_NONE)[0]
        for j, leaf in enumerate(self._leaves):
            for k, observed in enumerate((write.obs, following, final)):
                pointers[k, j] = observed[leaf.name].data_ptr()
        for j, name in enumerate(self._columns, len(self._leaves)):
            pointers[0, j] = write.columns[name].data_ptr()
        found = _step(
            ids, write.terminated, write.truncated, write.reward, at, frame,
            self._sizes, pool.heads, pool.ring, self._rewards, self._table, pointers, marks, out,
        )  # fmt: skip
        if not found:
            pool.side.singles.extend(taken.tolist())
            return None
        if found > 1:
            pool.side.free(out[1], out[2])
        rows = out[3]
        return Written(env_ids=ids, positions=out[0], rows=rows, steps=pool.flat_steps[rows], ended=ended, cut=marks[1])
