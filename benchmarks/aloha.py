"""Evaluations of LeRobot's ACT on ALOHA: LeRobot's own loop on gym-aloha, against headrace with its defaults.

ACT has its default size and random weights, plans 100 actions from a 480 × 640 picture and plays 100 or 16 of them, in
2, 10 and 16 episodes of 160 steps, in as many environments. LeRobot's loop draws in every step, three cameras of which
it returns one; here it draws only the one that is returned (patched). All environments are in one process. headrace
draws what the policy reads, with its own renderer (native) or MuJoCo's (gl); its batches are strict and verified.

  without policy   wall time less the time inside ACT's predict_action_chunk, which is the same network everywhere
  rows per row     rows that the model computed, verification included, per row that was needed
  physics alone    env-steps per second without pictures and policy: 10 environments in one process of gym-aloha, in two
                   worker processes, and natively batched on two threads

  python benchmarks/aloha.py            the whole table, about 18 minutes
  python benchmarks/aloha.py --quick    about a minute: 2 episodes of 100 steps (chunk 16: of 112)
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
RENDERING, PHYSICS = 30.0, 3.0
REST = {100: 10.0, 16: 4.0}
WHOLE = {100: 4.0, 16: 2.0}
"""Chunk → bar of the ratio of seconds without and with the policy."""
ROWS, ROWS_FROM = 1.05, 160
"""Bar of rows per row, for evaluations of so many rows: eight rows are verified at least."""
HEADS = (
    "loop",
    "environments",
    "chunk",
    "seconds",
    "without policy",
    "drawing",
    "pictures",
    "model calls",
    "rows per row",
)
NATIVE, PEER = "headrace, native", "LeRobot, gym-aloha"


class Row(NamedTuple):
    """One evaluation."""

    loop: str
    num_envs: int
    chunk: int
    found: dict[str, float]

    @property
    def rest(self) -> float:
        """Seconds without the policy."""
        return self.found["seconds"] - self.found["policy"]

    @property
    def cells(self) -> tuple[str, ...]:
        found = self.found
        times = f"{found['seconds']:.1f}", f"{self.rest:.2f}", f"{found['render']:.2f}"
        counts = f"{found['pictures']:,.0f}", f"{found['calls']:,.0f}", f"{found['rows_per_row']:.2f}"
        return self.loop, str(self.num_envs), str(self.chunk), *times, *counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about a minute: short episodes, two environments")
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
        print(f"falls short: {' '.join(bar.cells)}", file=sys.stderr)
    return 1 if short and arguments.check else 0


def measure(quick: bool) -> tuple[list[Row], dict[str, float]]:
    sizes = (2,) if quick else (2, 10, 16)
    steps = {100: 100, 16: 112} if quick else {100: 160, 16: 160}
    cases = [(num_envs, chunk) for num_envs in sizes for chunk in steps]
    rows: list[Row] = []
    # a case of both sides next to each other, since a machine drifts
    for num_envs, chunk in cases:
        (found,) = run("peer", [["peer", chunk, num_envs, steps[chunk]]])
        rows.append(Row(PEER, num_envs, chunk, found))
        renderers = ("native", "gl") if (num_envs, chunk) == cases[0] else ("native",)
        own = run("ours", [["ours", renderer, chunk, num_envs, steps[chunk]] for renderer in renderers])
        rows += [
            Row(f"headrace, {renderer}", num_envs, chunk, found) for renderer, found in zip(renderers, own, strict=True)
        ]
    taken = 100 if quick else 1000
    genuine = run("peer", [["physics", "genuine", 10, taken // 10], ["physics", "workers", 2, taken // 2]])
    (batched,) = run("ours", [["physics", "ours", 10, taken]])
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
    at_most: bool = False

    @property
    def holds(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    @property
    def cells(self) -> tuple[str, str, str]:
        limit = f"{'≤' if self.at_most else '≥'} {self.limit:g}" if self.limit else "–"
        return self.name, f"{self.value:.2f}", limit


def judge(rows: Sequence[Row], rates: dict[str, float]) -> list[Bar]:
    """The bars, against LeRobot's loop on the same environments."""
    bars: list[Bar] = []
    for peer in (row for row in rows if row.loop == PEER):
        same = [row for row in rows if row[1:3] == peer[1:3]]
        own = next(row for row in same if row.loop == NATIVE)
        where = f"{peer.num_envs} environments, chunk {peer.chunk}"
        if peer.chunk == 100:
            bars.append(Bar(f"{where}: less drawing", peer.found["render"] / own.found["render"], RENDERING))
        bars.append(Bar(f"{where}: end to end without policy", peer.rest / own.rest, REST[peer.chunk]))
        whole = peer.found["seconds"] / own.found["seconds"]
        bars.append(Bar(f"{where}: end to end with policy", whole, WHOLE[peer.chunk]))
        if own.found["rows"] >= ROWS_FROM:
            bars.append(Bar(f"{where}: rows per row", own.found["rows_per_row"], ROWS, at_most=True))
    bars.append(Bar("physics alone", rates["headrace"] / rates["gym-aloha, one process"], PHYSICS))
    bars.append(
        Bar("physics alone against two workers (no bar)", rates["headrace"] / rates["gym-aloha, two workers"], 0.0)
    )
    return bars


def show(rows: Sequence[Row], rates: dict[str, float], bars: Sequence[Bar]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="evaluations of ACT on the transfer of the cube; seconds")
    for head in HEADS:
        table.add_column(head, justify="left" if head == "loop" else "right")
    for row in rows:
        table.add_row(*row.cells)
    console = Console(width=140)
    console.print(table)
    for name, rate in rates.items():
        console.print(f"physics alone, {name}: {rate:,.0f} env-steps/s")
    verdicts = Table(title="headrace against LeRobot's loop")
    for head in ("ratio", "reached", "bar"):
        verdicts.add_column(head, justify="left" if head == "ratio" else "right")
    for bar in bars:
        verdicts.add_row(*bar.cells)
    console.print(verdicts)


def markdown(rows: Sequence[Row], rates: dict[str, float], bars: Sequence[Bar], quick: bool) -> str:
    size = "2 episodes of 100 steps (112 at chunk 16)" if quick else "2, 10 and 16 episodes of 160 steps"
    lines = [
        "# ALOHA",
        "",
        f"{size}, on two cores. {(__doc__ or '').split(chr(10) * 2)[1]}",
        "",
    ]
    lines += [f"| {' | '.join(HEADS)} |", "|---|" + "---:|" * (len(HEADS) - 1)]
    lines += [f"| {' | '.join(row.cells)} |" for row in rows]
    lines += ["", "| physics alone | env-steps/s |", "|---|---:|"]
    lines += [f"| {name} | {rate:,.0f} |" for name, rate in rates.items()]
    lines += ["", "| headrace against LeRobot's loop | reached | bar |", "|---|---:|---:|"]
    lines += [f"| {' | '.join(bar.cells)} |" for bar in bars]
    command = "python benchmarks/aloha.py --markdown" + (" --quick" if quick else "")
    return "\n".join([*lines, "", f"Reproduce: `{command}`", ""])


if __name__ == "__main__":
    sys.exit(main())
