"""Overrides: one setting of a task by its path, from Python or from the command line."""

from __future__ import annotations

import ast
import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar, cast

from headrace.errors import ConfigError, DataError, UnknownNameError

_T = TypeVar("_T")


def with_overrides(cfg: _T, overrides: Mapping[str, object]) -> _T:
    """Return a copy of a (nested) dataclass with some settings changed; the checks of the dataclass run again.

    Args:
        cfg: a frozen dataclass, possibly with dataclasses and mappings inside.
        overrides: path → value, for example ``{"episode_length": 50, "rewards.alive.weight": 2.0}``.
    """
    for path, value in overrides.items():
        cfg = cast("_T", _replaced(cfg, path.split("."), value, path))
    return cfg


_WORDS: Mapping[str, object] = {"true": True, "false": False, "null": None}
"""What YAML and JSON call them, beside Python's own names."""


def parse_assignments(assignments: Iterable[str], option: str = "--set") -> dict[str, object]:
    """``path=value`` texts from a command line as overrides.

    Values are Python literals, ``true``, ``false`` or ``null`` in any case, or text as it stands.
    """
    parsed: dict[str, object] = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path:
            raise ConfigError(
                f"{option}: expected path=value, got {assignment!r}; for example {option} episode_length=50"
            )
        if text.lower() in _WORDS:
            parsed[path] = _WORDS[text.lower()]
            continue
        try:
            parsed[path] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            parsed[path] = text
    return parsed


def read_preset(path: Path) -> dict[str, object]:
    """Read overrides from a YAML file: ``path: value`` lines, nested or with dots."""
    return _flat(read_yaml(path, "--preset"), "")


def read_yaml(path: Path, whose: str, form: str = "settings as 'path: value' lines") -> Mapping[object, object]:
    """Return a mapping from a YAML file; ``whose`` names it in errors, ``form`` says what was expected."""
    import yaml

    try:
        found: object = yaml.safe_load(path.read_text())
    except OSError as error:
        raise DataError(f"{whose} {path}: expected a YAML file, got: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DataError(f"{whose} {path}: expected YAML, got: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{whose} {path}: expected {form}, got {type(found).__name__}")
    return cast("Mapping[object, object]", found)


def _flat(settings: Mapping[object, object], prefix: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            found |= _flat(cast("Mapping[object, object]", value), f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _replaced(node: object, path: list[str], value: object, whole: str) -> object:
    name, rest = path[0], path[1:]
    if isinstance(node, Mapping):
        entries = dict(cast("Mapping[str, object]", node))
        if name not in entries:
            raise UnknownNameError(f"setting in {whole!r}:", name, entries)
        entries[name] = (
            _replaced(entries[name], rest, value, whole) if rest else _fitted(entries[name], value, (), whole)
        )
        return entries
    if not dataclasses.is_dataclass(node) or isinstance(node, type):
        raise ConfigError(f"{whole!r}: {name!r} has no settings below it; it is {node!r}")
    known = [field.name for field in dataclasses.fields(node)]
    if name not in known:
        raise UnknownNameError(f"setting in {whole!r}:", name, known)
    old: object = getattr(node, name)
    hints = _alternatives(node, name)
    choices = typing.get_args(hints[0]) if len(hints) == 1 and typing.get_origin(hints[0]) is typing.Literal else ()
    if choices and value not in choices:
        raise UnknownNameError(f"value of {whole!r}:", str(value), map(str, choices))
    kinds = tuple(typing.get_origin(hint) or hint for hint in hints)
    new = _replaced(old, rest, value, whole) if rest else _fitted(old, value, kinds, whole)
    return dataclasses.replace(node, **{name: new})


def _fitted(old: object, value: object, alternatives: tuple[object, ...], path: str) -> object:
    """``value`` if it can stand in for ``old``.

    It can if it has the same type, if it is an integer where a float is, if both are functions (terms), or
    if the annotation of the setting allows for its type beside that of ``old``, such as None. A list stands for a
    tuple: JSON and YAML have no tuples, and settings have no lists.
    """
    if isinstance(value, list) and (isinstance(old, tuple) or tuple in alternatives):
        value = tuple(cast("list[object]", value))
    if isinstance(old, tuple) and isinstance(value, tuple):
        olds, values = cast("tuple[object, ...]", old), cast("tuple[object, ...]", value)
        pairs = zip(values, olds[: len(values)] + olds[-1:] * (len(values) - len(olds)), strict=bool(olds))
        return tuple(_fitted(was, new, (), path) for new, was in pairs) if olds else values
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if is_whole and (isinstance(old, float) or (not isinstance(old, int) and float in alternatives)):
        return float(cast("int", value))
    if type(value) is type(old) or (callable(old) and callable(value)):
        return value
    if any(isinstance(value, kind) for kind in alternatives if isinstance(kind, type)) and not isinstance(value, bool):
        return value
    raise ConfigError(f"{path}: expected {type(old).__name__} like {old!r}, got {type(value).__name__} {value!r}")


def _alternatives(node: object, name: str) -> tuple[object, ...]:
    """Return what the annotation of a dataclass field unites: ``float | None`` → (float, NoneType)."""
    try:
        hint = typing.get_type_hints(type(node)).get(name)
    except NameError:
        # a dataclass whose annotations name types that only a type checker sees
        return ()
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
