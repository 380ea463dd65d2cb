"""``examples/my_robot`` is installed into a virtual environment of its own and used as a reader would use it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import headrace

PACKAGE = Path(__file__).parents[2] / "examples" / "my_robot"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new virtual environment, which sees what this one has, and the package."""
    place = tmp_path_factory.mktemp("own") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    interpreter = place / "bin" / "python"
    # libraries of the running interpreter and headrace as it is tested here: nothing is downloaded
    home = Path(headrace.__file__).parents[1]
    theirs = subprocess.run(
        [str(interpreter), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    (Path(theirs) / "running.pth").write_text(f"{home}\n{sysconfig.get_path('purelib')}\n")
    install = [sys.executable, "-m", "pip", "--python", str(interpreter), "install", "--quiet", "--no-deps"]
    subprocess.run([*install, "--no-build-isolation", "--no-index", str(PACKAGE)], check=True)
    return interpreter


def ran(python: Path, place: Path, *words: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run(
        [str(python), *words], cwd=place, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_the_packages_own_tests_pass_there(python: Path) -> None:
    ran(python, PACKAGE, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", str(PACKAGE / "tests"))


def test_commands_find_the_task_by_its_entry_point(python: Path, tmp_path: Path) -> None:
    main = ("-c", "import sys; from headrace.cli import main; sys.exit(main(sys.argv[1:]))")
    assert "my-robot-reach" in ran(python, tmp_path, *main, "tasks")
    short = ("--num-envs", "2", "--set", "episode_length=6")
    stepped = ran(
        *(python, tmp_path, *main, "run", "my-robot-reach", *short, "--num-steps", "7"),
        *("--set", "camera=true", "--record", "set"),
    )
    assert "episodes recorded" in stepped
    assert "bit-exact" in ran(python, tmp_path, *main, "record", "replay", "set")
    ran(python, tmp_path, *main, "picture", "my-robot-reach", "--camera", "top", "-o", "top.png")
    trained = ran(python, tmp_path, str(PACKAGE / "train.py"), "--iterations", "1", "--num-envs", "4", "--output", "t")
    assert Path(tmp_path, trained.strip()).is_file()
    assert "my-robot-reach" in ran(python, tmp_path, *main, "tasks")
