"""What is kept: columns of transitions in one memory, written by steps or batches, read at positions."""

from __future__ import annotations

import threading
import warnings
import weakref
from typing import Protocol

import numpy as np

from headrace._kernels.gather import Bytes
from headrace.errors import LifecycleError
from headrace.replay._disk import CommitRecord
from headrace.replay._memory import COMMIT, FileMemory, Memory, ReadOnlyMemory
from headrace.replay._pool import FramePool, Write, Written
from headrace.replay._rows import MappedRows
from headrace.replay._samplers import Picked, Sampler
from headrace.replay._spec import StoreSpec

_CUTS_TO_WARN = 64
_ATTEMPTS = 1000


class Reader(Protocol):
    """Whoever must know what is stored."""

    sampler: Sampler
    """Told of every write, which counts when everybody knows it."""

    def attach(self) -> None:
        """Begin anew with what is stored."""
        ...


class Store:
    """Frames once, actions, rewards, extras, and the record that makes them count. One lock makes each call whole.

    A store in memory that may only be read follows one that another process writes: see :meth:`follow`.
    """

    def __init__(self, spec: StoreSpec, memory: Memory) -> None:
        self.spec = spec
        self.memory = memory
        self.lock = threading.RLock()
        self._readers: list[weakref.ref[Reader]] = []
        self.cuts = 0
        self._going_on = 0
        self._warned = False
        self.durable = isinstance(memory, FileMemory)
        self.follows = isinstance(memory, ReadOnlyMemory)
        self.pool = FramePool(spec, memory)
        slots = self.pool.first_side_row
        self.column_specs = {"action": spec.action, **spec.extras}
        """What is kept per transition besides frames and rewards: the action and the extras."""
        self.columns = {
            name: MappedRows(memory, f"column{i}", max(column.nbytes, 1), slots)
            for i, (name, column) in enumerate(self.column_specs.items())
        }
        self._reward_block = memory.allocate("rewards", slots * 4)
        self._flat_rewards = self._reward_block.view(np.float32)
        self.rewards = self._flat_rewards.reshape(spec.num_envs, -1)
        self._head_block = memory.allocate("heads", 2 * 8 * spec.num_envs)
        self.heads = self._head_block.view(np.int64).reshape(2, spec.num_envs)
        """Count at which the newest transition waits for its next frame, and the caller's id of its trajectory."""
        self.record = CommitRecord(memory, spec.num_envs)
        self.pool.counts[:], self.pool.trajectories[:] = self.record.read()
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
        """All memory by name, with the counters of this moment; called with the lock held."""
        self.commit()
        blocks = {**self.pool.blocks(), "rewards": self._reward_block, "heads": self._head_block}
        for rows in (*self.pool.rows.values(), *self.columns.values()):
            blocks |= rows.blocks()
        return blocks | {COMMIT: self.record.block}

    def commit(self) -> None:
        """Make what was written count."""
        self.record.write(self.pool.counts, self.pool.trajectories)

    def check_writable(self) -> None:
        """Raise where nothing may be written."""
        if self.follows:
            raise LifecycleError("extend: this buffer was opened with read_only=True; its writer is another process")
        if isinstance(self.memory, FileMemory) and not self.memory.release.alive:
            raise LifecycleError("extend: this buffer was closed; open the store again with ReplayBuffer.open")

    def write(self, write: Write) -> None:
        """Store transitions; called with the lock held."""
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
        if self.durable:
            self.commit()
        pool.side.settle()

    def is_whole(self, picked: Picked, heads: Bytes) -> bool:
        """Whether a writer in another process overwrote nothing that was picked since ``heads`` were read."""
        self.record.refresh()
        # what a write in progress touches is in no transition that counts, but for the flag that cuts the newest one
        oldest = np.maximum(self.record.read()[0] - self.spec.length, 0)
        stored = (picked.positions.reshape(len(picked.envs), -1).min(1) >= oldest[picked.envs]).all()
        return bool(stored) and np.array_equal(heads, self.head_flags())

    def follow(self) -> None:
        """Take up what the writer in another process has committed, where there is one."""
        if not self.follows:
            return
        self.record.refresh()
        counts, trajectories = self.record.read()
        for _ in range(_ATTEMPTS):
            if np.array_equal(counts, self.pool.counts):
                return
            self.pool.counts[:], self.pool.trajectories[:] = counts, trajectories
            self._attach()
            # an index made of what was overwritten meanwhile is made again
            self.record.refresh()
            latest, trajectories = self.record.read()
            if (latest <= counts + self.pool.history + 1).all():
                return
            counts = latest
        raise LifecycleError("sample: the writer overwrites the store faster than it can be indexed; make it larger")

    def add(self, reader: Reader) -> None:
        """Tell ``reader`` of every write from now on, for as long as somebody else holds it."""
        self._readers.append(weakref.ref(reader))

    def _listening(self) -> list[Reader]:
        return [reader for reference in self._readers if (reader := reference()) is not None]

    def _attach(self) -> None:
        for reader in self._listening():
            reader.attach()

    def head_flags(self) -> Bytes:
        """Flags of the newest transitions, (N,), a copy."""
        return self.pool.flags[self.pool.everyone, (self.pool.counts - 1) % self.pool.slots]

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
        """Forget all transitions; memory is kept. Called with the lock held."""
        self.pool.clear()
        self.heads[0] = 0
        self.commit()
        self._attach()
