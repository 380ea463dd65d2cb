"""Names across packages: a leading underscore stays inside its package, and a class name means one thing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import headrace

HOME = Path(headrace.__file__).parent
MIRRORED = {"headrace.compat.isaaclab", "headrace.bridges.child"}
"""Isaac Lab's names are the interface there; ``child.py`` runs where headrace is not installed."""
BUNDLE_SCHEMA = {"EpisodePlan"}
"""Records of bundles, whose names stand in the published schema."""


def modules() -> Iterator[tuple[tuple[str, ...], ast.Module]]:
    for file in sorted(HOME.rglob("*.py")):
        parts = ("headrace", *file.relative_to(HOME).with_suffix("").parts)
        yield parts, ast.parse(file.read_text())


def imported(tree: ast.Module) -> Iterator[list[str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            assert node.level == 0
            yield from ([*node.module.split("."), alias.name] for alias in node.names)


def test_private_modules_and_names_are_imported_only_inside_their_package() -> None:
    outside: list[str] = []
    for importer, tree in modules():
        for path in imported(tree):
            if importer[-1] == "__init__" and tuple(path[: len(importer) - 1]) == importer[:-1]:
                continue  # a package shows what is inside it
            private = [place for place, part in enumerate(path) if part.startswith("_") and part != "__future__"]
            if path[0] == "headrace" and any(importer[:place] != tuple(path[:place]) for place in private):
                outside.append(f"{'.'.join(importer)} imports {'.'.join(path)}")
    assert outside == []


def test_a_public_class_name_means_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for parts, tree in modules():
        module = ".".join(parts)
        if not any(module.startswith(mirror) for mirror in MIRRORED):
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(module)
    assert {name: found for name, found in places.items() if len(found) > 1 and name not in BUNDLE_SCHEMA} == {}
