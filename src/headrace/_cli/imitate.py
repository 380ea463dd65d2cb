"""``headrace imitate``: clone an expert, or a dataset, into a chunk policy, and say how good the clone is."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from headrace._cli.options import add_option, add_task, values
from headrace._interrupts import exit_code

if TYPE_CHECKING:
    from headrace._jobs.imitate import ImitationResult

_MOST_ROWS = 10


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]  # argparse has no public name for it
    """Add the sub-command."""
    parser = commands.add_parser(
        "imitate",
        help="train a chunk policy on an expert's demonstrations, or on a recorded dataset",
        description=(
            "Record successful episodes of TASK's expert, or take those of a dataset, train a small action-chunking "
            "transformer on them, save it, and evaluate it on episodes it has not seen, compared with the same model "
            "untrained and with the mean action."
        ),
    )
    more = (
        "; it must have an expert, or, with --dataset, it is evaluated in (default: what the dataset was recorded in)"
    )
    add_task(parser, more=more, optional=True)
    parser.add_argument("--dataset", metavar="DIR", help="a recorded dataset, ours or LeRobot's (version 3)")
    parser.add_argument(
        "--groups", metavar="A,B", help="observation groups of the dataset to learn from (default: all but critic)"
    )
    parser.add_argument(
        "--keep",
        choices=("succeeded", "all"),
        help="episodes of the dataset to learn from (default: succeeded, where the dataset says which are)",
    )
    parser.add_argument("--demos", type=int, default=2000, help="successful episodes of the expert (default: 2000)")
    parser.add_argument("--updates", type=int, default=8000, help="optimizer steps (default: 8000)")
    parser.add_argument(
        "--held-out",
        type=float,
        metavar="SHARE",
        help="share of the episodes to measure the loss on instead of learning from them (default: 0.1 of a dataset)",
    )
    parser.add_argument(
        "--act",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the policy or of its training, for example horizon=100, width=128, batch=64; repeatable",
    )
    add_option(parser, "--resume")
    add_option(parser, "--output", required=True)
    add_option(parser, "--num-envs", default=128)
    add_option(parser, "--seed", default=0)
    add_option(parser, "--set")
    add_option(parser, "--episodes", default=300, otherwise="300; 0 for no evaluation")
    add_option(parser, "--execute", otherwise="the whole chunk")
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    from headrace._jobs.imitate import imitate
    from headrace.envs._overrides import parse_assignments

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bars: dict[str, TaskID] = {}

        def update(stage: str, done: int, total: int) -> None:
            name = stage.partition(",")[0]
            if name not in bars:
                bars[name] = progress.add_task(name, total=total)
            progress.update(bars[name], completed=done, description=stage)

        names = ("dataset", "keep", "demos", "updates", "held_out", "resume", "num_envs", "seed", "overrides")
        result = imitate(
            arguments.task,
            arguments.output,
            **values(arguments, *names, "episodes", "execute"),
            groups=None if arguments.groups is None else arguments.groups.split(","),
            settings=parse_assignments(arguments.act, "--act"),
            on_progress=update,
        )
    console = Console()
    if result.losses:
        console.print(_loss_table(result))
    if result.evaluations:
        console.print(_table(result))
    else:
        console.print("not evaluated: no episodes were asked for, or the dataset does not say its environment (TASK)")
    console.print(f"{result.path}: {result.path.stat().st_size:,} bytes, sha256 {result.sha256}", soft_wrap=True)
    return 0 if result.interrupt is None else exit_code(result.interrupt)


def _loss_table(found: ImitationResult) -> Table:
    held = f", {found.held_out} of them held out" if found.held_out else ""
    table = Table(title=f"{found.demonstrations} demonstrations of {found.attempted} episodes{held}")
    for name in ("updates", "loss", "held-out loss"):
        table.add_column(name, justify="right")
    every = max(1, math.ceil(len(found.losses) / _MOST_ROWS))
    for loss in found.losses[::-1][::every][::-1]:
        held_out = "" if loss.held_out is None else f"{loss.held_out:.3f}"
        table.add_row(f"{loss.updates:,}", f"{loss.train:.3f}", held_out)
    return table


def _table(found: ImitationResult) -> Table:
    judged = any(result.success_rate is not None for result in found.evaluations.values())
    table = Table(title=str(found.source))
    table.add_column("policy")
    table.add_column("success" if judged else "mean reward", justify="right")
    table.add_column("95 % interval", justify="right")
    table.add_column("episodes", justify="right")
    for name, result in found.evaluations.items():
        figure = result.success_rate if judged else result.mean_reward
        if figure is not None:
            form = ".1%" if judged else ".4g"
            interval = f"{figure.low:{form}} to {figure.high:{form}}"
            table.add_row(name, f"{figure.value:{form}}", interval, f"{len(result.episodes):,}")
    return table
