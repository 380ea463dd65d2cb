"""The verdict on each metric: a permutation test says whether it changed, its interval what can be ruled out.

A difference counts if it is significant and its interval is not wholly within what does not matter; it is ruled out if
the whole interval is, and that includes what so few units may have missed. Over all metrics of a comparison together,
the chance that equal sides are called different is at most ``alpha``. With few units there is no verdict: eight pairs
are the fewest that can differ at 1 %, six that can be unchanged.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from headrace.bench import _significance as tests
from headrace.bench._samples import Sample
from headrace.bench._significance import MISS, Moments, Shift

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
            groups[_group(sample, index)].append(index)
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
    back: Callable[[float], float] = math.expm1 if sample.scale == "relative" else float
    effect, low, high = (None if edge is None or math.isnan(edge) else back(edge) for edge in tested.shift)
    return MetricComparison(sample, effect, low, high, tested.p, tested.test, verdict, reason)


def _testable(sample: Sample) -> bool:
    if sample.metric.better is None or sample.refused is not None:
        return False
    return min(side.n for side in sample.moments) >= 2


def _group(sample: Sample, index: int) -> tuple[object, ...]:
    """Return what metrics share that are relabeled together: the same units, in the same order."""
    if sample.kept is not None or sample.censored is not None:
        return (index,)
    return (sample.unit, sample.paired, len(sample.before), len(sample.after))


def _test(samples: Sequence[Sample]) -> tuple[str, list[float]]:
    """Return the test of a group of metrics by name, and their p-values."""
    sample = samples[0]
    if sample.kept is not None:
        return "Welch's t-test", [tests.welch_p(*sample.kept)]
    if sample.censored is not None:
        scores = tests.gehan_scores((*sample.before, *sample.after), sample.censored)
        cut = len(sample.before)
        never = f"relabeling of Gehan's scores, {sum(sample.censored)} without success"
        return never, tests.relabel_p([scores[:cut].tolist()], [scores[cut:].tolist()])
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
    if sample.censored is not None:
        return Shift(math.nan, None, None)
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
        return tests.mean_shift(*sides, miss).widen(_unseen(sample, miss))
    found = tests.paired_shift(sample.differences(), miss) if sample.paired else tests.shift(*sample.on_scale(), miss)
    tied = len({*sample.before, *sample.after}) < len(sample.before) + len(sample.after)
    return found.widen(_unseen(sample, miss)) if tied and sample.metric.role == "outcome" else found


def _unseen(sample: Sample, miss: float) -> float:
    """Return by how much outcomes that so few units may never have shown could move the change.

    Outcomes are taken to lie within the range that was seen or, if that is larger, between zero and what was seen.
    """
    one, other = sample.moments
    values = (*sample.before, *sample.after)
    spread = max(values) - min(values) if values else 4 * max(one.std, other.std)
    largest = max(spread, abs(one.mean), abs(other.mean))
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
        higher = shift.estimate > 0 if sample.censored is None else _later(sample, sample.censored)
        improved = higher == (metric.better == "higher")
        return ("improved" if improved else "regressed"), "significant, and not shown to be smaller than " + size
    return "inconclusive", _advice(sample, margin, level, size)


def _later(sample: Sample, censored: Sequence[bool]) -> bool:
    """Whether the second side reached success later, or more rarely."""
    values = (*sample.before, *sample.after)
    known = [math.inf if never else value for value, never in zip(values, censored, strict=True)]
    first, second = known[: len(sample.before)], known[len(sample.before) :]
    return sum((b > a) - (b < a) for a in first for b in second) > 0


def _too_few(sample: Sample) -> str:
    if sample.unit == "runs":
        return "one run per side says nothing about the variation between runs; run 'headrace sweep … --repeats 10'"
    if sample.unit == "seeds":
        return "runs with the same settings and seed repeat one outcome; use several seeds per side"
    return f"too few {sample.unit}: {sample.sizes}"


def _advice(sample: Sample, margin: float, level: _Level, size: str) -> str:
    """Say why there is no verdict, and what to run instead."""
    if sample.censored is not None:
        return "the times to success overlap; use more runs per side"
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
