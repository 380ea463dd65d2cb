"""Every shell block of README, guides and CONTRIBUTING is run: commands of ours for real, with small numbers."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from headrace.cli import main

ROOT = Path(__file__).resolve().parents[2]
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md"]
FILES += sorted((ROOT / "docs").rglob("*.md"))
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)

# a page's numbers are for its reader; the last of a repeated option counts
SMALLER = {
    "imitate": "--demos 4 --updates 2 --episodes 4 --num-envs 8",
    "play": "--num-envs 4 --episodes 4",
    "runtime": "--num-envs 4 --num-steps 10 --warmup-steps 2",
    "startup": "--num-envs 4",
    "sweep": "--num-steps 10 --warmup-steps 2",
    "train": "--num-envs 8 --iterations 2",
}
# what a page presumes to be there
BEFORE = {
    "README.md": (
        "headrace runtime ant --output sweeps/mine/main/000\nheadrace runtime ant --output sweeps/mine/my-branch/000"
    ),
    "docs/benchmarking.md": "headrace runtime ant --output runs/before\nheadrace runtime ant --output runs/after",
    "docs/recording.md": (
        "headrace run cartpole-camera --set frame_stack=1 --set episode_length=12 --num-envs 4 --num-steps 60 "
        "--record runs/ant"
    ),
}
MY_TASKS = """
from headrace import TaskEntry, register_task
from headrace.envs.registry import task_entry

cartpole = task_entry("cartpole")
register_task(TaskEntry(name="reach", task=cartpole.task, cfg=cartpole.cfg, summary="the reader's own"))
"""
URDF = """<robot name="rod"><link name="base"><visual><geometry><box size=".1 .1 .1"/></geometry></visual></link>
<link name="rod"><inertial><mass value="1"/><inertia ixx="1" iyy="1" izz="1" ixy="0" ixz="0" iyz="0"/></inertial></link>
<joint name="swing" type="continuous"><parent link="base"/><child link="rod"/><axis xyz="0 1 0"/></joint></robot>"""
RUNNER = """
num_steps_per_env: 8
algorithm: {class_name: PPO, num_learning_epochs: 1, num_mini_batches: 1}
actor: {class_name: MLPModel, hidden_dims: [16], activation: elu, distribution_cfg:
    {class_name: GaussianDistribution, init_std: 1.0}}
critic: {class_name: MLPModel, hidden_dims: [16], activation: elu}
"""
ELSEWHERE = {
    "headrace serve": "runs until Ctrl-C: tests/cli/test_serve_command.py",
    "headrace evaluate pusher-solid --policy openpi://": "needs the server: tests/cli/test_serve_command.py",
    "headrace evaluate pusher-solid --episodes 500 --workers": "tests/distributed",
    "scripts/setup_libero.sh": "make test-libero, where LIBERO's assets are",
    "export HEADRACE_LIBERO_ASSETS": "make test-libero",
    "headrace libero": "make test-libero",
    "python examples/imitate_libero.py": "make test-libero plays it small",
    "headrace tasks libero": "make test-libero",
    "headrace evaluate libero_spatial": "make test-libero",
    "headrace report runs/plain runs/moved": "make test-libero",
    "scripts/setup_simulators.sh": "make test-simulators",
    "headrace evaluate metaworld_mt50": "tests/evaluation/benchmarks_check.py",
    "headrace evaluate pusht": "tests/evaluation/benchmarks_check.py",
    "headrace sweep --commits": "tests/bench/test_sweep.py sweeps over two commits of a repository of its own",
    ".venv/bin/pre-commit install": "would change this clone",
    ".venv/bin/python -m pytest tests/envs -k your_task": "your_task is the reader's",
}


def _blocks(path: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(path.read_text())


def _lines(path: Path) -> list[str]:
    joined = [body.replace("\\\n", " ") for language, body in _blocks(path) if language == "sh"]
    return [line.strip() for body in joined for line in body.splitlines() if line.strip()]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_block_says_what_it_is() -> None:
    known = {"python", "sh", "toml", "yaml", "text"}
    odd = [(_name(path), language) for path in FILES for language, _ in _blocks(path) if language not in known]
    assert odd == []


def _marked(path: Path) -> object:
    # sweeps and trainings take processes and minutes
    slow = [pytest.mark.slow] if _name(path) in ("docs/benchmarking.md", "docs/vision.md") else []
    return pytest.param(path, id=_name(path), marks=slow)


@pytest.mark.parametrize("path", [_marked(path) for path in FILES if _lines(path)])
def test_every_shell_line_works(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_tasks.py").write_text(MY_TASKS)
    (tmp_path / "my_runner.yaml").write_text(RUNNER)
    (tmp_path / "robot.urdf").write_text(URDF)
    (tmp_path / "robot.xml").write_text(URDF)  # MuJoCo tells them apart by their content
    for line in [*BEFORE.get(_name(path), "").splitlines(), *_lines(path)]:
        _run(line)


def _run(line: str) -> None:
    if any(line.startswith(start) for start in ELSEWHERE):
        return
    program, *words = shlex.split(line, comments=True)
    match program.removeprefix(".venv/bin/"):
        case "headrace":
            _headrace(line, words)
        case "make":
            ran = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, check=False)
            assert ran.returncode == 0, f"{line}: {ran.stderr}"
        case "python":
            _script(line, words)
        case "torchrun":
            small = {"256": "8", "100": "1"}
            command = [sys.executable, "-m", "torch.distributed.run", *(small.get(word, word) for word in words)]
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
            assert ran.returncode == 0, f"{line}: {ran.stderr}"
        case "pip":
            (wanted,) = (word for word in words if word.startswith("headrace["))
            extras = set(wanted.removeprefix("headrace[").removesuffix("]").split(","))
            assert extras <= set(metadata.metadata("headrace").get_all("Provides-Extra") or ()), line
        case other:
            pytest.fail(f"{line}: nothing here knows how to try {other!r}")


def _headrace(line: str, words: list[str]) -> None:
    smaller = SMALLER.get(words[0], "").split()
    if "runs/FOLDER" in words:  # the reader's newest training
        words[words.index("runs/FOLDER")] = str(max(Path("runs").glob("rsl-rl_*_cartpole_*")))
    if "--num-steps" in words and words[0] == "play":
        smaller = ["--num-envs", "4", "--num-steps", "20"]
    if words[0] == "sweep":
        words = ["sweep", *re.sub(r"--repeats \d+ ?", "", " ".join(words[1:])).split()]
        words[1:1] = ["--repeats", "1"]
    code = main([*words, *smaller])
    # a comparison may well find a difference: the sides of a page are any two
    assert code == 0 or (code == 1 and words[0] in ("compare", "sweep")), line


def _script(line: str, words: list[str]) -> None:
    script, *options = words
    if script.startswith("benchmarks/"):
        ran = subprocess.run([sys.executable, ROOT / script, "--help"], capture_output=True, text=True, check=True)
        assert all(option in ran.stdout for option in options if option.startswith("--")), line
        return
    few = [] if options[0] == "draw" else ["--kinds", "state", "--seeds", "0", "--iterations", "2"]
    subprocess.run([sys.executable, ROOT / script, *options, *few], capture_output=True, text=True, check=True)
