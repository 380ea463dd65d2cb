"""The guide's code runs, in order, as a reader would type it."""

from __future__ import annotations

import re
from pathlib import Path


def test_every_python_block_of_the_vision_guide_runs() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "vision.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    assert len(blocks) >= 6
    exec(compile("\n".join(blocks), "docs/vision.md", "exec"), {"__name__": "guide"})
