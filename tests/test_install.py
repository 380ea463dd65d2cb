"""Wheel and sdist in an empty virtual environment, as somebody who has only the package index."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"  # its CPU build is found under this exact version; without it pip would fetch CUDA's


@pytest.mark.slow
def test_wheel_and_sdist_install_and_work_in_an_empty_environment(tmp_path: Path) -> None:
    dist = tmp_path / "dist"
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv" / "bin"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"PATH": f"{programs}:{os.defpath}", "HOME": str(tmp_path)}

    def run(*words: str) -> str:
        ran = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, f"{words}: {ran.stdout[-2000:]}{ran.stderr[-2000:]}"
        assert "Warning" not in ran.stderr, ran.stderr
        return ran.stdout

    run("python", "-m", "pip", "install", "--quiet", TORCH)
    for number, package in enumerate((wheel, sdist)):
        options = ["--force-reinstall", "--no-deps"] if number else []
        run("python", "-m", "pip", "install", "--quiet", *options, str(package))
        place = run("python", "-c", "import headrace; print(headrace.__path__[0])").strip()
        assert place.startswith(str(tmp_path / "venv"))
        assert (Path(place) / "py.typed").exists()
        assert "The core works." in run("headrace", "doctor")
        played = run("headrace", "play", "cartpole", "--num-envs", "4", "--output", f"played-{number}")
        assert "completed" in played
