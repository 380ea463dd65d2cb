"""Environments in another interpreter: stepped over ``headrace.bridge`` against stepped bare, in that interpreter.

  robosuite  Lift, state observations, in .venv-robosuite (``scripts/setup_simulators.sh`` makes it)
  toy        a disc drawn on 84 x 84 pixels with numpy, under the interpreter that runs this

16 environments, two processes of that interpreter: bare, each steps its eight in a loop, both at once, and nobody reads
the observations; over the bridge, torch tensors of all 16 come back from every step. Rounds take turns; no episode ends
within one. Bar: the bridge has at least 0.8 of the bare rate.

  python benchmarks/bridges.py             nine rounds
  python benchmarks/bridges.py --quick     five short rounds, under a minute
  python benchmarks/bridges.py --check     exit 1 and name each bar that falls short, and each simulator that is absent
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

import headrace

ROOT = Path(__file__).resolve().parent.parent
WORKER = Path(__file__).with_name("bridges_worker.py")
NUM_ENVS, WORKERS, LEAST = 16, 2, 0.8


@dataclass(frozen=True)
class Case:
    """A simulator, and how many steps of the batch a round has."""

    name: str
    python: Path
    entry: str
    steps: int
    quick_steps: int


CASES = (
    Case("toy, 84 x 84 images", Path(sys.executable), f"{WORKER}:Disc", 200, 100),
    Case(
        "robosuite Lift",
        ROOT / ".venv-robosuite" / "bin" / "python",
        f"{ROOT / 'examples' / 'simulators' / 'robosuite_lift.py'}:make",
        20,
        10,
    ),
)


class Bare:
    """Two processes that step eight environments each."""

    def __init__(self, case: Case) -> None:
        command = [str(case.python), str(WORKER), case.entry, str(NUM_ENVS // WORKERS)]
        pipe = subprocess.PIPE
        self._processes = [
            subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
            for _ in range(WORKERS)
        ]
        self._wait()

    def seconds(self, steps: int) -> float:
        """Both at once, until the slower one is done."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        taken = [float(self._line(process)) for process in self._processes]
        self._wait()
        return max(taken)

    def _wait(self) -> None:
        for process in self._processes:
            if self._line(process) != "ready":
                raise RuntimeError("a bare worker ended early; run bridges_worker.py by hand to see why")

    def _line(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


def bridged_seconds(env: headrace.bridges.BridgeEnv, steps: int) -> float:
    """The same number of steps over the bridge, from new episodes."""
    env.reset(seed=0)
    actions = torch.rand(steps, NUM_ENVS, *env.single_action_space.shape) * 0.2 - 0.1
    begun = time.perf_counter()
    for row in actions:
        env.step(row)
    return time.perf_counter() - begun


def copied_bytes(env: headrace.bridges.BridgeEnv) -> int:
    """Bytes copied per environment and step: observations three times (into the shared memory, out of it, to the
    caller), the action and the results twice."""
    layout = env.backend.exchange.layout
    sizes = {name: torch.Size(shape[1:]).numel() * dtype.itemsize for name, shape, dtype, _ in layout.places()}
    seen = sum(size for name, size in sizes.items() if name.startswith("obs:"))
    return 3 * seen + 2 * (sum(sizes.values()) - seen)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short rounds, under a minute")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar falls short or a simulator is absent")
    arguments = parser.parse_args()
    short: list[str] = []
    print(f"{'':22}{'bare':>12}{'bridge':>12}{'ratio':>8}{'bytes copied':>14}")
    for case in CASES:
        if not case.python.exists():
            print(f"{case.name:22}{'absent':>12}")
            short.append(f"{case.name}: {case.python} is absent; run scripts/setup_simulators.sh")
            continue
        steps = case.quick_steps if arguments.quick else case.steps
        places = {"python": str(case.python), "entry": case.entry}
        with closing(Bare(case)) as bare, closing(headrace.bridge(num_envs=NUM_ENVS, workers=WORKERS, **places)) as env:
            bare.seconds(2), bridged_seconds(env, 2)
            rounds = [(bare.seconds(steps), bridged_seconds(env, steps)) for _ in range(5 if arguments.quick else 9)]
            copied = copied_bytes(env)
        rates = [
            statistics.median(NUM_ENVS * steps / seconds for seconds in side) for side in zip(*rounds, strict=True)
        ]
        ratio = statistics.median(alone / over for alone, over in rounds)
        print(f"{case.name:22}{rates[0]:>10,.0f}/s{rates[1]:>10,.0f}/s{ratio:>8.2f}{copied:>14,}")
        if ratio < LEAST:
            short.append(f"{case.name}: expected at least {LEAST} of the bare rate, got {ratio:.2f}")
    print("\nenv-steps/s, medians; the ratio is the median over rounds; bytes are per environment and step")
    for line in short:
        print(f"SHORT  {line}", file=sys.stderr)
    return 1 if short and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
