"""Names of nested observations: the leaf ``{"camera": {"left": …}}`` is called ``camera/left``, everywhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias, cast

from gymnasium import spaces

from headrace.errors import ConfigError

SEPARATOR = "/"
Path: TypeAlias = tuple[str | int, ...]
"""Keys of dicts and indices of tuples, from the root of an observation."""


class Leaf(NamedTuple):
    """One array of a nested observation, or its space."""

    name: str
    path: Path
    value: Any


def leaves(tree: object, root: str = "") -> tuple[Leaf, ...]:
    """Return the leaves of nested mappings or of a ``Dict`` or ``Tuple`` space, in order, with distinct names.

    Keys and indices are joined with ``/``; a key may be such a name already. ``root`` is the name of a tree that is
    itself a leaf, and of a ``Tuple`` at the root.
    """
    found = tuple(_walk(tree, (), root))
    names = [leaf.name for leaf in found]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ConfigError(f"observations: expected distinct names, got {repeated[0]!r} twice; rename its keys")
    return found


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one dict of leaves by name, below ``prefix``."""
    return {f"{prefix}{SEPARATOR}{leaf.name}" if prefix else leaf.name: leaf.value for leaf in leaves(tree)}


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves by name as nested dicts."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *groups, last = name.split(SEPARATOR)
        branch = tree
        for group in groups:
            branch = branch.setdefault(group, {})
        branch[last] = value
    return tree


def _walk(tree: object, path: Path, name: str) -> Iterator[Leaf]:
    if isinstance(tree, spaces.Tuple):
        parts: list[tuple[str | int, object]] = list(enumerate(cast("tuple[object, ...]", tree.spaces)))
    elif isinstance(tree, Mapping | spaces.Dict):
        parts = list(cast("Mapping[str, object]", tree).items())
        name = name if path else ""
    else:
        yield Leaf(name, path, tree)
        return
    if not parts:
        raise ConfigError("observations: expected at least one group, got an empty dict")
    for key, part in parts:
        if key == "" or not all(str(key).split(SEPARATOR)):
            raise ConfigError(f"observations: expected names that are not empty, got {key!r}; rename it")
        yield from _walk(part, (*path, key), f"{name}{SEPARATOR}{key}" if name else str(key))
