"""headrace beside a MuJoCo that its native tasks cannot use: nothing else imports it."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CHECK = ROOT / "tests" / "without_native_mujoco.py"
TORCH = "torch==2.13.0"  # its CPU build is found under this exact version; without it pip would fetch CUDA's
OLDEST = ("mujoco==3.3.7", "numpy==1.26.4", "gymnasium==1.2.0")
"""What the bounds in pyproject.toml were tried with, beside the versions of the lock file."""


def test_bridges_evaluation_replay_learning_vision_and_bench_work_without_mujoco(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, str(CHECK), "blocked", "native tasks need MuJoCo 4", "not installed", "Bridges, evaluation"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "refused: native tasks need MuJoCo 4" in ran.stdout


@pytest.mark.slow
def test_the_wheel_installs_and_works_beside_mujoco_3_numpy_1_and_an_older_gymnasium(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(*words: str) -> str:
        ran = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, f"{words}: {ran.stdout[-2000:]}{ran.stderr[-2000:]}"
        return ran.stdout

    run(python, "-m", "pip", "install", "--quiet", TORCH)
    run(python, "-m", "pip", "install", "--quiet", *OLDEST)
    run(python, "-m", "pip", "install", "--quiet", str(wheel))
    listed = run(python, "-m", "pip", "list", "--format", "freeze")
    assert set(OLDEST) <= set(listed.split()), "nothing was upgraded"
    said = run(python, str(CHECK), "present", "native tasks need MuJoCo 4", "3.3.7 is installed")
    assert "refused" in said
