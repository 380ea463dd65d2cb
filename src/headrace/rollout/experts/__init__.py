"""Experts to learn from: feedback laws that see the observation and nothing else."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from headrace.errors import UnknownNameError
from headrace.rollout.experts._aloha import aloha_expert
from headrace.rollout.experts._pusher import pusher_expert
from headrace.types import Obs

Expert = Callable[[Obs], Tensor]
"""Observation groups (n, …) → actions float32 (n, A), without memory."""

_EXPERTS: dict[str, tuple[Expert, float]] = {
    "aloha-transfer-cube": (aloha_expert, 0.02),
    "aloha-transfer-cube-state": (aloha_expert, 0.02),
    "pusher-solid": (pusher_expert, 0.3),
}
"""Task → its expert, and how much of a disturbance it recovers from, in units of its actions."""


def expert_for(task: str) -> Expert:
    """The expert of a task, by the task's name."""
    return _known(task)[0]


def disturbance_for(task: str) -> float:
    """How far a task's demonstrations are disturbed, so that a learner sees how its expert recovers."""
    return _known(task)[1]


def _known(task: str) -> tuple[Expert, float]:
    if task not in _EXPERTS:
        raise UnknownNameError("task with an expert", task, _EXPERTS)
    return _EXPERTS[task]


__all__ = ["disturbance_for", "expert_for"]
