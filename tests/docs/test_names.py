"""Every file and every dotted name of headrace that a page mentions is there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "headrace"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES.remove(ROOT / "docs" / "coming_from.md")  # names of other libraries; test_coming_from.py has ours
FOLDERS = {path.name for folder in (ROOT, SOURCE) for path in folder.iterdir() if path.is_dir()}
FILE = re.compile(r"(?<![\w/.:-])((?:\w+/)+[\w.-]+\.(?:py|json|sh|lock|toml|xml))\b")
NAME = re.compile(r"`(headrace(?:\.\w+)+)")
NOT_MODULES = {"headrace.tasks", "headrace.libraries", "headrace.kernels", "headrace.json"}
"""Groups of entry points, a logger, a file."""


def missing(text: str) -> list[str]:
    files = [file for file in FILE.findall(text) if file.split("/")[0] in FOLDERS and "NAME" not in file]
    names = [name for name in NAME.findall(text) if name not in NOT_MODULES]
    return [file for file in files if not any((folder / file).exists() for folder in (ROOT, SOURCE))] + [
        name for name in names if not found(name)
    ]


def found(name: str) -> bool:
    value: object = importlib.import_module("headrace")
    for place, part in enumerate(parts := name.split(".")[1:], 1):
        if not hasattr(value, part):
            try:
                importlib.import_module(".".join(["headrace", *parts[:place]]))
            except ImportError:
                return False
        value = getattr(value, part)
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_and_name_of_a_page_is_there(page: Path) -> None:
    assert missing(page.read_text()) == []


def test_a_file_and_a_name_that_are_nowhere_are_found() -> None:
    text = "`replay/_samplers.py`, `replay/_sampler.py`, `headrace.replay.Sampler`, `headrace.replay.Samplr`"
    assert missing(text) == ["replay/_sampler.py", "headrace.replay.Samplr"]
