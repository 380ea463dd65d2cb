"""LIBERO natively against genuine LIBERO: CPU seconds of an episode besides the policy, chunk 8, 256 × 256 pixels.

Genuine LIBERO runs one process per core, so CPU seconds of one process are what its episodes cost; natively, those of
all threads of a batch of 8 are divided by 8. An episode is a reset, 10 waits and the suite's horizon of steps, from
measured resets and steps.

  openpi's loop   genuine, both cameras drawn by EGL in every step
  on demand       genuine, drawn once in 8 steps
  native          headrace, its own renderer, drawn once in 8 steps
  native, gl      headrace, MuJoCo's renderer, drawn once in 8 steps

  python benchmarks/libero.py            240 steps each, about 20 minutes
  python benchmarks/libero.py --quick    16 steps
  python benchmarks/libero.py --check    exit 1 and name each bar that falls short

Needs scripts/setup_libero.sh, exported tasks, HEADRACE_LIBERO_ASSETS and software GL (make system-packages). On a GPU
drawing is cheap: there the row "physics" is what is left.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import headrace
from headrace.envs.tasks.libero.names import HORIZONS

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "docs" / "benchmarks" / "libero.md"
PYTHON = Path(os.environ.get("HEADRACE_LIBERO_PYTHON", ROOT / ".venv-libero" / "bin" / "python"))
DRAWN = "libero_spatial/0"
PHYSICS = (DRAWN, "libero_object/0", "libero_goal/0", "libero_10/2", "libero_90/0")
CHUNK, BATCH, WAITS = 8, 8, 10


class Cost(NamedTuple):
    """CPU seconds of a reset without waits, and of a step."""

    reset: float
    step: float

    def episode(self, name: str) -> float:
        """Return the CPU seconds of an episode."""
        return self.reset + self.step * (WAITS + HORIZONS[name.partition("/")[0]])


class Bar(NamedTuple):
    """What must hold: at least the limit, or at most."""

    name: str
    value: float
    limit: float
    unit: str = "×"
    at_most: bool = False

    @property
    def holds(self) -> bool:
        """Return whether it does."""
        return self.value <= self.limit if self.at_most else self.value >= self.limit


def measure_genuine(jobs: list[tuple[str, str, int]]) -> list[Cost]:
    """Measure in LIBERO's interpreter."""
    worker = Path(__file__).with_name("libero_worker.py")
    environment = {**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, "MUJOCO_GL": "egl"}
    done = subprocess.run(
        [PYTHON, worker, json.dumps(jobs)], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{worker.name} failed:\n{done.stderr[-3000:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    return [Cost(**json.loads(line.removeprefix("FOUND "))) for line in lines]


def measure_native(name: str, renderer: str | None, steps: int) -> Cost:
    """Measure a batch; ``renderer`` None is physics alone."""
    cameras = {"cameras": ()} if renderer is None else {"renderer": renderer, "pixels": 256}
    env = headrace.make(name, BATCH, overrides={**cameras, "waits": 0, "episode_length": 10_000}, final_obs=False)
    unseen = torch.zeros(BATCH, dtype=torch.bool)
    env.reset(options={"observe": unseen})
    begun = time.process_time()
    env.reset(options={"observe": unseen})
    reset = (time.process_time() - begun) / BATCH
    rng, read = np.random.default_rng(0), torch.ones(BATCH, dtype=torch.bool)
    env.observe()
    env.step(torch.zeros(BATCH, 7), observe=unseen)
    begun = time.process_time()
    for step in range(steps):
        actions = torch.from_numpy(rng.uniform(-0.3, 0.3, (BATCH, 7)))
        env.step(actions, observe=read if step % CHUNK == CHUNK - 1 else unseen)
    taken = (time.process_time() - begun) / steps / BATCH
    env.close()
    return Cost(reset, taken)


def measure_ready() -> list[Bar]:
    """Return what a task takes until its first pictures, warm, and what a further environment weighs."""
    worker = Path(__file__).with_name("libero_ready.py")

    def run(num_envs: int) -> dict[str, float]:
        done = subprocess.run(
            [sys.executable, worker, DRAWN, str(num_envs)], capture_output=True, text=True, check=True
        )
        return json.loads(done.stdout)

    run(1)  # compiles kernels, reads the files once
    one, more = run(1), run(1 + BATCH)
    further = (more["bytes"] - one["bytes"]) / BATCH / 2**20
    return [
        Bar("a further environment with both cameras", further, 60.0, " MB", at_most=True),
        Bar("from the task's name to its first pictures, processor time", one["cpu_seconds"], 3.0, " s", at_most=True),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="16 steps each")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar falls short, naming it")
    parser.add_argument("--markdown", action="store_true", help=f"also write {REPORT.name} in docs/benchmarks")
    arguments = parser.parse_args()
    if not PYTHON.is_file():
        print(f"not there: {PYTHON}; run scripts/setup_libero.sh", file=sys.stderr)
        return 1
    steps = 16 if arguments.quick else 240
    kinds = ("every", "demand")
    found = measure_genuine([(DRAWN, kind, steps) for kind in kinds] + [(name, "physics", steps) for name in PHYSICS])
    rows = {"openpi's loop": found[0], "on demand": found[1]}
    rows |= {"native": measure_native(DRAWN, "native", steps), "native, gl": measure_native(DRAWN, "gl", steps)}
    physics = {name: (found[2 + i], measure_native(name, None, steps)) for i, name in enumerate(PHYSICS)}
    cost = {name: each.episode(DRAWN) for name, each in rows.items()}
    ratios = {name: theirs.step / ours.step for name, (theirs, ours) in physics.items()}
    mean = float(np.exp(np.mean(np.log(list(ratios.values())))))
    bars = [
        Bar("native against openpi's loop", cost["openpi's loop"] / cost["native"], 20.0),
        Bar("native against genuine on demand", cost["on demand"] / cost["native"], 4.0),
        Bar("native physics with gl against openpi's loop", cost["openpi's loop"] / cost["native, gl"], 5.0),
        Bar("physics over the suites", mean, 4.0),
        Bar("physics on spatial", ratios[DRAWN], 3.5),
        *measure_ready(),
    ]
    text = report(rows, cost, physics, bars, steps)
    print(text)
    if arguments.markdown:
        REPORT.write_text(text)
    short = [bar for bar in bars if not bar.holds]
    for bar in short:
        print(f"falls short: {bar.name} {bar.value:.1f}{bar.unit}, bar {bar.limit:g}{bar.unit}", file=sys.stderr)
    return 1 if short and arguments.check else 0


def report(rows, cost, physics, bars, steps: int) -> str:
    """Return the page."""
    lines = [
        "# LIBERO",
        "",
        f"{DRAWN}, {steps} measured steps each, two cores without a GPU (EGL is software). CPU seconds of an episode "
        f"of {HORIZONS['libero_spatial']} steps besides the policy; chunk {CHUNK}, 256 × 256 pixels.",
        "",
        "| loop | reset, s | step, ms | episode, s | episodes per hour and core |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, each in rows.items():
        rate = f"{3600 / cost[name]:,.0f}"
        lines.append(f"| {name} | {each.reset:.3f} | {1e3 * each.step:.1f} | {cost[name]:.2f} | {rate} |")
    lines += ["", "| physics alone, ms per step | genuine | native | |", "|---|---:|---:|---:|"]
    for name, (theirs, ours) in physics.items():
        times = f"{1e3 * theirs.step:.1f} | {1e3 * ours.step:.2f} | {theirs.step / ours.step:.1f}×"
        lines.append(f"| {name} | {times} |")
    lines += ["", "| | | bar |", "|---|---:|---:|"]
    for bar in bars:
        limit = f"{'at most ' if bar.at_most else ''}{bar.limit:g}{bar.unit}"
        lines.append(f"| {bar.name} | {bar.value:.1f}{bar.unit} | {limit} |")
    command = "python benchmarks/libero.py --markdown" + ("" if steps > 16 else " --quick")
    return "\n".join([*lines, "", f"Reproduce: `{command}`", ""])


if __name__ == "__main__":
    sys.exit(main())
