"""The lessons run."""

from __future__ import annotations

import ast
import runpy
import tempfile
from pathlib import Path

import pytest

from headrace.envs import registry

_DOCS = Path(__file__).parents[2] / "docs"
_LESSONS = sorted((_DOCS / "tutorials").glob("*.py"))


@pytest.fixture(autouse=True)
def _forget_registered_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lesson may register tasks; the next test shall not know them, nor a lesson those of another test."""
    own = {name: entry for name, entry in registry._TASKS.items() if name != "reach"}  # of the shell blocks
    monkeypatch.setattr(registry, "_TASKS", own)


@pytest.mark.parametrize("lesson", _LESSONS, ids=lambda path: path.stem)
def test_lesson_runs_and_leaves_nothing_behind(lesson: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(lesson))
    # torch's compiler keeps its cache there, once for all programs
    assert [path for path in tmp_path.iterdir() if not path.name.startswith("torchinductor")] == []


def test_the_class_of_the_lesson_takes_less_than_60_lines_with_its_model_and_settings() -> None:
    tree = ast.parse((_DOCS / "tutorials" / "writing_a_task.py").read_text())
    names = {"SWING_UP_XML", "SwingUpCfg", "SwingUp"}
    lines, found = 0, set()
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else node
        name = getattr(target, "id", None) or getattr(target, "name", None)
        if name in names:
            found.add(name)
            first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
            lines += node.end_lineno - first + 1
    assert found == names
    assert lines < 60
