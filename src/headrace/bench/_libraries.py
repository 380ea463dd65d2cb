"""How an RL library is described in a bundle."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING

from headrace.adapters._library import library
from headrace.bench._learning_schema import LibraryDescriptor

if TYPE_CHECKING:
    from pydantic import JsonValue


def describe_library(
    name: str, *, algorithm: str | None = None, settings: Mapping[str, JsonValue] | None = None
) -> LibraryDescriptor:
    """A descriptor with the installed version, read without importing the library; null where it is not installed.

    With ``settings`` it says where the library computes something else than they suggest.
    """
    spec = library(name)
    try:
        version = metadata.version(spec.distribution)
    except metadata.PackageNotFoundError:
        version = None
    differences = [] if settings is None else list(spec.differences)
    return LibraryDescriptor(
        name=name, version=version, algorithm=algorithm, settings=dict(settings or {}), differences=differences
    )
