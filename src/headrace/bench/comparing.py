"""``headrace.compare``, ``headrace.bench.report`` and ``headrace.bench.sweep``: runs next to each other."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

from rich import box
from rich.markup import escape
from rich.table import Table

from headrace.bench._bundle_files import bundle_paths, evaluation_bundle, read_bundles
from headrace.bench._samples import ORDER_MARK
from headrace.bench._significance import Moments, least_units
from headrace.bench.comparison import CompareCfg, Comparison, MetricComparison
from headrace.bench.comparison import compare as compare_bundles
from headrace.bench.figures import number
from headrace.bench.schema import BUNDLES, Bundle
from headrace.errors import ConfigError, HeadraceError
from headrace.files import check_writable, write_whole

if TYPE_CHECKING:
    from headrace.bench._sweep import Outcome, Side, Sweep
    from headrace.bench.reporting.page import Story
    from headrace.evaluation import Evaluation


Runs: TypeAlias = "str | Path | Bundle | Evaluation | Iterable[str | Path | Bundle | Evaluation]"
"""Bundles, evaluations, files of either, or directories of them; one or several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonResult:
    """The verdicts on two sets of runs: a comparison for every kind of bundle that both have."""

    comparisons: tuple[Comparison, ...]
    notes: tuple[str, ...]
    """Kinds that one side has, files that could not be read."""
    names: tuple[str, str] = ("A", "B")

    @property
    def regressed(self) -> bool:
        """Whether a gate should close."""
        return any(comparison.regressed for comparison in self.comparisons)

    @property
    def inconclusive(self) -> bool:
        """Whether any metric is."""
        return any(comparison.count("inconclusive") for comparison in self.comparisons)

    def markdown(self) -> str:
        """Return the tables, for a pull request."""
        return markdown(self.comparisons, self.names)


def compare(
    before: Runs, after: Runs, *, rule: CompareCfg | None = None, names: tuple[str, str] = ("A", "B")
) -> ComparisonResult:
    """Compare two sets of runs, metric by metric. The design of the data chooses the units of the test.

    Args:
        before: bundles, evaluations, files of either (also journals), or directories of them.
        after: likewise.
        rule: when a change counts; the usual rule if None.
        names: of the sides, for tables.

    Returns:
        ``comparisons`` (one per kind and task), ``notes``, ``regressed``, ``inconclusive``, and the tables as
        ``markdown()``.
    """
    (first, notes), (second, more) = _read(before, "A"), _read(after, "B")
    return _judge_sides(first, second, rule or CompareCfg(), [*notes, *more], names)


class ReportResult(NamedTuple):
    """A page that was written."""

    path: Path
    runs: int
    notes: tuple[str, ...]
    """Files that could not be read, and why sides could not be compared."""


def report(
    runs: Runs,
    versus: Runs | None = None,
    *,
    output: str | Path = "report.html",
    title: str = "headrace report",
    names: tuple[str, str] = ("A", "B"),
    rule: CompareCfg | None = None,
    story: Story | None = None,
    history: bool = False,
) -> ReportResult:
    """Put runs on one HTML page that needs no network; with ``versus``, the page has the verdicts as well.

    Args:
        runs: bundles, evaluations, files of either, or directories of them.
        versus: the runs to compare with.
        output: the file, which must end in ``.html``.
        title: heading of the page.
        names: of the sides.
        rule: as for :func:`compare`.
        story: what the page begins with.
        history: draw the metrics of ``rule``, or the usual ones, over the commits of the runs, with change points.

    Returns:
        ``path`` of the page, ``runs`` on it, and ``notes``: files that could not be read, sides that could not be
        compared.
    """
    from headrace.bench.reporting.history import histories
    from headrace.bench.reporting.page import report_page

    rule = rule or CompareCfg()
    output = Path(output)
    if output.suffix not in (".html", ".htm"):
        raise ConfigError(f"output (--output): expected a file that ends in .html, got {str(output)!r}")
    bundles, notes = _read(runs, "A")
    comparisons: tuple[Comparison, ...] = ()
    sides: dict[str, str] = {}
    if versus is not None:
        others, more = _read(versus, "B")
        notes = [*notes, *more]
        sides = {run.run.run_id: names[0] for run in bundles} | {run.run.run_id: names[1] for run in others}
        try:
            found = _judge_sides(bundles, others, rule, [], names)
            comparisons, notes = found.comparisons, [*notes, *found.notes]
        except HeadraceError as error:
            notes.append(f"not compared: {error}")
        bundles = [*bundles, *others]
    check_writable(output.parent)
    drawn = histories(bundles, rule.metrics, alpha=rule.alpha, min_effect=rule.min_effect) if history else []
    if history and not drawn:
        notes.append(
            "no history: expected runs of two commits with the same task and settings; name others with --metrics"
        )
    page = report_page(
        bundles, comparisons, names=names, title=title, notes=notes, sides=sides, story=story, history=drawn
    )
    write_whole(output, page)
    return ReportResult(path=output, runs=len(bundles), notes=tuple(notes))


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """What a sweep left behind."""

    directory: Path
    """The bundles, one directory per side."""
    outcomes: tuple[Outcome, ...]
    comparisons: tuple[ComparisonResult, ...]
    """Every side compared with the first."""
    notes: tuple[str, ...] = ()
    """What speaks against the sweep as a whole: a busy machine, too few repeats for any verdict."""

    @property
    def regressed(self) -> bool:
        """Whether a gate should close."""
        return any(comparison.regressed for comparison in self.comparisons)


LOOKS = (10, 15, 20, 30, 40)
"""Repeats after which a sweep that stops when it is decided compares what it has."""


def sweep(
    command: Sequence[str],
    *,
    vary: Mapping[str, Sequence[object]] | None = None,
    commits: tuple[str, str] | None = None,
    repeats: int | None = None,
    until_decided: bool = False,
    seed: int = 0,
    order_seed: int | None = None,
    output: str | Path | None = None,
    resume: bool = False,
    rule: CompareCfg | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> SweepResult:
    """Run variants of a benchmark in turn, each run in a process of its own, and compare each with the first.

    ``headrace.bench.sweep(["runtime", "ant", "--num-envs", "256"], vary={"threads": [1, 2]}, repeats=10)``

    Args:
        command: a benchmark command with its options, without ``--seed`` and ``--output``.
        vary: one option and its values.
        commits: two commits of the project that you are in, instead of ``vary``.
        repeats: runs of each variant; None for 10, with ``until_decided`` at most 40. A repetition in which a run did
            not become steady is replaced.
        until_decided: stop as soon as no metric is inconclusive; chances of errors hold for all looks together.
        seed: of the first repetition; counts up.
        order_seed: of the order of the variants within a repetition; None to draw one.
        output: an empty or new directory; None for ``sweeps/<time>``.
        resume: go on with the sweep in ``output``, which was cut off.
        rule: as for :func:`compare`.
        progress: called with how many runs are done, and of how many.

    Returns:
        ``directory`` of the bundles, ``outcomes`` of the runs, ``comparisons`` of every side with the first,
        ``regressed``, ``notes``.
    """
    from headrace.bench._sweep import Sweep

    _check_command(command)
    if (vary is None) == (commits is None) or (vary is not None and len(vary) != 1):
        raise ConfigError("sweep: expected one option to vary (--vary), or two commits (--commits)")
    most = repeats if repeats is not None else LOOKS[-1] if until_decided else LOOKS[0]
    if most < 1:
        raise ConfigError(f"--repeats: expected at least 1, got {most}")
    if resume and output is None:
        raise ConfigError("--resume: expected --output with the directory of the sweep to go on with")
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    looks = [*(look for look in LOOKS if look < most), most] if until_decided else [most]
    rule = rule or CompareCfg()
    differing = () if vary is None else ("settings", "library") if "library" in vary else ("settings", "timing")
    rule = replace(rule, allow=(*rule.allow, *differing), looks=len(looks))
    order_seed = secrets.randbits(32) if order_seed is None else order_seed
    with _sides(vary, commits) as sides:
        plan = Sweep(
            sweep_id=f"sweep-{stamp}{ORDER_MARK}{order_seed}",
            command=tuple(command),
            sides=tuple(sides),
            seed=seed,
            order_seed=order_seed,
            output=Path("sweeps") / stamp if output is None else Path(output),
        ).claim(resume=resume)
        if commits is not None:
            plan.rehearse()
        return _run_until(plan, looks, rule, progress or (lambda _, __: None))


def _run_until(
    plan: Sweep, looks: Sequence[int], rule: CompareCfg, progress: Callable[[int, int], None]
) -> SweepResult:
    """Run repetitions up to each look, and compare; stop where everything is decided, or the machine is too busy."""
    outcomes: list[Outcome] = []
    compared: list[ComparisonResult] = []
    notes: list[str] = []
    if looks[-1] < (least := least_units(rule.alpha / rule.looks, paired=True)):
        notes.append(f"{looks[-1]} repeats cannot show any difference at --alpha {rule.alpha:g}; use at least {least}")
    repetition = steady = 0
    for look in looks:
        while steady < look and repetition < 2 * looks[-1]:
            done = plan.run(repetition)
            outcomes += done
            steady += all(outcome.steady for outcome in done)
            repetition += 1
            progress(len(outcomes), max(looks[-1], repetition) * len(plan.sides))
        compared = _compare_sides(plan, rule)
        if steady < look or not any(comparison.inconclusive for comparison in compared):
            break
    if repetition > steady:
        busy = "this machine is too busy: " if steady < looks[-1] and repetition >= 2 * looks[-1] else ""
        notes.append(f"{busy}{repetition - steady} of {repetition} repetitions did not become steady")
    return SweepResult(directory=plan.output, outcomes=tuple(outcomes), comparisons=tuple(compared), notes=tuple(notes))


def _compare_sides(plan: Sweep, rule: CompareCfg) -> list[ComparisonResult]:
    first, *others = plan.sides
    paths = {side.label: bundle_paths(plan.output / side.folder) for side in plan.sides}
    return [
        compare(paths[first.label], paths[side.label], rule=rule, names=(first.label, side.label)) for side in others
    ]


def _read(runs: Runs, side: str = "") -> tuple[list[Bundle], list[str]]:
    # evaluations are recognized by what they are not: torch is not imported to name their class
    whole = tuple(BUNDLES.values())
    single = isinstance(runs, (str, Path, *whole)) or not isinstance(runs, Iterable)
    listed = [runs] if single else list(cast("Iterable[Bundle]", runs))
    paths = [run for run in listed if isinstance(run, (str, Path))]
    bundles: list[Bundle] = [
        run if isinstance(run, whole) else evaluation_bundle(cast("Evaluation", run), f"{side}{number}")
        for number, run in enumerate(listed, 1)
        if not isinstance(run, (str, Path))
    ]
    found, notes = read_bundles(paths) if paths else ([], [])
    return [*bundles, *found], notes


def _judge_sides(
    before: Sequence[Bundle], after: Sequence[Bundle], cfg: CompareCfg, notes: list[str], names: tuple[str, str]
) -> ComparisonResult:
    first, second = ({run.kind: [it for it in side if it.kind == run.kind] for run in side} for side in (before, after))
    notes += [f"only {names[0]} has {kind} bundles" for kind in first if kind not in second]
    notes += [f"only {names[1]} has {kind} bundles" for kind in second if kind not in first]
    shared = [kind for kind in first if kind in second]
    if not shared:
        raise ConfigError(
            f"compare: expected bundles of the same kind on both sides, got {', '.join(first)} and {', '.join(second)}"
        )
    found = tuple(compare_bundles(first[kind], second[kind], cfg) for kind in shared)
    return ComparisonResult(comparisons=found, notes=tuple(notes), names=names)


COMMANDS = ("runtime", "startup", "train", "play")


def _check_command(command: Sequence[str]) -> None:
    if not command or command[0] not in COMMANDS:
        raise ConfigError(f"sweep: expected one of {', '.join(COMMANDS)} and a task, got {' '.join(command)!r}")
    if len(command) < 2:
        raise ConfigError(f"sweep: expected a task after {command[0]!r}, got none")
    for option in ("--seed", "--output"):
        if any(word == option or word.startswith(f"{option}=") for word in command):
            raise ConfigError(f"sweep: expected {option} before {command[0]!r}: the sweep sets it for each run")


@contextmanager
def _sides(vary: Mapping[str, Sequence[object]] | None, commits: tuple[str, str] | None) -> Generator[Sequence[Side]]:
    from headrace.bench._sweep import Side, checkouts

    if commits is not None:
        with checkouts(commits, Path.cwd()) as sides:
            yield sides
        return
    assert vary is not None
    ((name, values),) = vary.items()
    option = name.replace("_", "-")
    yield [Side(label=f"{option}={value}", arguments=(f"--{option}", str(value))) for value in values]


_STYLES = {"improved": "green", "regressed": "bold red", "unchanged": "dim", "inconclusive": "yellow"}
_COLUMNS = ("metric", "A", "B", "change", "95 % interval", "p", "n", "variation", "verdict")


def table(comparison: Comparison, names: tuple[str, str] = ("A", "B")) -> Table:
    """For a terminal of 80 columns: medians over runs with their variation, the change with its interval."""
    found = Table(title=f"{comparison.kind}: {comparison.task}", caption=_tally(comparison), box=box.SIMPLE_HEAD)
    found.add_column("metric", overflow="fold")
    for column in (*names, "change"):
        found.add_column(escape(column), justify="right", overflow="fold")
    found.add_column("verdict")
    for row in comparison.rows:
        path, before, after, change, interval, _, _, _, verdict = cells(row)
        sides = [
            center if spread is None else f"{center}\n[dim]± {spread:.1%}[/]"
            for center, spread in zip((before, after), variations(row), strict=True)
        ]
        style = _STYLES.get(row.verdict or "", "dim")
        shown = change if row.low is None else f"{change}\n[dim]{interval}[/]"
        found.add_row(path.replace(".", ".\n"), *sides, shown, f"[{style}]{verdict}[/]")
    return found


def markdown(comparisons: Sequence[Comparison], names: tuple[str, str] = ("A", "B")) -> str:
    """For a pull request."""
    lines: list[str] = []
    for comparison in comparisons:
        lines += [f"### {comparison.kind}: {comparison.task}", "", _tally(comparison), ""]
        heads = ("metric", *names, *_COLUMNS[3:])
        lines += [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 2)}---|"]
        for row in comparison.rows:
            *shown, verdict = cells(row)
            word = f"**{verdict}**" if row.verdict in ("regressed", "improved") else verdict
            lines.append(f"| {' | '.join((*shown, word))} |".replace("\n", " "))
        lines.append("")
        lines += [f"- {note}" for note in all_notes(comparison)]
        lines.append("")
    return "\n".join(lines)


def all_notes(comparison: Comparison) -> list[str]:
    """Return what belongs below a table: the tests, crashes, remarks, metrics on one side only, why metrics are
    inconclusive."""
    notes = [f"{test}: {_list(paths, comparison)}" for test, paths in _paths_by(comparison.rows, "test").items()]
    if comparison.failed_after:
        notes.append(f"{comparison.failed_after} runs of side B crashed, none of side A")
    notes += comparison.notes
    alone = {"A": comparison.only_before, "B": comparison.only_after}
    notes += [f"only {side} has: {', '.join(paths)}" for side, paths in alone.items() if paths]
    open_rows = [row for row in comparison.rows if row.verdict == "inconclusive"]
    reasons = _paths_by(open_rows, "reason")
    return notes + [f"inconclusive: {_list(paths, comparison)}: {reason}" for reason, paths in reasons.items()]


def cells(row: MetricComparison) -> tuple[str, ...]:
    """Return the texts of a row: metric, both sides, change, interval, p, n, variation, verdict."""
    sample, unit = row.sample, row.sample.metric.unit
    noise = ["–" if spread is None else f"{spread:.1%}" for spread in variations(row)]
    return (
        row.path,
        *(number(value, unit, percent=sample.scale == "points") for value in sample.centers),
        change(row),
        "–" if row.low is None or row.high is None else f"{_effect(row, row.low)} to {_effect(row, row.high)}",
        "–" if row.p is None else f"{row.p:.2g}",
        " / ".join(f"{side.n:,}" for side in sample.moments),
        " / ".join(noise),
        row.verdict or "–",
    )


def change(row: MetricComparison) -> str:
    """Return the effect, on its scale."""
    return "–" if row.effect is None else _effect(row, row.effect)


def variations(row: MetricComparison) -> list[float | None]:
    """Return the standard deviation of each side relative to its mean; None where that has no meaning, as for rates."""
    if row.sample.scale == "points":
        return [None, None]
    sides = [Moments.of(side) for side in (row.sample.before, row.sample.after)]
    return [side.std / abs(side.mean) if side.n > 1 and side.mean else None for side in sides]


def _effect(row: MetricComparison, effect: float) -> str:
    scale = row.sample.scale
    if scale == "points":
        return f"{100 * effect:+.1f} points"
    if scale == "absolute":
        text = number(effect, row.sample.metric.unit)
        return text if text.startswith("-") else f"+{text}"
    return f"{effect:+.1%}" if effect < 1.0 else f"×{1 + effect:.3g}"


def _paths_by(rows: Sequence[MetricComparison], name: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row in rows:
        if text := getattr(row, name):
            found.setdefault(text, []).append(row.path)
    return found


def _list(paths: Sequence[str], comparison: Comparison) -> str:
    judged = sum(row.verdict is not None for row in comparison.rows)
    return f"all {judged} metrics" if len(paths) == judged > 1 else ", ".join(paths)


def _tally(comparison: Comparison) -> str:
    words = [
        f"{comparison.count(verdict)} {verdict}"
        for verdict in ("regressed", "improved", "unchanged", "inconclusive")
        if comparison.count(verdict)
    ]
    return (", ".join(words) or "nothing to compare") + f"; {comparison.runs[0]} and {comparison.runs[1]} runs"
