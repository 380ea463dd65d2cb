"""``headrace.compare``, ``headrace.bench.report`` and ``headrace.bench.sweep``: runs next to each other."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

from headrace.bench._bundle_files import bundle_paths, read_bundles
from headrace.bench._comparison import DIFFERENCES, CompareCfg, Comparison, Difference
from headrace.bench._comparison import compare as compare_bundles
from headrace.bench.schema import BUNDLES, Bundle
from headrace.errors import ConfigError, HeadraceError, UnknownNameError
from headrace.files import check_writable, write_whole

if TYPE_CHECKING:
    from headrace.bench._sweep import Outcome, Side
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
        from headrace.bench.comparison_output import markdown

        return markdown(self.comparisons, self.names)


def compare(
    before: Runs,
    after: Runs,
    *,
    min_effect: float = 0.05,
    alpha: float = 0.01,
    allow: Iterable[str] = (),
    metrics: Sequence[str] = (),
    accept_drift: bool = False,
    names: tuple[str, str] = ("A", "B"),
) -> ComparisonResult:
    """Compare two sets of runs, metric by metric. The design of the data chooses the test.

    Args:
        before: bundles, evaluations, files of either (also journals), or directories of them.
        after: likewise.
        min_effect: smallest change that matters.
        alpha: chance of any false verdict in a comparison.
        allow: compare although this differs: ``hardware``, ``task``, ``settings``, ``timing``, ``library``; repeatable.
        metrics: only metrics that match, such as ``runtime.*``; repeatable; in Python all if empty.
        accept_drift: judge times although one side ran before the other, or a warm-up did not become steady.
        names: of the sides, for tables.

    Returns:
        ``comparisons`` (one per kind and task), ``notes``, ``regressed``, ``inconclusive``, and the tables as
        ``markdown()``.
    """
    cfg = CompareCfg(
        min_effect=min_effect,
        alpha=alpha,
        allow=_allowed(allow),
        metrics=tuple(metrics),
        accept_drift=accept_drift,
    )
    (first, notes), (second, more) = _read(before, "A"), _read(after, "B")
    return _compared(first, second, cfg, [*notes, *more], names)


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
    allow: Iterable[str] = (),
    accept_drift: bool = False,
    story: Story | None = None,
) -> ReportResult:
    """Put runs on one HTML page that needs no network; with ``versus``, the page has the verdicts as well.

    Args:
        runs: bundles, evaluations, files of either, or directories of them.
        versus: the runs to compare with.
        output: the file, which must end in ``.html``.
        title: heading of the page.
        names: of the sides.
        allow: as for :func:`compare`.
        accept_drift: as for :func:`compare`.
        story: what the page begins with.

    Returns:
        ``path`` of the page, ``runs`` on it, and ``notes``: files that could not be read, sides that could not be
        compared.
    """
    from headrace.bench.reporting.page import report_page

    output = Path(output)
    if output.suffix not in (".html", ".htm"):
        raise ConfigError(f"output (--output): expected a file that ends in .html, got {str(output)!r}")
    allowed = _allowed(allow)
    bundles, notes = _read(runs, "A")
    comparisons: tuple[Comparison, ...] = ()
    sides: dict[str, str] = {}
    if versus is not None:
        others, more = _read(versus, "B")
        notes = [*notes, *more]
        sides = {run.run.run_id: names[0] for run in bundles} | {run.run.run_id: names[1] for run in others}
        try:
            found = _compared(bundles, others, CompareCfg(allow=allowed, accept_drift=accept_drift), [], names)
            comparisons, notes = found.comparisons, [*notes, *found.notes]
        except HeadraceError as error:
            notes.append(f"not compared: {error}")
        bundles = [*bundles, *others]
    check_writable(output.parent)
    page = report_page(bundles, comparisons, names=names, title=title, notes=notes, sides=sides, story=story)
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

    @property
    def regressed(self) -> bool:
        """Whether a gate should close."""
        return any(comparison.regressed for comparison in self.comparisons)


def sweep(
    command: Sequence[str],
    *,
    vary: Mapping[str, Sequence[object]] | None = None,
    commits: tuple[str, str] | None = None,
    repeats: int = 10,
    seed: int = 0,
    output: str | Path | None = None,
    min_effect: float = 0.05,
    alpha: float = 0.01,
    allow: Iterable[str] = (),
    metrics: Sequence[str] = (),
    accept_drift: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> SweepResult:
    """Run variants of a benchmark in turn, each run in a process of its own, and compare each with the first.

    ``headrace.bench.sweep(["runtime", "ant", "--num-envs", "256"], vary={"threads": [1, 2]}, repeats=10)``

    Args:
        command: a benchmark command with its options, without ``--seed`` and ``--output``.
        vary: one option and its values.
        commits: two commits of the project that you are in, instead of ``vary``.
        repeats: runs of each variant.
        seed: of the first repetition; counts up.
        output: an empty or new directory; None for ``sweeps/<time>``.
        min_effect: as for :func:`compare`, as are the arguments below.
        alpha: chance of any false verdict.
        allow: in what the sides may differ, beyond what is varied.
        metrics: patterns of metrics.
        accept_drift: judge times of runs that did not become steady.
        progress: called with how many runs are done, and of how many.

    Returns:
        ``directory`` of the bundles, ``outcomes`` of the runs, ``comparisons`` of every side with the first,
        ``regressed``.
    """
    from headrace.bench._sweep import Sweep, run_sweep

    _check_command(command)
    if (vary is None) == (commits is None) or (vary is not None and len(vary) != 1):
        raise ConfigError("sweep: expected one option to vary (--vary), or two commits (--commits)")
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    directory = Path("sweeps") / stamp if output is None else Path(output)
    if directory.exists() and any(directory.iterdir()):
        raise ConfigError(f"--output: expected an empty or new directory, got {str(directory)!r}, which has files")
    differing = () if vary is None else ("settings", "library") if "library" in vary else ("settings", "timing")
    allowed = _allowed((*allow, *differing))
    with _sides(vary, commits) as sides:
        plan = Sweep(
            sweep_id=f"sweep-{stamp}",
            command=tuple(command),
            sides=tuple(sides),
            repetitions=repeats,
            seed=seed,
            output=directory,
            rehearse=commits is not None,
        )
        check_writable(directory)
        total = len(plan.turns())
        outcomes = run_sweep(plan, (lambda done: progress(done, total)) if progress else lambda _: None)
    first, *others = plan.sides
    compared = [
        compare(
            bundle_paths(plan.output / first.folder),
            bundle_paths(plan.output / side.folder),
            min_effect=min_effect,
            alpha=alpha,
            allow=allowed,
            metrics=metrics,
            accept_drift=accept_drift,
            names=(first.label, side.label),
        )
        for side in others
    ]
    return SweepResult(directory=directory, outcomes=tuple(outcomes), comparisons=tuple(compared))


def _allowed(allow: Iterable[str]) -> frozenset[Difference]:
    names = set(allow)
    for name in names.difference(DIFFERENCES):
        raise UnknownNameError("difference for --allow:", name, DIFFERENCES)
    return frozenset(name for name in DIFFERENCES if name in names)


def _read(runs: Runs, side: str = "") -> tuple[list[Bundle], list[str]]:
    from headrace.bench._bundle_files import evaluation_bundle

    # evaluations are told by what they are not: torch is not imported to name their class
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


def _compared(
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
