"""What a task declares: a model, spaces, an episode length, and a few functions over rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from typing_extensions import TypeVar

from headrace.envs._compiled_rows import CompiledRows, TaskArrays
from headrace.envs._image_spec import ImageSpec
from headrace.envs._rows import Rows
from headrace.errors import ConfigError
from headrace.sim._mujoco_api import Model
from headrace.types import Obs


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

    def __init__(
        self,
        cfg: Cfg,
        model: Model,
        observations: Mapping[str, int],
        images: Mapping[str, ImageSpec] | None = None,
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

    def apply_action(self, rows: Rows, actions: Tensor) -> None:
        """Write the controls for the coming step from ``actions``, float64 (n, A) or int64 (n,)."""
        rows.set("ctrl", actions)

    def observe(self, rows: Rows) -> Obs:
        """The observation groups, float64 (n, features)."""
        raise NotImplementedError(f"{type(self).__name__} must override observe(rows)")

    def reward(self, rows: Rows, actions: Tensor) -> Tensor:
        """Reward of the step just taken, float64 (n,)."""
        raise NotImplementedError(f"{type(self).__name__} must override reward(rows, actions)")

    def terminated(self, rows: Rows) -> Tensor:
        """Whether the task ends here, bool (n,)."""
        return torch.zeros(len(rows), dtype=torch.bool, device=rows.device)

    def success(self, rows: Rows) -> Tensor | None:
        """Whether the episode that ends here succeeded, bool (n,); asked for ended rows only. None: no such measure."""
        del rows
        return None

    def compiled(self, arrays: TaskArrays) -> CompiledRows | None:
        """The row functions as kernels, for a task that steps often; None: there are none.

        An environment uses them on the CPU in steps that nothing watches; the functions above stay the reference.
        """
        del arrays
        return None

    def instructions(self, rows: Rows) -> Sequence[str] | None:
        """What each row is told to do in its episode, n texts; asked for once, after ``reset``. None: nothing."""
        del rows
        return None
