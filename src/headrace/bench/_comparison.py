"""Two sets of runs, metric by metric: improved, regressed, unchanged or inconclusive.

The design of the data (``_design``) chooses the test (``_significance``); here the verdicts are given. Over all metrics
of a comparison together, the chance that equal sides are called different is at most ``alpha``.
"""

from __future__ import annotations

import fnmatch
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from headrace.bench import _significance as tests
from headrace.bench._design import (
    EpisodeSample,
    Layout,
    cut_short,
    episode_sample,
    one_policy_each,
    outcome_layout,
    time_layout,
    unsteady,
)
from headrace.bench._metrics import Metric, metrics
from headrace.bench._schema import Bundle, Kind, PlayBundle, RuntimeBundle, StartupBundle, TrainingBundle
from headrace.bench._significance import Shift, holm, least_p, least_signed_rank_p
from headrace.bench._statistic import Better, Proportion
from headrace.errors import ConfigError, DataError, UnknownNameError

Verdict = Literal["improved", "regressed", "unchanged", "inconclusive"]
Difference = Literal["hardware", "task", "settings", "timing", "library"]
DIFFERENCES: tuple[Difference, ...] = get_args(Difference)
Scale = Literal["relative", "points", "absolute"]
_FEW_EPISODES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareCfg:
    """When a change counts."""

    min_effect: float = 0.05
    """The smallest change that matters: relative, for success rates in points. Changes whose whole interval is smaller
    are called unchanged. Ratios are judged alike both ways: ×1.05 and ÷1.05."""
    alpha: float = 0.01
    """Chance of any false verdict among the metrics of a comparison."""
    allow: frozenset[Difference] = frozenset()
    """In what the sides may differ."""
    metrics: tuple[str, ...] = ()
    """Patterns of the metrics to compare, such as ``runtime.*``; all if empty. Fewer metrics need fewer runs."""
    accept_drift: bool = False
    """Judge times although one side ran before the other, or a warm-up did not reach a steady step time."""

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
    """One value per unit of the design: run, seed, policy, or episode where the bundles keep them."""
    after: list[float]
    centers: tuple[float, float]
    """What to show of the sides: medians of runs, means of episodes."""
    scale: Scale
    """How :attr:`effect` is meant: relative change, points of a rate, or a difference in the metric's unit."""
    effect: float | None
    """From before to after; None where nothing was tested."""
    low: float | None
    high: float | None
    """95 % interval of the effect; None where there are too few values for one."""
    p: float | None
    """Adjusted for the number of metrics; None where nothing was tested."""
    test: str
    """The test and its units, such as ``signed-rank test, 12 pairs of runs``; empty where nothing was tested."""
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
    runs: tuple[int, int] = (0, 0)
    """Completed runs of each side."""
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
    notes += _notes(*sides)
    sizes = {(run.run.num_envs, _frames(run)) for run in sides[0] + sides[1]}
    if len(sizes) > 1:
        notes.append("the batches differ in size: times are per frame; memory and start-up are shown only")
    first, second = (_metrics(side, per_frame=len(sizes) > 1) for side in sides)
    for pattern in cfg.metrics:
        if not any(fnmatch.fnmatchcase(path, pattern) for path in (*first, *second)):
            raise UnknownNameError("metric", pattern, {*first, *second})
    first, second = (_chosen(side, cfg.metrics) for side in (first, second))
    samples = _Arrangement(sides[0], sides[1], cfg, notes, per_frame=len(sizes) > 1)
    shared = [samples.of(first[path]) for path in first if path in second]
    crashed = [sum(run.run.status == "crashed" for run in runs) for runs in (before, after)]
    return Comparison(
        kind=before[0].kind,
        task=sides[1][0].run.task,
        rows=_judged(shared, cfg),
        only_before=[path for path in first if path not in second],
        only_after=[path for path in second if path not in first],
        runs=(len(sides[0]), len(sides[1])),
        notes=notes,
        failed_after=crashed[1] if not crashed[0] else 0,
    )


def variation(values: Sequence[float]) -> float | None:
    """Standard deviation relative to the mean; None for fewer than two values or a mean of 0."""
    if len(values) < 2:
        return None
    mean = statistics.fmean(values)
    return statistics.stdev(values) / abs(mean) if mean else None


@dataclass(slots=True, kw_only=True)
class _Sample:
    """A metric on both sides, arranged by the design."""

    metric: Metric
    before: list[float]
    after: list[float]
    unit: str
    """Plural, for texts."""
    paired: bool = False
    episodes: EpisodeSample | None = None
    censored: list[bool] | None = None
    refused: str | None = None

    @property
    def scale(self) -> Scale:
        if isinstance(self.metric.spread, Proportion):
            return "points"
        positive = min((*self.before, *self.after), default=math.inf) > 0
        return "relative" if positive and self.metric.role != "outcome" else "absolute"

    @property
    def centers(self) -> tuple[float, float]:
        if self.episodes is not None:
            return self.episodes.before.mean, self.episodes.after.mean
        return statistics.median(self.before), statistics.median(self.after)

    def margin(self, min_effect: float) -> float:
        """What matters, on the scale of the test: a log ratio, points, or a difference.

        A difference matters relative to the larger of the centers or, near zero, to the spread of the units.
        """
        if self.scale == "relative":
            return math.log1p(min_effect)
        if self.scale == "points":
            return min_effect
        spread = statistics.fmean(_deviation(side) for side in (self.before, self.after))
        if self.episodes is not None:
            spread = (self.episodes.before.std + self.episodes.after.std) / 2
        return min_effect * max(*map(abs, self.centers), spread)

    def on_scale(self) -> tuple[list[float], list[float]]:
        """The values as the test takes them."""
        if self.scale == "relative":
            return [math.log(value) for value in self.before], [math.log(value) for value in self.after]
        return self.before, self.after

    def spread(self) -> float:
        """Standard deviation of the difference of two units."""
        first, second = self.on_scale()
        if self.paired:
            return _deviation([b - a for a, b in zip(first, second, strict=True)])
        return math.hypot(_deviation(first), _deviation(second))


class _Arrangement:
    """Gives the sample of each metric; layouts are made once per role."""

    def __init__(
        self, before: list[Bundle], after: list[Bundle], cfg: CompareCfg, notes: list[str], *, per_frame: bool
    ) -> None:
        self._runs = (before, after)
        self._metrics = {run.run.run_id: _metrics([run], per_frame=per_frame) for run in (*before, *after)}
        steady = [side if cfg.accept_drift else [run for run in side if not unsteady(run)] for side in self._runs]
        shaky = len(before) + len(after) - sum(map(len, steady))
        if shaky:
            notes.append(
                f"{shaky} runs did not reach a steady step time before measuring and are left out of times; use "
                "longer --warmup-steps, or pass --accept-drift"
            )
        self._time = time_layout(steady[0], steady[1], accept_drift=cfg.accept_drift)
        self._outcome = outcome_layout(before, after)
        self._by_episode = one_policy_each(before, after)

    def of(self, metric: Metric) -> _Sample:
        """The values of a metric on both sides."""
        if metric.role == "outcome" and self._by_episode:
            return self._episodes(metric)
        return self._units(metric, self._outcome if metric.role == "outcome" else self._time)

    def _episodes(self, metric: Metric) -> _Sample:
        found = episode_sample(metric, *self._runs)
        if isinstance(found, str):
            sample = self._units(metric, self._outcome)
            sample.refused = found
            return sample
        pairs = found.pairs
        return _Sample(
            metric=metric,
            before=[found.before.mean] if pairs is None else [first for first, _ in pairs],
            after=[found.after.mean] if pairs is None else [second for _, second in pairs],
            unit="episodes",
            paired=pairs is not None,
            episodes=found,
            refused=cut_short((*self._runs[0], *self._runs[1])),
        )

    def _units(self, metric: Metric, layout: Layout) -> _Sample:
        sides = [self._numbers(metric.path, units) for units in (layout.before, layout.after)]
        missing = [
            f"{len(units) - len(found)} of {len(units)} {layout.unit}s of side {name}"
            for found, units, name in zip(sides, (layout.before, layout.after), "AB", strict=True)
            if 0 < len(found) < len(units)
        ]
        censored = any(cut for side in sides for _, cut in side.values())
        pairs = None if censored else layout.pairs
        if pairs is not None:
            pairs = [(one, other) for one, other in pairs if one in sides[0] and other in sides[1]]
        keys = (list(sides[0]), list(sides[1])) if pairs is None else tuple(zip(*pairs, strict=True)) or ((), ())
        values = [[side[key][0] for key in chosen] for side, chosen in zip(sides, keys, strict=True)]
        cut = [side[key][1] for side, chosen in zip(sides, keys, strict=True) for key in chosen]
        return _Sample(
            metric=metric,
            before=values[0],
            after=values[1],
            unit=f"{layout.unit}s" if layout.unit != "policy" else "policies",
            paired=pairs is not None,
            censored=cut if censored else None,
            refused=f"missing in {' and '.join(missing)}" if missing else layout.refused,
        )

    def _numbers(self, path: str, units: Mapping[str, list[Bundle]]) -> dict[str, tuple[float, bool]]:
        found: dict[str, tuple[float, bool]] = {}
        for key, runs in units.items():
            here = [self._metrics[run.run.run_id].get(path) for run in runs]
            known = [metric for metric in here if metric is not None]
            if known:
                mean = statistics.fmean(metric.value for metric in known)
                found[key] = (mean, any(metric.censored for metric in known))
        return found


def _judged(samples: Sequence[_Sample], cfg: CompareCfg) -> list[MetricComparison]:
    tested = [index for index, sample in enumerate(samples) if _testable(sample)]
    needed = cfg.alpha / max(len(tested), 1)
    found = {index: _tested(samples[index], needed) for index in tested}
    adjusted = dict(zip(tested, holm([p for p, _, _ in found.values()]), strict=True))
    return [_row(sample, found.get(index), adjusted.get(index), needed, cfg) for index, sample in enumerate(samples)]


def _testable(sample: _Sample) -> bool:
    if sample.metric.better is None or sample.refused is not None:
        return False
    if sample.episodes is not None:
        return min(sample.episodes.before.n, sample.episodes.after.n) >= 2
    return min(len(sample.before), len(sample.after)) >= (3 if sample.paired else 2)


def _tested(sample: _Sample, needed: float) -> tuple[float, Shift, str]:
    """P-value, shift on the scale of the test, and the name of the test."""
    if sample.episodes is not None:
        return _tested_episodes(sample, sample.episodes)
    first, second = sample.on_scale()
    if sample.censored is not None:
        p = tests.rank_sum_p(first, second, censored=sample.censored)
        never = sum(sample.censored)
        return p, Shift(math.nan, None, None), f"Gehan's rank test, {_sizes(sample)}, {never} without success"
    if not sample.paired:
        return tests.rank_sum_p(first, second), tests.shift(first, second), f"rank-sum test, {_sizes(sample)}"
    differences = [b - a for a, b in zip(first, second, strict=True)]
    pairs = f"{len(differences)} pairs of {sample.unit}"
    # with few pairs the signed-rank test cannot reach the level at all; the t-test can, at the cost of an assumption
    if least_signed_rank_p(len(differences)) < needed:
        return tests.signed_rank_p(differences), tests.signed_rank_shift(differences), f"signed-rank test, {pairs}"
    return tests.t_test_p(differences), tests.t_shift(differences), f"paired t-test, {pairs}"


def _tested_episodes(sample: _Sample, found: EpisodeSample) -> tuple[float, Shift, str]:
    success = sample.scale == "points"
    if found.pairs is not None:
        count = f"{len(found.pairs):,} paired episodes"
        if success:
            gained = sum(after > before for before, after in found.pairs)
            lost = sum(after < before for before, after in found.pairs)
            shift = tests.paired_rate_shift(gained, lost, len(found.pairs))
            return tests.mcnemar_p(gained, lost), shift, f"McNemar's test, {count}"
        differences = [after - before for before, after in found.pairs]
        if len(differences) < _FEW_EPISODES:
            return tests.t_test_p(differences), tests.t_shift(differences), f"paired t-test, {count}"
        return tests.t_test_p(differences), tests.bootstrap_shift(differences), f"paired t-test and bootstrap, {count}"
    count = f"{found.before.n:,} and {found.after.n:,} episodes"
    if success:
        rates = [(round(side.mean * side.n), side.n) for side in (found.before, found.after)]
        return tests.fisher_p(*rates), tests.rate_shift(*rates), f"Fisher's exact test, {count}"
    return (*tests.welch(found.before, found.after), f"Welch's t-test, {count}")


def _row(
    sample: _Sample, found: tuple[float, Shift, str] | None, p: float | None, needed: float, cfg: CompareCfg
) -> MetricComparison:
    metric = sample.metric
    shift = None if found is None else found[1]
    verdict, reason = _verdict(sample, shift, p, needed, cfg)
    back: Callable[[float], float] = math.expm1 if sample.scale == "relative" else float
    edges = [
        None if edge is None or math.isnan(edge) else back(edge)
        for edge in ((None, None, None) if shift is None else shift)
    ]
    return MetricComparison(
        path=metric.path,
        unit=metric.unit,
        better=metric.better,
        before=sample.before,
        after=sample.after,
        centers=sample.centers if sample.before and sample.after else (math.nan, math.nan),
        scale=sample.scale,
        effect=edges[0],
        low=edges[1],
        high=edges[2],
        p=p,
        test="" if found is None else found[2],
        verdict=verdict,
        reason=reason,
    )


def _verdict(
    sample: _Sample, shift: Shift | None, p: float | None, needed: float, cfg: CompareCfg
) -> tuple[Verdict | None, str]:
    metric = sample.metric
    if metric.better is None:
        return None, "neither direction is an improvement"
    if sample.refused is not None:
        return "inconclusive", sample.refused
    if p is None or shift is None:
        return "inconclusive", _too_few(sample)
    margin = sample.margin(cfg.min_effect)
    significant = p < cfg.alpha
    size = f"{cfg.min_effect:.0%}"
    if shift.low is not None and shift.high is not None and -margin < shift.low and shift.high < margin:
        small = f"a change, but smaller than {size}" if significant else f"the whole interval is within ±{size}"
        return "unchanged", small
    if significant:
        higher = shift.estimate > 0 if sample.censored is None else _later(sample)
        improved = higher == (metric.better == "higher")
        return ("improved" if improved else "regressed"), "significant, and not shown to be smaller than " + size
    return "inconclusive", _advice(sample, margin, needed, cfg)


def _later(sample: _Sample) -> bool:
    """Whether the second side reached success later, or more rarely."""
    assert sample.censored is not None
    cut = sample.censored
    sides = [
        [math.inf if never else value for value, never in zip(values, flags, strict=True)]
        for values, flags in ((sample.before, cut[: len(sample.before)]), (sample.after, cut[len(sample.before) :]))
    ]
    wins = sum((b > a) - (b < a) for a in sides[0] for b in sides[1])
    return wins > 0


def _too_few(sample: _Sample) -> str:
    if sample.unit == "runs":
        return (
            "one run per side says nothing about the variation between runs; run 'headrace sweep … --repeats 10'"
            if min(len(sample.before), len(sample.after)) < 2
            else "too few pairs of runs; run 'headrace sweep … --repeats 10'"
        )
    if sample.unit == "seeds":
        return "runs with the same settings and seed repeat one outcome; use several seeds per side"
    return f"too few {sample.unit}: {_sizes(sample)}"


def _advice(sample: _Sample, margin: float, needed: float, cfg: CompareCfg) -> str:
    """Why nothing can be said, and what to run instead."""
    size = f"{cfg.min_effect:.0%}"
    if sample.censored is not None:
        return "the times to success overlap; use more runs per side"
    count = tests.runs_needed(sample.spread() if sample.episodes is None else 0.0, margin, needed)
    if sample.episodes is not None:
        found = sample.episodes
        spread = math.hypot(found.before.std, found.after.std)
        if found.pairs is not None:
            spread = _deviation([after - before for before, after in found.pairs])
        count = tests.runs_needed(spread, margin, needed)
        return f"a change of {size} can be neither shown nor ruled out; play about {count:,} episodes per side"
    least = 2
    while not sample.paired and least_p(least, least) >= needed:
        least += 1
    count = max(count, least)
    what = {"runs": f"run 'headrace sweep … --repeats {count}'", "seeds": f"use {count} seeds per side"}
    return f"a change of {size} can be neither shown nor ruled out with {_sizes(sample)}; " + what.get(
        sample.unit, f"use {count} {sample.unit} per side"
    )


def _sizes(sample: _Sample) -> str:
    if sample.paired:
        return f"{len(sample.before)} pairs of {sample.unit}"
    return f"{len(sample.before)} and {len(sample.after)} {sample.unit}"


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


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


def _notes(before: Sequence[Bundle], after: Sequence[Bundle]) -> list[str]:
    notes: list[str] = []
    if {run.run.seed for run in before} != {run.run.seed for run in after}:
        notes.append("the sides used different seeds; give both the same")
    loads = [(run.hardware.load_average or (0.0,))[0] / run.hardware.cpu_count for run in (*before, *after)]
    busy = sum(load > 1.0 for load in loads)
    if busy:
        notes.append(f"{busy} of {len(loads)} runs began on a machine with more work than cores")
    return notes


def _frames(run: Bundle) -> int | None:
    return None if isinstance(run, StartupBundle) else run.runtime.steps_per_iteration


def _metrics(runs: Sequence[Bundle], *, per_frame: bool) -> dict[str, Metric]:
    """Path → the metric of the first run that has it."""
    found: dict[str, Metric] = {}
    for run in runs:
        for metric in metrics(run):
            shown = metric.per_frame() if per_frame else metric
            found.setdefault(shown.path, shown)
    return found


def _chosen(side: dict[str, Metric], patterns: tuple[str, ...]) -> dict[str, Metric]:
    if not patterns:
        return side
    return {
        path: metric for path, metric in side.items() if any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)
    }
