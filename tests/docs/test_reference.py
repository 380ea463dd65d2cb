"""The reference: every public package stands in it, and every name that a package exports has a docstring."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from itertools import pairwise
from pathlib import Path

import pytest

import headrace

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
SHOWN = {name: page for page in PAGES for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)}


def public(name: str) -> bool:
    return not any(part.startswith("_") for part in name.split(".")[1:])


PACKAGES = ["headrace"] + [
    found.name for found in pkgutil.walk_packages(headrace.__path__, "headrace.") if found.ispkg and public(found.name)
]
EXPORTING = [name for name in PACKAGES if hasattr(importlib.import_module(name), "__all__")]


def test_every_public_package_stands_in_a_reference_page_that_the_site_lists() -> None:
    inner = {"bench.measured", "cli", "envs.tasks", "policies.serving"}
    inner |= {"envs.tasks.libero", "recording.export", "sim.camera", "bench.reporting"}
    inner |= {"adapters", "adapters.sb3"}  # where checkpoints of 0.2 look for classes
    assert set(PACKAGES) - set(EXPORTING) == {f"headrace.{name}" for name in inner}, "packages without names of users"
    assert sorted(set(EXPORTING) - set(SHOWN)) == []
    site = (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in PAGES if f"reference/{page.name}" not in site] == []


def test_every_public_module_of_the_top_level_stands_in_a_reference_page() -> None:
    modules = [found.name for found in pkgutil.iter_modules(headrace.__path__, "headrace.") if not found.ispkg]
    assert [name for name in modules if public(name) and name not in SHOWN] == []


def documented_assignments() -> set[str]:
    """Names that a module assigns and documents in a string after it."""
    found: set[str] = set()
    for path in (ROOT / "src" / "headrace").rglob("*.py"):
        for assigned, after in pairwise(ast.parse(path.read_text()).body):
            text = after.value if isinstance(after, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                targets = assigned.targets if isinstance(assigned, ast.Assign) else [getattr(assigned, "target", None)]
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


DOCUMENTED = documented_assignments()


@pytest.mark.parametrize("package", EXPORTING)
def test_every_exported_name_has_a_docstring(package: str) -> None:
    module = importlib.import_module(package)
    bare: list[str] = []
    for name in module.__all__:
        if name == "__version__":
            continue
        value = getattr(module, name)
        own = inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)
        if not (inspect.getdoc(value) if own else name in DOCUMENTED):
            bare.append(name)
    assert bare == []


@pytest.mark.parametrize("package", EXPORTING)
def test_a_package_lists_what_it_exports(package: str) -> None:
    """``dir()`` gives the names, also where they load on use: completion in a shell sees them."""
    module = importlib.import_module(package)
    assert set(module.__all__) <= set(dir(module))
    assert len(set(module.__all__)) == len(module.__all__)


def words_of_examples() -> set[str]:
    """Those of every code block, lesson and example; tests run all of them."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    code = [block for page in pages for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M)]
    code += [path.read_text() for folder in ("docs", "examples") for path in (ROOT / folder).rglob("*.py")]
    return set(re.findall(r"\w+", "\n".join(code)))


def test_every_public_name_is_shown_in_use() -> None:
    shown = words_of_examples()
    exported = {package: importlib.import_module(package).__all__ for package in EXPORTING}
    unused = [f"{package}.{name}" for package, names in exported.items() for name in names if name not in shown]
    assert [name for name in unused if name not in PACKAGES] == []
