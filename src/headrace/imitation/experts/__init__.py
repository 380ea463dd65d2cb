"""Experts to learn from: feedback laws that see the observation and nothing else."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from headrace.errors import UnknownNameError
from headrace.imitation.experts._arm import aloha_expert, pusher_expert
from headrace.imitation.experts._libero import SKILLS, libero_expert
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
    """Return the expert of a task, by the task's name."""
    return libero_expert(task) if task in SKILLS else _find_expert(task)[0]


def disturbance_for(task: str) -> float:
    """Return how far a task's demonstrations are disturbed, so that a learner sees how its expert recovers."""
    return 0.1 if task in SKILLS else _find_expert(task)[1]


def _find_expert(task: str) -> tuple[Expert, float]:
    if task not in _EXPERTS:
        raise UnknownNameError("task with an expert", task, [*_EXPERTS, *SKILLS])
    return _EXPERTS[task]


__all__ = ["disturbance_for", "expert_for"]
