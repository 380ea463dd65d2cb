"""Two sets of runs, metric by metric: improved, regressed, unchanged or inconclusive.

A change is reported only if it is significant *and* large enough to matter. The unit is a run. Over all metrics of a
comparison together, the chance that equal sides are called different is at most ``alpha``.
"""

from __future__ import annotations

import fnmatch
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from headrace.bench._metrics import Metric, metrics
from headrace.bench._schema import Bundle, Kind, PlayBundle, RuntimeBundle, StartupBundle, TrainingBundle
from headrace.bench._significance import holm, least_p, rank_sum_p, shift
from headrace.bench._statistic import Better, Proportion
from headrace.errors import ConfigError, DataError, UnknownNameError

Verdict = Literal["improved", "regressed", "unchanged", "inconclusive"]
Difference = Literal["hardware", "task", "settings", "timing", "library"]
DIFFERENCES: tuple[Difference, ...] = get_args(Difference)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareCfg:
    """When a change counts."""

    min_effect: float = 0.05
    """Relative; for rates such as success in points. Ratios are judged alike both ways: ×1.05 and ÷1.05."""
    alpha: float = 0.01
    """Chance of any false verdict among the metrics of a comparison."""
    allow: frozenset[Difference] = frozenset()
    """In what the sides may differ."""
    metrics: tuple[str, ...] = ()
    """Patterns of the metrics to compare, such as ``runtime.*``; all if empty. Fewer metrics need fewer runs."""

    def __post_init__(self) -> None:
        if not self.min_effect > 0:
            raise ConfigError(f"--min-effect: expected a share above 0, such as 0.05, got {self.min_effect}")
        if not 0 < self.alpha < 1:
            raise ConfigError(f"--alpha: expected a chance between 0 and 1, got {self.alpha}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricComparison:
    """One metric on both sides."""

    path: str
    unit: str | None
    better: Better | None
    before: list[float]
    """One value a run."""
    after: list[float]
    effect: float | None
    """Relative change from before to after, or difference in points for rates; None where it has no meaning."""
    low: float | None
    high: float | None
    """95 % interval of the effect; None where there are too few runs for one."""
    p: float | None
    """Adjusted for the number of metrics; None where nothing was tested."""
    verdict: Verdict | None
    """None for metrics of which neither direction is an improvement."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result."""

    kind: Kind
    task: str
    rows: list[MetricComparison]
    only_before: list[str]
    """Metrics that only the first side has."""
    only_after: list[str]
    notes: list[str] = field(default_factory=list[str])
    failed_after: int = 0
    """Runs of the second side that crashed, where none of the first did."""

    def count(self, verdict: Verdict) -> int:
        """How many metrics got this verdict."""
        return sum(row.verdict == verdict for row in self.rows)

    @property
    def regressed(self) -> bool:
        """Whether a gate should close."""
        return bool(self.count("regressed") or self.failed_after)


def compare(before: Sequence[Bundle], after: Sequence[Bundle], cfg: CompareCfg | None = None) -> Comparison:
    """Compare two sets of runs of one kind. Runs that did not complete are left out, and named.

    Raises:
        ConfigError: the sides differ in something that ``cfg.allow`` does not name.
        DataError: a side has no completed run, a run twice, or runs of several kinds.
    """
    cfg = cfg or CompareCfg()
    notes: list[str] = []
    sides = [_usable(runs, side, notes) for side, runs in (("A", before), ("B", after))]
    _check_alike(sides[0] + sides[1], cfg.allow)
    notes += _drift_notes(*sides)
    first, second = (_values(side) for side in sides)
    for pattern in cfg.metrics:
        if not any(fnmatch.fnmatchcase(path, pattern) for path in (*first, *second)):
            raise UnknownNameError("metric", pattern, {*first, *second})
    first, second = (_chosen(side, cfg.metrics) for side in (first, second))
    shared = [path for path in first if path in second]
    crashed = [sum(run.run.status == "crashed" for run in runs) for runs in (before, after)]
    return Comparison(
        kind=before[0].kind,
        task=sides[1][0].run.task,
        rows=_judged([(first[path], second[path]) for path in shared], cfg),
        only_before=[path for path in first if path not in second],
        only_after=[path for path in second if path not in first],
        notes=notes,
        failed_after=crashed[1] if not crashed[0] else 0,
    )


def variation(values: Sequence[float]) -> float | None:
    """Standard deviation relative to the mean; None for fewer than two values or a mean of 0."""
    mean = statistics.fmean(values)
    return statistics.stdev(values) / abs(mean) if len(values) > 1 and mean else None


@dataclass(slots=True)
class _Side:
    """A metric on one side: its values, one a run."""

    metric: Metric
    values: list[float]


def _usable(runs: Sequence[Bundle], side: str, notes: list[str]) -> list[Bundle]:
    if not runs:
        raise DataError(f"side {side}: expected at least one bundle, got none")
    kinds = {run.kind for run in runs}
    if len(kinds) > 1:
        raise DataError(f"side {side}: expected bundles of one kind, got {', '.join(sorted(kinds))}")
    ids = [run.run.run_id for run in runs]
    twice = sorted({run_id for run_id in ids if ids.count(run_id) > 1})
    if twice:
        raise DataError(f"side {side}: expected every run once, got {', '.join(twice)} more than once")
    for run in runs:
        if run.run.status != "completed":
            notes.append(f"side {side}: {run.run.run_id} is left out: {run.run.status} ({run.run.status_reason})")
    done = [run for run in runs if run.run.status == "completed"]
    if not done:
        raise DataError(f"side {side}: expected a completed run, got {len(runs)} that did not complete")
    return done


def _check_alike(runs: Sequence[Bundle], allow: frozenset[Difference]) -> None:
    reference = _traits(runs[0])
    for run in runs[1:]:
        for difference, traits in _traits(run).items():
            if difference in allow or traits == reference[difference]:
                continue
            names = [name for name, value in traits.items() if value != reference[difference].get(name)]
            told = "; ".join(f"{name}: {reference[difference].get(name)} and {traits[name]}" for name in names)
            raise ConfigError(
                f"compare: expected runs with the same {difference}, got {told} "
                f"({runs[0].run.run_id} and {run.run.run_id}); pass --allow {difference} to compare them all the same"
            )


def _traits(bundle: Bundle) -> dict[Difference, dict[str, object]]:
    """What two runs must share for their numbers to mean the same."""
    run, hardware = bundle.run, bundle.hardware
    timing = None if isinstance(bundle, StartupBundle) else bundle.runtime.environment_step_timing
    settings: dict[str, object] = {"num_envs": run.num_envs, "max_iterations": run.max_iterations}
    settings |= run.config.model_dump()
    if isinstance(bundle, RuntimeBundle):
        settings["num_steps"] = bundle.runtime.iterations_completed
    if isinstance(bundle, TrainingBundle) and bundle.library is not None:
        settings["hyper-parameters"] = bundle.library.settings
    if isinstance(bundle, PlayBundle) and bundle.plan is not None:
        settings |= bundle.plan.model_dump(exclude={"shorter_than_episode"})
    return {
        "task": {"kind": bundle.kind, "task": run.task},
        "library": {"library": run.framework},
        "settings": settings,
        "timing": {"measurement_mode": None if timing is None else timing.measurement_mode},
        "hardware": {
            "cpu_name": hardware.cpu_name,
            "cpu_count": hardware.cpu_count,
            "cpu_usable": hardware.cpu_usable,
            "ram_gb": round(hardware.ram_gb),
            "cpu_governor": hardware.cpu_governor,
            "gpus": [gpu.name for gpu in hardware.gpu_devices],
        },
    }


def _drift_notes(before: Sequence[Bundle], after: Sequence[Bundle]) -> list[str]:
    if len(before) < 2 or len(after) < 2:
        return []
    first = [run.run.start_time_utc for run in before]
    second = [run.run.start_time_utc for run in after]
    notes: list[str] = []
    if max(first) < min(second) or max(second) < min(first):
        notes.append(
            "all runs of one side came before those of the other: a machine that grew slower looks like a "
            "regression; 'headrace sweep' interleaves them"
        )
    if {run.run.seed for run in before} != {run.run.seed for run in after}:
        notes.append("the sides used other seeds; give both the same")
    loads = [(run.hardware.load_average or (0.0,))[0] / run.hardware.cpu_count for run in (*before, *after)]
    busy = sum(load > 1.0 for load in loads)
    if busy:
        notes.append(f"{busy} of {len(loads)} runs began on a machine with more work than cores")
    return notes


def _values(runs: Sequence[Bundle]) -> dict[str, _Side]:
    """Path → values; a metric that a run of the side lacks has fewer values than runs."""
    found: dict[str, _Side] = {}
    for run in runs:
        for metric in metrics(run):
            found.setdefault(metric.path, _Side(metric, [])).values.append(metric.value)
    return found


def _chosen(side: dict[str, _Side], patterns: tuple[str, ...]) -> dict[str, _Side]:
    if not patterns:
        return side
    return {
        path: values for path, values in side.items() if any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)
    }


def _judged(pairs: Sequence[tuple[_Side, _Side]], cfg: CompareCfg) -> list[MetricComparison]:
    tested = [
        index
        for index, (first, second) in enumerate(pairs)
        if first.metric.better is not None and min(len(first.values), len(second.values)) > 1
    ]
    adjusted = holm([rank_sum_p(pairs[i][0].values, pairs[i][1].values) for i in tested])
    p_of = dict(zip(tested, adjusted, strict=True))
    return [_row(first, second, p_of.get(i), len(tested), cfg) for i, (first, second) in enumerate(pairs)]


def _row(first: _Side, second: _Side, p: float | None, family: int, cfg: CompareCfg) -> MetricComparison:
    effect, low, high = _effect(first, second)
    verdict, reason = _verdict(first, second, (effect, low, high), p, family, cfg)
    return MetricComparison(
        path=first.metric.path,
        unit=first.metric.unit,
        better=first.metric.better,
        before=first.values,
        after=second.values,
        effect=effect,
        low=low,
        high=high,
        p=p,
        verdict=verdict,
        reason=reason,
    )


def _effect(first: _Side, second: _Side) -> tuple[float | None, float | None, float | None]:
    """Relative change and its interval: of ratios where all values are positive, else of differences."""
    a, b = first.values, second.values
    if isinstance(first.metric.spread, Proportion):
        return shift(a, b)
    if min(*a, *b) > 0:
        found = shift([math.log(value) for value in a], [math.log(value) for value in b])
        low, high = (None if edge is None else math.expm1(edge) for edge in (found.low, found.high))
        return math.expm1(found.estimate), low, high
    scale = abs(statistics.median(a))
    if not scale:
        return (0.0, 0.0, 0.0) if set(a) == set(b) == {0.0} else (None, None, None)
    found = shift([value / scale for value in a], [value / scale for value in b])
    return found.estimate, found.low, found.high


def _verdict(
    first: _Side,
    second: _Side,
    found: tuple[float | None, float | None, float | None],
    p: float | None,
    family: int,
    cfg: CompareCfg,
) -> tuple[Verdict | None, str]:
    effect, low, high = found
    n_first, n_second = len(first.values), len(second.values)
    if first.metric.better is None:
        return None, "neither direction is an improvement"
    if min(n_first, n_second) < 2 or p is None:
        return "inconclusive", "one run a side tells nothing about the variation between runs"
    if effect is None:
        return "inconclusive", "a change relative to zero has no meaning"
    least, most = _bounds(first, second, cfg.min_effect)
    if p < cfg.alpha and not least < effect < most:
        improved = (effect > 0) == (first.metric.better == "higher")
        return ("improved", "significant") if improved else ("regressed", "significant")
    if low is not None and high is not None and least < low and high < most:
        return "unchanged", f"the whole interval is within ±{cfg.min_effect:.0%}"
    if family * least_p(n_first, n_second) >= cfg.alpha:
        enough = _enough(family, cfg)
        return "inconclusive", f"{n_first} and {n_second} runs are too few for {family} metrics; use {enough} a side"
    if p < cfg.alpha:
        return "inconclusive", f"there is a change, but it may be smaller than {cfg.min_effect:.0%}"
    return "inconclusive", f"a change of {cfg.min_effect:.0%} can be neither shown nor ruled out; use more runs"


def _bounds(first: _Side, second: _Side, min_effect: float) -> tuple[float, float]:
    """The effects that matter lie outside."""
    ratios = not isinstance(first.metric.spread, Proportion) and min(*first.values, *second.values) > 0
    return (-min_effect / (1 + min_effect) if ratios else -min_effect), min_effect


def _enough(family: int, cfg: CompareCfg) -> int:
    """Runs a side from which on a difference can be significant at all."""
    runs = 2
    while family * least_p(runs, runs) >= cfg.alpha:
        runs += 1
    return runs
