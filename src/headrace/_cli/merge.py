"""``headrace merge``: parts of a plan of episodes that were played apart, as one table."""

from __future__ import annotations

import argparse
from pathlib import Path

from headrace._cli.evaluate import check_table, show
from headrace._cli.options import add_option


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]  # argparse has no public name for it
    """Add the sub-command."""
    parser = commands.add_parser(
        "merge",
        help="put evaluations that were played apart into one table",
        description=(
            "Merge journals and saved evaluations of 'headrace evaluate' (--journal, --output) into one table, and "
            "print what it reached. Task, seed, policy and whatever else decides the rows must be equal, and an "
            "episode that is in several must have equal rows. While episodes of the plan are missing there are no "
            "rates, and the exit code is 1."
        ),
    )
    parser.add_argument("parts", metavar="FILE", type=Path, nargs="+", help="a journal or a saved evaluation")
    add_option(parser, "--output", short="-o", otherwise="nowhere")
    add_option(parser, "--csv")
    parser.set_defaults(handler=_merge)


def _merge(arguments: argparse.Namespace) -> int:
    from headrace._jobs.evaluate import merge

    check_table(arguments.csv)
    found = merge(*arguments.parts, output=arguments.output)
    show(found, arguments.csv)
    return 1 if found.unfinished else 0
