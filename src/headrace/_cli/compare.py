"""``headrace compare``: are two sets of runs different?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from headrace.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from headrace.bench._comparison import CompareCfg, Comparison, Difference
    from headrace.bench._schema import Bundle

_SEPARATOR = "vs"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]  # argparse has no public name for it
    """Add the sub-command."""
    parser = commands.add_parser(
        "compare",
        help="say which metrics of two sets of runs improved or regressed",
        usage="headrace compare [options] A [A ...] [vs] B [B ...]",
        description=(
            "Compare runs A with runs B, metric by metric: improved, regressed, unchanged or inconclusive. A and B are "
            "bundle files or folders of them; with more than two, put 'vs' between the sides. A change counts only if "
            "it is significant (exact rank test over runs, corrected for the number of metrics) and at least "
            "--min-effect. One run a side is always inconclusive; use seven or more. Exit code 1 if anything regressed."
        ),
    )
    parser.add_argument("paths", nargs="+", metavar="A … vs B …", help="bundle files or folders")
    add_rule_options(parser)
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table as Markdown")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="also write the verdicts as JUnit XML")
    parser.set_defaults(handler=_compare)


def add_rule_options(parser: argparse.ArgumentParser) -> None:
    """When a change counts; also for ``sweep``."""
    parser.add_argument("--min-effect", type=float, default=0.05, help="smallest change that matters (default: 0.05)")
    parser.add_argument(
        "--alpha", type=float, default=0.01, help="chance of any false verdict in a comparison (default: 0.01)"
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="DIFFERENCE",
        help="compare although this differs: hardware, task, settings, timing, library; repeatable",
    )
    parser.add_argument(
        "--metric", action="append", default=[], metavar="PATTERN", help="only metrics that match, such as 'runtime.*'"
    )
    parser.add_argument("--fail-inconclusive", action="store_true", help="exit code 1 also if a metric is inconclusive")


def rule_of(arguments: argparse.Namespace, allow: Sequence[str] = ()) -> CompareCfg:
    """The rule that the options describe."""
    from headrace.bench._comparison import DIFFERENCES, CompareCfg

    for name in arguments.allow:
        if name not in DIFFERENCES:
            raise UnknownNameError("difference for --allow:", name, DIFFERENCES)
    named = (*arguments.allow, *allow)
    allowed: frozenset[Difference] = frozenset(name for name in DIFFERENCES if name in named)
    return CompareCfg(
        min_effect=arguments.min_effect, alpha=arguments.alpha, allow=allowed, metrics=tuple(arguments.metric)
    )


def _compare(arguments: argparse.Namespace) -> int:
    before, after = _sides(arguments.paths)
    comparisons, notes = compared(before, after, rule_of(arguments))
    return shown(comparisons, notes, arguments, ("A", "B"))


def compared(before: Sequence[Path], after: Sequence[Path], cfg: CompareCfg) -> tuple[list[Comparison], list[str]]:
    """A comparison for every kind of bundle that both sides have, and a note for every kind that one has."""
    from headrace.bench._comparison import compare

    first, second = _by_kind(before), _by_kind(after)
    notes = [f"only A has {kind} bundles" for kind in first if kind not in second]
    notes += [f"only B has {kind} bundles" for kind in second if kind not in first]
    shared = [kind for kind in first if kind in second]
    if not shared:
        raise ConfigError(
            f"compare: expected bundles of the same kind on both sides, got {', '.join(first)} and {', '.join(second)}"
        )
    return [compare(first[kind], second[kind], cfg) for kind in shared], notes


def shown(
    comparisons: Sequence[Comparison], notes: Sequence[str], arguments: argparse.Namespace, names: tuple[str, str]
) -> int:
    """Print and write what was asked for; returns the exit code."""
    from headrace.bench._comparison_output import all_notes, junit, markdown, table
    from headrace.files import write_whole

    console = Console()
    for comparison in comparisons:
        console.print(table(comparison, names))
        for note in (*all_notes(comparison), *notes):
            console.print(Text(f"• {note}"), soft_wrap=True)
    strict: bool = arguments.fail_inconclusive
    if getattr(arguments, "markdown", None) is not None:
        write_whole(arguments.markdown, markdown(comparisons, names))
    if getattr(arguments, "junit", None) is not None:
        write_whole(arguments.junit, junit(comparisons, fail_inconclusive=strict))
    failed = any(found.regressed or (strict and found.count("inconclusive")) for found in comparisons)
    return 1 if failed else 0


def _sides(paths: Sequence[str]) -> tuple[list[Path], list[Path]]:
    from headrace.bench import bundle_paths

    if paths.count(_SEPARATOR) == 1:
        split = list(paths).index(_SEPARATOR)
        sides = [list(paths[:split]), list(paths[split + 1 :])]
    elif len(paths) == 2 and _SEPARATOR not in paths:
        sides = [[paths[0]], [paths[1]]]
    else:
        raise ConfigError(f"compare: expected A B, or A … vs B …, got {' '.join(paths)!r}")
    if not all(sides):
        raise ConfigError(f"compare: expected a path on both sides of 'vs', got {' '.join(paths)!r}")
    before, after = ([file for path in side for file in bundle_paths(path)] for side in sides)
    return before, after


def _by_kind(paths: Sequence[Path]) -> dict[str, list[Bundle]]:
    from headrace.bench import read_bundle

    found: dict[str, list[Bundle]] = {}
    for path in paths:
        bundle = read_bundle(path)
        found.setdefault(bundle.kind, []).append(bundle)
    return found
