"""``headrace compare``, ``sweep`` and ``report``: are runs different, and all of them on one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from rich.console import Console

from headrace._progress import progress_bar, say
from headrace.bench.comparing import compare, report, sweep
from headrace.bench.comparison import CompareCfg
from headrace.cli.records import Command, Only, Positional, keywords
from headrace.errors import ConfigError
from headrace.files import write_whole

if TYPE_CHECKING:
    from headrace.bench.comparing import ComparisonResult


Rule = Annotated[CompareCfg, Only("min_effect", "alpha", "metrics", "allow", "accept_drift")]


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Compare runs A with runs B, metric by metric: improved, regressed, unchanged or inconclusive. A and B are bundle
    files or directories of them; with more than two, put 'vs' between the sides. The design of the data chooses the
    units: runs of a sweep are compared in pairs, plays of one policy per side by episode; times of runs that are not of
    a sweep get no verdict. P-values are those of permutation tests, for all metrics together. Exit code 1 if anything
    regressed."""

    paths: Annotated[Sequence[str], Positional("A … vs B …")]
    """Bundle files or directories."""
    rule: Rule
    fail_inconclusive: bool = False
    """Exit code 1 also if a metric is inconclusive."""
    markdown: Path | None = None
    """Also write the table as Markdown."""


def _compare(given: CompareOptions) -> int:
    sides = split_sides(given.paths)
    if len(sides) != 2:
        raise ConfigError(f"compare: expected A B, or A … vs B …, got {' '.join(given.paths)!r}")
    result = compare(*sides, rule=given.rule)
    if given.markdown is not None:
        write_whole(given.markdown, result.markdown())
    return _show(result, given.fail_inconclusive)


def _show(result: ComparisonResult, strict: bool) -> int:
    """Print the verdicts; returns the exit code."""
    from headrace.bench.comparing import all_notes, table

    console = Console()
    for comparison in result.comparisons:
        console.print(table(comparison, result.names))
        for note in (*all_notes(comparison), *result.notes):
            say(f"• {note}")
    return 1 if result.regressed or (strict and result.inconclusive) else 0


def split_sides(paths: Sequence[str]) -> list[list[str]]:
    """Return the sides of a comparison: around ``vs``, or one path each if there are two; else one side."""
    if "vs" in paths:
        at = list(paths).index("vs")
        sides = [list(paths[:at]), list(paths[at + 1 :])]
        if not all(sides) or "vs" in sides[1]:
            raise ConfigError(
                f"expected a path on both sides of one 'vs', such as before vs after; got {' '.join(paths)!r}"
            )
        return sides
    return [[path] for path in paths] if len(paths) == 2 else [list(paths)]


def _values(text: str) -> Mapping[str, Sequence[object]]:
    """Return an option and its values from ``OPTION=VALUE,VALUE``."""
    option, equals, values = text.partition("=")
    if not equals or not option or len(values.split(",")) < 2:
        raise ConfigError(f"--vary: expected OPTION=VALUE,VALUE, got {text!r}; for example num-envs=64,256")
    option = option.removeprefix("--")
    return {option: [value.removeprefix(f"{option}=") for value in values.split(",")]}


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Run a benchmark command several times for each of two or more variants, taking turns, then compare every variant
    with the first; seeds count up from --seed. Variants: --commits A B (git commits of the project you are in), or
    --vary OPTION=VALUE,VALUE,… for any option of the command, for example --vary num-envs=64,256, --vary
    set=decimation=2,set=decimation=4, --vary library=rsl_rl,skrl. Exit code 1 if anything regressed."""

    commits: tuple[str, str] | None = None
    """Two commits, tags or branches."""
    vary: Annotated[Mapping[str, Sequence[object]] | None, _values] = None
    """An option of the command and its values."""
    repeats: int | None = None
    """Runs of each variant (default: 10, with --until-decided at most 40)."""
    until_decided: bool = False
    """Stop as soon as no metric is inconclusive."""
    seed: int = 0
    order_seed: int | None = None
    """Seed of the order of the variants within a repetition (default: drawn)."""
    output: str | None = None
    resume: bool = False
    rule: Rule
    fail_inconclusive: bool = False
    """Exit code 1 also if a metric is inconclusive."""
    benchmark: Annotated[Literal["runtime", "startup", "train", "play"], Positional()]
    """The benchmark to run."""
    rest: Annotated[Sequence[str], Positional("TASK …", rest=True)] = ()
    """Its task and options."""


def _sweep(given: SweepOptions) -> int:
    settings = keywords(given)
    strict, command = settings.pop("fail_inconclusive"), (settings.pop("benchmark"), *settings.pop("rest"))
    with progress_bar("runs", None) as update:
        result = sweep(command, **settings, progress=update)
    for outcome in result.outcomes:
        if outcome.code:
            words = f"run {outcome.repetition} of {outcome.side.label} failed: {outcome.message}"
            say(words, "yellow", stderr=True)
    codes = [_show(comparison, strict) for comparison in result.comparisons]
    for note in result.notes:
        say(f"• {note}", "yellow")
    say(f"bundles are in {result.directory}")
    return max(codes)


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Read bundles (files, or directories of them) and write one self-contained HTML page: a row per side with the
    distribution of its runs, evaluations, learning curves, every run. Two paths, or two sets of paths with
    'vs' between them, are compared, and the page begins with the verdicts of 'headrace compare'."""

    paths: Annotated[Sequence[str], Positional("PATH")]
    """Bundle files or directories; A B or A… vs B… compares."""
    output: str = "report.html"
    title: str = "headrace report"
    """Heading of the page."""
    history: bool = False
    """Draw metrics over the commits of the runs, with change points."""
    rule: Rule


def _report(given: ReportOptions) -> int:
    sides = split_sides(given.paths)
    names = ("A", "B") if len(sides) < 2 else (_name(sides[0], "A"), _name(sides[1], "B"))
    settings = keywords(given)
    del settings["paths"]
    written = report(*sides, names=names, **settings)
    for note in written.notes:
        say(f"• {note}")
    say(f"wrote {written.path}: {written.runs} runs")
    return 0


def _name(side: list[str], otherwise: str) -> str:
    """Return a directory's own name, where a side is one."""
    name = Path(side[0]).name
    return name if len(side) == 1 and name and not name.endswith(".json") else otherwise


COMMANDS = {
    "compare": Command(CompareOptions, _compare),
    "sweep": Command(SweepOptions, _sweep),
    "report": Command(ReportOptions, _report),
}
