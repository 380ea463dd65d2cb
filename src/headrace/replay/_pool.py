"""The frame pool: per-environment rings in which every frame is written once, and a side table for true last frames."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.errors import DataError
from headrace.replay import ring
from headrace.replay._blocks import Allocator, Bytes, Int64s
from headrace.replay._compressed import CompressedRowSpace
from headrace.replay._spec import LeafSpec, StoreSpec, Window
from headrace.replay.ring import ENDED, NO_ROW, Flags, Int32s, Ring, Stack
from headrace.replay.row_space import ZERO_ROW, Bools, RowSpace

AnyRowSpace: TypeAlias = RowSpace | CompressedRowSpace
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
    """What one write did, for samplers that keep an index: n transitions, those of one environment in order of time.

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

    def take(self, count: int, *, blocks: bool = False) -> Int64s:
        """Return ``count`` single rows, or the first rows of ``count`` blocks."""
        rows = np.empty(count, np.int64)
        idle, size = (self._blocks, self.block) if blocks else (self.singles, 1)
        for i in range(count):
            if idle:
                rows[i] = idle.pop()
            else:
                rows[i] = self.high
                self.high += size
        return rows

    def free(self, rows: Int64s, blocks: Int64s) -> None:
        """Give rows and blocks back; NO_ROW entries mean nothing."""
        self._waiting.extend(int(row) for row in rows[rows >= 0])
        self._waiting_blocks.extend(int(row) for row in blocks[blocks >= 0])

    def settle(self) -> None:
        """Make the rows that a complete write freed usable."""
        if self._waiting or self._waiting_blocks:
            self.singles += self._waiting
            self._blocks += self._waiting_blocks
            self._waiting, self._waiting_blocks = [], []


class _Plan:
    """What writing a leaf needs, worked out once."""

    def __init__(self, leaf: LeafSpec, rows: AnyRowSpace) -> None:
        self.name, self.rows = leaf.name, rows
        self.frames, self.outer, self.zero_filled = leaf.frames, leaf.outer, leaf.zero_filled
        self._stack = leaf.stack
        # frames of a stack lie one after another, or are interleaved
        self._interleaved = leaf.stack if leaf.outer > 1 else None

    def write(self, rows: Int64s, stacks: Tensor, index: Int64s, frame: int) -> None:
        """Write frame ``frame`` of ``stacks[index[i]]`` to ``rows[i]``."""
        if self._interleaved is None:
            self.rows.write(rows, stacks, index, frame * self.rows.row_bytes)
        else:
            self.rows.write(rows, self._interleaved.frame(stacks, frame).contiguous(), index)

    def frame_bytes(self, stacks: Tensor, index: Int64s, frame: int) -> Bytes:
        """Return frame ``frame`` of ``stacks[index[i]]`` as bytes, (n, row_bytes), fresh."""
        assert self._stack is not None
        frames = self._stack.frame(stacks[torch.from_numpy(index)], frame)
        return frames.contiguous().view(torch.uint8).reshape(index.shape[0], -1).numpy()


class FramePool:
    """Owns the frames, the side table and the trajectory bookkeeping of N environments.

    ``counts`` int64 (N,) is the number of transitions ever written per environment; the last ``length`` of them are
    stored. The per-slot arrays are (N, slots); see :mod:`headrace.replay.ring` for the layout.
    """

    def __init__(self, spec: StoreSpec, memory: Allocator) -> None:
        leaves, num_envs = spec.leaves, spec.num_envs
        self.num_envs, self.length = num_envs, spec.length
        self.history = max(leaf.frames for leaf in leaves) - 1
        self.slots = spec.slots
        self.first_side_row = num_envs * self.slots
        self.reserved = self.first_side_row
        """Rows that can be used."""
        self.side = SideTable(self.history)
        self.rows: dict[str, AnyRowSpace] = {}
        for i, leaf in enumerate(leaves):
            name, size = f"frames{i}", leaf.frame.nbytes
            if spec.codec is None:
                self.rows[leaf.name] = RowSpace(memory, name, size, self.first_side_row)
            else:
                self.rows[leaf.name] = CompressedRowSpace(spec.codec, size, memory, name)
        self.heads: Int64s = np.zeros((3, num_envs), np.int64)
        """Counts, trajectories and floors: positions below those are not stored any more, although the ring may still
        hold them."""
        self.counts, self.trajectories, self.floors = self.heads
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
        self.windows: dict[tuple[str, int], Window] = {}
        """Layouts of blocks of frames by leaf and number of frames, as far as they were needed."""
        self.all_envs = np.arange(num_envs)
        self.flat_steps = self.steps.reshape(-1)
        self._plans = [_Plan(leaf, self.rows[leaf.name]) for leaf in leaves]

    def lengths(self) -> Int64s:
        """Return the number of stored transitions per environment, (N,)."""
        return np.minimum(self.counts - self.floors, self.length)

    def oldest(self) -> Int64s:
        """Return the position of the oldest stored transition per environment, (N,)."""
        return np.maximum(self.counts - self.length, self.floors)

    def blocks(self) -> dict[str, Bytes]:
        """Return the bookkeeping arrays by name, for saving."""
        return dict(self._blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of frames (rings in full, side rows as far as they were ever used) and bookkeeping."""
        rows = self.first_side_row + self.side.high
        return sum(space.nbytes(rows) for space in self.rows.values()) + sum(b.nbytes for b in self._blocks.values())

    def clear(self, *, restart: bool = False) -> None:
        """Forget every transition; positions go on counting, or start at 0 again with ``restart``. Memory stays."""
        if restart:
            self.counts[:] = 0
        self.floors[:] = self.counts
        self._side_table()

    def raise_floors(self, floors: Int64s) -> None:
        """Give up the transitions below ``floors`` (N,), and free their side rows."""
        for e, (old, low, new) in enumerate(zip(self.floors, self.oldest(), floors, strict=True)):
            gone = np.arange(low, max(new, low)) % self.slots
            finals = self._final[e, gone[(self.flags[e, gone] & ENDED) != 0]]
            first = max(self.counts[e] + 1 - self.slots, old - self.history, 0)
            blocks = self._prefix[e, np.arange(first, max(new - self.history, first)) % self.slots]
            self.side.free(finals.astype(np.int64), blocks.astype(np.int64))
        self.floors[:] = floors

    def keep(self, low: Int64s, high: Int64s) -> None:
        """Store only the positions from ``low`` to ``high``, (N,) each, of what is stored; equal for none."""
        self.floors[:], self.counts[:] = low, high
        last = self.ring[2][self.all_envs, (high - 1) % self.slots]
        self.trajectories[:] = np.where(low < high, last + 1, self.trajectories)

    def write(self, write: Write) -> Written:
        """Store transitions.

        Observations that the ring has already are compared, not copied: normally that is the first one of every
        environment.
        """
        obs, ids, source, terminated, truncated, _, _, final_of, next_of, joined, follows, _ = write
        n = ids.shape[0]
        none = np.zeros(n, np.bool_)
        places, marks = np.empty((2, n), np.int64), np.empty((6, n), np.bool_)
        rows, nexts = places
        ended = terminated | truncated
        beginning = ring.begin(
            ids, none if joined is None else joined, none if follows is None else follows, ended,
            self.counts, self.floors, self.flags, places, marks,
        )  # fmt: skip
        starts, doubtful, put, cut, cut_after, last = marks
        if np.count_nonzero(doubtful):
            # compared bit by bit: a tensor that looks untouched may have been written to through numpy
            differs = ~doubtful
            for plan in self._plans:
                expected = np.empty((n, plan.frames), np.int64)
                ring.pending(ids, differs, self.counts, self.ring, self.stacks[plan.name], expected)
                plan.rows.differ(expected, plan.outer, obs[plan.name], source, differs)
            differs &= doubtful
            broken = np.count_nonzero(differs)
            if broken:
                self._break_off(ids[differs], rows[differs])
                starts |= differs
                put |= differs
                cut |= differs
                beginning += broken
        prefixes, finals = np.full((2, n), NO_ROW)
        self._write_newest(rows[put], (obs, source[put]))
        if beginning and self.history:
            self._store_history(obs, source, rows, starts, prefixes)
        if (which := (ended | cut_after).nonzero()[0]).size:
            finals[which] = self.side.take(which.shape[0])
            self.reserve()
            self._write_newest(self.first_side_row + finals[which], final_of(which))
        which = last.nonzero()[0]
        self._write_newest(nexts[which], next_of(which))
        after, sides = np.empty((3, n), np.int64), (finals, prefixes)
        sizes = self.length, self.history
        if ring.advance(ids, starts, terminated, truncated, cut_after, sides, *sizes, self.heads, self.ring, after):
            self.side.free(after[1], after[2])
        steps = self.flat_steps[rows]
        return Written(env_ids=ids, positions=after[0], rows=rows, steps=steps, ended=ended, cut=cut)

    def goes_on(self, ids: Int64s, obs: Mapping[str, Tensor], source: Int64s) -> Bools:
        """Return (n,) whether the older frames of ``obs[source]`` are the newest stored ones of environments ``ids``.

        For observations whose newest frame is not in the ring yet.
        """
        same = np.ones(ids.shape[0], np.bool_)
        for plan in self._plans:
            if plan.frames > 1 and ids.shape[0]:
                rows = np.empty((ids.shape[0], plan.frames), np.int64)
                ring.pending(ids, ~same, self.counts, self.ring, self.stacks[plan.name], rows)
                older = np.ascontiguousarray(np.where(same[:, None], rows[:, :-1], ZERO_ROW))
                stored = np.empty(older.size * plan.rows.row_bytes, np.uint8)
                plan.rows.read(older, 1, stored)
                given = np.concatenate([plan.frame_bytes(obs[plan.name], source, k) for k in range(plan.frames - 1)], 1)
                same &= (given == stored.reshape(given.shape)).all(1)
        return same

    def recover(self) -> None:
        """Check the bookkeeping arrays and rebuild the side table from them, after the counters were restored."""
        for e in range(self.num_envs):
            stored = np.arange(self.oldest()[e], self.counts[e])
            flags, steps, trajectory, final, prefix = (field[e, stored % self.slots] for field in self.ring)
            ended = (flags & ENDED) != 0
            expected = np.where(ended[:-1], 0, steps[:-1] + 1)
            whole = (
                (flags <= ENDED).all()
                and ((steps >= 0) & (steps <= stored)).all()
                and np.array_equal(steps[1:], expected)
                and np.array_equal(trajectory[1:], trajectory[:-1] + ended[:-1])
                and (not stored.size or trajectory[-1] == self.trajectories[e] - 1)
                and (final[ended] >= 0).all()
                and (prefix[steps > 0] == NO_ROW).all()
            )
            if not whole:
                raise DataError(
                    f"environment {e}: the bookkeeping of its ring contradicts itself; the store is damaged"
                )
        used = self._side_table()
        if np.unique(used).size != used.size:
            raise DataError("final.bin, prefix.bin: expected different side rows, got one twice; the store is damaged")
        self.reserve()

    def _side_table(self) -> Int64s:
        """Build the side table from the bookkeeping arrays and return the rows in use."""
        taken: list[Int64s] = []
        for e in range(self.num_envs):
            count, floor = int(self.counts[e]), int(self.floors[e])
            stored = np.arange(max(count - self.length, floor), count) % self.slots
            ended = stored[(self.flags[e, stored] & ENDED) != 0]
            taken.append(self._final[e, ended].astype(np.int64))
            reachable = np.arange(max(count - self.slots + 1, floor - self.history, 0), count) % self.slots
            blocks = self._prefix[e, reachable]
            blocks = blocks[blocks >= 0].astype(np.int64)
            taken.append((blocks[:, None] + np.arange(self.history)).reshape(-1))
        used = np.concatenate(taken)
        self.side = SideTable(self.history)
        self.side.high = int(used.max(initial=-1)) + 1
        # a row and a block for each slot, twice: what a write frees rests until it is complete
        if self.side.high > 2 * self.first_side_row * (1 + self.history):
            raise DataError(f"final.bin, prefix.bin: side row {self.side.high - 1:,} is of no store of this size")
        idle = np.ones(self.side.high, np.bool_)
        idle[used] = False
        self.side.singles = idle.nonzero()[0].tolist()
        return used

    def _break_off(self, ids: Int64s, rows: Int64s) -> None:
        """End trajectories at their newest transition: the frame after it moves to the side table.

        The order matters to a crash in between: the copy, then the link, then the flag that makes both count.
        """
        side = self.side.take(ids.shape[0])
        self.reserve()
        for space in self.rows.values():
            space.move(self.first_side_row + side, rows)
        last = (self.counts[ids] - 1) % self.slots
        self._final[ids, last] = side
        self.flags[ids, last] |= ring.CUT

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
            blocks = self.side.take(int(joined.sum()), blocks=True)
            prefixes[where[joined]] = blocks
            self.reserve()
            for plan in stacked:
                for k in range(plan.frames - 1):
                    to = self.first_side_row + blocks + (self.history - plan.frames + 1 + k)
                    plan.write(to, obs[plan.name], source[where[joined]], k)

    def _write_newest(self, rows: Int64s, sourced: Sourced) -> None:
        """Write the newest frame of every leaf."""
        obs, index = sourced
        for plan in self._plans:
            plan.write(rows, obs[plan.name], index, plan.frames - 1)

    def reserve(self) -> None:
        """Make all side rows usable that are numbered so far."""
        self.reserved = self.first_side_row + self.side.high
        for space in self.rows.values():
            space.reserve(self.reserved)


_INT32_FIELDS = ("steps", "trajectory", "final", "prefix")
