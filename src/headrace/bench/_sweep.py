"""Interleaved runs: the sides of a sweep take turns, with paired seeds, each run in a process of its own.

Noise that lasts minutes (other users, heat) then hits all sides alike. The order is reversed every other repetition.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from headrace._interrupts import interruptible
from headrace.bench._benchmark import LABEL, REPETITION, SWEEP_ID
from headrace.errors import ConfigError, DataError

_GRACE = 30.0
_BAD_REQUEST = 2
_MAIN = "import sys; from headrace.cli import main; sys.exit(main())"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the things to compare."""

    label: str
    arguments: tuple[str, ...] = ()
    """Options of the command that are this side's own."""
    source: Path | None = None
    """Folder to run in and import from, such as a checkout of a commit; None for here."""

    @property
    def folder(self) -> str:
        """The label, fit for a file name."""
        return re.sub(r"[^A-Za-z0-9._=-]+", "-", self.label)


class Turn(NamedTuple):
    """One run of a sweep."""

    side: Side
    repetition: int
    seed: int


class Outcome(NamedTuple):
    """How a run of a sweep ended."""

    turn: Turn
    folder: Path
    code: int
    message: str
    """Its last words, where it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What to run."""

    sweep_id: str
    command: tuple[str, ...]
    """A benchmark command with its options, such as ``("runtime", "cartpole", "--num-steps", "500")``."""
    sides: tuple[Side, ...]
    repetitions: int
    seed: int
    output: Path
    rehearse: bool = False
    """Run each side once before, unmeasured: fresh checkouts compile their kernels at their first run."""

    def __post_init__(self) -> None:
        if len(self.sides) < 2:
            raise ConfigError(f"sweep: expected at least two sides, got {len(self.sides)}")
        if len({side.folder for side in self.sides}) < len(self.sides):
            raise ConfigError(f"sweep: expected sides of other names, got {', '.join(s.label for s in self.sides)}")
        if self.repetitions < 1:
            raise ConfigError(f"--repeats: expected at least 1, got {self.repetitions}")

    def turns(self) -> list[Turn]:
        """Every run in order: A B, B A, A B, …; the sides of a repetition share its seed."""
        found: list[Turn] = []
        for repetition in range(self.repetitions):
            order = self.sides if repetition % 2 == 0 else tuple(reversed(self.sides))
            found += [Turn(side, repetition, self.seed + repetition) for side in order]
        return found

    def folder(self, turn: Turn) -> Path:
        """Where the run of a turn writes to."""
        return self.output / turn.side.folder / f"{turn.repetition:03d}"


def run_sweep(sweep: Sweep, progress: Callable[[int], None] = lambda _: None) -> list[Outcome]:
    """Run all turns. A run that crashes is kept in the result and the sweep goes on.

    Raises:
        ConfigError: a run says that it cannot be done as asked; the others could not, either.
    """
    outcomes: list[Outcome] = []
    with interruptible():
        if sweep.rehearse:
            with tempfile.TemporaryDirectory() as scratch:
                for side in sweep.sides:
                    _run(sweep, Turn(side, 0, sweep.seed), Path(scratch) / side.folder)
        for index, turn in enumerate(sweep.turns()):
            outcomes.append(_run(sweep, turn, sweep.folder(turn)))
            progress(index + 1)
    return outcomes


@contextmanager
def checkouts(commits: Sequence[str], repository: Path) -> Generator[list[Side]]:
    """Yield a side per commit, each checked out to a directory that is removed after the block."""
    shared = Path(tempfile.mkdtemp(prefix="headrace-sweep-"))
    made: list[Path] = []
    try:
        sides: list[Side] = []
        for commit in commits:
            number = _git(repository, "rev-parse", "--verify", f"{commit}^{{commit}}")
            folder = shared / number
            if not folder.exists():
                _git(repository, "worktree", "add", "--detach", str(folder), number)
                made.append(folder)
            sides.append(Side(label=commit, source=folder))
        yield sides
    finally:
        for folder in made:
            _git(repository, "worktree", "remove", "--force", str(folder))
        shutil.rmtree(shared, ignore_errors=True)


def _run(sweep: Sweep, turn: Turn, folder: Path) -> Outcome:
    command = [sys.executable, "-c", _MAIN, *sweep.command, *turn.side.arguments]
    command += ["--seed", str(turn.seed), "--output", str(folder.absolute())]
    variables = {LABEL: turn.side.label, SWEEP_ID: sweep.sweep_id, REPETITION: str(turn.repetition)}
    source = turn.side.source
    if source is not None:
        inherited = os.environ.get("PYTHONPATH")
        paths = [str(source / "src"), str(source), *([inherited] if inherited else [])]
        variables["PYTHONPATH"] = os.pathsep.join(paths)
    process = subprocess.Popen(
        command,
        cwd=source,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, errors = process.communicate()
    finally:
        _end(process)
    message = (errors.strip().splitlines() or [""])[-1]
    if process.returncode == _BAD_REQUEST:
        raise ConfigError(f"sweep: the run of {turn.side.label!r} cannot be done: {message}")
    return Outcome(turn, folder, process.returncode, message)


def _end(process: subprocess.Popen[str]) -> None:
    """Ask a run that is still going to stop, so that it writes its bundle; then make it stop."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=_GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def _git(repository: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise ConfigError("--commits: expected git on the PATH, got none; install it, or use --vary") from error
    if done.returncode:
        raise DataError(f"--commits: git {' '.join(arguments)} failed: {done.stderr.strip()}")
    return done.stdout.strip()
