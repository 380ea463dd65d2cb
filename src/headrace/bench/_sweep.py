"""Interleaved runs: the sides of a sweep take turns, with paired seeds, each run in a process of its own.

Which side of a pair comes first is drawn at random, so a load of any period hits both with the same chance.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from headrace._interrupts import Child, interruptible
from headrace.bench._bundle_files import read_bundle
from headrace.bench._samples import unsteady
from headrace.bench.benchmark import LABEL, ORDER_SEED, REPETITION, SWEEP_ID
from headrace.errors import ConfigError, DataError, LifecycleError
from headrace.files import Lock, check_writable, read_json, write_whole

PLAN = "sweep.json"
_GRACE = 30.0
_BAD_REQUEST = 2
_PREFIX = "headrace-sweep-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the things to compare."""

    label: str
    arguments: tuple[str, ...] = ()
    """Options of the command that are this side's own."""
    source: Path | None = None
    """Folder to run in and import from, such as a checkout of a commit; None for here."""
    commit: str | None = None
    """What is checked out there."""

    @property
    def folder(self) -> str:
        """The label, fit for a file name."""
        return re.sub(r"[^A-Za-z0-9._=-]+", "-", self.label)


class Outcome(NamedTuple):
    """How a run of a sweep ended."""

    side: Side
    repetition: int
    code: int
    message: str
    """Its last words, where it failed."""
    steady: bool
    """Whether its warm-up reached a steady step time; true where that was not judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What to run."""

    sweep_id: str
    command: tuple[str, ...]
    """A benchmark command with its options, such as ``("runtime", "cartpole", "--num-steps", "500")``."""
    sides: tuple[Side, ...]
    seed: int
    order_seed: int
    """Of the order of the sides within a repetition, which is drawn: no load can favor a side systematically."""
    output: Path

    def __post_init__(self) -> None:
        if len(self.sides) < 2:
            raise ConfigError(f"sweep: expected at least two sides, got {len(self.sides)}")
        if len({side.folder for side in self.sides}) < len(self.sides):
            raise ConfigError(f"sweep: expected sides of other names, got {', '.join(s.label for s in self.sides)}")

    def order(self, repetition: int) -> list[Side]:
        """Return the sides in the order in which they run."""
        drawn = np.random.default_rng([self.order_seed, repetition]).permutation(len(self.sides))
        return [self.sides[index] for index in drawn]

    def folder(self, side: Side, repetition: int) -> Path:
        """Return where a run writes to."""
        return self.output / side.folder / f"{repetition:03d}"

    def claim(self, *, resume: bool) -> Sweep:
        """Write what this sweep is into its directory; to ``resume``, return the one that is there, if it is the same.

        Raises:
            ConfigError: the directory has another sweep, or other files.
        """
        path = self.output / PLAN
        mine = {
            "command": list(self.command),
            "sides": {side.label: [*side.arguments, *([side.commit] if side.commit else [])] for side in self.sides},
            "seed": self.seed,
        }
        if resume:
            there = read_json(path)
            for name, value in mine.items():
                if there.get(name) != value:
                    raise ConfigError(f"--resume: {path} has {name} {there.get(name)!r}, got {value!r}; pass the same")
            return replace(self, sweep_id=str(there["sweep_id"]), order_seed=int(str(there["order_seed"])))
        if self.output.exists() and any(self.output.iterdir()):
            raise ConfigError(
                f"--output: {str(self.output)!r} has files; choose a new directory, or pass --resume to go on there"
            )
        check_writable(self.output)
        self.output.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({**mine, "sweep_id": self.sweep_id, "order_seed": self.order_seed}, indent=1))
        return self

    def rehearse(self) -> None:
        """Run each side once, unmeasured: fresh checkouts compile their kernels at their first run."""
        with interruptible(), tempfile.TemporaryDirectory() as scratch:
            for side in self.sides:
                self._run(side, 0, Path(scratch) / side.folder)

    def run(self, repetition: int) -> list[Outcome]:
        """Run every side once, but for what an earlier try has completed. A crash is an outcome as well.

        Raises:
            ConfigError: a run cannot be done as asked; neither could the others.
        """
        outcomes: list[Outcome] = []
        with interruptible():
            for side in self.order(repetition):
                folder = self.folder(side, repetition)
                done = self._outcome(side, repetition, 0, "")
                if done is None:
                    shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut off
                    code, message = self._run(side, repetition, folder)
                    done = self._outcome(side, repetition, code, message)
                outcomes.append(done or Outcome(side, repetition, 1, "it left no bundle", True))
        return outcomes

    def _outcome(self, side: Side, repetition: int, code: int, message: str) -> Outcome | None:
        """Return how a run ended, from its bundle; None if there is no ended one."""
        kind = "training" if self.command[0] == "train" else self.command[0]
        path = self.folder(side, repetition) / f"{kind}.json"
        if not path.is_file():
            return Outcome(side, repetition, code, message, True) if code else None
        bundle = read_bundle(path)
        if bundle.run.status in ("running", "interrupted"):
            return None
        failed = bundle.run.status == "crashed"
        why = message or bundle.run.status_reason or ""
        return Outcome(side, repetition, (code or 1) if failed else 0, why if failed else "", not unsteady(bundle))

    def _run(self, side: Side, repetition: int, folder: Path) -> tuple[int, str]:
        command = [sys.executable, "-m", "headrace", *self.command, *side.arguments]
        command += ["--seed", str(self.seed + repetition), "--output", str(folder.absolute())]
        variables = {LABEL: side.label, SWEEP_ID: self.sweep_id, REPETITION: str(repetition)}
        variables[ORDER_SEED] = str(self.order_seed)
        source = side.source
        if source is not None:
            inherited = os.environ.get("PYTHONPATH")
            paths = [str(source / "src"), str(source), *([inherited] if inherited else [])]
            variables["PYTHONPATH"] = os.pathsep.join(paths)
        process = Child(
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
            raise ConfigError(f"sweep: the run of {side.label!r} cannot be done: {message}")
        return process.returncode, message


@contextmanager
def checkouts(commits: Sequence[str], repository: Path) -> Generator[list[Side]]:
    """Yield a side per commit, each a clone of its own, without copies of objects, that is removed after the block."""
    _remove_abandoned()
    repository = Path(_git(repository, "rev-parse", "--show-toplevel"))
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as shared, closing(Lock(Path(shared))):
        sides: list[Side] = []
        for commit in commits:
            number = _git(repository, "rev-parse", "--verify", f"{commit}^{{commit}}")
            folder = Path(shared) / number
            if not folder.exists():
                _git(repository, "clone", "--quiet", "--shared", "--no-checkout", ".", str(folder))
                _git(folder, "checkout", "--quiet", "--detach", number)
            sides.append(Side(label=commit, source=folder, commit=number))
        yield sides


def _remove_abandoned() -> None:
    """Remove the clones of sweeps that were killed; one that runs holds the lock of its own."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(LifecycleError, DataError, OSError), closing(Lock(folder)):  # running, or of another user
            shutil.rmtree(folder)


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
