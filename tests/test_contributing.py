"""The steps of CONTRIBUTING.md: one task, camera, sampler, engine, library, formatter and metric of one's own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
BLOCK = re.compile(r"^### (A[^\n]*)\n(.*?)(?=^##)", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
KINDS = ("A task", "A camera", "A sampler", "An engine", "A library", "A formatter", "A metric")


def test_the_steps_of_every_kind_run_and_register_without_a_change_in_headrace(tmp_path: Path) -> None:
    """In a process of its own: what is registered stays registered."""
    steps = dict(BLOCK.findall(TEXT))
    assert tuple(steps) == KINDS
    program = tmp_path / "steps.py"
    program.write_text("\n".join(code for kind in KINDS for code in CODE.findall(steps[kind])))
    run = subprocess.run(
        [sys.executable, "-W", "error", str(program)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("kind", [kind.split(" ", 1)[1] for kind in KINDS])
def test_the_table_says_where_each_kind_goes_and_the_files_are_there(kind: str) -> None:
    row = next(line for line in TEXT.splitlines() if re.match(rf"\| an? {kind} ", line))
    _, _, inside, outside, held_to, _ = (cell.strip() for cell in row.split("|"))
    for path in re.findall(r"`([a-z_/]+\.py)`", inside):
        assert (ROOT / "src" / "headrace" / path).is_file(), path
    for path in re.findall(r"`(tests/[a-z_/.]+)`", held_to):
        assert (ROOT / path).exists(), path
    import importlib

    for name in re.findall(r"`(headrace(?:\.\w+)+)`", f"{outside} {held_to}"):
        if name in ("headrace.tasks", "headrace.libraries"):
            continue  # groups of entry points
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name
