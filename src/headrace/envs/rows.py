"""What the functions of a task see: the compact rows of the environments that a stage works on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headrace import rng
from headrace.envs.slots import Slots
from headrace.sim import Simulation
from headrace.sim.mujoco_api import Model


class Rows:
    """n of the N environments of a batch, in ascending order.

    Row i of everything here belongs to environment ``ids[i]``. What ``get`` returns is a contiguous copy that is shared
    between the functions of one stage: read it, do not write into it. It is contiguous also when all environments take
    part, so that no arithmetic depends on how many do.
    """

    def __init__(self, sim: Simulation, slots: Slots, ids: Tensor | None) -> None:
        self._sim = sim
        self._slots = slots
        self._ids = ids
        self._parent: Rows | None = None
        self._seen: dict[tuple[str, int | slice | tuple[int, ...] | None], Tensor] = {}

    def __len__(self) -> int:
        return self._sim.num_envs if self._ids is None else int(self._ids.shape[0])

    @property
    def ids(self) -> Tensor:
        """int64 (n,): the environments."""
        if self._ids is None:
            return torch.arange(self._sim.num_envs, device=self._sim.device)
        return self._ids

    @property
    def device(self) -> torch.device:
        """Where all tensors are."""
        return self._sim.device

    @property
    def model(self) -> Model:
        """The model of all rows: sizes, names and nominal parameters."""
        return self._sim.model

    def where(self, chosen: Tensor) -> Rows:
        """The rows that ``chosen``, bool (n,), names. What is written through them is seen here, too."""
        part = Rows(self._sim, self._slots, self.ids[chosen])
        part._parent = self
        return part

    @property
    def episode_ids(self) -> Tensor:
        """int64 (n,): the identity of each row's episode."""
        return self._pick(self._slots.episode_ids)

    @property
    def steps(self) -> Tensor:
        """int64 (n,): environment steps taken in the episode; 0 in ``reset`` and for the first observation."""
        return self._pick(self._slots.steps)

    def get(self, field: str, index: int | slice | tuple[int, ...] | None = None) -> Tensor:
        """MjData ``field``, float64 (n, …); with ``index`` only that part of its second axis, for example one body."""
        key = (field, index)
        # slices cannot be keys before Python 3.12
        memo = key if not isinstance(index, slice) else (f"{field}[:]", (index.start, index.stop, index.step))
        if memo not in self._seen:
            view = self._sim.field(field)
            if index is not None:
                view = view[:, list(index) if isinstance(index, tuple) else index]
            self._seen[memo] = self._pick(view)
        return self._seen[memo]

    def set(self, field: str, values: Tensor, index: int | slice | None = None) -> None:
        """Write MjData state ``field`` (``qpos``, ``ctrl``, …), float64 (n, …) or what broadcasts to it."""
        view = self._sim.field(field)
        view = view if index is None else view[:, index]
        self._put(view, values)
        self._forget()

    def get_model(self, field: str) -> Tensor:
        """MjModel ``field`` of each row's own model, (n, …)."""
        return self._pick(self._sim.model_field(field))

    def set_model(self, field: str, values: Tensor) -> None:
        """Give each row its own MjModel ``field`` for this episode, (n, …); at reset only."""
        self._put(self._sim.model_field(field), values)

    def once(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """``compute()``, but once per stage: for what several functions of a task need. Do not write into it."""
        key = (name, ())
        if key not in self._seen:
            self._seen[key] = compute()
        return self._seen[key]

    def recall(self, name: str) -> Tensor:
        """The task's own memory ``name``, float64 (n, …); zero at the start of an episode."""
        return self._pick(self._slots.memory[name])

    def remember(self, name: str, values: Tensor) -> None:
        """Write the task's own memory ``name``, float64 (n, …)."""
        self._put(self._slots.memory[name], values)

    def uniform(
        self, stream: str, count: int, *, low: float = 0.0, high: float = 1.0, draw: Tensor | int = 0
    ) -> Tensor:
        """Uniform numbers in [low, high) from the episodes' own stream, float64 (n, count).

        The same call gives the same numbers: use another ``stream`` or ``draw`` for others (``draw=rows.steps * count``
        for new ones in each step), :meth:`noise` for normal ones that are new in each step.
        """
        return rng.uniform(self._slots.seed, self.episode_ids, stream, count, low=low, high=high, draw=draw)

    def normal(self, stream: str, count: int, *, std: float = 1.0, draw: Tensor | int = 0) -> Tensor:
        """Normal numbers with mean 0 from the episodes' own stream, float64 (n, count). See :meth:`uniform`."""
        return rng.normal(self._slots.seed, self.episode_ids, stream, count, std=std, draw=draw)

    def noise(self, stream: str, count: int, *, std: float = 1.0) -> Tensor:
        """Normal numbers that are new in each step of an episode, float64 (n, count)."""
        first = self.steps * count
        return rng.normal(self._slots.seed, self.episode_ids, stream, count, std=std, draw=first)

    def _forget(self) -> None:
        self._seen.clear()
        if self._parent is not None:
            self._parent._forget()

    def _pick(self, view: Tensor) -> Tensor:
        if self._ids is None:
            rows = view.clone(memory_format=torch.contiguous_format)
        else:
            rows = view.index_select(0, self._ids)
        # a simulation in single precision: tasks compute in double all the same
        return rows.to(torch.float64) if rows.dtype == torch.float32 else rows

    def _put(self, view: Tensor, values: Tensor) -> None:
        if self._ids is None:
            view.copy_(values)
        else:
            view[self._ids] = values if values.dtype == view.dtype else values.to(view.dtype)
