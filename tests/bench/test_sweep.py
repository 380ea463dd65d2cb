"""Sweeps: the sides take turns, with paired seeds, in processes of their own."""

from __future__ import annotations

import os
import random
import select
import subprocess
import sys
import time
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
        "seed": 5,
        "order_seed": 1,
        "output": tmp_path,
    }
    return Sweep(**{**settings, **changes})  # type: ignore[arg-type]  # settings by name, checked at run time


def test_the_order_within_a_repetition_is_drawn_and_repeats_with_its_seed(tmp_path: Path) -> None:
    orders = [[side.label for side in sweep(tmp_path).order(repetition)] for repetition in range(200)]
    first = sum(order == ["a", "b"] for order in orders)
    assert all(sorted(order) == ["a", "b"] for order in orders)
    assert 70 <= first <= 130  # 100 expected; four standard deviations are 28
    assert orders == [[side.label for side in sweep(tmp_path).order(repetition)] for repetition in range(200)]
    assert orders != [[s.label for s in sweep(tmp_path, order_seed=2).order(r)] for r in range(200)]
    # neither period two nor four: what repeats with a load would alias with it
    assert all(orders[:40] != orders[shift : 40 + shift] for shift in (1, 2, 3, 4))
    assert sweep(tmp_path).folder(SIDES[1], 1) == tmp_path / "b" / "001"


def test_a_sweep_is_resumed_in_its_own_directory_only(tmp_path: Path) -> None:
    made = sweep(tmp_path / "x").claim(resume=False)
    with pytest.raises(ConfigError, match="--resume"):
        sweep(tmp_path / "x").claim(resume=False)
    again = sweep(tmp_path / "x", sweep_id="other", order_seed=9).claim(resume=True)
    assert again == made
    with pytest.raises(ConfigError, match="seed"):
        sweep(tmp_path / "x", seed=6).claim(resume=True)
    with pytest.raises(DataError):
        sweep(tmp_path / "nothing").claim(resume=True)


def test_sweeps_that_compare_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least two sides"):
        sweep(tmp_path, sides=SIDES[:1])
    with pytest.raises(ConfigError, match="other names"):
        sweep(tmp_path, sides=(Side(label="x/y"), Side(label="x-y")))


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
    (tmp_path / "below").mkdir()
    with checkouts(["HEAD~1", "main"], tmp_path / "below") as sides:
        assert [side.label for side in sides] == ["HEAD~1", "main"]
        assert [(side.source / "file").read_text() for side in sides if side.source] == ["old", "new"]
        kept = [side.source for side in sides]
    assert not any(os.path.exists(folder) for folder in kept if folder)
    assert git("worktree", "list").count("\n") == 0
    with pytest.raises(DataError, match="no-such-commit"), checkouts(["no-such-commit", "main"], tmp_path):
        pass


KILLED = """
import os, sys
from pathlib import Path
from headrace.bench._sweep import Side, Sweep, checkouts
repository, output = map(Path, sys.argv[1:])
with checkouts(["main"], repository) as (side,):
    (side.source / "headrace").mkdir()
    (side.source / "headrace/__init__.py").touch()
    (side.source / "headrace/__main__.py").write_text(
        "import os, time\\nprint(os.getpid(), file=open('pid.part', 'w'), flush=True)\\n"
        "os.rename('pid.part', 'pid')\\ntime.sleep(600)\\n"
    )
    print(side.source, flush=True)
    sides = (side, Side(label="other"))
    Sweep(sweep_id="s", command=("runtime",), sides=sides, seed=0, order_seed=0, output=output)._run(side, 0, output)
"""


@pytest.mark.parametrize("moment", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 10))])
def test_a_killed_sweep_ends_its_run_and_leaves_nothing_in_the_repository(moment: int, tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@y"]
    subprocess.run([*git, "init", "-q", "-b", "main"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "one"], check=True)
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        folder = Path(killed.stdout.readline().strip())
        until = time.monotonic() + random.Random(moment).uniform(0.0, 1.0)
        while time.monotonic() < until if moment else not (folder / "pid").exists():
            assert killed.poll() is None
            time.sleep(0.002)
        # a run that has not begun has no number, and ends with its pipe as well
        run = os.pidfd_open(int((folder / "pid").read_text())) if (folder / "pid").exists() else None
        killed.kill()
    if run is not None:
        assert select.select([run], [], [], 60)[0], "the run has ended"
        os.close(run)
    listed = subprocess.run([*git, "worktree", "list"], check=True, capture_output=True, text=True).stdout
    assert len(listed.splitlines()) == 1
    with checkouts(["main"], tmp_path) as (side,):  # of a sweep that runs: it stays
        assert not folder.parent.exists()
        with checkouts(["main"], tmp_path):
            assert side.source is not None
            assert side.source.exists()
