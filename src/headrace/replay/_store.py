"""What is kept: columns of transitions in one memory, written by steps or batches, read at positions."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from headrace.errors import LifecycleError
from headrace.replay._blocks import COMMIT, KEPT, Allocator, Bytes, FileAllocator, Int64s, ReadOnlyAllocator, TwoHalves
from headrace.replay._durability import Durability
from headrace.replay._pool import FramePool, Sourced, Write, Written
from headrace.replay._samplers import Picked, Sampler
from headrace.replay._spec import StoreSpec
from headrace.replay._stack_check import StackCheck
from headrace.replay.row_space import RowSpace

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
        self._stacks = StackCheck(spec)
        self.durable = isinstance(memory, FileAllocator)
        self.follows = isinstance(memory, ReadOnlyAllocator)
        self.pool = FramePool(spec, memory)
        slots = self.pool.first_side_row
        self.column_specs = {"action": spec.action, **spec.extras}
        """What is kept per transition besides frames and rewards: the action and the extras."""
        self.columns = {
            name: RowSpace(memory, f"column{i}", max(column.nbytes, 1), slots)
            for i, (name, column) in enumerate(self.column_specs.items())
        }
        self._reward_block = memory.allocate("rewards", slots * 4)
        self._flat_rewards = self._reward_block.view(np.float32)
        self.rewards = self._flat_rewards.reshape(spec.num_envs, -1)
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
        if isinstance(self.memory, FileAllocator) and self.memory.process != os.getpid():
            raise LifecycleError(
                f"extend: {self.memory.directory} belongs to the process that opened it, and this is a fork of it; "
                "open another store here, or read this one with ReplayBuffer.open(…, read_only=True)"
            )

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
        pool = self.pool
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

    def check_stacks(self, write: Write) -> None:
        """Refuse a step whose next observations are not its observations and one more frame; see StackCheck."""
        self._stacks.check_step(write)

    def check_shifts(self, ids: Int64s, earlier: Sourced, later: Sourced) -> None:
        """Refuse stacks that do not go on from the ones before them; see StackCheck."""
        self._stacks.check(ids, earlier, later)

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
        for _ in range(_ATTEMPTS):
            floors = self._kept.floors()
            self.record.refresh()
            counts, trajectories = self.record.read()
            if np.array_equal(counts, self.pool.counts) and np.array_equal(floors, self.pool.floors):
                return
            # counts may be older than the floors of a batch that is being written
            self.pool.counts[:], self.pool.floors[:] = np.maximum(counts, floors), floors
            self.pool.trajectories[:] = trajectories
            self._attach()
            # an index made of what was overwritten meanwhile is made again
            self.record.refresh()
            latest = self.record.read()[0]
            if (latest <= counts + self.pool.history + 1).all() and np.array_equal(floors, self._kept.floors()):
                return
        raise LifecycleError("sample: the writer overwrites the store faster than it can be indexed; make it larger")

    def add(self, reader: Reader) -> None:
        """Notify ``reader`` of every write from now on, for as long as it is alive."""
        self._readers.append(weakref.ref(reader))

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
