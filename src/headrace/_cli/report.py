"""``headrace report``: runs on one page that needs no network."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from headrace._cli.compare import add_design_options, split_sides
from headrace._cli.options import add_option, values


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]  # argparse has no public name for it
    """Add the sub-command."""
    parser = commands.add_parser(
        "report",
        help="put runs on one HTML page: table, plots, verdicts",
        description=(
            "Read bundles (files, or directories of them) and write one self-contained HTML page: a table of runs with "
            "filters, throughput, learning curves, time split, memory, start-up. Two paths, or two sets of paths with "
            "'vs' between them, are compared, and the page has the verdicts of 'headrace compare' as well."
        ),
    )
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", help="bundle files or directories; A B or A… vs B… compares"
    )
    add_option(parser, "--output", default=Path("report.html"))
    parser.add_argument("--title", default="headrace report", help="heading of the page")
    add_design_options(parser)
    parser.set_defaults(handler=_report)


def _report(arguments: argparse.Namespace) -> int:
    from headrace._jobs.comparing import report

    sides = split_sides(arguments.paths)
    names = ("A", "B") if len(sides) < 2 else (_name(sides[0], "A"), _name(sides[1], "B"))
    written = report(
        sides[0],
        sides[1] if len(sides) == 2 else None,
        names=names,
        **values(arguments, "output", "title", "allow", "accept_drift"),
    )
    console = Console()
    for note in written.notes:
        console.print(f"• {note}", highlight=False, soft_wrap=True, markup=False)
    console.print(f"wrote {written.path}: {written.runs} runs", highlight=False, soft_wrap=True)
    return 0


def _name(side: list[str], otherwise: str) -> str:
    """A directory's own name, where a side is one."""
    name = Path(side[0]).name
    return name if len(side) == 1 and name and not name.endswith(".json") else otherwise
