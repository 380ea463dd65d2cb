"""One evaluation of LeRobot's ACT on ALOHA: LeRobot's own loop on gym-aloha, against headrace.

ACT has its default size and random weights, plans 100 actions from a 480 × 640 picture and plays 100 or 16 of them. Ten
episodes of 400 steps. LeRobot's loop draws in every step, three cameras of which it returns one ("as it is"); the fair
peer draws only the one that is returned ("top only", patched here). Sync has ten environments in one process, Async two
workers. headrace draws what the policy reads, with its own renderer (native) or MuJoCo's (gl).

  without policy   wall time less the time inside ACT's predict_action_chunk, which is the same network everywhere
  physics alone    env-steps per second without pictures and policy: 10 environments in one process of gym-aloha, in two
                   worker processes, and natively batched on two threads

  python benchmarks/aloha.py            the whole table, about 40 minutes
  python benchmarks/aloha.py --quick    about a minute: 2 episodes of 100 steps (chunk 16: of 48), Sync alone
  python benchmarks/aloha.py --check    exit 1 and name each bar that falls short, or a peer that is not there

Needs scripts/setup_aloha.sh, scripts/setup_lerobot.sh and software GL (make system-packages).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "docs" / "benchmarks" / "aloha.md"
INTERPRETERS = {"peer": ROOT / ".venv-aloha" / "bin" / "python", "ours": ROOT / ".venv-lerobot" / "bin" / "python"}
RENDERING, WHOLE, WHOLE_16, PHYSICS = 30.0, 10.0, 4.0, 3.0
HEADS = ("loop", "chunk", "seconds", "without policy", "drawing", "pictures", "model calls")
NATIVE, FAIR = "headrace, native", "gym-aloha, top only"


class Row(NamedTuple):
    """One evaluation."""

    loop: str
    chunk: int
    found: dict[str, float]

    @property
    def rest(self) -> float:
        """Seconds without the policy."""
        return self.found["seconds"] - self.found["policy"]

    @property
    def cells(self) -> tuple[str, ...]:
        drawing = f"{self.found['render']:.2f}" if "render" in self.found else "in the workers"
        counts = f"{self.found['pictures']:,.0f}", f"{self.found['calls']:,.0f}"
        return self.loop, str(self.chunk), f"{self.found['seconds']:.1f}", f"{self.rest:.2f}", drawing, *counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about a minute: short episodes, Sync alone")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar falls short, naming it")
    parser.add_argument("--markdown", action="store_true", help=f"also write {REPORT.name} in docs/benchmarks")
    arguments = parser.parse_args()
    missing = [str(python.relative_to(ROOT)) for python in INTERPRETERS.values() if not python.exists()]
    if missing:
        print(
            f"not there: {', '.join(missing)}; run scripts/setup_aloha.sh and scripts/setup_lerobot.sh", file=sys.stderr
        )
        return 1
    rows, rates = measure(arguments.quick)
    bars = judge(rows, rates)
    show(rows, rates, bars)
    if arguments.markdown:
        REPORT.write_text(markdown(rows, rates, bars, arguments.quick))
    short = [bar for bar in bars if not bar.holds]
    for bar in short:
        print(f"falls short: {bar.name} {bar.value:.1f}×, bar {bar.limit:.0f}×", file=sys.stderr)
    return 1 if short and arguments.check else 0


def measure(quick: bool) -> tuple[list[Row], dict[str, float]]:
    sizes = {100: (2, 100), 16: (2, 48)} if quick else {100: (10, 400), 16: (10, 400)}
    steps = 100 if quick else 1000
    vectors = ("sync",) if quick else ("sync", "async")
    theirs = [["peer", vector, "top", chunk, *sizes[chunk]] for chunk in sizes for vector in vectors]
    theirs += [] if quick else [["peer", vector, "all", 100, *sizes[100]] for vector in vectors]
    own = [["ours", "native", chunk, *sizes[chunk]] for chunk in sizes]
    own += [["ours", "gl", chunk, *sizes[chunk]] for chunk in ((100,) if quick else sizes)]
    names = {"sync": "Sync", "async": "Async", "top": "top only", "all": "as it is"}
    rows: list[Row] = []
    for job, found in zip(theirs, run("peer", theirs), strict=True):
        rows.append(Row(f"{names[str(job[1])]}, gym-aloha, {names[str(job[2])]}", int(job[3]), found))
    for job, found in zip(own, run("ours", own), strict=True):
        rows.append(Row(f"headrace, {job[1]}", int(job[2]), found))
    genuine = run("peer", [["physics", "genuine", 10, steps // 10], ["physics", "workers", 2, steps // 2]])
    (batched,) = run("ours", [["physics", "ours", 10, steps]])
    rates = {"gym-aloha, one process": genuine[0], "gym-aloha, two workers": genuine[1], "headrace": batched}
    return rows, {name: found["rate"] for name, found in rates.items()}


def run(where: str, jobs: Sequence[Sequence[object]]) -> list[dict[str, float]]:
    """Measurements of one interpreter, one after the other."""
    worker = Path(__file__).with_name("aloha_worker.py")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if where == "ours":
        environment["PYTHONPATH"] = str(ROOT / "src")
    done = subprocess.run(
        [INTERPRETERS[where], worker, json.dumps(jobs)], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{worker.name} failed in {INTERPRETERS[where]}:\n{done.stderr[-3000:]}")
    # tqdm and gymnasium print as well
    return [json.loads(line.split("FOUND ", 1)[1]) for line in done.stdout.splitlines() if "FOUND " in line]


class Bar(NamedTuple):
    """What must hold."""

    name: str
    value: float
    limit: float

    @property
    def holds(self) -> bool:
        return self.value >= self.limit


def judge(rows: Sequence[Row], rates: dict[str, float]) -> list[Bar]:
    """The bars, against the faster of the fair peers."""
    bars: list[Bar] = []
    for chunk, limit in ((100, WHOLE), (16, WHOLE_16)):
        own = next(row for row in rows if row.loop == NATIVE and row.chunk == chunk)
        fair = [row for row in rows if FAIR in row.loop and row.chunk == chunk]
        if chunk == 100:
            drawing = min(row.found["render"] for row in fair if "render" in row.found)
            bars.append(Bar("less drawing at chunk 100", drawing / own.found["render"], RENDERING))
        bars.append(Bar(f"end to end without policy at chunk {chunk}", min(r.rest for r in fair) / own.rest, limit))
        whole = min(row.found["seconds"] for row in fair) / own.found["seconds"]
        bars.append(Bar(f"end to end with policy at chunk {chunk} (no bar)", whole, 0.0))
    bars.append(Bar("physics alone", rates["headrace"] / rates["gym-aloha, one process"], PHYSICS))
    bars.append(
        Bar("physics alone against two workers (no bar)", rates["headrace"] / rates["gym-aloha, two workers"], 0.0)
    )
    return bars


def show(rows: Sequence[Row], rates: dict[str, float], bars: Sequence[Bar]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="one evaluation of ACT on the transfer of the cube; seconds")
    for head in HEADS:
        table.add_column(head, justify="left" if head == "loop" else "right")
    for row in rows:
        table.add_row(*row.cells)
    console = Console(width=140)
    console.print(table)
    for name, rate in rates.items():
        console.print(f"physics alone, {name}: {rate:,.0f} env-steps/s")
    for bar in bars:
        console.print(f"{bar.name}: {bar.value:.1f}×" + (f" (bar {bar.limit:.0f}×)" if bar.limit else ""))


def markdown(rows: Sequence[Row], rates: dict[str, float], bars: Sequence[Bar], quick: bool) -> str:
    size = "2 episodes of 100 steps (48 at chunk 16)" if quick else "10 episodes of 400 steps"
    lines = [
        "# ALOHA",
        "",
        f"One evaluation of LeRobot's ACT, {size}, on two cores. {(__doc__ or '').split(chr(10) * 2)[1]}",
        "",
    ]
    lines += [f"| {' | '.join(HEADS)} |", "|---|" + "---:|" * (len(HEADS) - 1)]
    lines += [f"| {' | '.join(row.cells)} |" for row in rows]
    lines += ["", "| physics alone | env-steps/s |", "|---|---:|"]
    lines += [f"| {name} | {rate:,.0f} |" for name, rate in rates.items()]
    lines += ["", "| headrace against the fair peer | | bar |", "|---|---:|---:|"]
    lines += [f"| {bar.name} | {bar.value:.1f}× | {f'{bar.limit:.0f}×' if bar.limit else '–'} |" for bar in bars]
    command = "python benchmarks/aloha.py --markdown" + (" --quick" if quick else "")
    return "\n".join([*lines, "", f"Reproduce: `{command}`", ""])


if __name__ == "__main__":
    sys.exit(main())
