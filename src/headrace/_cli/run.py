"""``headrace run``: step a task, with a progress bar and the rates it reached."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from headrace._cli.bench_options import progress_bar
from headrace._cli.options import add_option, add_task, values

if TYPE_CHECKING:
    from headrace._jobs.run import SteppingResult


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]  # argparse has no public name for it
    """Add the sub-command."""
    parser = commands.add_parser(
        "run",
        help="step a task and see its rates",
        description=(
            "Step TASK with random, zero or your own actions and print env-steps per second, where the time went and "
            "how the episodes ended. With --suspend-fraction F that share of the environments is frozen, at no cost."
        ),
    )
    add_task(parser)
    add_option(parser, "--num-envs", otherwise="64, or the recipe's")
    add_option(parser, "--num-steps", default=300)
    add_option(parser, "--seed", otherwise="0, or the recipe's")
    add_option(parser, "--threads", otherwise="all cores")
    parser.add_argument(
        "--policy",
        default="random",
        help="random, zero, module:name of a function of the observation groups, a checkpoint of 'headrace train', its "
        "run's directory, or latest (default: random)",
    )
    parser.add_argument(
        "--suspend-fraction", type=float, default=0.0, help="share of environments to suspend, 0 to 1 (default: 0)"
    )
    add_option(parser, "--set")
    parser.add_argument(
        "--frame-stack", type=int, metavar="K", help="frames in an observation of a camera task, oldest first"
    )
    parser.add_argument(
        "--record",
        type=Path,
        metavar="DIRECTORY",
        help="record every finished episode (observations, actions, rewards, flags, physics states); see 'record'",
    )
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    from headrace._jobs.run import run

    names = ("policy", "num_steps", "suspend_fraction", "frame_stack", "record")
    environment = ("num_envs", "seed", "threads", "overrides")
    with progress_bar("stepping", arguments.num_steps) as update:
        result = run(arguments.task, **values(arguments, *names, *environment), on_progress=update)
    Console().print(_table(result, arguments.record))
    return 0


def _table(result: SteppingResult, recorded_in: Path | None) -> Table:
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
