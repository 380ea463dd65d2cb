"""Every Python block of README and guides runs, in order, one namespace a file."""

from __future__ import annotations

import re
import sys
import tempfile
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _blocks(path: Path) -> list[tuple[int, str]]:
    """The line each block starts on, and its code."""
    text = path.read_text()
    return [(text.count("\n", 0, match.start()) + 2, match.group(1)) for match in BLOCK.finditer(text)]


@pytest.mark.parametrize("path", [f for f in FILES if _blocks(f)], ids=lambda f: str(f.relative_to(ROOT)))
def test_every_python_block_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    module = types.ModuleType("snippet")  # dataclasses look their module up by name
    monkeypatch.setitem(sys.modules, "snippet", module)
    for line, code in _blocks(path):
        # the padding makes a traceback point at the line in the document
        exec(compile("\n" * (line - 1) + code, str(path), "exec"), module.__dict__)


def test_the_readme_has_snippets() -> None:
    assert len(_blocks(ROOT / "README.md")) >= 4
