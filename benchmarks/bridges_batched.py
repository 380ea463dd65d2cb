"""A batched simulator under the row protocol against the same one stepped bare: mjlab (Cartpole, 64 rows).

It runs in ``.venv-mjlab``, which ``scripts/setup_simulators.sh`` makes. The contestants take turns, round after round,
and ratios are of medians.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
ROWS = 64
BRIDGES = ROOT / "src" / "headrace" / "bridges"
INTERPRETERS = {"mjlab": ".venv-mjlab"}


class Bar(NamedTuple):
    """One ratio and its limit."""

    name: str
    value: float
    limit: float
    at_most: bool

    @property
    def holds(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def __str__(self) -> str:
        return f"{self.name}: {self.value:.3f} ({'at most' if self.at_most else 'at least'} {self.limit})"


# --- in the simulator's interpreter -----------------------------------------------------------------------------


def interleaved(contestants: dict[str, Callable[[], object]], *, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Seconds per call of each contestant, one figure per round."""
    for call in contestants.values():
        for _ in range(3):
            call()
    figures: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, call in contestants.items():
            begun, calls = time.perf_counter(), 0
            while time.perf_counter() - begun < seconds:
                call()
                calls += 1
            figures[name].append((time.perf_counter() - begun) / calls)
    return figures


def mjlab_worker(rounds: int, seconds: float) -> dict[str, list[float]]:
    sys.path.insert(0, str(BRIDGES))
    import child  # pyright: ignore[reportMissingImports]
    import mjlab_rows  # pyright: ignore[reportMissingImports]
    import numpy as np

    sim = mjlab_rows.make(ROWS, "Mjlab-Cartpole-Balance", overrides={"episode_length_s": 1e6})
    rows = child.RowSimulation(sim)
    rows.reset(np.arange(ROWS), np.arange(ROWS))
    actions = np.random.default_rng(0).uniform(-1, 1, (ROWS, 1)).astype(np.float32)
    everyone, half = np.ones(ROWS, np.bool_), np.arange(ROWS) % 2 == 0
    turn = [False]

    def changing() -> object:
        # another half each time, as in an evaluation: saved anew in every step
        turn[0] = not turn[0]
        return rows.step(actions, half if turn[0] else ~half)

    bare_actions = mjlab_rows.torch.from_numpy(actions)
    contestants: dict[str, Callable[[], object]] = {
        "bare": lambda: sim._env.step(bare_actions),
        "bridge": lambda: rows.step(actions, everyone),
        "half suspended": changing,
    }
    return interleaved(contestants, rounds=rounds, seconds=seconds)


# --- in ours ----------------------------------------------------------------------------------------------------


def measure(quick: bool) -> tuple[dict[str, dict[str, list[float]]], dict[str, str]]:
    """Seconds per call of every contestant of every simulator, and what is missing."""
    found: dict[str, dict[str, list[float]]] = {}
    missing: dict[str, str] = {}
    rounds, seconds = (5, 0.4) if quick else (15, 1.0)
    for name, environment in INTERPRETERS.items():
        python = ROOT / environment / "bin" / "python"
        if not python.exists():
            missing[name] = f"{environment} is missing; run scripts/setup_simulators.sh"
            continue
        command = [str(python), __file__, "--worker", name, "--rounds", str(rounds), "--seconds", str(seconds)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}
        )
        if done.returncode != 0:
            missing[name] = done.stderr.strip()[-600:]
            continue
        found[name] = json.loads(done.stdout.strip().splitlines()[-1])
    return found, missing


def bars(found: dict[str, dict[str, list[float]]]) -> list[Bar]:
    """What must hold of the figures."""
    results: list[Bar] = []
    if "mjlab" in found:
        ratio = _median(found, "mjlab", "half suspended") / _median(found, "mjlab", "bare")
        results.append(Bar("mjlab: a suspended step against a bare one", ratio, 1.15, at_most=True))
    return results


def _median(found: dict[str, dict[str, list[float]]], name: str, contestant: str) -> float:
    return statistics.median(found[name][contestant])


def main() -> None:
    """Measure, print a table, and check the bars if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--check", action="store_true", help="fail where a bar does not hold or a simulator is missing")
    parser.add_argument("--worker", choices=sorted(INTERPRETERS), help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=5, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=0.4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        workers = {"mjlab": mjlab_worker}
        with contextlib.redirect_stdout(sys.stderr):
            figures: Any = workers[args.worker](args.rounds, args.seconds)
        print(json.dumps(figures))
        return
    found, missing = measure(args.quick)
    print(f"{'simulator':12}{'contestant':18}{'ms per step':>14}{'env-steps/s':>14}{'x bare':>9}")
    for name, contestants in found.items():
        for contestant in contestants:
            seconds = _median(found, name, contestant)
            acting = ROWS // 2 if contestant == "half suspended" else ROWS
            ratio = _median(found, name, "bare") / seconds
            print(f"{name:12}{contestant:18}{1e3 * seconds:14.3f}{acting / seconds:14,.0f}{ratio:9.3f}")
    for name, reason in missing.items():
        print(f"{name}: {reason}")
    short = [bar for bar in bars(found) if not bar.holds]
    for bar in bars(found):
        print(("holds  " if bar.holds else "SHORT  ") + str(bar))
    if args.check and (short or missing):
        raise SystemExit(f"short: {[bar.name for bar in short]}, missing: {list(missing)}")


if __name__ == "__main__":
    main()
