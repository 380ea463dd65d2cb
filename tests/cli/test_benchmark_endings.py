"""Benchmark runs that end badly, in real processes: each leaves a valid bundle and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from headrace.bench import read_bundle
from headrace.bench.schema import RuntimeBundle

QUICK = ("--num-envs", "4", "--num-steps", "30", "--warmup-steps", "10")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "import sys; from headrace.cli import main; sys.exit(main())", *arguments]


def wait_for(condition: object, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]  # any callable
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def words(process: psutil.Process) -> str:
    """The command line of a process; empty when it ended since it was listed."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # a zombie too
        return ""


@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGINT, "Ctrl-C"), pytest.param(signal.SIGTERM, "SIGTERM", marks=pytest.mark.slow)],
)
def test_an_interrupted_run_leaves_a_valid_bundle(tmp_path: Path, number: int, reason: str) -> None:
    (tmp_path / "marking.py").write_text(
        "from pathlib import Path\n"
        "from headrace.bench import stepping\n"
        "plain = stepping.Stepper.run\n"
        "def run(self, *arguments):\n"
        "    Path('measuring').touch()\n"
        "    plain(self, *arguments)\n"
        "stepping.Stepper.run = run\n"
        "from headrace.cli import main\n"
        "import sys\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    arguments = ["runtime", "cartpole", "--num-envs", "2", "--num-steps", "100000000", "--warmup-steps", "1"]
    process = subprocess.Popen(
        [sys.executable, "marking.py", *arguments, "--output", "out"], cwd=tmp_path, stderr=subprocess.PIPE
    )
    try:
        wait_for((tmp_path / "measuring").exists)
        time.sleep(0.2)
        process.send_signal(number)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + number
    bundle = read_bundle(tmp_path / "out" / "runtime.json")
    assert isinstance(bundle, RuntimeBundle)
    assert (bundle.run.status, bundle.run.status_reason) == ("interrupted", reason)
    assert bundle.runtime.iterations_completed > 0


INTERRUPTED_IMPORT = """
import importlib.abc, os, signal, sys

class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch.nn":  # in the middle of importing torch
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Interrupting())
from headrace.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("train", "training"),
        pytest.param("runtime", "runtime", marks=pytest.mark.slow),
        pytest.param("play", "play", marks=pytest.mark.slow),
    ],
)
def test_a_signal_during_imports_leaves_a_valid_bundle(tmp_path: Path, command: str, kind: str) -> None:
    (tmp_path / "interrupted.py").write_text(INTERRUPTED_IMPORT)
    arguments = [command, "cartpole", "--num-envs", "2", "--output", "out"]
    done = subprocess.run(
        [sys.executable, "interrupted.py", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    run = read_bundle(tmp_path / "out" / f"{kind}.json").run
    assert (run.status, run.status_reason) == ("interrupted", "SIGTERM")


CRASHING = """
import gymnasium, os

class Crashing(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)
    steps = 0

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample() * 0, {}

    def step(self, action):
        Crashing.steps += 1
        if Crashing.steps == 50:
            raise RuntimeError("the gripper fell off")
        return self.observation_space.sample() * 0, 0.0, False, False, {}

gymnasium.register("Crashing-v0", entry_point=Crashing, disable_env_checker=True)
"""


def test_a_crashed_run_leaves_a_valid_bundle_and_no_process(tmp_path: Path) -> None:
    (tmp_path / "crashing.py").write_text(CRASHING)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    arguments = ("runtime", "gym:crashing:Crashing-v0", *QUICK, "--threads", "2", "--output", "out")
    done = subprocess.run(command(*arguments), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "the gripper fell off" in done.stderr
    bundle = read_bundle(tmp_path / "out" / "runtime.json")
    assert bundle.run.status == "crashed"
    assert bundle.run.error is not None
    assert bundle.run.error.type == "EnvError"
    assert "the gripper fell off" in "\n".join(bundle.run.error.traceback)
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_an_interrupted_startup_leaves_no_worker(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command("startup", "cartpole", "--output", "out"), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        known = psutil.Process(process.pid)
        wait_for(lambda: any("startup_worker" in words(child) for child in known.children()))
        workers = known.children(recursive=True)
        os.kill(process.pid, signal.SIGTERM)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + signal.SIGTERM
    assert not any(worker.is_running() for worker in workers)
    assert read_bundle(tmp_path / "out" / "startup.json").run.status == "interrupted"
