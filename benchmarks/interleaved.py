"""Interleaved measurements: one process per contestant, all warm and waiting, measured in turn, round after round.

The parent talks to its workers in lines of JSON. A worker answers ``{"ready": {...}}`` once it is warm; each ``go``
line makes it measure once and answer ``{"value": number}``. Only one worker runs at a time; noise that lasts seconds
hits all of them alike, and ratios of medians survive it. Standard library only: a peer's virtual environment need not
have ours.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class PeerMissingError(RuntimeError):
    """A contestant could not start: it is not installed, or it is broken. The message has its last words."""


def python_of(environment: str) -> Path:
    """The interpreter of a virtual environment in the clone; ``make bench-setup`` makes those of peers."""
    return ROOT / environment / "bin" / "python"


class Worker:
    """A contestant in a process of its own."""

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self.name = name
        if not Path(command[0]).exists():
            raise PeerMissingError(f"{name}: {command[0]} does not exist; run: make bench-setup")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **ONE_THREAD, **(environment or {})},
        )
        self.ready: dict[str, Any] = self._answer()["ready"]

    def measure(self) -> float:
        """One measurement: the worker runs while everyone else waits."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return float(self._answer()["value"])

    def close(self) -> None:
        """End the process."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        _, errors = self._process.communicate()
        raise PeerMissingError(
            f"{self.name}: {errors.strip().splitlines()[-1] if errors.strip() else 'ended silently'}"
        )


def serve(ready: dict[str, Any], measure: Callable[[], float]) -> None:
    """The worker's side: say ready, then answer every ``go`` until the parent is gone."""
    print(json.dumps({"ready": ready}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"value": measure()}), flush=True)


def started(commands: dict[str, list[str]], environment: dict[str, str], absent: list[str]) -> list[Worker]:
    """A worker for every name and command, two starting at a time; ``absent`` gets a line for each that cannot."""
    with ThreadPoolExecutor(2) as pool:
        starting = [pool.submit(Worker, name, command, environment) for name, command in commands.items()]
    workers: list[Worker] = []
    for start in starting:
        try:
            workers.append(start.result())
        except PeerMissingError as error:
            absent.append(f"peer absent: {error}")
    return workers


def rounds(workers: Sequence[Worker], count: int) -> dict[str, list[float]]:
    """``count`` measurements of every worker, interleaved; the order is reversed every other round."""
    values: dict[str, list[float]] = {worker.name: [] for worker in workers}
    for i in range(count):
        for worker in workers if i % 2 == 0 else list(reversed(workers)):
            values[worker.name].append(worker.measure())
    return values


def verdict(console: Any, failures: Sequence[str], *, check: bool) -> int:
    """Print the bars that fell short on a rich console; returns the exit code, 1 only if ``check`` and any did."""
    for failure in failures:
        console.print(f"[red]short:[/] {failure}", highlight=False)
    if check:
        console.print("[red]--check failed[/]" if failures else "[green]--check passed: every bar holds[/]")
    return 1 if check and failures else 0


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median over rounds of the ratio within a round: what slows a whole round down cancels."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))
