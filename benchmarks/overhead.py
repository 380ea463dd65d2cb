"""What measuring costs: the loop of ``headrace runtime`` and its monitor, against a bare loop over ``env.step``.

loop      times every step, reads the stage timers and counts episodes. The same environment and the same actions as
          the bare loop, in short blocks that take turns; the figure is the median over rounds of the ratio within a
          round, so that what slows the machine down for longer than a block cancels.
monitor   one sample of CPU, memory and GPU, as a share of the second between samples: what it would cost if the loop
          stood still meanwhile, which it does only where it waits for Python's lock.

  python benchmarks/overhead.py            about 2 minutes
  python benchmarks/overhead.py --quick    under a minute
  python benchmarks/overhead.py --check    exit 1 if both together are more than 2 %
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

LIMIT = 0.02
TASK, NUM_ENVS = "cartpole", 1024
BLOCK, INTERVAL = 10, 1.0
REPORT = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "overhead.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under a minute: fewer and shorter rounds")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar falls short, naming it")
    parser.add_argument("--markdown", action="store_true", help=f"also write {REPORT.name} in docs/benchmarks")
    arguments = parser.parse_args()

    rounds = 100 if arguments.quick else 400
    found = measured(rounds)
    lines = table(found)
    show(lines, rounds)
    if arguments.markdown:
        REPORT.write_text(markdown(lines, rounds))
    if found.overhead > LIMIT:
        print(f"falls short: overhead of loop and monitor {found.overhead:.2%}, limit {LIMIT:.0%}", file=sys.stderr)
        return 1 if arguments.check else 0
    return 0


class Found(NamedTuple):
    """Seconds per step, round by round, and seconds of one sample."""

    bare: list[float]
    loop: list[float]
    sample: float

    @property
    def loop_share(self) -> float:
        return statistics.median(a / b for a, b in zip(self.loop, self.bare, strict=True)) - 1.0

    @property
    def overhead(self) -> float:
        return max(self.loop_share, 0.0) + self.sample / INTERVAL


def measured(rounds: int) -> Found:
    import torch

    import headrace
    from headrace.bench.builders import RuntimeBuilder
    from headrace.bench.capture import ResourceMonitor
    from headrace.bench.stepping import Stepper, action_maker

    torch.set_num_threads(1)
    env = headrace.make(TASK, NUM_ENVS, threads=2)
    draw = action_maker("random", env.single_action_space, NUM_ENVS, env.device, seed=0)
    actions = itertools.cycle([draw() for _ in range(64)])  # choosing them is not what is measured
    env.reset()

    def bare(count: int) -> None:
        for _ in range(count):
            env.step(next(actions))

    stepper = Stepper(env, lambda: next(actions), RuntimeBuilder())

    def loop(count: int) -> None:
        stepper.run(count, lambda _: None)

    bare(200)
    found: dict[str, list[float]] = {"bare": [], "loop": []}
    for index in range(rounds):
        for name in ("bare", "loop") if index % 2 == 0 else ("loop", "bare"):
            found[name].append(_timed(bare if name == "bare" else loop, BLOCK) / BLOCK)
    env.close()
    monitor = ResourceMonitor(INTERVAL)
    monitor.start()
    samples = [_timed(lambda _: monitor._sample(), 1) for _ in range(30)]
    monitor.stop()
    return Found(found["bare"], found["loop"], statistics.median(samples))


def _timed(run: Callable[[int], None], count: int) -> float:
    begin = time.perf_counter()
    run(count)
    return time.perf_counter() - begin


def table(found: Found) -> list[tuple[str, str, str]]:
    step = statistics.median(found.bare)
    return [
        ("bare loop", f"{step * 1e3:.3f} ms per step, {NUM_ENVS / step:,.0f} frames/s", ""),
        ("loop of runtime", f"{statistics.median(found.loop) * 1e3:.3f} ms per step", f"{found.loop_share:+.2%}"),
        ("monitor", f"{found.sample * 1e3:.3f} ms a sample, once a second", f"{found.sample / INTERVAL:+.2%}"),
        ("both", "", f"{found.overhead:+.2%}"),
    ]


def show(lines: list[tuple[str, str, str]], rounds: int) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=f"{TASK}, {NUM_ENVS:,} environments, {rounds} rounds of {BLOCK} steps each")
    shown.add_column("what runs")
    shown.add_column("median", justify="right")
    shown.add_column("overhead", justify="right")
    for line in lines:
        shown.add_row(*line)
    Console().print(shown)


def markdown(lines: list[tuple[str, str, str]], rounds: int) -> str:
    rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return (
        f"# What measuring costs\n\n`{TASK}` with {NUM_ENVS:,} environments on two cores; {rounds} rounds of {BLOCK} "
        "steps each, bare and measured in turn. The overhead of\nthe loop is the median over rounds of the ratio "
        "within a round; that of the monitor is a sample as a share of the second between samples.\nLimit: 2 %.\n\n"
        f"| what runs | median | overhead |\n|---|---:|---:|\n{rows}\n\n"
        "Reproduce: `python benchmarks/overhead.py --markdown`\n"
    )


if __name__ == "__main__":
    sys.exit(main())
