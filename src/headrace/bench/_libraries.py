"""The RL libraries that runs name, and how each is described in a bundle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING

from headrace.bench._learning_schema import LibraryDescriptor
from headrace.errors import UnknownNameError

if TYPE_CHECKING:
    from pydantic import JsonValue

LIBRARIES = {
    "headrace": "headrace",
    "rl_games": "rl-games",
    "rsl_rl": "rsl-rl-lib",
    "sb3": "stable-baselines3",
    "skrl": "skrl",
    "torchrl": "torchrl",
}
"""Name as in ``--library`` → distribution."""


def describe_library(
    name: str,
    *,
    algorithm: str | None = None,
    settings: Mapping[str, JsonValue] | None = None,
    differences: Sequence[str] = (),
) -> LibraryDescriptor:
    """A descriptor with the installed version, read without importing the library; null where it is not installed."""
    if name not in LIBRARIES:
        raise UnknownNameError("library", name, LIBRARIES)
    try:
        version = metadata.version(LIBRARIES[name])
    except metadata.PackageNotFoundError:
        version = None
    return LibraryDescriptor(
        name=name,
        version=version,
        algorithm=algorithm,
        settings=dict(settings or {}),
        differences=list(differences),
    )
