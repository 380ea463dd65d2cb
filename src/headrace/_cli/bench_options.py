"""Options and small steps that the benchmark commands share."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from headrace._cli.options import add_option, add_task, values

if TYPE_CHECKING:
    from headrace.bench._schema import Bundle

USUAL_ENVS = 64
"""Environments in a batch where nobody says how many."""
FORMS = "schema, isaaclab, json, omniperf, osmo, summary, tensorboard, or module:function of your own"


def add_target_options(parser: argparse.ArgumentParser) -> None:
    """What to run on."""
    add_task(parser)
    add_option(parser, "--num-envs", otherwise="64, or the recipe's")
    add_option(parser, "--seed", otherwise="0, or the recipe's")
    add_option(parser, "--threads", otherwise="all cores")
    parser.add_argument("--sim", metavar="SIM", help="physics: mujoco or warp (default: mujoco)")
    parser.add_argument("--device", help="device of the tensors: cpu, or cuda with --sim warp (default: cpu)")
    add_option(parser, "--set")
    add_option(parser, "--preset")


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Where results go, and in what form."""
    add_option(parser, "--output", otherwise="runs/<run id>; never overwrites")
    parser.add_argument(
        "--formatter",
        action="append",
        metavar="FORM",
        help=f"form of the result, repeatable: {FORMS} (default: schema, the bundle)",
    )
    parser.add_argument("--label", help="a name for this run in comparisons and reports")


def environment_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What :func:`add_target_options` parsed, as the arguments of a job."""
    names = ("task", "num_envs", "seed", "threads", "device", "sim", "overrides")
    return values(arguments, *names) | {"presets": arguments.preset}


def output_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What :func:`add_output_options` parsed, as the arguments of a job."""
    return {
        "output": arguments.output,
        "formatters": arguments.formatter or ("schema",),
        "label": arguments.label,
    }


@contextmanager
def progress_bar(description: str, total: int) -> Generator[Callable[[int], None]]:
    """A bar on standard error, gone when the block ends; yields what to call with the number of steps done.

    It is updated and drawn twice a second, so that a loop is not slowed down.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    shown = console.is_terminal
    with Progress(*columns, console=console, transient=True, refresh_per_second=2, disable=not shown) as progress:
        bar = progress.add_task(description, total=total)
        due = 0.0

        def update(done: int) -> None:
            nonlocal due
            now = time.perf_counter()
            if now >= due:
                due = now + 0.5
                progress.update(bar, completed=done)

        yield update


def show_bundle(bundle: Bundle, paths: Sequence[Path]) -> None:
    """Print the summary box of a bundle, and the files it was written to."""
    from headrace.bench._formatters._summary import summary_table

    console = Console()
    console.print(summary_table(bundle))
    for path in paths:
        console.print(Text(f"wrote {path}"), soft_wrap=True)
