"""Every name of ours on the page *Coming from another library* exists."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import headrace
from headrace.cli.main import build_parser

PAGE = Path(__file__).parents[2] / "docs" / "coming_from.md"
PACKAGES = [
    module
    for found in pkgutil.walk_packages(headrace.__path__, "headrace.")
    # modules of one foreign simulator each import it
    if (found.ispkg or found.name.endswith(".terms")) and not any(part[0] == "_" for part in found.name.split("."))
    if hasattr(module := importlib.import_module(found.name), "__all__")
]
OBJECTS = {
    "env": (headrace.make("cartpole", 1),),
    "info": (),  # keys of a dict: tested where they are filled
    "ends": (headrace.EpisodeEnds,),
}


def ours() -> list[str]:
    """What stands in the second column, in backticks."""
    rows = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("|")]
    cells = [row[2] for row in rows if row[2].strip() not in ("here", "---")]
    return sorted({token for cell in cells for token in re.findall(r"`([^`]+)`", cell)})


def public(name: str) -> list[object]:
    return [getattr(package, name) for package in [headrace, *PACKAGES] if name in package.__all__]


def options() -> set[str]:
    found: set[str] = set()
    parsers = [build_parser()]
    while parsers:
        for action in parsers.pop()._actions:
            found.update(action.option_strings)
            if isinstance(action.choices, dict):
                found.update(action.choices)
                parsers += action.choices.values()
    return found


def resolves(token: str) -> bool:
    if token.startswith(("headrace ", "--")):
        words = re.findall(r"(?<!\S)(--[\w-]+|[a-z][\w-]*)", token)
        commands = [word for word in words if word.startswith("--")] + words[1:2] * token.startswith("headrace ")
        return set(commands) <= options()
    if re.fullmatch(r'"\w+"', token):
        return True  # a value of an argument that stands beside it
    name = re.match(r"[\w.]+", token)
    assert name is not None, token
    first, *rest = name[0].split(".")
    if first == "headrace":
        module: object = headrace
        for part in rest:
            if not hasattr(module, part):
                try:
                    importlib.import_module(f"{getattr(module, '__name__', '')}.{part}")
                except ImportError:
                    return False
            module = getattr(module, part)
        return True
    if first in OBJECTS:
        return all(any(hasattr(owner, part) for owner in OBJECTS[first]) for part in rest)
    found: list[object] = public(first)
    for part in rest:
        found = [getattr(owner, part) for owner in found if hasattr(owner, part)]
    if found:
        return True
    # an argument of something public, or a field that results have
    known = [getattr(package, name) for package in [headrace, *PACKAGES] for name in package.__all__]
    known += [value.forward for value in known if hasattr(value, "forward")]
    return any(first in inspect.signature(value).parameters for value in known if _has_signature(value))


def _has_signature(value: object) -> bool:
    try:
        inspect.signature(value)  # pyright: ignore[reportArgumentType]  # what has none raises
    except (TypeError, ValueError):
        return False
    return True


@pytest.mark.parametrize("token", ours())
def test_a_name_on_the_page_exists(token: str) -> None:
    assert resolves(token), f"{token} is on the page and nowhere else"


def test_a_name_that_is_nowhere_is_found() -> None:
    for wrong in ("headrace.replay.ReplayBufer", "FrameStak", "env.suspendd", "headrace trian TASK", "--check-succes"):
        assert not resolves(wrong)
