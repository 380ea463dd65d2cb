"""What networks compute is, on one machine, bit for bit what headrace 0.2 computes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMMIT = "80843bd"
"""The last of 0.2."""


@pytest.mark.slow
def test_tables_and_weights_equal_those_of_a_checkout_of_0_2(tmp_path: Path) -> None:
    packed = subprocess.run(["git", "archive", COMMIT, "src"], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode:
        pytest.skip(f"commit {COMMIT} is not in this clone: git fetch --unshallow")
    subprocess.run(["tar", "-x", "-C", tmp_path], input=packed.stdout, check=True)
    program = ROOT / "tests/data/v0_2/compare.py"
    command = [sys.executable, str(program), str(tmp_path / "src"), str(ROOT / "src")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
