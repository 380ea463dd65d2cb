"""Useful env-steps per second with action chunks: every rule and engine, what others do, and the bounds.

N environments play chunks of 16 actions; episodes end at random, so that the environments are out of phase.

  (a) model on the same cores    ants, q = 1/50; a torch transformer whose full-batch call takes about 16 (and 48)
                                 steps of physics, computed by the cores that do the physics
  (b) model on another device    ants with 20 physics steps an action, so that a step takes tens of milliseconds, as
                                 where the ratios come from; q = 1/150; a stand-in for the model: a call takes a + b·k
                                 seconds off the CPU for k rows, half of it fixed, in the ratios to the physics of GR1
                                 (200 ms per call to 58.9 ms per step) and DROID (700 ms)
  (c) camera in the observation  cartpole-camera, 64 × 64 pixels, q = 1/150, policy time excluded: pictures drawn for
                                 the observations that a model reads, against a picture every step

Restated, since they come inside other frameworks:
  any, full batch (restated)     one environment needs a chunk → the whole batch is inferred, rows of others are dropped
  synced, hold (restated)        inference when all need a chunk; who is done early is stepped with a hold action

"useful" steps have an action that the policy planned for them: held steps do not count. "bound" is the closed form of
the scheduler with the measured p (a full step of the settled environments), a and b (the model's time for k rows is
a + b·k), M = (1 − (1 − q)^16) / q useful steps a chunk; p is measured before and after each contestant:
  any N / (p + I(N)·[1 − (1 − 1/M)^N]), synced N·M / (16·p + I(N)), suspended N / (p + I(N)/M),
  with overlap on another device min(N/p, M·N/I(N)).

  python benchmarks/chunking.py              the whole table, about 15 minutes
  python benchmarks/chunking.py --quick      under a minute
  python benchmarks/chunking.py --check      exit 1 and name each bar that falls short
  python benchmarks/chunking.py --part b     one setting only
  python benchmarks/chunking.py --bars-only  only the schedulers with bars
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from chunking_camera import camera_rows
from chunking_cases import Case, Effort, Row, case_rows
from chunking_plot import bars_svg
from interleaved import verdict

HEADS = ["setting", "N", "scheduler", "useful steps/s", "× any", "× synced", "of bound", "wasted rows", "held"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under a minute: N = 16, the schedulers with bars")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar falls short, naming it")
    parser.add_argument("--part", action="append", choices=list("abc"), help="only this setting; may be repeated")
    parser.add_argument("--bars-only", action="store_true", help="leave out the schedulers without bars")
    parser.add_argument("--num-envs", type=int, help="only this N")
    parser.add_argument("--markdown", metavar="FILE", help="also write the table as Markdown")
    parser.add_argument("--plot", metavar="FILE", help="also draw the rates as an SVG")
    arguments = parser.parse_args()

    import torch
    from rich.console import Console
    from rich.progress import Progress

    torch.set_num_threads(2)
    console = Console(width=160)
    effort = Effort.quick() if arguments.quick else Effort.full()
    if arguments.num_envs:
        effort = replace(effort, sizes=(arguments.num_envs,))
    if arguments.bars_only:
        effort = replace(effort, every_rule=False)
    rows: list[Row] = []
    parts = arguments.part or ["a", "b", "c"]
    cases = [case for case in _cases(effort) if case.setting[1] in parts]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("measuring", total=len(cases) + 2 * ("c" in parts))
        for case in cases:
            progress.update(bar, description=f"{case.setting}, N = {case.num_envs}")
            rows += case_rows(case, effort)
            progress.advance(bar)
        for frames in (1, 2) if "c" in parts else ():
            progress.update(bar, description=f"(c) camera, K = {frames}")
            rows += camera_rows(frames, effort)
            progress.advance(bar)
    console.print(_table(rows))
    if arguments.markdown:
        Path(arguments.markdown).write_text(_markdown(rows))
    if arguments.plot:
        Path(arguments.plot).write_text(bars_svg(rows))
    return verdict(console, _shortfalls(rows), check=arguments.check)


def _cases(effort: Effort) -> list[Case]:
    cases = []
    for num_envs in effort.sizes:
        for times in (1, 3):
            name = f"(a) same cores, model = {16 * times} steps"
            every = effort.every_rule and times == 1
            cases.append(
                Case(name, num_envs, 1 / 50, model_steps=16.0 * times, same_cores=True, every_rule=every, decimation=5)
            )
        for name, ratio in (("GR1", 200 / 58.9), ("DROID", 700 / 58.9)):
            setting = f"(b) other device, {name}-like"
            every = effort.every_rule
            cases.append(
                Case(setting, num_envs, 1 / 150, model_steps=ratio, same_cores=False, every_rule=every, decimation=20)
            )
    return cases


def _shortfalls(rows: list[Row]) -> list[str]:
    """Every bar that does not hold, with the figure reached."""
    failures: list[str] = []

    def bar(row: Row, what: str, reached: float | None, wanted: float) -> None:
        if reached is None or reached < wanted:
            shown = "nothing measured" if reached is None else f"{reached:.2f}"
            failures.append(f"{row.setting}, N = {row.num_envs}, {row.scheduler}, {what}: {shown}, bar ≥ {wanted}")

    for row in rows:
        suspends = not row.scheduler.endswith("restated)")
        if suspends and not row.scheduler.startswith("Any") and row.wasted:
            failures.append(f"{row.setting}, N = {row.num_envs}, {row.scheduler}: {row.wasted} wasted rows, bar 0")
        if row.setting.startswith("(a)") and row.scheduler == "Greedy, inline":
            bar(row, "× any, full batch", row.times_any, 3.0 if row.num_envs == 64 else 2.5)
            bar(row, "× synced, hold", row.times_synced, 0.95)
        if row.setting.startswith("(b)") and row.scheduler == "Greedy, thread":
            bar(row, "× any, full batch", row.times_any, 3.0 if row.num_envs == 64 else 2.5)
            bar(row, "× synced, hold", row.times_synced, 1.4 if "DROID" in row.setting else 1.1)
            if "GR1" in row.setting:
                bar(row, "of the bound", row.of_bound, 0.9)
        if row.setting.startswith("(c)") and row.scheduler.startswith("on demand"):
            bar(row, "of the gain that p and r allow", row.of_bound, 0.85)
    return failures


def _cells(row: Row) -> list[str]:
    def ratio(value: float | None) -> str:
        return "–" if value is None else f"{value:.2f}"

    return [
        row.setting,
        str(row.num_envs),
        row.scheduler,
        f"{row.rate:,.0f}",
        ratio(row.times_any),
        ratio(row.times_synced),
        ratio(row.of_bound),
        "–" if row.wasted is None else f"{row.wasted:,}",
        "–" if row.held is None else f"{row.held:,}",
    ]


def _table(rows: list[Row]) -> object:
    from rich.table import Table

    table = Table(title="useful env-steps per second, medians of interleaved rounds", caption=_notes(rows))
    for head in HEADS:
        table.add_column(head, justify="left" if head in ("setting", "scheduler") else "right")
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _markdown(rows: list[Row]) -> str:
    lines = ["| " + " | ".join(HEADS) + " |", "|" + "---|" * len(HEADS)]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in rows]
    return "\n".join(lines) + "\n\n" + _notes(rows) + "\n"


def _notes(rows: list[Row]) -> str:
    return "\n".join(dict.fromkeys(row.note for row in rows if row.note))


if __name__ == "__main__":
    sys.exit(main())
