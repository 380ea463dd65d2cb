"""``headrace report``: runs on one page that needs no network."""

from __future__ import annotations

import argparse
from pathlib import Path

from headrace._cli.compare import split_sides
from headrace._cli.options import add_options, arguments_of
from headrace._cli.printing import say
from headrace._jobs.comparing import compare, report

HELP = "put runs on one HTML page: table, plots, verdicts"
DESCRIPTION = (
    "Read bundles (files, or directories of them) and write one self-contained HTML page: a table of runs with "
    "filters, throughput, learning curves, time split, memory, start-up. Two paths, or two sets of paths with "
    "'vs' between them, are compared, and the page has the verdicts of 'headrace compare' as well."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", help="bundle files or directories; A B or A… vs B… compares"
    )
    add_options(parser, report, "output", "title")
    add_options(parser, compare, "allow DIFFERENCE", "accept_drift")


def handle(arguments: argparse.Namespace) -> int:
    """Write the page."""
    sides = split_sides(arguments.paths)
    names = ("A", "B") if len(sides) < 2 else (_name(sides[0], "A"), _name(sides[1], "B"))
    written = report(*sides, names=names, **arguments_of(arguments, report))
    for note in written.notes:
        say(f"• {note}")
    say(f"wrote {written.path}: {written.runs} runs")
    return 0


def _name(side: list[str], otherwise: str) -> str:
    """A directory's own name, where a side is one."""
    name = Path(side[0]).name
    return name if len(side) == 1 and name and not name.endswith(".json") else otherwise
