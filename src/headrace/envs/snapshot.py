"""Snapshots: checked before anything is changed."""

from __future__ import annotations

from headrace.errors import DataError
from headrace.types import StateDict

_KEYS = ("task", "num_envs", "seed", "divergences", "sim", "slots", "suspended", "parked", "board")


def checked_snapshot(state: StateDict, task: str, num_envs: int) -> StateDict:
    """``state`` as it is, once it is known to belong to this task and number of environments."""
    missing = [key for key in _KEYS if key not in state]
    if missing:
        raise DataError(f"snapshot: expected what state_dict() gave, got one without {missing}")
    if state["task"] != task or state["num_envs"] != num_envs:
        raise DataError(
            f"snapshot: expected {num_envs} environments of {task}, got {state['num_envs']} of {state['task']}; "
            "make an environment with the same task and num_envs"
        )
    return state
