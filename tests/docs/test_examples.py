"""The examples run, each in a process of its own, as a reader would start it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_EXAMPLES = Path(__file__).parents[2] / "examples"
_SHORT = {
    "bridge_your_environment": ["--num-steps", "70"],
    "curriculum": ["--num-envs", "4", "--limit", "200"],
    "dqn_with_frame_replay": ["--num-steps", "300", "--buffer", "200"],
    "evaluate_lerobot_style_policy": ["--episodes", "8", "--num-envs", "4"],
    "evaluate_over_a_server": ["--episodes", "4", "--num-envs", "2"],
    "expensive_resets": ["--num-envs", "4", "--episodes", "8", "--seconds", "0.02"],
    "sac_from_states": ["--frames", "1040", "--peer"],
    "train_with_each_library": ["--task", "cartpole", "--num-envs", "4", "--iterations", "1"],
    "two_timescales": ["--num-envs", "8", "--ticks", "10"],
}


@pytest.mark.parametrize("name", sorted(_SHORT))
def test_example_runs(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error::UserWarning", str(_EXAMPLES / f"{name}.py"), *_SHORT[name]]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # what it leaves there goes with the test
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()


def test_every_example_is_in_the_list_and_explains_itself() -> None:
    listed = (_EXAMPLES / "README.md").read_text()
    for path in _EXAMPLES.glob("*.py"):
        assert f"`{path.name}`" in listed
        assert path.read_text().startswith('"""')
