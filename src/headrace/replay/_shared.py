"""One view over the stores of several processes on one machine, each of which writes to rings of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from headrace.errors import ConfigError, DataError, LifecycleError
from headrace.files import claim
from headrace.replay._batches import Mixture
from headrace.replay._buffer import ReplayBuffer
from headrace.replay._priorities import PrioritizedSampler
from headrace.replay._samplers import Sampler, UniformSampler, make_sampler
from headrace.replay._spec import SpaceLike

if TYPE_CHECKING:
    from tensordict import TensorDict

_NAME = "writer-{:04d}"
_SEED_STRIDE = 1_000_003


class SharedReplay(Mixture):
    """Reads what several processes write, each into a store of its own below one directory, as if it were one.

    :meth:`create` makes the stores; each writer opens one of ``paths`` with :meth:`ReplayBuffer.open
    <headrace.replay.ReplayBuffer.open>`, or is a worker of ``Collector.fill``. A store draws as
    large a share of a batch as it has of all items, or of all priorities, so each item is as likely as in one buffer.
    Nothing waits for a writer: one that is killed leaves what it committed, and another process can go on with its
    store.

    ``index`` and ``("collector", "traj_ids")`` name transitions and trajectories over all stores; ``origin`` is the
    store. Priorities belong to this view and are lost with it.
    """

    def __init__(self, directory: str | Path, *, sampler: Sampler | None = None) -> None:
        """Open the stores that :meth:`create` made.

        Args:
            directory: of the stores.
            sampler: its settings are those of the sampler of every store; uniform if None.
        """
        self.directory = Path(directory)
        self.paths = sorted(self.directory.glob(_NAME.format(0).replace("0000", "*")))
        """Where each writer writes, in order of the environments."""
        if not self.paths:
            raise DataError(f"{self.directory}: expected stores made by SharedReplay.create, got none")
        config = (sampler or UniformSampler()).config()
        self.stores = [ReplayBuffer.open(path, read_only=True, sampler=make_sampler(config)) for path in self.paths]
        super().__init__(self.stores)

    @classmethod
    def create(
        cls,
        directory: str | Path,
        writers: int,
        capacity: int,
        num_envs: int,
        observation: SpaceLike,
        action: SpaceLike,
        *,
        sampler: Sampler | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> SharedReplay:
        """Make one empty store per writer in a new directory, and return the view over them.

        Args:
            directory: new, on this machine.
            writers: processes that will write; each has its share of the environments, in order.
            capacity: transitions over all environments.
            num_envs: environments of all writers together.
            observation: one environment's observation space.
            action: one environment's action space.
            sampler: of the view; uniform if None.
            seed: of the draws.
            settings: ``stack``, ``extras``, ``n_step``, ``gamma``, ``autoreset``, as for ``ReplayBuffer``.
        """
        if not 1 <= writers <= num_envs or capacity % num_envs:
            raise ConfigError(
                f"SharedReplay: expected 1 to num_envs writers and a capacity that is a multiple of num_envs, got "
                f"{writers} writers, {num_envs} environments, capacity {capacity}"
            )
        path = Path(directory)
        claim(path, "open it with SharedReplay(directory), or choose another").close()
        for number, share in enumerate(torch.arange(num_envs).tensor_split(writers)):
            count = len(share)
            ReplayBuffer(
                capacity // num_envs * count, count, observation, action, seed=seed + _SEED_STRIDE * number,
                directory=path / _NAME.format(number), **settings,
            ).close()  # fmt: skip
        return cls(path, sampler=sampler)

    def __len__(self) -> int:
        """Return transitions stored."""
        return sum(map(len, self.stores))

    @property
    def num_envs(self) -> int:
        """Environments of all writers."""
        return sum(store.num_envs for store in self.stores)

    @property
    def weights(self) -> list[float]:
        """Share of each store in the next batch, by what it holds now."""
        masses: list[float] = []
        for store in self.stores:
            with store.store.lock:
                store.store.follow()
                masses.append(store.sampler.mass)
        total = sum(masses)
        if not total:
            raise LifecycleError("sample: the writers have stored nothing that could be drawn yet; wait for them")
        return [mass / total for mass in masses]

    def sample(self, batch_size: int) -> TensorDict:
        """Draw a batch of ``batch_size`` items from all stores; rows are ordered by store."""
        batch = super().sample(batch_size)
        lowest = self._lowest()
        if lowest is not None:
            # weights are relative to the smallest probability, which is that of one store so far
            batch["_weight"] = batch["_weight"] * torch.from_numpy(lowest)[batch["origin"]]
        return self._rename_indices(batch)

    def _rename_indices(self, batch: TensorDict) -> TensorDict:
        """Return the batch with names that are different in every store."""
        for key in ("index", ("collector", "traj_ids")):
            batch[key] = batch[key] * len(self.stores) + batch["origin"]
        return batch

    def _lowest(self) -> np.ndarray[tuple[int], np.dtype[np.float32]] | None:
        samplers = [store.sampler for store in self.stores]
        ours = [sampler for sampler in samplers if isinstance(sampler, PrioritizedSampler)]
        if not ours:
            return None
        lows = np.array([sampler.lowest for sampler in ours])
        return ((lows.min() / lows) ** ours[0].beta).astype(np.float32)

    def get(self, index: Tensor) -> TensorDict:
        """Return the transitions of these ``index`` values, int64 (B,), in their order."""
        found: list[TensorDict] = []
        places: list[Tensor] = []
        for number, store in enumerate(self.stores):
            where = (index % len(self.stores) == number).nonzero()[:, 0]
            if len(where):
                found.append(store.get(index[where] // len(self.stores)))
                places.append(where)
        batch = cast("TensorDict", torch.cat(cast("Any", found))[torch.cat(places).argsort()])
        batch["origin"] = index % len(self.stores)
        return self._rename_indices(batch)

    def update_priorities(self, index: Tensor, priority: Tensor, origin: Tensor | None = None) -> None:
        """Give what was drawn new priorities; ``index`` is that of a batch, (B,) or (B, T), and names the store."""
        del origin
        count = len(self.stores)
        super().update_priorities(index // count, priority, index % count)
        ours = [store.sampler for store in self.stores if isinstance(store.sampler, PrioritizedSampler)]
        largest = max(sampler.largest for sampler in ours)
        for sampler in ours:
            sampler.expect(largest)
