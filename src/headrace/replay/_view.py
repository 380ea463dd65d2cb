"""One sampler over a store: what is drawn, when, and how it comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from headrace import rng
from headrace._kernels.gather import Int64s
from headrace.buffers._output import OutputPool
from headrace.errors import ConfigError, IdError, LifecycleError, ShapeError
from headrace.replay._arithmetic import Float64s
from headrace.replay._batches import assemble
from headrace.replay._memory import Memory, Namespace
from headrace.replay._priorities import PrioritizedSampler
from headrace.replay._samplers import Picked, Sampler
from headrace.replay._spec import ViewSpec
from headrace.replay._store import Store
from headrace.types import as_device

if TYPE_CHECKING:
    from tensordict import TensorDict

_ATTEMPTS = 1000


class _Tickets:
    """The uniform numbers of draws, made for several draws at a time; which those are changes none of them."""

    _AHEAD = 32

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._first = 0
        self._made = np.empty((0, 0))

    def of(self, draw: int, count: int) -> Float64s:
        """Numbers in [0, 1) of this draw, (count,): a function of seed, draw and place."""
        row = draw - self._first
        if self._made.shape[1] != count or not 0 <= row < self._made.shape[0]:
            made = rng.uniform(self._seed, torch.arange(count), "replay", self._AHEAD, draw=draw)
            self._made, self._first, row = np.ascontiguousarray(made.numpy().T), draw, 0
        return self._made[row]


class SamplerView:
    """Batches of a store, drawn by one sampler; made by :meth:`ReplayBuffer.with_sampler`.

    Any number of them may read one store, each with n-step returns, draws and a device of its own. See
    :class:`headrace.replay.ReplayBuffer` for the keys of a batch.
    """

    def __init__(
        self, store: Store, name: str, sampler: Sampler, settings: ViewSpec, device: torch.device | str
    ) -> None:
        if store.follows and isinstance(sampler, PrioritizedSampler):
            raise ConfigError("PrioritizedSampler: a buffer that was opened with read_only=True has no priorities")
        self.name, self.sampler, self.settings = name, sampler, settings
        self.device = as_device(device)
        self.memory = Namespace(Memory() if store.follows else store.memory, f"{name}.")
        """What is saved with the store."""
        self._store = store
        self._tickets = _Tickets(settings.seed)
        self._outputs = OutputPool(pinned=self.device.type == "cuda")
        with store.lock:
            self._draws = self.memory.allocate("draws", 8).view(np.int64)
            self.attach()
            store.add(self)

    def attach(self) -> None:
        """Let the sampler begin anew with what is stored; called by the store."""
        self.sampler.attach(self._store.pool, self.memory, self.settings.seed)

    def sample(self, batch_size: int) -> TensorDict:
        """Draw a batch: ``batch_size`` transitions, slices or trajectories, as the sampler says."""
        if batch_size < 1:
            raise ShapeError(f"batch_size: expected at least 1, got {batch_size}")
        with self._store.lock:
            tickets = self._tickets.of(int(self._draws[0]), batch_size)
            batch = self._read(lambda: self.sampler.draw(tickets))
            self._draws[0] += 1
            return batch

    def get(self, index: Tensor) -> TensorDict:
        """The transitions of these ``index`` values, int64 (B,), as :meth:`sample` gives them."""
        if index.dim() != 1:
            raise IdError(f"index: expected int64 (B,), got {tuple(index.shape)}")
        if not len(index):
            return self.at(torch.zeros(1, dtype=torch.int64))[:0]
        envs, positions = self._locate(index)
        with self._store.lock:
            return self._read(lambda: self._stored(envs, positions, index))

    def _stored(self, envs: Int64s, positions: Int64s, index: Tensor) -> Picked:
        pool = self._store.pool
        stored = (positions >= pool.oldest()[envs]) & (positions < pool.counts[envs])
        if not stored.all():
            raise IdError(f"index: {index[torch.from_numpy(~stored)].tolist()[:8]} are not stored, or no longer")
        return Picked(envs=envs, positions=positions)

    def at(self, place: Tensor) -> TensorDict:
        """The transitions at places 0 ≤ place < len, int64 (B,), counted by environment, oldest first."""
        pool, where = self._store.pool, place.numpy()

        def pick() -> Picked:
            ends = np.cumsum(pool.lengths())
            if where.ndim != 1 or (where < 0).any() or (where >= ends[-1]).any():
                raise IdError(f"place: expected int64 (B,) between 0 and {int(ends[-1]) - 1}, got {place}")
            envs = np.searchsorted(ends, where, side="right")
            return Picked(envs=envs, positions=pool.oldest()[envs] + where - (ends - pool.lengths())[envs])

        with self._store.lock:
            return self._read(pick)

    def update_priorities(self, index: Tensor, priority: Tensor) -> None:
        """Give what was drawn new priorities, usually absolute TD errors; both (B,). Overwritten ones are passed over.

        A :class:`PrioritizedSampler` of runs also takes both as (B, T), those of all transitions.
        """
        if not isinstance(self.sampler, PrioritizedSampler):
            raise ConfigError("update_priorities: the sampler has no priorities; use PrioritizedSampler()")
        envs, positions = self._locate(index)
        values = priority.detach().to("cpu", torch.float64).numpy()
        if values.ndim == positions.ndim + 1 and values.shape[-1] == 1:
            values = values[..., 0]
        with self._store.lock:
            self.sampler.update(envs, positions, values)

    def _locate(self, index: Tensor) -> tuple[Int64s, Int64s]:
        if index.dtype != torch.int64 or (index < 0).any():
            raise IdError(f"index: expected int64, not negative, got {index.dtype} {tuple(index.shape)}")
        positions, envs = np.divmod(index.cpu().numpy(), self._store.spec.num_envs)
        return envs, positions

    def _read(self, pick: Callable[[], Picked]) -> TensorDict:
        """What was picked; called with the lock held."""
        settings = self.settings
        if self._store.follows:
            batch = self._read_whole(pick)
        else:
            batch = assemble(self._store, self._outputs, pick(), settings.n_step, settings.gamma)
        return batch if self.device.type == "cpu" else batch.to(self.device, non_blocking=True)

    def _read_whole(self, pick: Callable[[], Picked]) -> TensorDict:
        """The same where another process writes meanwhile: again, until nothing was overwritten."""
        store, settings, blocks = self._store, self.settings, self.memory.blocks
        for _ in range(_ATTEMPTS):
            before = {name: block.copy() for name, block in blocks.items()}
            store.follow()
            picked, heads = pick(), store.head_flags()
            batch = assemble(store, self._outputs, picked, settings.n_step, settings.gamma)
            if store.is_whole(picked, heads):
                return batch
            for name, block in before.items():
                blocks[name][:] = block
            self.attach()
        raise LifecycleError("sample: the writer overwrites transitions faster than they can be read; make it larger")
