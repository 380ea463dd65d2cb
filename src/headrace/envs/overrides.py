"""Overrides: one setting of a task by its path, from Python or from the command line."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable, Mapping
from typing import TypeVar, cast

from headrace.errors import ConfigError, UnknownNameError

_T = TypeVar("_T")


def with_overrides(cfg: _T, overrides: Mapping[str, object]) -> _T:
    """A copy of a (nested) dataclass with some settings changed; the checks of the dataclass run again.

    Args:
        cfg: a frozen dataclass, possibly with dataclasses and mappings inside.
        overrides: path → value, for example ``{"episode_length": 50, "rewards.alive.weight": 2.0}``.
    """
    for path, value in overrides.items():
        cfg = cast("_T", _replaced(cfg, path.split("."), value, path))
    return cfg


def parse_assignments(assignments: Iterable[str]) -> dict[str, object]:
    """``path=value`` texts from a command line as overrides; values are Python literals, or text as it stands."""
    parsed: dict[str, object] = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path:
            raise ConfigError(f"--set: expected path=value, got {assignment!r}; for example --set episode_length=50")
        try:
            parsed[path] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            parsed[path] = text
    return parsed


def _replaced(node: object, path: list[str], value: object, whole: str) -> object:
    name, rest = path[0], path[1:]
    if isinstance(node, Mapping):
        entries = dict(cast("Mapping[str, object]", node))
        if name not in entries:
            raise UnknownNameError(f"setting in {whole!r}:", name, entries)
        entries[name] = _replaced(entries[name], rest, value, whole) if rest else _fitted(entries[name], value, whole)
        return entries
    if not dataclasses.is_dataclass(node) or isinstance(node, type):
        raise ConfigError(f"{whole!r}: {name!r} has no settings below it; it is {node!r}")
    known = [field.name for field in dataclasses.fields(node)]
    if name not in known:
        raise UnknownNameError(f"setting in {whole!r}:", name, known)
    old: object = getattr(node, name)
    return dataclasses.replace(
        node, **{name: _replaced(old, rest, value, whole) if rest else _fitted(old, value, whole)}
    )


def _fitted(old: object, value: object, path: str) -> object:
    """``value`` if it can stand in for ``old``: an integer may stand in for a float, nothing else changes its type."""
    if isinstance(old, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if old is not None and value is not None and type(value) is not type(old):
        raise ConfigError(f"{path}: expected {type(old).__name__} like {old!r}, got {type(value).__name__} {value!r}")
    return value
