"""``headrace imitate``: record an expert, clone it into a chunk policy, and say how good the clone is."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from headrace._cli.options import add_option, values
from headrace._interrupts import exit_code

if TYPE_CHECKING:
    from headrace._jobs.imitate import ImitationResult


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]  # argparse has no public name for it
    """Add the sub-command."""
    parser = commands.add_parser(
        "imitate",
        help="train a chunk policy on an expert's demonstrations",
        description=(
            "Record successful episodes of TASK's expert, train a small action-chunking transformer on them, save it, "
            "and evaluate it on episodes it has not seen, compared with the same model untrained and with the expert's "
            "mean action."
        ),
    )
    parser.add_argument("task", metavar="TASK", help="a task with an expert, for example pusher-solid")
    parser.add_argument("--demos", type=int, default=2000, help="successful episodes to learn from (default: 2000)")
    parser.add_argument("--updates", type=int, default=8000, help="optimizer steps (default: 8000)")
    add_option(parser, "--output", required=True)
    add_option(parser, "--num-envs", default=128)
    add_option(parser, "--seed", default=0)
    add_option(parser, "--episodes", default=300)
    add_option(parser, "--execute", default=16)
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    from headrace._jobs.imitate import imitate

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bars: dict[str, TaskID] = {}

        def update(stage: str, done: int, total: int) -> None:
            name = stage.partition(",")[0]
            if name not in bars:
                bars[name] = progress.add_task(name, total=total)
            progress.update(bars[name], completed=done, description=stage)

        names = ("demos", "updates", "num_envs", "seed", "episodes", "execute")
        result = imitate(arguments.task, arguments.output, **values(arguments, *names), on_progress=update)
    console = Console()
    console.print(_table(arguments.task, result))
    console.print(f"{result.path}: {result.path.stat().st_size:,} bytes, sha256 {result.sha256}", soft_wrap=True)
    return 0 if result.interrupt is None else exit_code(result.interrupt)


def _table(task: str, found: ImitationResult) -> Table:
    table = Table(title=f"{task}: {found.demonstrations} demonstrations of {found.attempted} episodes")
    table.add_column("policy")
    table.add_column("success", justify="right")
    table.add_column("95 % interval", justify="right")
    table.add_column("episodes", justify="right")
    for name, result in found.evaluations.items():
        rate = result.success_rate
        if rate is not None:
            interval = f"{rate.low:.1%} to {rate.high:.1%}"
            table.add_row(name, f"{rate.value:.1%}", interval, f"{len(result.episodes):,}")
    return table
