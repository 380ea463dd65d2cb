"""``headrace report``: runs on one page that needs no network."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from headrace._cli.compare import compared, rule_of
from headrace._cli.options import add_option
from headrace.errors import ConfigError
from headrace.files import check_writable, write_whole

_SEPARATOR = "vs"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]  # argparse has no public name for it
    """Add the sub-command."""
    parser = commands.add_parser(
        "report",
        help="put runs on one HTML page: table, plots, verdicts",
        description=(
            "Read bundles (files, or folders of them) and write one self-contained HTML page: a table of runs with "
            "filters, throughput, learning curves, time split, memory, start-up. With 'vs' between two sets of paths "
            "the page has the verdicts of 'headrace compare' as well."
        ),
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="bundle files or directories; optionally A… vs B…")
    add_option(parser, "--output", default=Path("report.html"))
    parser.add_argument("--title", default="headrace report", help="heading of the page")
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="DIFFERENCE",
        help="compare although this differs: hardware, task, settings, timing, library; repeatable",
    )
    # the rule of 'headrace compare', without its further options
    parser.set_defaults(handler=_report, min_effect=0.05, alpha=0.01, metric=[])


def _report(arguments: argparse.Namespace) -> int:
    from headrace.bench._bundle_files import bundle_paths, read_bundle
    from headrace.bench.report import report_page

    if arguments.output.suffix not in (".html", ".htm"):
        raise ConfigError(f"--output: expected a file that ends in .html, got {str(arguments.output)!r}")
    rule = rule_of(arguments)
    sides = [[file for text in side for file in bundle_paths(text)] for side in _sides(arguments.paths)]
    check_writable(arguments.output.parent)
    bundles = [read_bundle(path) for side in sides for path in side]
    comparisons = compared(sides[0], sides[1], rule)[0] if len(sides) == 2 else []
    write_whole(arguments.output, report_page(bundles, comparisons, title=arguments.title))
    Console().print(f"wrote {arguments.output}: {len(bundles)} runs", highlight=False, soft_wrap=True)
    return 0


def _sides(paths: list[str]) -> list[list[str]]:
    if _SEPARATOR not in paths:
        return [paths]
    at = paths.index(_SEPARATOR)
    sides = [paths[:at], paths[at + 1 :]]
    if not all(sides) or _SEPARATOR in sides[1]:
        raise ConfigError("report: expected paths, one 'vs' and paths again, such as: headrace report before vs after")
    return sides
