"""What measuring costs: the loop of ``headrace runtime``, monitor included, against a bare loop over ``env.step``.

The same environment, the same actions, blocks of equal length that take turns; the figure is the median over rounds
of the ratio within a round, so that what slows a whole round down cancels.

  python benchmarks/overhead.py            about 3 minutes
  python benchmarks/overhead.py --quick    under a minute
  python benchmarks/overhead.py --check    exit 1 if the overhead is more than 2 %
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

LIMIT = 0.02
TASK, NUM_ENVS = "cartpole", 1024
REPORT = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "overhead.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under a minute: fewer and shorter rounds")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar falls short, naming it")
    parser.add_argument("--markdown", action="store_true", help=f"also write {REPORT.name} in docs/benchmarks")
    arguments = parser.parse_args()

    rounds, seconds = (7, 2.0) if arguments.quick else (15, 4.0)
    found = measured(rounds, seconds)
    lines = table(found)
    show(lines, found["rounds"])
    if arguments.markdown:
        REPORT.write_text(markdown(lines, rounds, seconds))
    overhead = ratio(found, "loop and monitor") - 1.0
    if overhead > LIMIT:
        print(f"falls short: overhead of loop and monitor {overhead:.2%}, limit {LIMIT:.0%}", file=sys.stderr)
        return 1 if arguments.check else 0
    return 0


def measured(rounds: int, seconds: float) -> dict[str, list[float]]:
    """Seconds per step of each contestant, round by round."""
    import torch

    import headrace
    from headrace.bench.actions import action_maker
    from headrace.bench.builders import RuntimeBuilder
    from headrace.bench.monitor import ResourceMonitor
    from headrace.bench.stepping import Stepper

    torch.set_num_threads(1)
    env = headrace.make(TASK, NUM_ENVS, threads=2)
    draw = action_maker("random", env.single_action_space, NUM_ENVS, env.device, seed=0)
    actions = itertools.cycle([draw() for _ in range(64)])  # the same for all: choosing them is not what is measured
    env.reset()

    def bare(count: int) -> None:
        for _ in range(count):
            env.step(next(actions))

    def loop(count: int) -> None:
        Stepper(env, lambda: next(actions), RuntimeBuilder(NUM_ENVS)).run(count, lambda _: None)

    def watched(count: int) -> None:
        monitor = ResourceMonitor(1.0)
        monitor.start()
        loop(count)
        monitor.stop()

    contestants: dict[str, Callable[[int], None]] = {"bare": bare, "loop": loop, "loop and monitor": watched}
    bare(300)
    count = max(50, round(seconds / _timed(bare, 200)))
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for index in range(rounds):
        order = list(contestants) if index % 2 == 0 else list(reversed(contestants))
        for name in order:
            found[name].append(_timed(contestants[name], count))
    env.close()
    found["rounds"] = [float(rounds), float(count)]
    return found


def _timed(run: Callable[[int], None], count: int) -> float:
    begin = time.perf_counter()
    run(count)
    return (time.perf_counter() - begin) / count


def ratio(found: dict[str, list[float]], name: str) -> float:
    return statistics.median(a / b for a, b in zip(found[name], found["bare"], strict=True))


def table(found: dict[str, list[float]]) -> list[tuple[str, str, str, str]]:
    lines: list[tuple[str, str, str, str]] = []
    for name in ("bare", "loop", "loop and monitor"):
        step = statistics.median(found[name])
        extra = "" if name == "bare" else f"{ratio(found, name) - 1:+.2%}"
        lines.append((name, f"{step * 1e3:.3f} ms", f"{NUM_ENVS / step:,.0f}", extra))
    return lines


def show(lines: list[tuple[str, str, str, str]], rounds: list[float]) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=f"{TASK}, {NUM_ENVS:,} environments, {rounds[0]:.0f} rounds of {rounds[1]:,.0f} steps")
    shown.add_column("what runs")
    for column in ("step of the batch", "frames/s", "overhead"):
        shown.add_column(column, justify="right")
    for line in lines:
        shown.add_row(*line)
    Console().print(shown)


def markdown(lines: list[tuple[str, str, str, str]], rounds: int, seconds: float) -> str:
    rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return (
        f"# What measuring costs\n\n`{TASK}` with {NUM_ENVS:,} environments on two cores. The same environment and "
        f"actions; {rounds} rounds of\nblocks of {seconds:g} seconds that take turns; medians, and the median over "
        "rounds of the ratio within a round. Limit: 2 %.\n\n| what runs | step of the batch | frames/s | overhead |\n"
        f"|---|---:|---:|---:|\n{rows}\n\n*bare*: `for …: env.step(actions)`. *loop*: that of `headrace runtime`, "
        "which times every step, reads the stage timers and counts\nepisodes. *monitor*: samples CPU, memory and GPU "
        "once a second, beside it.\n\nReproduce: `python benchmarks/overhead.py --markdown`\n"
    )


if __name__ == "__main__":
    sys.exit(main())
