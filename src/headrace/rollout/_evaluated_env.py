"""What an evaluation uses of an environment."""

from __future__ import annotations

from typing import Protocol, cast

import torch
from gymnasium import spaces
from torch import Tensor

from headrace.errors import ConfigError
from headrace.timing import StageTimer
from headrace.types import Ids, Obs, Step


class EvaluatedEnv(Protocol):
    """What an evaluation uses of an environment: a ``BatchEnv``, or a bridge."""

    num_envs: int
    device: torch.device
    timer: StageTimer

    @property
    def autoreset(self) -> str:
        """As given to ``make``."""
        ...

    @property
    def fidelity(self) -> str:
        """How a suspended environment is kept: ``native``, ``restore`` or ``hold``."""
        ...

    @property
    def single_action_space(self) -> spaces.Space[object]:
        """Of one environment."""
        ...

    def reset(self, *, seed: int | None = None, options: dict[str, object] | None = None) -> object:
        """As ``BatchEnv.reset``."""
        ...

    def step(self, actions: Tensor, observe: Tensor | None = None) -> Step:
        """As ``BatchEnv.step``."""
        ...

    def observe(self, ids: Ids | None = None) -> Obs:
        """As ``BatchEnv.observe``."""
        ...

    def instructions(self, ids: Ids | None = None) -> tuple[str, ...]:
        """As ``BatchEnv.instructions``."""
        ...

    def suspend(self, ids: Ids) -> None:
        """As ``BatchEnv.suspend``."""
        ...

    def resume(self, ids: Ids) -> None:
        """As ``BatchEnv.resume``."""
        ...


def action_size(space: spaces.Space[object]) -> int:
    """Numbers of one action: A of a Box (A,), 1 for a choice."""
    if isinstance(space, spaces.Discrete):
        return 1
    if not isinstance(space, spaces.Box) or len(space.shape) != 1:
        raise ConfigError(f"policy: expected an environment with actions (A,) of real numbers, or choices, got {space}")
    return space.shape[0]


def reseeds(env: EvaluatedEnv) -> bool:
    """Whether an episode is a function of (seed, episode id, actions); a bridge may say that it is not."""
    return bool(getattr(env, "reseeds", True))


def frames_drawn(env: EvaluatedEnv) -> int:
    """Camera frames so far; a bridged environment draws on its own, uncounted."""
    return cast("int", getattr(env, "frames_drawn", 0))
