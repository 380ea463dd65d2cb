"""``headrace compare``: are two sets of runs different?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from headrace._cli.options import add_options, arguments_of
from headrace._cli.printing import say
from headrace._jobs.comparing import compare
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace._jobs.comparing import ComparisonResult

_SEPARATOR = "vs"


HELP = "say which metrics of two sets of runs improved or regressed"
DESCRIPTION = (
    "Compare runs A with runs B, metric by metric: improved, regressed, unchanged or inconclusive. A and B are "
    "bundle files or directories of them; with more than two, put 'vs' between the sides. The design of the "
    "data chooses the test: runs of a sweep are compared in pairs, plays of one policy per side by episode, "
    "others by ranks; times of runs that did not take turns get no verdict. P-values are corrected for the "
    "number of metrics. Exit code 1 if anything regressed."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.usage = "headrace compare [options] A [A ...] [vs] B [B ...]"
    parser.add_argument("paths", nargs="+", metavar="A … vs B …", help="bundle files or directories")
    add_rule_options(parser)
    parser.add_argument("--markdown", metavar="FILE", help="also write the table as Markdown")
    parser.add_argument("--junit", metavar="FILE", help="also write the verdicts as JUnit XML")


def add_rule_options(parser: argparse.ArgumentParser) -> None:
    """When a change counts; also for ``sweep``."""
    add_options(parser, compare, "min_effect", "alpha", "metrics PATTERN")
    parser.add_argument("--fail-inconclusive", action="store_true", help="exit code 1 also if a metric is inconclusive")
    add_options(parser, compare, "allow DIFFERENCE", "accept_drift")


def handle(arguments: argparse.Namespace) -> int:
    """Compare and print."""
    sides = split_sides(arguments.paths)
    if len(sides) != 2:
        raise ConfigError(f"compare: expected A B, or A … vs B …, got {' '.join(arguments.paths)!r}")
    return show(compare(*sides, **arguments_of(arguments, compare)), arguments)


def show(result: ComparisonResult, arguments: argparse.Namespace) -> int:
    """Print and write what was asked for; returns the exit code."""
    from headrace.bench._comparison_output import all_notes, table
    from headrace.files import write_whole

    console = Console()
    for comparison in result.comparisons:
        console.print(table(comparison, result.names))
        for note in (*all_notes(comparison), *result.notes):
            say(f"• {note}")
    strict: bool = arguments.fail_inconclusive
    if getattr(arguments, "markdown", None) is not None:
        write_whole(Path(arguments.markdown), result.markdown())
    if getattr(arguments, "junit", None) is not None:
        write_whole(Path(arguments.junit), result.junit(fail_inconclusive=strict))
    return 1 if result.regressed or (strict and result.inconclusive) else 0


def split_sides(paths: Sequence[str]) -> list[list[str]]:
    """The sides of a comparison: around ``vs``, or one path each if there are two; else one side."""
    if _SEPARATOR in paths:
        at = list(paths).index(_SEPARATOR)
        sides = [list(paths[:at]), list(paths[at + 1 :])]
        if not all(sides) or _SEPARATOR in sides[1]:
            raise ConfigError(
                f"expected a path on both sides of one 'vs', such as before vs after; got {' '.join(paths)!r}"
            )
        return sides
    return [[path] for path in paths] if len(paths) == 2 else [list(paths)]
