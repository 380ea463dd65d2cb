"""What the functions of a task see: the compact rows of the environments that a stage works on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace import rng
from headrace.envs._episode_state import EpisodeState
from headrace.sim import Simulation
from headrace.sim._mujoco_api import Model

_ALL = slice(None)


class Rows:
    """n of the N environments of a batch, in ascending order.

    Row i of everything here belongs to environment ``ids[i]``. What ``get`` returns is a contiguous copy that is shared
    between the functions of one stage: read it, do not write into it. It is contiguous also when all environments take
    part, so that no arithmetic depends on how many do.
    """

    def __init__(self, sim: Simulation, episodes: EpisodeState, ids: Tensor | None) -> None:
        self._sim = sim
        self._episodes = episodes
        self._ids = ids
        # on the CPU rows are gathered and scattered by numpy, whose calls take a third of the time of torch's
        self._on_cpu = sim.device.type == "cpu"
        self._index = None if ids is None or not self._on_cpu else ids.numpy()
        self._parent: Rows | None = None
        self._seen: dict[tuple[str, int | slice | tuple[int, ...] | None], Tensor] = {}

    def renew(self) -> None:
        """The simulation has moved on, or was written to: what was read of it is read again."""
        self._seen.clear()
        if self._parent is not None:
            self._parent.renew()

    def __len__(self) -> int:
        return self._sim.num_envs if self._ids is None else int(self._ids.shape[0])

    @property
    def ids(self) -> Tensor:
        """int64 (n,): the environments. Do not write into it."""
        return self._episodes.everyone if self._ids is None else self._ids

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
        part = Rows(self._sim, self._episodes, self.ids[chosen])
        part._parent = self
        return part

    @property
    def episode_ids(self) -> Tensor:
        """int64 (n,): the identity of each row's episode."""
        return self._pick(self._episodes.episode_ids)

    @property
    def steps(self) -> Tensor:
        """int64 (n,): environment steps taken in the episode; 0 in ``reset`` and for the first observation."""
        return self._pick(self._episodes.steps)

    def get(self, field: str, index: int | slice | tuple[int, ...] | None = None) -> Tensor:
        """MjData ``field``, float64 (n, …); with ``index`` only that part of its second axis, for example one body."""
        # slices cannot be keys before Python 3.12
        memo = (f"{field}[:]", (index.start, index.stop, index.step)) if isinstance(index, slice) else (field, index)
        if memo not in self._seen:
            self._seen[memo] = self._pick(self._view(field, list(index) if isinstance(index, tuple) else index))
        return self._seen[memo]

    def join(self, *fields: str | tuple[str, slice]) -> Tensor:
        """Several MjData fields side by side, flat, float64 (n, features); with a slice, part of the second axis.

        What an observation mostly is: ``rows.join(("qpos", slice(2, None)), "qvel")``. The caller owns it.
        """
        named = [(field, _ALL) if isinstance(field, str) else field for field in fields]
        if not self._on_cpu:
            return torch.cat([self.get(field, part).flatten(1) for field, part in named], dim=1)
        views = [self._array(field)[:, part] for field, part in named]
        chosen = views if self._index is None else [view[self._index] for view in views]
        parts = [array if array.ndim == 2 else array.reshape(array.shape[0], -1) for array in chosen]
        return torch.from_numpy(np.concatenate(parts, axis=1, dtype=np.float64))

    def set(self, field: str, values: Tensor, index: int | slice | None = None) -> None:
        """Write MjData state ``field`` (``qpos``, ``ctrl``, …), float64 (n, …) or what broadcasts to it."""
        self._put(self._view(field, index), values)
        self.renew()

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
        return self._pick(self._episodes.memory[name])

    def remember(self, name: str, values: Tensor) -> None:
        """Write the task's own memory ``name``, float64 (n, …)."""
        self._put(self._episodes.memory[name], values)

    def uniform(
        self, stream: str, count: int, *, low: float = 0.0, high: float = 1.0, draw: Tensor | int = 0
    ) -> Tensor:
        """Uniform numbers in [low, high) from the episodes' own stream, float64 (n, count).

        The same call gives the same numbers: use another ``stream`` or ``draw`` for others (``draw=rows.steps * count``
        for new ones in each step), :meth:`noise` for normal ones that are new in each step.
        """
        return rng.uniform(self._episodes.seed, self.episode_ids, stream, count, low=low, high=high, draw=draw)

    def normal(self, stream: str, count: int, *, std: float = 1.0, draw: Tensor | int = 0) -> Tensor:
        """Normal numbers with mean 0 from the episodes' own stream, float64 (n, count). See :meth:`uniform`."""
        return rng.normal(self._episodes.seed, self.episode_ids, stream, count, std=std, draw=draw)

    def noise(self, stream: str, count: int, *, std: float = 1.0) -> Tensor:
        """Normal numbers that are new in each step of an episode, float64 (n, count)."""
        return self.normal(stream, count, std=std, draw=self.steps * count)

    def _array(self, field: str) -> NDArray[Any]:
        views = self._episodes.field_views
        if field not in views:
            views[field] = self._sim.field(field).numpy()
        return views[field]

    def _view(self, field: str, index: int | slice | list[int] | None) -> Tensor | NDArray[Any]:
        """All N environments' ``field``, or the part ``index`` of its second axis; a copy where that is a list."""
        if self._on_cpu:
            array = self._array(field)
            return array if index is None else array[:, index]
        view = self._sim.field(field)
        return view if index is None else view[:, index]

    def _pick(self, view: Tensor | NDArray[Any]) -> Tensor:
        if self._on_cpu:
            array = view.numpy() if isinstance(view, Tensor) else view
            # numpy lays out what it indexes as it likes; a copy is in C order
            rows = torch.from_numpy(array.copy() if self._index is None else np.ascontiguousarray(array[self._index]))
        else:
            assert isinstance(view, Tensor)
            plain = torch.contiguous_format
            rows = view.clone(memory_format=plain) if self._ids is None else view.index_select(0, self._ids)
        # a simulation in single precision: tasks compute in double all the same
        return rows.to(torch.float64) if rows.dtype == torch.float32 else rows

    def _put(self, view: Tensor | NDArray[Any], values: Tensor) -> None:
        if self._on_cpu:
            array = view.numpy() if isinstance(view, Tensor) else view
            array[_ALL if self._index is None else self._index] = values.detach().numpy()
            return
        assert isinstance(view, Tensor)
        if self._ids is None:
            view.copy_(values)
        else:
            view[self._ids] = values if values.dtype == view.dtype else values.to(view.dtype)
