"""Intervals and robust means, as pure functions on numpy arrays. Seeded: the same data gives the same interval."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigError

_Z_95 = 1.959963984540054
_AT_ONCE = 10**6
"""Numbers that a bootstrap draws in one go."""
_NORMAL_FROM = 20_000


class Interval(NamedTuple):
    """A point estimate with its 95 % interval."""

    value: float
    low: float
    high: float


def wilson_interval(successes: int, trials: int) -> Interval:
    """Success rate with Wilson's 95 % score interval; honest for few trials and for rates near 0 and 1."""
    if trials < 1 or not 0 <= successes <= trials:
        raise ConfigError(f"wilson_interval: expected 0 <= successes <= trials, trials >= 1, got {successes}/{trials}")
    rate = successes / trials
    z2 = _Z_95 * _Z_95
    scale = 1.0 / (1.0 + z2 / trials)
    center = (rate + z2 / (2 * trials)) * scale
    half = _Z_95 * math.sqrt(rate * (1 - rate) / trials + z2 / (4 * trials * trials)) * scale
    # at 0 and 1 the bound is the rate itself, but for rounding
    return Interval(rate, max(0.0, min(center - half, rate)), min(1.0, max(center + half, rate)))


def paired_interval(both: int, first: int, second: int, neither: int) -> Interval:
    """Return by how much the second of two success rates over the same trials is larger, with a 95 % interval.

    Newcombe's tenth method (1998): Wilson's intervals of both rates, joined by their correlation.

    Args:
        both: trials in which both succeed.
        first: trials in which the first alone does.
        second: trials in which the second alone does.
        neither: trials in which neither does.
    """
    trials = both + first + second + neither
    before, after = wilson_interval(both + first, trials), wilson_interval(both + second, trials)
    margins = (both + first) * (second + neither) * (both + second) * (first + neither)
    cross = both * neither - first * second
    cross = max(cross - trials / 2, 0.0) if cross > 0 else cross
    phi = cross / math.sqrt(margins) if margins else 0.0

    def reach(up: float, down: float) -> float:
        return math.sqrt(max(0.0, up * up - 2 * phi * up * down + down * down))

    change = after.value - before.value
    low = reach(after.value - after.low, before.high - before.value)
    high = reach(after.high - after.value, before.value - before.low)
    return Interval(change, change - low, change + high)


def bootstrap_interval(
    values: NDArray[np.float64], *, robust: bool = False, resamples: int = 2000, seed: int = 0
) -> Interval:
    """Mean (or, if ``robust``, interquartile mean) of (n,) values with a percentile bootstrap 95 % interval.

    From 20,000 values on it is the interval of the normal distribution: a bootstrap would give the same.
    """
    data = np.asarray(values, dtype=np.float64)
    count = len(data)
    if not count:
        raise ConfigError("bootstrap_interval: expected at least one value, got none")
    if count >= _NORMAL_FROM:
        middle = np.clip(data, *np.quantile(data, [0.25, 0.75])) if robust else data
        center = float(_middle_mean(data) if robust else data.mean())
        width = _Z_95 * float(middle.std()) / ((0.5 if robust else 1.0) * math.sqrt(count))
        return Interval(center, center - width, center + width)
    generator, estimates = np.random.default_rng(seed), np.empty(resamples)
    rows = max(1, _AT_ONCE // count)
    for first in range(0, resamples, rows):
        part = estimates[first : first + rows]
        sample = data[generator.integers(0, count, (len(part), count))]
        part[:] = _middle_mean(sample) if robust else sample.mean(axis=1)
    low, high = np.quantile(estimates, [0.025, 0.975])
    return Interval(float(_middle_mean(data) if robust else data.mean()), float(low), float(high))


def _middle_mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of the middle half of the last axis."""
    # value i covers the share [i, i + 1] / n of the distribution; its weight is what lies within [1/4, 3/4]
    edges = np.arange(values.shape[-1] + 1) / values.shape[-1]
    weights = np.clip(np.minimum(edges[1:], 0.75) - np.maximum(edges[:-1], 0.25), 0.0, None)
    return (np.sort(values) * weights).sum(axis=-1) / weights.sum()
