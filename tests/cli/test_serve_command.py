"""``headrace serve``, started as a user would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli import main


def test_it_serves_the_shipped_policy_until_ctrl_c_and_evaluate_plays_with_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "headrace", "serve", "pusher-solid", "--port", "0", "--max-wait", "5"]
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"}
    )
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line.startswith("serving pusher-solid at ws://127.0.0.1:"), line
        address = line.split()[3].rstrip(";").replace("ws:", "openpi:")
        play = ["evaluate", "pusher-solid", "--episodes", "4", "--set", "episode_length=32", "--csv"]
        assert main([*play, str(tmp_path / "remote.csv"), "--policy", address, "--num-envs", "3"]) == 0
        server.send_signal(signal.SIGINT)
        rest, errors = server.communicate(timeout=60)
    finally:
        server.kill()
        server.wait()
    assert server.returncode == 0, errors
    assert "rows in" in rest
    assert main([*play, str(tmp_path / "inline.csv"), "--num-envs", "4"]) == 0
    assert (tmp_path / "remote.csv").read_text() == (tmp_path / "inline.csv").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected TASK or --policy"),
        (["humanoid"], "we ship none for 'humanoid'"),
        (["pusher-solid", "--batch-size", "0"], "batching size: expected at least 1 row, got 0"),
        (["pusher-solid", "--max-rows", "0"], "max_rows: expected a whole number from 1, got 0"),
        (["--policy", "no_such_module:policy"], "cannot be imported"),
    ],
)
def test_what_cannot_be_served_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_policy_that_does_not_say_its_sizes_gets_them_from_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sway_policy.py").write_text("def sway(obs):\n    return obs['policy'][:, None, :1]\n")
    monkeypatch.chdir(tmp_path)
    assert main(["serve", "--policy", "sway_policy:sway", "--horizon", "1"]) == 2
    assert "--action-dim: expected a policy that says it" in " ".join(capsys.readouterr().err.split())
