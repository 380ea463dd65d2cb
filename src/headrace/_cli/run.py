"""``headrace run``: step a task, with a progress bar and the rates it reached."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from headrace._cli.options import add_options, add_task, arguments_of
from headrace._cli.printing import progress_bar
from headrace._jobs.run import run

if TYPE_CHECKING:
    from headrace._jobs.run import SteppingResult

HELP = "step a task and see its rates"
DESCRIPTION = (
    "Step TASK with random, zero or your own actions and print env-steps per second, where the time went and "
    "how the episodes ended. With --suspend-fraction F that share of the environments is frozen, at no cost."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_task(parser)
    add_options(parser, run, "num_envs", "num_steps", "seed", "threads", "policy", "suspend_fraction F", "overrides")
    add_options(parser, run, "frame_stack K", "record DIRECTORY")


def handle(arguments: argparse.Namespace) -> int:
    """Step and print."""
    with progress_bar("stepping", arguments.num_steps) as update:
        result = run(**arguments_of(arguments, run), on_progress=update)
    Console().print(_table(result, arguments.record))
    return 0


def _table(result: SteppingResult, recorded_in: str | None) -> Table:
    acting = result.num_envs - result.suspended
    table = Table(title=f"{result.task}: {acting} of {result.num_envs} environments acting", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_row("env-steps per second", f"{result.steps_per_second:,.0f}")
    table.add_row("milliseconds per step of the batch", f"{result.seconds / result.num_steps * 1e3:.2f}")
    for stage, spent in result.stages.items():
        table.add_row(f"  in {stage}", f"{spent / result.seconds:.0%}")
    table.add_row("episodes finished", f"{result.episodes:,}")
    for name, value, form in (
        ("mean return", result.mean_return, ",.2f"),
        ("mean length", result.mean_length, ",.1f"),
        ("success rate", result.success_rate, ".1%"),
    ):
        if value is not None:
            table.add_row(name, format(value, form))
    table.add_row("simulations that diverged", f"{result.divergences:,}")
    table.add_row("a suspended environment costs", result.suspension_cost)
    if result.recorded is not None:
        table.add_row("episodes recorded", f"{result.recorded:,} in {recorded_in}")
        table.add_row("unfinished ones, given up", f"{result.abandoned:,}")
    return table
