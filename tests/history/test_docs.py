"""The guides' code runs, in order, as a reader would type it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


@pytest.mark.parametrize(("name", "at_least"), [("vision.md", 6), ("cameras.md", 2)])
def test_every_python_block_of_the_guides_runs(name: str, at_least: int) -> None:
    guide = (Path(__file__).parents[2] / "docs" / name).read_text()
    blocks = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    assert len(blocks) >= at_least
    exec(compile("\n".join(blocks), f"docs/{name}", "exec"), {"__name__": "guide"})
