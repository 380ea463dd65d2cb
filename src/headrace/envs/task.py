"""What a task declares (a model, spaces, an episode length, a few functions over rows), and the rows that they see.

Actions, checked once at the boundary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import TypeVar

from headrace import rng
from headrace._kernels.compiled import kernel
from headrace.envs._episode_state import EpisodeState
from headrace.envs.image_spec import ImageSpec
from headrace.errors import ActionError, ConfigError, DeviceError, DtypeError, ShapeError
from headrace.sim import Simulation
from headrace.sim.mujoco_api import Model
from headrace.types import Obs

_CHOICES = (torch.int64, torch.int32)
_FLOATS = (torch.float32, torch.float64)
_INTEGERS = (*_CHOICES, torch.int16, torch.int8, torch.uint8)


@kernel()
def take_rows(actions: NDArray[Any], ids: NDArray[np.int64], out: NDArray[np.float64]) -> bool:
    """Copy rows ``ids`` (n,) of ``actions`` (N, A) to ``out`` (n, A) as float64; whether all of them are finite."""
    fine = True
    for row in range(ids.shape[0]):
        env = ids[row]
        for column in range(actions.shape[1]):
            value = np.float64(actions[env, column])
            fine = fine and np.isfinite(value)
            out[row, column] = value
    return fine


def select_actions(
    actions: Tensor, space: spaces.Box | spaces.Discrete, active_ids: Tensor | None, all_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the actions as :func:`check_actions` gives them, and those of the active rows as a task wants them.

    The latter are fresh: float64 (n, A), or int64 (n,) for a Discrete space.
    """
    num_envs, device, rows = all_ids.shape[0], all_ids.device, all_ids if active_ids is None else active_ids
    actions = _of_right_kind(actions, space, num_envs, device)
    if device.type == "cpu" and actions.is_floating_point():
        # one pass instead of a check, a selection and a cast
        given = np.ascontiguousarray(actions.numpy())
        flat = given.reshape(num_envs, math.prod(given.shape[1:]))
        chosen = np.empty((rows.shape[0], flat.shape[1]))
        if take_rows(flat, rows.numpy(), chosen):
            return actions, torch.from_numpy(chosen.reshape(rows.shape[0], *given.shape[1:]))
    actions = check_actions(actions, space, active_ids, num_envs, device)
    return actions, actions.index_select(0, rows).to(torch.float64 if actions.is_floating_point() else torch.int64)


def device_actions(
    actions: Tensor, space: spaces.Box | spaces.Discrete, active_ids: Tensor | None, all_ids: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`select_actions`, on a GPU and without waiting for it.

    Whether the values are fit is the third of what it returns, bool (n,) of the rows that are not: zeros, or the first
    choice, stand for them. Who reads it refuses them with :func:`refuse_actions`.
    """
    actions = _of_right_kind(actions, space, all_ids.shape[0], all_ids.device)
    chosen = actions if active_ids is None else actions.index_select(0, active_ids)
    if isinstance(space, spaces.Discrete):
        low = int(space.start)
        fine, usual = (chosen >= low) & (chosen < low + int(space.n)), low
        return actions, torch.where(fine, chosen, usual).to(torch.int64), ~fine
    fine = torch.isfinite(chosen)
    rows = fine.reshape(chosen.shape[0], -1).all(dim=1)
    return actions, torch.where(fine, chosen, 0.0).to(torch.float64), ~rows


def refuse_actions(actions: Tensor, space: spaces.Box | spaces.Discrete, active_ids: Tensor | None) -> None:
    """Raise what is wrong with actions that :func:`device_actions` found unfit, after the step that used them."""
    try:
        check_actions(actions, space, active_ids, actions.shape[0], actions.device)
    except ActionError as error:
        wrong = str(error).removesuffix("; nothing was stepped")
        raise ActionError(f"{wrong}; on a GPU this is found after the step: call reset() to start again") from None


def check_actions(
    actions: Tensor, space: spaces.Space[object], active_ids: Tensor | None, num_envs: int, device: torch.device
) -> Tensor:
    """Return the actions as given, without a gradient, once they are known to be safe for the active environments.

    A Box of floats takes any finite number, as its environments do; out of range is refused for all other spaces.

    Args:
        actions: (N, A) floats for a Box space, (N,) integers for a Discrete one, integers for MultiDiscrete and integer
            Box spaces, integers or bool for MultiBinary.
        space: the space of one environment's action.
        active_ids: int64 (n,), or None when all are active. Other rows are not looked at.
        num_envs: N.
        device: where the actions must be.
    """
    actions = _of_right_kind(actions, space, num_envs, device)
    if (limits := _limits(space, device)) is None:
        # a finite sum has finite terms only; anything else (an overflow, too) is looked at closely
        if math.isfinite(float(actions.sum())):
            return actions
        fine, wish = torch.isfinite(actions), "finite numbers"
    else:
        low, high = limits
        wide = actions.to(torch.int64)
        fine = (wide >= low) & (wide <= high)
        if isinstance(low, int):
            wish = f"a choice in [{low}, {high + 1})"
        else:
            wish = f"values in [{low.tolist()}, {torch.as_tensor(high).tolist()}]"
    if not fine.all():
        bad = (~fine.reshape(num_envs, -1).all(dim=1)).nonzero().squeeze(1)
        if active_ids is not None:
            bad = bad[torch.isin(bad, active_ids)]
        if len(bad):
            first = int(bad[0])
            shown = ", ".join(str(int(i)) for i in bad[:8]) + (", …" if len(bad) > 8 else "")
            raise ActionError(
                f"actions: expected {wish}, got {actions[first].tolist()} for environment {first} "
                f"(bad rows: {shown}); nothing was stepped"
            )
    return actions


def _limits(space: spaces.Space[object], device: torch.device) -> tuple[Tensor | int, Tensor | int] | None:
    """Return the lowest and highest allowed value, int64 of the action's shape; None for a Box of floats."""
    if isinstance(space, spaces.Discrete):
        return int(space.start), int(space.start) + int(space.n) - 1
    if isinstance(space, spaces.MultiDiscrete):
        low, high = space.start, space.start + space.nvec - 1
    elif isinstance(space, spaces.MultiBinary):
        low, high = np.zeros(space.shape), np.ones(space.shape)
    elif isinstance(space, spaces.Box) and np.dtype(space.dtype).kind != "f":
        low, high = space.low, space.high
    else:
        return None
    return torch.as_tensor(low.astype(np.int64), device=device), torch.as_tensor(high.astype(np.int64), device=device)


def _of_right_kind(actions: Tensor, space: spaces.Space[object], num_envs: int, device: torch.device) -> Tensor:
    """Return the actions without a gradient, once it is known that they are a tensor of the right shape, device and
    dtype."""
    if not isinstance(actions, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers are not all typed
        raise DtypeError(
            f"actions: expected a torch tensor, got {type(actions).__name__}; "
            "use torch.as_tensor(actions), or gymnasium.make_vec for an environment that takes numpy arrays"
        )
    if actions.requires_grad:  # the simulator's memory must not become part of a policy's graph
        actions = actions.detach()
    expected = (num_envs, *(space.shape or ()))
    if actions.shape != expected:
        raise ShapeError(
            f"actions: expected {expected}, got {tuple(actions.shape)}; "
            "pass one row per environment, suspended ones included (their rows are ignored)"
        )
    if actions.device != device:
        raise DeviceError(f"actions: expected device {device}, got {actions.device}; use actions.to({str(device)!r})")
    if isinstance(space, spaces.Discrete):
        if actions.dtype not in _CHOICES:
            raise DtypeError(f"actions: expected int64 choices, got {actions.dtype}")
    elif isinstance(space, spaces.Box) and np.dtype(space.dtype).kind == "f":
        if actions.dtype not in _FLOATS:
            raise DtypeError(f"actions: expected float32 or float64, got {actions.dtype}; use actions.float()")
    elif actions.dtype not in _INTEGERS and not (actions.dtype == torch.bool and isinstance(space, spaces.MultiBinary)):
        raise DtypeError(f"actions: expected integers for {space}, got {actions.dtype}; use actions.long()")
    return actions


def count_actions(space: spaces.Space[Any]) -> int:
    """Return numbers of one action: A of a Box (A,), 1 for a choice."""
    if isinstance(space, spaces.Discrete):
        return 1
    if not isinstance(space, spaces.Box) or len(space.shape) != 1:
        raise ConfigError(f"policy: expected an environment with actions (A,) of real numbers, or choices, got {space}")
    return space.shape[0]


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
        self.ids = episodes.all_ids if ids is None else ids
        """int64 (n,): the environments. Do not write into it."""
        self.device = sim.device
        """Where all tensors are."""
        self.model: Model = sim.model
        """The model of all rows: sizes, names and nominal parameters."""
        # on the CPU rows are gathered and scattered by numpy, whose calls take a third of the time of torch's
        self._on_cpu = sim.device.type == "cpu"
        self._index = None if ids is None or not self._on_cpu else ids.numpy()
        self._parent: Rows | None = None
        self._seen: dict[tuple[str, int | slice | tuple[int, ...] | None], Tensor] = {}

    def renew(self) -> None:
        """Read again what was read, after the simulation has moved on or was written to."""
        self._seen.clear()
        if self._parent is not None:
            self._parent.renew()

    def __len__(self) -> int:
        return self._sim.num_envs if self._ids is None else int(self._ids.shape[0])

    def where(self, chosen: Tensor) -> Rows:
        """Return the rows that ``chosen``, bool (n,), names. What is written through them is seen here, too."""
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
        """Return the task's own memory ``name``, float64 (n, …); zero at the start of an episode."""
        return self._pick(self._episodes.memory[name])

    def live(self, name: str) -> NDArray[Any]:
        """Return the memory itself of all N environments, of an MjData field or of the task's own memory: for kernels.

        On the CPU only. A kernel reads and writes the rows ``ids`` of it; what :meth:`get` gave before is not renewed.
        """
        return self._episodes.memory[name].numpy() if name in self._episodes.memory else self._array(name)

    def remember(self, name: str, values: Tensor) -> None:
        """Write the task's own memory ``name``, float64 (n, …)."""
        self._put(self._episodes.memory[name], values)

    def uniform(
        self, stream: str, count: int, *, low: float = 0.0, high: float = 1.0, draw: Tensor | int = 0
    ) -> Tensor:
        """Return uniform numbers in [low, high) from the episodes' own stream, float64 (n, count).

        The same call gives the same numbers: use another ``stream`` or ``draw`` for others (``draw=rows.steps * count``
        for new ones in each step), :meth:`noise` for normal ones that are new in each step.
        """
        return rng.uniform(self._episodes.seed, self.episode_ids, stream, count, low=low, high=high, draw=draw)

    def normal(self, stream: str, count: int, *, std: float = 1.0, draw: Tensor | int = 0) -> Tensor:
        """Return normal numbers with mean 0 from the episodes' own stream, float64 (n, count). See :meth:`uniform`."""
        return rng.normal(self._episodes.seed, self.episode_ids, stream, count, std=std, draw=draw)

    def noise(self, stream: str, count: int, *, std: float = 1.0) -> Tensor:
        """Return normal numbers that are new in each step of an episode, float64 (n, count)."""
        return self.normal(stream, count, std=std, draw=self.steps * count)

    def _array(self, field: str) -> NDArray[Any]:
        views = self._episodes.field_views
        if field not in views:
            views[field] = self._sim.field(field).numpy()
        return views[field]

    def _view(self, field: str, index: int | slice | list[int] | None) -> Tensor | NDArray[Any]:
        """Return all N environments' ``field``, or the part ``index`` of its second axis.

        A copy where that is a list.
        """
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


@dataclass(frozen=True, kw_only=True)
class TaskCfg:
    """Settings that every task has. A task's own settings extend it; all can be overridden by name."""

    decimation: int
    """Physics steps per environment step."""
    episode_length: int
    """Environment steps after which an episode is truncated."""
    njmax: int | None = None
    """Constraint rows per environment that ``sim="warp"`` has room for; None for an estimate. An environment with more
    of them ends its episode as diverged. ``sim="mujoco"`` has no such limit."""
    nconmax: int | None = None
    """Contacts per environment, on the average of all, that ``sim="warp"`` has room for; None for an estimate."""

    def __post_init__(self) -> None:
        for name in ("decimation", "episode_length", "njmax", "nconmax"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ConfigError(f"{name}: expected at least 1, got {size}")


Cfg = TypeVar("Cfg", bound=TaskCfg, covariant=True, default=TaskCfg)


class Task(Generic[Cfg]):
    """A task in the direct form: subclass ``Task[YourCfg]``, load a model, override the row functions.

    Row functions are pure: what they return is a function of the rows they are given (states, episode ids, step counts,
    the task's memory) and of nothing else, one row not looking at another. They compute in float64. Do not use ``@``
    or a non-integer ``**`` over rows: their bits change with the number of rows.
    """

    memory: Mapping[str, tuple[int, ...]] = {}
    """Numbers a task keeps per environment between steps: name → shape of one row. Part of every snapshot."""
    success_measure: str | None = None
    """In words, when an episode counts as a success; None where the task has no such measure."""
    current_positions: bool = False
    """Whether what follows from positions (``xpos``, contacts, …) belongs to the state after a step, not to the one
    before its last physics step. It costs one more look for contacts per step."""

    controlled: bool = False
    """Whether :meth:`control` is called before each physics step; with ``sim="mujoco"`` only."""
    shown_positions: str | None = None
    """The memory, (nq,) per row, whose joint positions the cameras show; None for those of the state after a step."""

    def __init__(
        self, cfg: Cfg, model: Model, observations: Mapping[str, int], images: Mapping[str, ImageSpec] | None = None
    ) -> None:
        """Declare what the task is.

        Args:
            cfg: the settings.
            model: the compiled MuJoCo model.
            observations: observation group → its number of features.
            images: observation group → the camera that fills it.
        """
        self.cfg = cfg
        self.model = model
        self.images: Mapping[str, ImageSpec] = images or {}
        """Observation groups that a camera fills; the task does not compute them."""
        groups: dict[str, spaces.Space[Any]] = {}
        groups |= {name: spaces.Box(-np.inf, np.inf, (size,), np.float32) for name, size in observations.items()}
        groups |= {name: spec.space for name, spec in self.images.items()}
        self.observation_space = spaces.Dict(groups)
        # MuJoCo keeps (0, 0) as the range of an actuator that has none
        limited = model.actuator_ctrllimited[:, None].astype(np.bool_)
        low, high = np.where(limited, model.actuator_ctrlrange, (-np.inf, np.inf)).astype(np.float32).T
        self.action_space: spaces.Box | spaces.Discrete = spaces.Box(low, high, dtype=np.float32)

    @property
    def dt(self) -> float:
        """Seconds of simulated time per environment step."""
        return self.model.opt.timestep * self.cfg.decimation

    @property
    def identity(self) -> str:
        """What a snapshot must be of to be loaded into this task."""
        return type(self).__name__

    def reset(self, rows: Rows) -> None:
        """Write the initial state of the rows' episodes; it is the model's default when this is called."""

    def settle(self, rows: Rows, advance: Callable[[Tensor], None]) -> None:
        """Finish the start of episodes whose initial state is written and computed.

        ``advance(actions)`` takes a step with the rows that does not count: no observer sees it.
        """

    def apply_action(self, rows: Rows, actions: Tensor) -> None:
        """Write the controls for the coming step from ``actions``, float64 (n, A) or int64 (n,)."""
        rows.set("ctrl", actions)

    def control(self, rows: Rows, index: int) -> None:
        """Write the controls of physics step ``index`` of an environment step; a task with ``controlled`` overrides it.

        What follows from positions and velocities (``xpos``, ``qfrc_bias``, ``M``, …) is that of the current state.
        """

    def observe(self, rows: Rows) -> Obs:
        """Return the observation groups, float64 (n, features)."""
        raise NotImplementedError(f"{type(self).__name__} must override observe(rows)")

    def reward(self, rows: Rows, actions: Tensor) -> Tensor:
        """Reward of the step just taken, float64 (n,)."""
        raise NotImplementedError(f"{type(self).__name__} must override reward(rows, actions)")

    def terminated(self, rows: Rows) -> Tensor:
        """Return whether the task ends here, bool (n,)."""
        return torch.zeros(len(rows), dtype=torch.bool, device=rows.device)

    def success(self, rows: Rows) -> Tensor | None:
        """Return whether the episode that ends here succeeded, bool (n,); asked for ended rows only.

        None: no such measure.
        """
        del rows
        return None

    def instructions(self, rows: Rows) -> Sequence[str] | None:
        """Return the instruction of each row in its episode, n texts; asked for once, after ``reset``.

        None: nothing.
        """
        del rows
        return None
