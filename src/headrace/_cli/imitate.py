"""``headrace imitate``: clone an expert, or a dataset, into a chunk policy, and say how good the clone is."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import TaskProgressColumn, TimeRemainingColumn
from rich.table import Table

from headrace._cli.options import add_options, add_repeatable, add_task, arguments_of
from headrace._cli.printing import progress, say
from headrace._interrupts import exit_code
from headrace._jobs.imitate import imitate

if TYPE_CHECKING:
    from headrace._jobs.imitate import ImitationResult

_MOST_ROWS = 10


HELP = "train a chunk policy on an expert's demonstrations, or on a recorded dataset"
DESCRIPTION = (
    "Record successful episodes of TASK's expert, or take those of a dataset, train a small action-chunking "
    "transformer on them, save it, and evaluate it on episodes it has not seen, compared with the same model "
    "untrained and with the mean action. --episodes 0 leaves the evaluation out."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    more = (
        "; it must have an expert, or, with --dataset, it is evaluated in (default: what the dataset was recorded in)"
    )
    add_task(parser, more=more, optional=True)
    add_options(parser, imitate, "dataset DIR")
    parser.add_argument(
        "--groups",
        metavar="A,B",
        type=lambda text: text.split(","),
        help="observation groups of the dataset to learn from (default: all but critic)",
    )
    add_options(parser, imitate, "keep {succeeded,all}", "demos", "updates", "held_out SHARE")
    text = "a setting of the policy or of its training, for example horizon=100, width=128, batch=64; repeatable"
    add_repeatable(parser, "--act", "NAME=VALUE", text)
    add_options(parser, imitate, "resume")
    add_options(parser, imitate, "output", required=True)
    add_options(parser, imitate, "num_envs", "seed", "overrides", "episodes", "execute")


def handle(arguments: argparse.Namespace) -> int:
    """Train, evaluate and print."""
    from headrace.envs._overrides import parse_assignments

    settings = parse_assignments(arguments.act, "--act")
    with progress("imitating", None, TaskProgressColumn(), TimeRemainingColumn()) as show:

        def update(stage: str, done: int, total: int) -> None:
            show(description=stage, completed=done, total=total)

        result = imitate(**arguments_of(arguments, imitate), settings=settings, on_progress=update)
    console = Console()
    if result.losses:
        console.print(_loss_table(result))
    if result.evaluations:
        console.print(_table(result))
    else:
        console.print("not evaluated: no episodes were asked for, or the dataset does not say its environment (TASK)")
    say(f"{result.path}: {result.path.stat().st_size:,} bytes, sha256 {result.sha256}")
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
