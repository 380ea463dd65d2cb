"""Sweeps: the sides take turns, with paired seeds, in processes of their own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from headrace.bench._sweep import Side, Sweep, checkouts
from headrace.errors import ConfigError, DataError

SIDES = (Side(label="a"), Side(label="b"))


def sweep(tmp_path: Path, **changes: object) -> Sweep:
    settings: dict[str, object] = {
        "sweep_id": "s",
        "command": ("runtime", "cartpole"),
        "sides": SIDES,
        "repetitions": 3,
        "seed": 5,
        "output": tmp_path,
    }
    return Sweep(**{**settings, **changes})  # type: ignore[arg-type]  # settings by name, checked at run time


def test_the_sides_take_turns_and_share_the_seed_of_a_repetition(tmp_path: Path) -> None:
    turns = sweep(tmp_path).turns()
    assert [(turn.side.label, turn.seed) for turn in turns] == [
        *(("a", 5), ("b", 5)),
        *(("b", 6), ("a", 6)),
        *(("a", 7), ("b", 7)),
    ]
    assert sweep(tmp_path).folder(turns[2]) == tmp_path / "b" / "001"


def test_sweeps_that_compare_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least two sides"):
        sweep(tmp_path, sides=SIDES[:1])
    with pytest.raises(ConfigError, match="other names"):
        sweep(tmp_path, sides=(Side(label="x/y"), Side(label="x-y")))
    with pytest.raises(ConfigError, match="--repeats"):
        sweep(tmp_path, repetitions=0)


def test_commits_are_checked_out_side_by_side_and_gone_afterwards(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=T", "-c", "user.email=t@example.com"]
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q", "-b", "main")
    for text in ("old", "new"):
        (tmp_path / "file").write_text(text)
        git("add", "file")
        git("commit", "-qm", text)
    with checkouts(["HEAD~1", "main"], tmp_path) as sides:
        assert [side.label for side in sides] == ["HEAD~1", "main"]
        assert [(side.source / "file").read_text() for side in sides if side.source] == ["old", "new"]
        kept = [side.source for side in sides]
    assert not any(os.path.exists(folder) for folder in kept if folder)
    assert git("worktree", "list").count("\n") == 0
    with pytest.raises(DataError, match="no-such-commit"), checkouts(["no-such-commit", "main"], tmp_path):
        pass
