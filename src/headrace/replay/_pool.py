"""The frame pool: per-environment rings in which every frame is written once, and a side table for true last frames."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headrace._kernels.gather import ZERO_ROW, Bools, Bytes, Int64s
from headrace.replay import _arithmetic as arithmetic
from headrace.replay._arithmetic import ENDED, NO_ROW, Flags, Int32s, Ring, Stack
from headrace.replay._compressed import CompressedRows
from headrace.replay._memory import Memory
from headrace.replay._rows import MappedRows
from headrace.replay._spec import Leaf, StoreSpec

Rows: TypeAlias = MappedRows | CompressedRows
Sourced = tuple[Mapping[str, Tensor], Int64s]
"""Observations by leaf, (R, …) each, and the rows among them that are meant."""


class Write(NamedTuple):
    """n transitions to store, in order of time; everything was checked."""

    obs: Mapping[str, Tensor]
    """(R, …) by leaf."""
    ids: Int64s
    """Environment of each transition, (n,); at most a ring of each."""
    source: Int64s
    """Row of ``obs``, and of ``columns``, of each transition, (n,)."""
    terminated: Bools
    truncated: Bools
    reward: NDArray[np.float32]
    columns: Mapping[str, Tensor]
    """(R, …): actions and extras."""
    final_of: Callable[[Int64s], Sourced]
    """Which transitions (indices below n) → their true next observations, where a trajectory ends."""
    next_of: Callable[[Int64s], Sourced]
    """The same for the last transition of every environment."""
    joined: Bools | None = None
    """(n,): whether it goes on from the transition before it in this write; None if each is alone."""
    follows: Bools | None = None
    """(n,): goes on from what is stored although that has no frame for it yet, so nothing is compared."""
    heads: Int64s | None = None
    """(N,), where the frames after the newest transitions are not known yet: the trajectories' ids."""


class Written(NamedTuple):
    """What one write did, for whoever keeps an index: n transitions, those of one environment in order of time.

    No environment has more than its ring holds. The arrays are borrowed: read them, keep copies.
    """

    env_ids: Int64s
    positions: Int64s
    """The transition's number in its environment, from 0."""
    rows: Int64s
    steps: Int32s
    """Index of the transition in its trajectory."""
    ended: Bools
    """This transition is the last of its trajectory."""
    cut: Bools
    """The transition *before* this one turned out to be the last of its trajectory."""


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


class _Plan:
    """What writing a leaf needs, worked out once."""

    def __init__(self, leaf: Leaf, rows: Rows) -> None:
        self.name, self.rows = leaf.name, rows
        self.frames, self.outer, self.zero_filled = leaf.frames, leaf.outer, leaf.zero_filled
        # frames of a stack lie one after another, or are interleaved
        self._interleaved = leaf.stack if leaf.outer > 1 else None

    def write(self, rows: Int64s, stacks: Tensor, index: Int64s, frame: int) -> None:
        """Write frame ``frame`` of ``stacks[index[i]]`` to ``rows[i]``."""
        if self._interleaved is None:
            self.rows.write(rows, stacks, index, frame * self.rows.row_bytes)
        else:
            self.rows.write(rows, self._interleaved.frame(stacks, frame).contiguous(), index)


class FramePool:
    """Owns the frames, the side table and the trajectory bookkeeping of N environments.

    ``counts`` int64 (N,) is the number of transitions ever written per environment; the last ``length`` of them are
    stored. The per-slot arrays are (N, slots); see :mod:`headrace.replay._arithmetic` for the layout.
    """

    def __init__(self, spec: StoreSpec, memory: Memory) -> None:
        leaves, num_envs = spec.leaves, spec.num_envs
        self.num_envs, self.length = num_envs, spec.length
        deepest = max(leaf.frames for leaf in leaves)
        self.history = deepest - 1
        self.slots = slots_per_env(spec.length, deepest)
        self.first_side_row = num_envs * self.slots
        self.side = SideTable(self.history)
        self.rows: dict[str, Rows] = {}
        for i, leaf in enumerate(leaves):
            name, size = f"frames{i}", leaf.frame.nbytes
            if spec.codec is None:
                self.rows[leaf.name] = MappedRows(memory, name, size, self.first_side_row)
            else:
                self.rows[leaf.name] = CompressedRows(spec.codec, size, memory, name)
        self.counts = np.zeros(num_envs, np.int64)
        self.trajectories = np.zeros(num_envs, np.int64)
        shape = (num_envs, self.slots)
        self._blocks = {
            name: memory.allocate(name, num_envs * self.slots * np.dtype(dtype).itemsize)
            for name, dtype in (("flags", np.uint8), *((name, np.int32) for name in _INT32_FIELDS))
        }
        self.flags: Flags = self._blocks["flags"].reshape(shape)
        self.steps, trajectory, self._final, self._prefix = (
            self._blocks[name].view(np.int32).reshape(shape) for name in _INT32_FIELDS
        )
        self.ring: Ring = (self.flags, self.steps, trajectory, self._final, self._prefix)
        self.stacks: dict[str, Stack] = {
            leaf.name: (leaf.frames, leaf.zero_filled, self.history, self.first_side_row) for leaf in leaves
        }
        self.everyone = np.arange(num_envs)
        self._nowhere = np.full(num_envs, NO_ROW)
        self._none = np.zeros(num_envs, np.bool_)
        self._flat_steps = self.steps.reshape(-1)
        self._plans = [_Plan(leaf, self.rows[leaf.name]) for leaf in leaves]

    def lengths(self) -> Int64s:
        """Transitions stored, per environment."""
        return np.minimum(self.counts, self.length)

    def oldest(self) -> Int64s:
        """Position of the oldest stored transition, per environment."""
        return np.maximum(self.counts - self.length, 0)

    def blocks(self) -> dict[str, Bytes]:
        """The bookkeeping arrays by name, for saving."""
        return dict(self._blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of frames (rings in full, side rows as far as they were ever used) and bookkeeping."""
        rows = self.first_side_row + self.side.high
        return sum(space.nbytes(rows) for space in self.rows.values()) + sum(b.nbytes for b in self._blocks.values())

    def clear(self) -> None:
        """Forget every transition; memory stays."""
        self.counts[:] = 0
        self.side = SideTable(self.history)

    def write(self, write: Write) -> Written:
        """Store transitions.

        Observations that the ring has already are compared, not copied: normally that is the first one of every
        environment.
        """
        obs, ids, source, terminated, truncated, _, _, final_of, next_of, joined, follows, _ = write
        n, alone = ids.shape[0], joined is None
        nobody = self._none[:n] if alone else np.zeros(n, np.bool_)
        places, marks = np.empty((2, n), np.int64), np.empty((6, n), np.bool_)
        rows, nexts = places
        ended = terminated | truncated
        beginning = arithmetic.begin(
            ids, nobody if joined is None else joined, nobody if follows is None else follows, ended,
            self.counts, self.flags, places, marks,
        )  # fmt: skip
        starts, doubtful, put, cut, cut_after, last = marks
        if np.count_nonzero(doubtful):
            # compared bit by bit: a tensor that looks untouched may have been written to through numpy
            differs = ~doubtful
            for plan in self._plans:
                expected = np.empty((n, plan.frames), np.int64)
                arithmetic.pending(ids, differs, self.counts, self.ring, self.stacks[plan.name], expected)
                plan.rows.differ(expected, plan.outer, obs[plan.name], source, differs)
            differs &= doubtful
            broken = np.count_nonzero(differs)
            if broken:
                self._break_off(ids[differs], rows[differs])
                starts |= differs
                put |= differs
                cut |= differs
                beginning += broken
        prefixes = finals = self._nowhere[:n] if alone else np.full(n, NO_ROW)
        if beginning or not alone:
            self._write_newest(rows[put], (obs, source[put]))
        if beginning and self.history:
            prefixes = np.full(n, NO_ROW)
            self._store_history(obs, source, rows, starts, prefixes)
        closing = ended if alone else ended | cut_after
        if np.count_nonzero(closing):
            which, finals = closing.nonzero()[0], np.full(n, NO_ROW)
            finals[which] = self.side.take(which.shape[0])
            self._reserve()
            self._write_newest(self.first_side_row + finals[which], final_of(which))
        which = self.everyone[:n] if alone else last.nonzero()[0]
        self._write_newest(nexts[which], next_of(which))
        after, heads = np.empty((3, n), np.int64), (self.counts, self.trajectories)
        sides = (finals, prefixes)
        if arithmetic.advance(
            ids, starts, terminated, truncated, cut_after, sides, self.length, heads, self.ring, after
        ):
            self.side.free(after[1], after[2])
        steps = self._flat_steps[rows]
        return Written(env_ids=ids, positions=after[0], rows=rows, steps=steps, ended=ended, cut=cut)

    def recover(self) -> None:
        """Rebuild the side table from the bookkeeping arrays, after ``counts`` and ``trajectories`` were restored."""
        taken: list[Int64s] = []
        for e in range(self.num_envs):
            count = int(self.counts[e])
            stored = np.arange(max(count - self.length, 0), count) % self.slots
            ended = stored[(self.flags[e, stored] & ENDED) != 0]
            taken.append(self._final[e, ended].astype(np.int64))
            reachable = np.arange(max(count - self.slots + 1, 0), count) % self.slots
            blocks = self._prefix[e, reachable]
            blocks = blocks[blocks >= 0].astype(np.int64)
            taken.append((blocks[:, None] + np.arange(self.history)).reshape(-1))
        used = np.concatenate(taken)
        self.side = SideTable(self.history)
        self.side.high = int(used.max()) + 1 if used.size else 0
        idle = np.ones(self.side.high, np.bool_)
        idle[used] = False
        self.side.singles = idle.nonzero()[0].tolist()
        for space in self.rows.values():
            space.reserve(self.first_side_row + self.side.high)

    def _break_off(self, ids: Int64s, rows: Int64s) -> None:
        """End trajectories at their newest transition: the frame after it moves to the side table.

        The order matters to a crash in between: the copy, then the link, then the flag that makes both count.
        """
        side = self.side.take(ids.shape[0])
        self._reserve()
        for space in self.rows.values():
            space.move(self.first_side_row + side, rows)
        last = (self.counts[ids] - 1) % self.slots
        self._final[ids, last] = side
        self.flags[ids, last] |= arithmetic.CUT

    def _store_history(
        self, obs: Mapping[str, Tensor], source: Int64s, rows: Int64s, starts: Bools, prefixes: Int64s
    ) -> None:
        """Keep the older frames of stacks that do not look like the start of an episode; sets ``prefixes``.

        The newest frame of each stack is in ``rows`` already: at the start of an episode it is all there is.
        """
        where = starts.nonzero()[0]
        joined = np.zeros(where.shape[0], np.bool_)
        stacked = [plan for plan in self._plans if plan.frames > 1]
        for plan in stacked:
            expected = np.repeat(rows[where, None], plan.frames, 1)
            if plan.zero_filled:
                expected[:, :-1] = ZERO_ROW
            plan.rows.differ(expected, plan.outer, obs[plan.name], source[where], joined)
        if joined.any():
            blocks = self.side.take_blocks(int(joined.sum()))
            prefixes[where[joined]] = blocks
            self._reserve()
            for plan in stacked:
                for k in range(plan.frames - 1):
                    to = self.first_side_row + blocks + (self.history - plan.frames + 1 + k)
                    plan.write(to, obs[plan.name], source[where[joined]], k)

    def _write_newest(self, rows: Int64s, sourced: Sourced) -> None:
        """Write the newest frame of every leaf."""
        obs, index = sourced
        for plan in self._plans:
            plan.write(rows, obs[plan.name], index, plan.frames - 1)

    def _reserve(self) -> None:
        for space in self.rows.values():
            space.reserve(self.first_side_row + self.side.high)


_INT32_FIELDS = ("steps", "trajectory", "final", "prefix")


def slots_per_env(length: int, frames: int) -> int:
    """EpisodeState of a ring: history, transitions, the frame after the newest, and one for a write in progress."""
    return length + frames + 1
