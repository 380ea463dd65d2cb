"""The verdict on each metric: a permutation test says whether it changed, its interval what can be ruled out.

A difference counts if it is significant and its interval is not wholly within what does not matter; it is ruled out if
the whole interval is, and that includes what so few units may have missed. Over all metrics of a comparison together,
the chance that equal sides are called different is at most ``alpha``. With few units there is no verdict: eight pairs
are the fewest that can differ at 1 %, six that can be unchanged.
"""

from __future__ import annotations

import fnmatch
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import numpy as np

from headrace.bench import _significance as tests
from headrace.bench._samples import Arrangement, Sample, find_metrics
from headrace.bench._significance import MISS, Moments, Shift
from headrace.bench.schema import Bundle, Kind, PlayBundle, RuntimeBundle, StartupBundle, TrainingBundle
from headrace.errors import ConfigError, DataError, UnknownNameError

if TYPE_CHECKING:
    from rich.table import Table


Verdict = Literal["improved", "regressed", "unchanged", "inconclusive"]
_MANY_RUNS = 200
"""Runs per side beyond which the advice is a quieter machine."""


@dataclass(frozen=True, slots=True)
class MetricComparison:
    """One metric on both sides."""

    sample: Sample
    """The values of both sides, and on which scale :attr:`effect` is."""
    effect: float | None
    """From before to after; None where nothing was tested."""
    low: float | None
    high: float | None
    """95 % interval of the effect; None where there are too few values for one."""
    p: float | None
    """Adjusted for the number of metrics; None where nothing was tested."""
    test: str
    """The test and its units, such as ``sign flips, 12 pairs of runs``; empty where nothing was tested."""
    verdict: Verdict | None
    """None for metrics of which neither direction is an improvement."""
    reason: str

    @property
    def path(self) -> str:
        """``phase.name`` of the metric."""
        return self.sample.metric.path


class _Tested(NamedTuple):
    p: float
    """Adjusted for the number of metrics."""
    shift: Shift
    """On the scale of the test."""
    test: str


@dataclass(frozen=True, slots=True)
class _Level:
    """What a verdict needs."""

    alpha: float
    min_effect: float
    needed: float
    """The p-value below which a metric is significant, before it is adjusted for groups of metrics and looks."""
    miss: float


def judge(samples: Sequence[Sample], *, alpha: float, min_effect: float, looks: int = 1) -> list[MetricComparison]:
    """Return a row per sample, in order.

    Args:
        samples: the metrics.
        alpha: chance of any false verdict among them.
        min_effect: smallest change that matters.
        looks: how often such a comparison is made of growing data; the chances hold for all looks together.
    """
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index, sample in enumerate(samples):
        if _testable(sample):
            # the same units, in the same order
            groups[sample.unit, sample.paired, len(sample.before), len(sample.after)].append(index)
    times = max(len(groups), 1) * looks
    level = _Level(alpha, min_effect, alpha / times, MISS / looks)
    found: dict[int, _Tested] = {}
    for members in groups.values():
        kind, p_values = _test([samples[index] for index in members])
        for index, p in zip(members, p_values, strict=True):
            words = f"{kind}, {samples[index].sizes}"
            found[index] = _Tested(min(1.0, p * times), _shift(samples[index], level.miss), words)
    return [_row(sample, found.get(index), level) for index, sample in enumerate(samples)]


def _row(sample: Sample, tested: _Tested | None, level: _Level) -> MetricComparison:
    verdict, reason = _verdict(sample, tested, level)
    if tested is None:
        return MetricComparison(sample, None, None, None, None, "", verdict, reason)
    # no number is larger than e to the power of 709
    back: Callable[[float], float] = (lambda edge: math.expm1(min(edge, 709))) if sample.scale == "relative" else float
    effect, low, high = (None if edge is None or math.isnan(edge) else back(edge) for edge in tested.shift)
    return MetricComparison(sample, effect, low, high, tested.p, tested.test, verdict, reason)


def _testable(sample: Sample) -> bool:
    if sample.metric.better is None or sample.refused is not None:
        return False
    return min(side.n for side in sample.moments) >= 2


def _test(samples: Sequence[Sample]) -> tuple[str, list[float]]:
    """Return the test of a group of metrics by name, and their p-values."""
    sample = samples[0]
    if sample.paired:
        differences = [np.array(one.differences()) for one in samples]
        scores = [values if sample.by_episode else tests.clip(values) for values in differences]
        return "sign flips", tests.sign_flip_p([values.tolist() for values in scores])
    pooled = [np.concatenate(one.on_scale()) for one in samples]
    scores = [values if sample.by_episode else tests.clip(values - np.median(values)) for values in pooled]
    cut = len(sample.before)
    return "relabeling", tests.relabel_p([s[:cut].tolist() for s in scores], [s[cut:].tolist() for s in scores])


def _shift(sample: Sample, miss: float) -> Shift:
    """Return the change with its interval: of the mean of episodes, of the median of other units."""
    one, other = sample.moments
    if sample.by_episode and sample.scale == "points":
        if not sample.paired:
            first, second = ((round(side.mean * side.n), side.n) for side in (one, other))
            return tests.rate_shift(first, second, miss)
        changes = sample.differences()
        lost, gained = sum(change < 0 for change in changes), sum(change > 0 for change in changes)
        return tests.rate_shift((lost, one.n), (gained, one.n), miss)
    if sample.by_episode:
        sides = (Moments(0.0, 0.0, one.n), Moments.of(sample.differences())) if sample.paired else (one, other)
        return tests.mean_shift(*sides, miss).widen(_bound_unseen(sample, miss))
    paired = sample.paired
    found = tests.measure_paired_shift(sample.differences(), miss) if paired else tests.shift(*sample.on_scale(), miss)
    tied = len({*sample.before, *sample.after}) < len(sample.before) + len(sample.after)
    return found.widen(_bound_unseen(sample, miss)) if tied and sample.metric.role == "outcome" else found


def _bound_unseen(sample: Sample, miss: float) -> float:
    """Return by how much outcomes that so few units may never have shown could move the change.

    Outcomes are taken to lie within the range that was seen or, if that is larger, between zero and what was seen.
    """
    one, other = sample.moments
    values = (*sample.before, *sample.after)
    largest = max(max(values) - min(values), abs(one.mean), abs(other.mean))
    shares = [tests.unseen(one.n, miss)] if sample.paired else [tests.unseen(side.n, miss) for side in (one, other)]
    return largest * sum(shares)


def _verdict(sample: Sample, tested: _Tested | None, level: _Level) -> tuple[Verdict | None, str]:
    metric = sample.metric
    if metric.better is None:
        return None, "neither direction is an improvement"
    if sample.refused is not None:
        return "inconclusive", sample.refused
    if tested is None:
        return "inconclusive", _too_few(sample)
    margin, shift = sample.margin(level.min_effect), tested.shift
    significant = tested.p < level.alpha
    size = f"{level.min_effect:.0%}"
    if shift.low is not None and shift.high is not None and -margin < shift.low and shift.high < margin:
        small = f"a change, but smaller than {size}" if significant else f"the whole interval is within ±{size}"
        return "unchanged", small
    if significant:
        improved = (shift.estimate > 0) == (metric.better == "higher")
        return ("improved" if improved else "regressed"), "significant, and not shown to be smaller than " + size
    return "inconclusive", _advice(sample, margin, level, size)


def _too_few(sample: Sample) -> str:
    if sample.unit == "runs":
        return "one run per side says nothing about the variation between runs; run 'headrace sweep … --repeats 10'"
    if sample.unit == "seeds":
        return "runs with the same settings and seed repeat one outcome; use several seeds per side"
    return f"too few {sample.unit}: {sample.sizes}"


def _advice(sample: Sample, margin: float, level: _Level, size: str) -> str:
    """Say why there is no verdict, and what to run instead."""
    if not margin:
        return f"every value is zero, so no change is small with {sample.sizes}; use more {sample.unit}"
    count = tests.units_needed(sample.spread(), margin, level.needed)
    still_open = f"a change of {size} can be neither shown nor ruled out with {sample.sizes}"
    if sample.by_episode:
        # episodes that are all alike have no spread to reckon with: then only more of them help
        return f"{still_open}; play about {max(count, 2 * min(side.n for side in sample.moments)):,} episodes per side"
    count = max(count, tests.least_units(level.needed, paired=sample.paired))
    if sample.unit != "runs":
        return f"{still_open}; use {count} {sample.unit} per side"
    if count > _MANY_RUNS:
        return (
            f"{still_open}: this machine is too busy, its runs vary by {sample.spread():.0%}; use a quieter one, "
            "longer runs, or compare processor time (--metrics 'runtime.cpu_*')"
        )
    return f"{still_open}; run 'headrace sweep … --repeats {count}'"


Difference = Literal["hardware", "task", "settings", "timing", "library"]
DIFFERENCES: tuple[Difference, ...] = get_args(Difference)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareCfg:
    """When a change counts."""

    min_effect: float = 0.05
    """The smallest change that matters: relative, for success rates in points. Changes whose whole interval is smaller
    are called unchanged. Ratios are judged alike both ways: ×1.05 and ÷1.05."""
    alpha: float = 0.01
    """Chance of any false verdict among the metrics of a comparison."""
    allow: Sequence[str] = ()
    """In what the sides may differ: ``hardware``, ``task``, ``settings``, ``timing``, ``library``."""
    metrics: Sequence[str] = ()
    """Patterns of the metrics to compare, such as ``runtime.*``; all if empty. Fewer metrics need fewer runs."""
    accept_drift: bool = False
    """Judge times although the order of the runs was not drawn at random, or a warm-up did not become steady."""
    looks: int = 1
    """How often growing data are compared until they decide; the chances hold for all looks together."""

    def __post_init__(self) -> None:
        if not self.min_effect > 0:
            raise ConfigError(f"--min-effect: expected a share above 0, such as 0.05, got {self.min_effect}")
        if not 0 < self.alpha < 1:
            raise ConfigError(f"--alpha: expected a chance between 0 and 1, got {self.alpha}")
        object.__setattr__(self, "allow", frozenset(self.allow))
        for name in set(self.allow).difference(DIFFERENCES):
            raise UnknownNameError("difference for --allow:", name, DIFFERENCES)


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

    def __rich__(self) -> Table:
        """Return what ``rich`` prints of it."""
        from headrace.bench.comparing import table

        return table(self)


def compare(before: Sequence[Bundle], after: Sequence[Bundle], cfg: CompareCfg | None = None) -> Comparison:
    """Compare two sets of runs of one kind. Runs that did not complete are left out, and named.

    Raises:
        ConfigError: the sides differ in something that ``cfg.allow`` does not name.
        DataError: a side has no completed run, a run twice, or runs of several kinds.
    """
    cfg = cfg or CompareCfg()
    notes: list[str] = []
    sides = [_usable(given, side, notes) for side, given in (("A", before), ("B", after))]
    runs = sides[0] + sides[1]
    _check_alike(runs, cfg.allow)
    notes += _circumstances(*sides)
    # a play ends with the environments that still have an episode: how many act says nothing of the batch
    frames = {None if isinstance(r, StartupBundle | PlayBundle) else r.runtime.steps_per_iteration for r in runs}
    per_frame = len(frames) > 1 or len({run.run.num_envs for run in runs}) > 1
    if per_frame:
        notes.append("the batches differ in size: times are per frame; memory and start-up are shown only")
    named = [find_metrics(side, per_frame=per_frame) for side in sides]
    known = named[0].keys() | named[1].keys()
    for pattern in cfg.metrics:
        if not fnmatch.filter(known, pattern):
            raise UnknownNameError("metric", pattern, known)
    chosen = known if not cfg.metrics else {path for p in cfg.metrics for path in fnmatch.filter(known, p)}
    first, second = ({path: metric for path, metric in side.items() if path in chosen} for side in named)
    arranged = Arrangement(sides[0], sides[1], notes, accept_drift=cfg.accept_drift, per_frame=per_frame)
    shared = [arranged.of(first[path]) for path in first if path in second]
    crashed = [sum(run.run.status == "crashed" for run in runs) for runs in (before, after)]
    return Comparison(
        kind=before[0].kind,
        task=sides[1][0].run.task,
        rows=judge(shared, alpha=cfg.alpha, min_effect=cfg.min_effect, looks=cfg.looks),
        only_before=[path for path in first if path not in second],
        only_after=[path for path in second if path not in first],
        runs=(len(sides[0]), len(sides[1])),
        notes=notes,
        failed_after=crashed[1] if not crashed[0] else 0,
    )


def _usable(runs: Sequence[Bundle], side: str, notes: list[str]) -> list[Bundle]:
    """Return the completed runs of a side; those that are not are named in ``notes``."""
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


def _check_alike(runs: Sequence[Bundle], allow: Iterable[str]) -> None:
    """Refuse runs whose numbers do not mean the same."""
    reference = _traits(runs[0])
    for run in runs[1:]:
        for difference, traits in _traits(run).items():
            if difference in allow or traits == reference[difference]:
                continue
            names = [name for name, value in traits.items() if value != reference[difference].get(name)]
            shown = "; ".join(f"{name}: {reference[difference].get(name)} and {traits[name]}" for name in names)
            raise ConfigError(
                f"compare: expected runs with the same {difference}, got {shown} "
                f"({runs[0].run.run_id} and {run.run.run_id}); pass --allow {difference} to compare them all the same"
            )


def _traits(bundle: Bundle) -> dict[Difference, dict[str, object]]:
    """Return what two runs must share for their numbers to mean the same."""
    run, hardware = bundle.run, bundle.hardware
    timing = None if isinstance(bundle, StartupBundle) else bundle.runtime.environment_step_timing
    settings: dict[str, object] = {"num_envs": run.num_envs, "max_iterations": run.max_iterations}
    if run.config.playing.get("strict_size"):  # then it changes when things are computed, not what comes of it
        del settings["num_envs"]
    settings |= run.config.model_dump()
    if isinstance(bundle, RuntimeBundle):
        settings["num_steps"] = bundle.runtime.iterations_completed
    if isinstance(bundle, TrainingBundle) and bundle.library is not None:
        settings["hyper-parameters"] = bundle.library.settings
    if isinstance(bundle, PlayBundle) and bundle.plan is not None:
        settings |= bundle.plan.model_dump(include={"kind", "num_steps", "max_episode_length"})
    if isinstance(bundle, (TrainingBundle, PlayBundle)):
        settings["filmed"] = bundle.video_path is not None
    return {
        "task": {"kind": bundle.kind, "task": run.task},
        "library": {"library": run.framework},
        "settings": settings,
        "timing": {"measurement_mode": None if timing is None else timing.measurement_mode},
        "hardware": {
            "cpu_name": hardware.cpu_name,
            "cpu_count": hardware.cpu_count,
            "cpu_usable": hardware.cpu_usable,
            "ram_gb": hardware.ram_gb and round(hardware.ram_gb),
            "cpu_governor": hardware.cpu_governor,
            "gpus": [gpu.name for gpu in hardware.gpu_devices],
        },
    }


def _circumstances(before: Sequence[Bundle], after: Sequence[Bundle]) -> list[str]:
    """Return what speaks against trusting the comparison."""
    notes: list[str] = []
    if {run.run.seed for run in before} != {run.run.seed for run in after}:
        notes.append("the sides used different seeds; give both the same")
    machines = [run.hardware for run in (*before, *after)]
    loads = [(machine.load_average or (0.0,))[0] / (machine.cpu_count or 1) for machine in machines]
    busy = sum(load > 1.0 for load in loads)
    if busy:
        notes.append(f"{busy} of {len(loads)} runs began on a machine with more work than cores")
    return notes
