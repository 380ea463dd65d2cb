"""Experts to learn from: feedback laws that see the observation and nothing else."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from headrace.errors import UnknownNameError
from headrace.rollout.experts._pusher import pusher_expert
from headrace.types import Obs

Expert = Callable[[Obs], Tensor]
"""Observation groups (n, …) → actions float32 (n, A), without memory."""

_EXPERTS: dict[str, Expert] = {"pusher-solid": pusher_expert}


def expert_for(task: str) -> Expert:
    """The expert of a task, by the task's name."""
    if task not in _EXPERTS:
        raise UnknownNameError("task with an expert", task, _EXPERTS)
    return _EXPERTS[task]


__all__ = ["Expert", "expert_for"]
