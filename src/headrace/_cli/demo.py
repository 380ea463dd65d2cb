"""``headrace demo``: the whole story, with real parts, real files and a table of what was saved."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rich.console import Console
from rich.rule import Rule
from rich.table import Table

from headrace._cli.options import add_options
from headrace._cli.printing import compile_bar
from headrace._jobs.demo import demo, warm_up

HELP = "the whole story in a few minutes"
DESCRIPTION = (
    "Evaluate the shipped chunk policy under three schedulers, kill and resume and merge the same evaluation, "
    "fill a replay buffer, record and replay episodes, and write a film and report.html. Ends with what was "
    "saved: model calls, images, bytes."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_options(parser, demo, "output", "quick")


def handle(arguments: argparse.Namespace) -> int:
    """Show everything."""
    console, begin = Console(), time.perf_counter()
    output = _free_folder(Path(arguments.output))
    # the first line comes before anything heavy, also where the output is a file
    console.print(
        f"headrace demo, into {output}; the first run on a machine compiles for about a minute", soft_wrap=True
    )
    with compile_bar():
        warm_up()
    result = demo(output, quick=arguments.quick, on_scene=lambda title: console.print(Rule(title)), show=console.print)
    table = Table(title="What was saved")
    for column in ("what", "the usual way", "it takes", "here", "saved"):
        table.add_column(column, justify="left" if column in ("what", "the usual way") else "right")
    for saving in result.savings:
        table.add_row(saving.what, *saving.cells())
    console.print(table)
    console.print(f"\nOpen [bold]{result.page}[/]; the film is {result.film}.", soft_wrap=True)
    console.print(
        f"Next: headrace view ant, the lessons in docs/tutorials/, examples/. ({time.perf_counter() - begin:.0f} s)"
    )
    return 0


def _free_folder(wanted: Path) -> Path:
    """The folder, or the first of ``wanted-2``, ``wanted-3``, … that is not there: nothing is overwritten."""
    folder, number = wanted, 1
    while folder.exists():
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    return folder
