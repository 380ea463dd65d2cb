"""What is kept: columns of transitions in one memory, written by steps or batches, read at positions."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.errors import LifecycleError, ShapeError
from headrace.replay._blocks import (
    COMMIT,
    KEPT,
    Allocator,
    Bytes,
    Durability,
    FileAllocator,
    Int64s,
    ReadOnlyAllocator,
    TwoHalves,
)
from headrace.replay._pool import FramePool, Sourced, Write, Written
from headrace.replay._samplers import Picked, Sampler
from headrace.replay._spec import LeafSpec, StoreSpec
from headrace.replay.ring import CUT, NO_ROW, TERMINATED, TRUNCATED, Float32s, write_step
from headrace.replay.row_space import WRITE_SHARE, RowSpace, shifts_differ
from headrace.types import StackSpec

_CUTS_TO_WARN = 64
_ATTEMPTS = 1000


class Reader(Protocol):
    """A view that follows what is stored."""

    sampler: Sampler
    """Notified of every write, before the write counts."""

    def attach(self) -> None:
        """Begin anew with what is stored."""
        ...


class Store:
    """Frames once, actions, rewards, extras, and the record that makes them count. One lock makes each call whole.

    A store in memory that may only be read follows one that another process writes: see :meth:`follow`.
    """

    def __init__(self, spec: StoreSpec, memory: Allocator, *, trust_unflushed: bool | None = None) -> None:
        self.spec = spec
        self.memory = memory
        self.lock = threading.RLock()
        self._readers: list[weakref.ref[Reader]] = []
        self.cuts = 0
        self._going_on = 0
        self._warned = False
        self.stacks = StackCheck(spec)
        """Refuses stacks that could not be given back."""
        self.durable = isinstance(memory, FileAllocator)
        self.follows = isinstance(memory, ReadOnlyAllocator)
        self.pool = FramePool(spec, memory)
        self._seen_heads = np.zeros(spec.num_envs, np.uint8)
        """Flags of the newest transitions when samplers made their index of a store that another process writes."""
        self._indexed = False
        """Whether that index was made with these flags."""
        slots = self.pool.first_side_row
        self.column_specs = {"action": spec.action, **spec.extras}
        """What is kept per transition besides frames and rewards: the action and the extras."""
        self.columns = {
            name: RowSpace(memory, f"column{i}", column.nbytes, slots)
            for i, (name, column) in enumerate(self.column_specs.items())
        }
        self._reward_block = memory.allocate("rewards", slots * 4)
        self._flat_rewards = self._reward_block.view(np.float32)
        self.rewards = self._flat_rewards.reshape(spec.num_envs, -1)
        self._stepping = Stepping(spec, self.pool, self.columns, self._flat_rewards)
        self._head_block = memory.allocate("heads", 2 * 8 * spec.num_envs)
        self.heads = self._head_block.view(np.int64).reshape(2, spec.num_envs)
        """Count at which the newest transition waits for its next frame, and the caller's id of its trajectory."""
        self.record = TwoHalves(memory, COMMIT, 2, spec.num_envs)
        self._kept = Durability(memory, spec.length, spec.num_envs)
        self.pool.counts[:], self.pool.trajectories[:] = self.record.read()
        self.pool.floors[:] = self._kept.floors()
        if isinstance(memory, FileAllocator):
            whole = self._kept.recover(self.pool.counts, trust_unflushed, memory.directory)
            if whole is not None:
                self.pool.keep(*whole)
                self._kept.set_floors(self.pool.floors)
                self.commit()
                self.flush()
        if not self.follows:
            self.pool.recover()

    def __len__(self) -> int:
        return int(self.pool.lengths().sum())

    @property
    def nbytes(self) -> int:
        """Bytes when every ring is full: frames, side rows used so far, columns, bookkeeping."""
        columns = sum(column.nbytes(self.pool.first_side_row) for column in self.columns.values())
        return self.pool.nbytes + self._reward_block.nbytes + self._head_block.nbytes + columns

    def blocks(self) -> dict[str, Bytes]:
        """Return all memory by name, with the counters of this moment; called with the lock held."""
        self.commit()
        blocks = {**self.pool.blocks(), "rewards": self._reward_block, "heads": self._head_block}
        for rows in (*self.pool.rows.values(), *self.columns.values()):
            blocks |= rows.blocks()
        return blocks | {COMMIT: self.record.block, KEPT: self._kept.block.view(np.uint8)}

    def commit(self) -> None:
        """Make what was written count."""
        self.record.write(self.pool.counts, self.pool.trajectories)

    def check_writable(self) -> None:
        """Raise where nothing may be written."""
        if self.follows:
            raise LifecycleError("extend: this buffer was opened with read_only=True; its writer is another process")
        if isinstance(self.memory, FileAllocator) and not self.memory.release.alive:
            raise LifecycleError("extend: this buffer was closed; open the store again with ReplayBuffer.open")
        if isinstance(self.memory, FileAllocator):
            hint = "open another store here, or read this one with ReplayBuffer.open(…, read_only=True)"
            self.memory.owner.check(self.memory.directory, hint)

    @contextmanager
    def adding(self, added: Int64s) -> Generator[None]:
        """Make writes of ``added`` (N,) transitions per environment inside the block count, all of them or none.

        A step fits into the spare slot of the ring. More than that replaces transitions before it is complete, so
        those are given up first. Called with the lock held.
        """
        pool = self.pool
        if not self.durable:
            yield
            return
        stop = pool.counts + added
        self._kept.guard(pool.counts, stop)
        if added.max(initial=0) > 1:
            pool.raise_floors(np.minimum(np.maximum(pool.floors, stop - pool.length), pool.counts))
            self._kept.set_floors(pool.floors)
        try:
            yield
        except BaseException:  # also Ctrl-C; raised again
            pool.counts[:], pool.trajectories[:] = self.record.read()
            pool.recover()
            self._attach()
            raise
        self.commit()

    def write(self, write: Write) -> None:
        """Store transitions; called with the lock held, inside :meth:`adding`."""
        pool, n, step = self.pool, write.ids.shape[0], write.joined is None
        plain = step and self._stepping.possible and not self.stacks.young and n > 0
        done = self._stepping.write(write, *self.stacks.next_place(n)) if plain else None
        if done is None:
            if step:
                self.stacks.check_step(write, every=plain)
            done = pool.write(write)
            self._flat_rewards[done.rows] = write.reward
            for name, column in write.columns.items():
                self.columns[name].write(done.rows, column, write.source)
        if write.heads is not None:
            self.heads[0, write.ids], self.heads[1] = pool.counts[write.ids], write.heads
        for reader in self._listening():
            reader.sampler.written(done)
        self._count_cuts(done)
        pool.side.settle()

    def is_whole(self, picked: Picked, heads: Bytes) -> bool:
        """Return whether a writer in another process overwrote nothing that was picked since ``heads`` were read."""
        self.record.refresh()
        # what a write in progress touches is in no transition that counts, but for the flag that cuts the newest one
        oldest = np.maximum(self.record.read()[0] - self.spec.length, self._kept.floors())
        stored = (picked.positions.reshape(len(picked.envs), -1).min(1) >= oldest[picked.envs]).all()
        return bool(stored) and np.array_equal(heads, self.head_flags())

    def follow(self) -> None:
        """Take up what the writer in another process has committed, where there is one."""
        if not self.follows:
            return
        pool, whole = self.pool, not self._indexed
        for _ in range(_ATTEMPTS):
            floors = self._kept.floors()
            self.record.refresh()
            counts, trajectories = self.record.read()
            if not whole and np.array_equal(counts, pool.counts) and np.array_equal(floors, pool.floors):
                return
            before, moved = pool.counts.copy(), not np.array_equal(floors, pool.floors)
            # counts may be older than the floors of a batch that is being written
            pool.counts[:], pool.floors[:] = np.maximum(counts, floors), floors
            pool.trajectories[:] = trajectories
            if whole or moved or (pool.counts - before).max() > pool.length:
                self._seen_heads = self.head_flags()
                self._attach()
                moved = not np.array_equal(self._seen_heads, self.head_flags())
            else:
                self._announce(before)
                self._seen_heads[:] = 0
            # an index made of what was overwritten meanwhile is made again
            self.record.refresh()
            latest = self.record.read()[0]
            whole = moved or not np.array_equal(floors, self._kept.floors())
            whole = whole or bool((latest > counts + pool.history + 1).any())
            self._indexed = not whole
            if not whole:
                return
        raise LifecycleError("sample: the writer overwrites the store faster than it can be indexed; make it larger")

    def _announce(self, before: Int64s) -> None:
        """Notify samplers of what another process has stored since the counts were ``before``, as if it were here."""
        pool = self.pool
        added = pool.counts - before
        envs = np.repeat(pool.all_envs, added)
        positions = np.arange(envs.shape[0]) + np.repeat(before - np.cumsum(added) + added, added)
        slots, earlier = positions % pool.slots, pool.flags[envs, (positions - 1) % pool.slots]
        # one that was cut already when the index was made is in it
        earlier &= ~np.where(positions == before[envs], self._seen_heads[envs], 0).astype(np.uint8)
        cut = ((earlier & CUT) != 0) & (positions > pool.oldest()[envs])
        ended = (pool.flags[envs, slots] & (TERMINATED | TRUNCATED)) != 0
        done = Written(envs, positions, envs * pool.slots + slots, pool.steps[envs, slots], ended, cut)
        for reader in self._listening():
            reader.sampler.written(done)

    def index_again(self) -> None:
        """Let samplers begin anew at the next :meth:`follow`: an index made apart from it may count a cut twice."""
        self._indexed = False

    def add(self, reader: Reader) -> None:
        """Notify ``reader`` of every write from now on, for as long as it is alive."""
        self._readers.append(weakref.ref(reader))
        self.index_again()

    def _listening(self) -> list[Reader]:
        return [reader for reference in self._readers if (reader := reference()) is not None]

    def _attach(self) -> None:
        for reader in self._listening():
            reader.attach()

    def head_flags(self) -> Bytes:
        """Return flags of the newest transitions, (N,), a copy."""
        return self.pool.flags[self.pool.all_envs, (self.pool.counts - 1) % self.pool.slots]

    def _count_cuts(self, write: Written) -> None:
        """Warn once when most steps are cuts: n-step returns are then one-step returns."""
        cuts = int(np.count_nonzero(write.cut))
        self.cuts += cuts
        self._going_on += int(np.count_nonzero(write.steps))
        if cuts and not self._warned and self.cuts >= _CUTS_TO_WARN and self.cuts > self._going_on:
            self._warned = True
            warnings.warn(
                f"ReplayBuffer: {self.cuts} of {self.cuts + self._going_on} steps did not go on from the observation "
                "stored before, so each was cut off as a trajectory of its own, and n-step returns are one-step "
                "returns. extend() must get as obs exactly, bit for bit, what was step.obs in the call before: store "
                "observations before a normalizer whose statistics drift, and the same dtype and rounding in both",
                UserWarning,
                stacklevel=4,
            )

    def clear(self) -> None:
        """Forget all transitions; memory is kept, positions go on counting. Called with the lock held."""
        self.pool.clear()
        self.heads[0] = 0
        self._kept.set_floors(self.pool.floors)
        self._attach()

    def flush(self) -> None:
        """Sync everything to the disk; called with the lock held."""
        self.memory.flush()
        self._kept.set_flushed(self.pool.counts)


_NO_IDS = np.empty(0, np.int64)


class Stepping:
    """Writes plain steps by one call of a kernel: what is stored already is compared, what is new is copied.

    Nearly every write is of this kind. Others are left to :meth:`FramePool.write`, with which the tests compare this
    one: observations that do not follow, stacks that are interleaved or compressed, and steps so large that several
    threads pay.
    """

    def __init__(self, spec: StoreSpec, pool: FramePool, columns: Mapping[str, RowSpace], rewards: Float32s) -> None:
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
        marks, out, taken = np.zeros((2, n), np.bool_), np.empty((6, n), np.int64), _NO_IDS
        out[4:] = NO_ROW
        if count := int(np.count_nonzero(ended)):
            out[4, ended] = taken = pool.side.take(count)
            pool.reserve()
        if pool.reserved != self._reserved:
            self._make_table()
        pointers, following, final = self._pointers, write.next_of(_NO_IDS)[0], write.final_of(_NO_IDS)[0]
        for j, leaf in enumerate(self._leaves):
            for k, observed in enumerate((write.obs, following, final)):
                pointers[k, j] = observed[leaf.name].data_ptr()
        for j, name in enumerate(self._columns, len(self._leaves)):
            pointers[0, j] = write.columns[name].data_ptr()
        found = write_step(
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


_THOROUGH = 100
"""Transitions per environment whose older frames are compared; afterwards those of one, or one frame, per write are."""


class StackCheck:
    """Refuses stacks that the store could not give back: each must be the stack before it and one more frame.

    A store keeps only the newest frame of a stack and takes the older ones from earlier observations. With another axis
    or order of frames than :class:`~headrace.types.StackSpec` names, it would give back other pixels. Stacks are
    compared with the stacks before them, thoroughly at first.
    """

    def __init__(self, spec: StoreSpec) -> None:
        self._leaves = [leaf for leaf in spec.leaves if leaf.frames > 1]
        self._seen = np.zeros(spec.num_envs, np.int64)
        self.young = bool(self._leaves)
        """Whether an environment has so few transitions that all of its frames are compared."""
        self._writes = 0

    def check_step(self, write: Write, *, every: bool = False) -> None:
        """Raise unless the next observations of a step are its observations and one more frame; see :meth:`check`."""
        ended = write.terminated | write.truncated
        for which, after in ((~ended).nonzero()[0], write.next_of), (ended.nonzero()[0], write.final_of):
            self.check(write.ids[which], (write.obs, write.source[which]), after(which), every=every)

    def check(self, ids: Int64s, earlier: Sourced, later: Sourced, *, every: bool = False) -> None:
        """Raise unless stack i of ``later`` is stack i of ``earlier`` moved by one frame; ``ids`` (n,) are their envs.

        ``every``: of all environments, not of the young ones or of one.

        Raises:
            ShapeError: naming the leaf, the axis and order that were expected, and those that fit.
        """
        if not self._leaves or not ids.shape[0]:
            return
        which = np.arange(ids.shape[0] if every else 0)
        if self.young:
            which = (self._seen[ids] < _THOROUGH).nonzero()[0]
            np.add.at(self._seen, ids, 1)
            self.young = bool((self._seen < _THOROUGH).any())
        if not which.size:
            which = np.array([self.next_place(ids.shape[0])[0]])
        first, second = earlier[1][which], later[1][which]
        for leaf in self._leaves:
            differs = np.zeros(which.shape[0], np.bool_)
            one, other = earlier[0][leaf.name], later[0][leaf.name]
            shifts_differ(leaf.outer, leaf.frames, (one, first), (other, second), differs)
            if np.count_nonzero(differs):
                bad = int(differs.nonzero()[0][0])
                raise ShapeError(_describe(leaf, int(ids[which[bad]]), one[first[bad]], other[second[bad]]))

    def next_place(self, count: int) -> tuple[int, int]:
        """Return which of ``count`` rows, and which of their frames, is to be compared in this write."""
        self._writes += 1
        return self._writes % count, self._writes // count


def _describe(leaf: LeafSpec, env: int, earlier: Tensor, later: Tensor) -> str:
    """Say which axis and order were expected of two stacks in turn, and which would fit."""
    stack = leaf.stack
    assert stack is not None
    shape, fits = leaf.observed.shape, list[str]()
    for dim in range(len(shape)):
        for layout in ("concat", "new_axis"):
            if shape[dim] % stack.frames or (layout == "new_axis" and shape[dim] != stack.frames):
                continue
            spec = StackSpec(frames=stack.frames, dim=dim, layout=layout)
            ours = torch.stack([spec.frame(earlier[None], k) for k in range(stack.frames)])
            theirs = torch.stack([spec.frame(later[None], k) for k in range(stack.frames)])
            if torch.equal(ours[1:], theirs[:-1]):
                fits.append(f"StackSpec(frames={stack.frames}, dim={dim}, layout={layout!r})")
            elif torch.equal(ours[:-1], theirs[1:]):
                fits.append(f"frames on axis {dim} from newest to oldest, which must be flipped first")
    return (
        f"stack of observation {leaf.name!r}, environment {env}: expected {stack.frames} frames on axis "
        f"{stack.axis(len(leaf.frame.shape))} of {shape}, oldest to newest, each stack the one before it moved by one "
        f"frame; got another. What fits these two: {'; '.join(fits) or 'no axis and order'}. "
        "Declare that, or store the observation without stack="
    )
