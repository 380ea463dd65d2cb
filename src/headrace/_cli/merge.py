"""``headrace merge``: parts of a plan of episodes that were played apart, as one table."""

from __future__ import annotations

import argparse

from headrace._cli.evaluate import add_csv, check_table, show
from headrace._cli.options import add_options
from headrace._jobs.evaluate import merge

HELP = "put evaluations that were played apart into one table"
DESCRIPTION = (
    "Merge journals and saved evaluations of 'headrace evaluate' (--journal, --output) into one table, and "
    "print what it reached. Task, seed, policy and whatever else decides the rows must be equal, and an "
    "episode that is in several must have equal rows. While episodes of the plan are missing there are no "
    "rates, and the exit code is 1."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("parts", metavar="FILE", nargs="+", help="a journal or a saved evaluation")
    add_options(parser, merge, "output", short="-o")
    add_csv(parser)


def handle(arguments: argparse.Namespace) -> int:
    """Merge and print."""
    check_table(arguments.csv)
    found = merge(*arguments.parts, output=arguments.output)
    show(found, arguments.csv)
    return 1 if found.unfinished else 0
