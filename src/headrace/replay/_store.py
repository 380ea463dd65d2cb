"""What is kept: columns of transitions in one memory, written by steps or batches, read at positions."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np
from torch import Tensor

from headrace._kernels.gather import Bools, Bytes, Int64s
from headrace.buffers._pool import OutputPool
from headrace.errors import LifecycleError
from headrace.replay._batches import assemble
from headrace.replay._checks import Transition
from headrace.replay._compressed import CompressedRows
from headrace.replay._disk import CommitRecord
from headrace.replay._memory import COMMIT, FileMemory, Memory, ReadOnlyMemory
from headrace.replay._pool import FramePool, Sourced, Written
from headrace.replay._rows import MappedRows, Rows
from headrace.replay._samplers import Picked
from headrace.replay._spec import StoreSpec

if TYPE_CHECKING:
    from tensordict import TensorDict

_CUTS_TO_WARN = 64
_ATTEMPTS = 1000


class Index(Protocol):
    """Whoever must know what is stored."""

    def attach(self) -> None:
        """Begin anew with what is stored."""
        ...

    def written(self, write: Written) -> None:
        """More was stored; it counts when everybody knows it."""
        ...


class Store:
    """Frames once, actions, rewards, extras, and the record that makes them count. One lock makes each call whole.

    A store in memory that may only be read follows one that another process writes: see :meth:`follow`.
    """

    def __init__(self, spec: StoreSpec, memory: Memory) -> None:
        self.spec = spec
        self.memory = memory
        self.lock = threading.RLock()
        self._indices: list[weakref.ref[Index]] = []
        self.cuts = 0
        self._going_on = 0
        self._warned = False
        self.durable = isinstance(memory, FileMemory)
        self.follows = isinstance(memory, ReadOnlyMemory)

        def make(name: str, row_bytes: int, rows: int) -> Rows:
            if spec.codec is None:
                return MappedRows(memory, name, row_bytes, rows)
            return CompressedRows(spec.codec, row_bytes, memory, name)

        self.pool = FramePool(spec.leaves, spec.num_envs, spec.length, memory, make)
        slots = self.pool.first_side_row
        self.columns = {
            name: MappedRows(memory, f"column{i}", max(column.nbytes, 1), slots)
            for i, (name, column) in enumerate(spec.columns.items())
        }
        self._reward_block = memory.allocate("rewards", slots * 4)
        self._flat_rewards = self._reward_block.view(np.float32)
        self._rewards = self._flat_rewards.reshape(spec.num_envs, -1)
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

    def write_step(self, step: Transition, columns: Mapping[str, Tensor]) -> None:
        """Store one transition of every active environment; everything was checked. Called with the lock held."""
        ids = self.pool.everyone if step.active is None else step.active.nonzero()[0]
        terminated, truncated, reward = step.terminated, step.truncated, step.reward.numpy()
        if step.active is not None:
            terminated, truncated, reward = terminated[ids], truncated[ids], reward[ids]
        self.write(
            step.obs, ids, ids, terminated, truncated, reward, columns,
            lambda which: (step.final_obs, ids[which]),
            lambda which: (step.next_obs, ids[which]),
        )  # fmt: skip

    def write(
        self,
        obs: Mapping[str, Tensor],
        ids: Int64s,
        source: Int64s,
        terminated: Bools,
        truncated: Bools,
        reward: np.ndarray[tuple[int], np.dtype[np.float32]],
        columns: Mapping[str, Tensor],
        final_of: Callable[[Int64s], Sourced],
        next_of: Callable[[Int64s], Sourced],
        joined: Bools | None = None,
        follows: Bools | None = None,
        heads: Int64s | None = None,
    ) -> None:
        """Store n transitions: see :meth:`FramePool.write`. Rows of ``columns`` are numbered as those of ``obs``.

        ``heads`` (N,), where the frames after the newest transitions are not known yet: the trajectories' ids.
        """
        pool = self.pool
        write = pool.write(obs, ids, source, terminated, truncated, final_of, next_of, joined, follows)
        self._flat_rewards[write.rows] = reward
        for name, column in columns.items():
            self.columns[name].write(write.rows, column, source)
        if heads is not None:
            self.heads[0, ids], self.heads[1] = pool.counts[ids], heads
        for index in self._listening():
            index.written(write)
        self._count_cuts(write)
        if self.durable:
            self.commit()
        pool.side.settle()

    def read(self, picked: Picked, n_step: int, gamma: float, outputs: OutputPool) -> TensorDict | None:
        """The batch of the picked transitions; None where a writer in another process overwrote some meanwhile."""
        heads = self._head_flags() if self.follows else None
        batch = assemble(self.spec, self.pool, self.columns, self._rewards, outputs, picked, n_step, gamma)
        if heads is None:
            return batch
        self.record.refresh()
        # what a write in progress touches is in no transition that counts, but for the flag that cuts the newest one
        oldest = np.maximum(self.record.read()[0] - self.spec.length, 0)
        whole = (picked.positions.reshape(len(picked.envs), -1).min(1) >= oldest[picked.envs]).all()
        return batch if whole and np.array_equal(heads, self._head_flags()) else None

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

    def add(self, index: Index) -> None:
        """Tell ``index`` of every write from now on, for as long as somebody else holds it."""
        self._indices.append(weakref.ref(index))

    def _listening(self) -> list[Index]:
        return [index for reference in self._indices if (index := reference()) is not None]

    def _attach(self) -> None:
        for index in self._listening():
            index.attach()

    def _head_flags(self) -> Bytes:
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
                stacklevel=5,
            )

    def clear(self) -> None:
        """Forget all transitions; memory is kept. Called with the lock held."""
        self.pool.clear()
        self.heads[0] = 0
        self.commit()
        self._attach()
