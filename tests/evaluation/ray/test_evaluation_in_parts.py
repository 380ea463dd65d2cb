"""The script of docs/scale.md: a plan in parts, without Ray, merged to the table of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from worker_policies import Shove

from flat import evaluate
from headrace.evaluation import Evaluation, merge

SCRIPT = Path(__file__).parents[3] / "examples" / "evaluate_in_parts.sh"


@pytest.mark.guides
def test_the_script_plays_parts_and_merges_them_and_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    (tmp_path / "headrace").write_text(f'#!/bin/sh\nexec {sys.executable} -m headrace "$@"\n')
    (tmp_path / "headrace").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    command = [str(SCRIPT), "cartpole", "7", "4", "parts", "--policy", "worker_policies:Shove", "--num-envs", "2"]
    command += ["--set", "episode_length=30", "--threads", "1"]
    places = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {"cwd": tmp_path, "env": os.environ | {"PATH": path, "PYTHONPATH": ":".join(places)}}
    ran = subprocess.run(command, **settings, capture_output=True, text=True, check=False)  # type: ignore[call-overload]
    assert ran.returncode == 0, ran.stderr
    assert "7 of 7 episodes, completed" in ran.stdout
    part = tmp_path / "parts" / "4.jsonl"
    part.write_bytes(b"".join(part.read_bytes().splitlines(keepends=True)[:2]))  # cut off after a row
    ran = subprocess.run(command, **settings, capture_output=True, text=True, check=False)  # type: ignore[call-overload]
    assert ran.returncode == 0, ran.stderr
    overrides = {"episode_length": 30}
    alone = evaluate("cartpole", Shove(), episodes=7, threads=1, overrides=overrides, progress=False)
    parts = [Evaluation.load(file) for file in sorted((tmp_path / "parts").glob("*"))]
    assert merge(*parts).episodes == alone.episodes
