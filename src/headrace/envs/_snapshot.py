"""Snapshots: checked before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from torch import Tensor

from headrace.errors import DataError
from headrace.types import StateDict

_KEYS = ("task", "num_envs", "seed", "divergences", "sim", "episodes", "suspended", "parked", "observations")


def check_snapshot(state: StateDict, like: StateDict) -> None:
    """Refuse a snapshot of another task or number of environments than ``like``, or of another layout."""
    missing = [key for key in _KEYS if key not in state]
    if missing:
        raise DataError(f"snapshot: expected what state_dict() gave, got one without {missing}")
    if state["task"] != like["task"] or state["num_envs"] != like["num_envs"]:
        raise DataError(
            f"snapshot: expected {like['num_envs']} environments of {like['task']}, got {state['num_envs']} of "
            f"{state['task']}; make an environment with the same task and num_envs"
        )
    _check_layout(state, like)


def _check_layout(state: StateDict, like: StateDict, inside: str = "") -> None:
    """Refuse a snapshot that lacks an entry of ``like``, or has a tensor of another shape or dtype in its place."""
    for key, expected in like.items():
        name = f"{inside}{key}"
        if key not in state:
            raise DataError(f"snapshot: expected an entry {name!r}, got none; it is damaged or of another version")
        got: object = state[key]
        if isinstance(expected, Mapping):
            if not isinstance(got, Mapping):
                raise DataError(f"snapshot: expected entries below {name!r}, got {type(got).__name__}")
            _check_layout(cast("StateDict", got), cast("StateDict", expected), f"{name}.")
        elif isinstance(expected, list):
            texts = cast("list[object]", got) if isinstance(got, list) else []
            if len(texts) != len(cast("list[object]", expected)) or not all(isinstance(text, str) for text in texts):
                raise DataError(f"snapshot: {name}: expected {len(cast('list[object]', expected))} texts, got {got!r}")
        elif isinstance(expected, Tensor) and (
            not isinstance(got, Tensor) or got.shape != expected.shape or got.dtype != expected.dtype
        ):
            found = f"{got.dtype} {tuple(got.shape)}" if isinstance(got, Tensor) else type(got).__name__
            raise DataError(f"snapshot: {name}: expected {expected.dtype} {tuple(expected.shape)}, got {found}")
