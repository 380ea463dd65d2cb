"""Exports that load on use: importing a package costs nothing until one of its names is read."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence


def lazy_exports(
    package: str, names: Sequence[str], homes: Mapping[str, tuple[str, ...]]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The module-level ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: the package's ``__name__``.
        names: the package's ``__all__``.
        homes: module → the names that it defines; a module that starts with ``.`` lies inside the package.
    """
    home_of = {name: home for home, defined in homes.items() for name in defined}

    def get(name: str) -> object:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(home_of[name], package), name)

    return get, lambda: list(names)
