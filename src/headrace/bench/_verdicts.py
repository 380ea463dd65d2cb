"""The verdict on each metric: which test its sample gets, and what its interval allows to say.

A difference counts if it is significant and its interval is not wholly within what does not matter; it is ruled out if
the whole interval is. Over all metrics of a comparison together, the chance that equal sides are called different is at
most ``alpha``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from headrace.bench import _significance as tests
from headrace.bench._samples import Sample
from headrace.bench._significance import Shift
from headrace.statistics import bootstrap_interval

Verdict = Literal["improved", "regressed", "unchanged", "inconclusive"]
_FEW_EPISODES = 20


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
    """The test and its units, such as ``signed-rank test, 12 pairs of runs``; empty where nothing was tested."""
    verdict: Verdict | None
    """None for metrics of which neither direction is an improvement."""
    reason: str

    @property
    def path(self) -> str:
        """``phase.name`` of the metric."""
        return self.sample.metric.path


class _Tested(NamedTuple):
    p: float
    shift: Shift
    """On the scale of the test."""
    test: str


def judge(samples: Sequence[Sample], *, alpha: float, min_effect: float) -> list[MetricComparison]:
    """Return a row per sample, in order.

    Args:
        samples: the metrics.
        alpha: chance of any false verdict among them.
        min_effect: smallest change that matters.
    """
    testable = [_testable(sample) for sample in samples]
    needed = alpha / max(sum(testable), 1)
    found = [_test(sample, needed) if can else None for sample, can in zip(samples, testable, strict=True)]
    adjusted = iter(tests.holm([tested.p for tested in found if tested is not None]))
    rows: list[MetricComparison] = []
    for sample, tested in zip(samples, found, strict=True):
        p = None if tested is None else next(adjusted)
        test, edges = ("", (None, None, None)) if tested is None else (tested.test, tested.shift)
        verdict, reason = _verdict(sample, tested, p, needed, alpha, min_effect)
        back: Callable[[float], float] = math.expm1 if sample.scale == "relative" else float
        effect, low, high = (None if edge is None or math.isnan(edge) else back(edge) for edge in edges)
        rows.append(MetricComparison(sample, effect, low, high, p, test, verdict, reason))
    return rows


def _testable(sample: Sample) -> bool:
    if sample.metric.better is None or sample.refused is not None:
        return False
    fewest = 3 if sample.paired and not sample.by_episode else 2
    return min(side.n for side in sample.moments) >= fewest


def _test(sample: Sample, needed: float) -> _Tested:
    if sample.by_episode:
        return _paired_episodes(sample) if sample.paired else _episodes(sample)
    first, second = sample.on_scale()
    if sample.censored is not None:
        p = tests.rank_sum_p(first, second, censored=sample.censored)
        never = f"{sum(sample.censored)} without success"
        return _Tested(p, Shift(math.nan, None, None), f"Gehan's rank test, {sample.sizes}, {never}")
    if not sample.paired:
        shift = tests.shift(first, second)
        return _Tested(tests.rank_sum_p(first, second), shift, f"rank-sum test, {sample.sizes}")
    differences = sample.differences()
    # with few pairs the signed-rank test cannot reach the level at all; the t-test can, at the cost of an assumption
    if tests.least_signed_rank_p(len(differences)) < needed:
        shift = tests.signed_rank_shift(differences)
        return _Tested(tests.signed_rank_p(differences), shift, f"signed-rank test, {sample.sizes}")
    return _Tested(tests.t_test_p(differences), tests.t_shift(differences), f"paired t-test, {sample.sizes}")


def _paired_episodes(sample: Sample) -> _Tested:
    differences = sample.differences()
    count = f"{len(differences):,} paired episodes"
    if sample.scale == "points":
        gained, lost = sum(change > 0 for change in differences), sum(change < 0 for change in differences)
        shift = tests.paired_rate_shift(gained, lost, len(differences))
        return _Tested(tests.mcnemar_p(gained, lost), shift, f"McNemar's test, {count}")
    p = tests.t_test_p(differences)
    if len(differences) < _FEW_EPISODES:
        return _Tested(p, tests.t_shift(differences), f"paired t-test, {count}")
    return _Tested(p, Shift(*bootstrap_interval(np.array(differences))), f"paired t-test and bootstrap, {count}")


def _episodes(sample: Sample) -> _Tested:
    before, after = sample.moments
    if sample.scale == "points":
        one, other = ((round(side.mean * side.n), side.n) for side in (before, after))
        return _Tested(tests.fisher_p(one, other), tests.rate_shift(one, other), f"Fisher's exact test, {sample.sizes}")
    return _Tested(*tests.welch(before, after), f"Welch's t-test, {sample.sizes}")


def _verdict(
    sample: Sample, tested: _Tested | None, p: float | None, needed: float, alpha: float, min_effect: float
) -> tuple[Verdict | None, str]:
    metric = sample.metric
    if metric.better is None:
        return None, "neither direction is an improvement"
    if sample.refused is not None:
        return "inconclusive", sample.refused
    if tested is None or p is None:
        return "inconclusive", _too_few(sample)
    margin, shift = sample.margin(min_effect), tested.shift
    significant = p < alpha
    size = f"{min_effect:.0%}"
    if shift.low is not None and shift.high is not None and -margin < shift.low and shift.high < margin:
        small = f"a change, but smaller than {size}" if significant else f"the whole interval is within ±{size}"
        return "unchanged", small
    if significant:
        higher = shift.estimate > 0 if sample.censored is None else _later(sample, sample.censored)
        improved = higher == (metric.better == "higher")
        return ("improved" if improved else "regressed"), "significant, and not shown to be smaller than " + size
    return "inconclusive", _advice(sample, margin, needed, size)


def _later(sample: Sample, censored: Sequence[bool]) -> bool:
    """Whether the second side reached success later, or more rarely."""
    values = (*sample.before, *sample.after)
    known = [math.inf if never else value for value, never in zip(values, censored, strict=True)]
    first, second = known[: len(sample.before)], known[len(sample.before) :]
    return sum((b > a) - (b < a) for a in first for b in second) > 0


def _too_few(sample: Sample) -> str:
    if sample.unit == "runs":
        alone = min(len(sample.before), len(sample.after)) < 2
        why = "one run per side says nothing about the variation between runs" if alone else "too few pairs of runs"
        return f"{why}; run 'headrace sweep … --repeats 10'"
    if sample.unit == "seeds":
        return "runs with the same settings and seed repeat one outcome; use several seeds per side"
    return f"too few {sample.unit}: {sample.sizes}"


def _advice(sample: Sample, margin: float, needed: float, size: str) -> str:
    """Why nothing can be said, and what to run instead."""
    if sample.censored is not None:
        return "the times to success overlap; use more runs per side"
    count = tests.runs_needed(sample.spread(), margin, needed)
    open_still = f"a change of {size} can be neither shown nor ruled out"
    if sample.by_episode:
        # episodes that are all alike have no spread to reckon with: then only more of them tell
        return f"{open_still}; play about {max(count, 2 * min(side.n for side in sample.moments)):,} episodes per side"
    if not sample.paired:
        count = max(count, tests.least_runs(needed))
    what = f"use {count} {sample.unit} per side"
    if sample.unit == "runs":
        what = f"run 'headrace sweep … --repeats {count}'"
    return f"{open_still} with {sample.sizes}; {what}"
