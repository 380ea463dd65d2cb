"""Tests and intervals for two samples: of runs, of pairs of runs, of episodes. Pure functions, no scipy.

Every function takes plain numbers, one per independent unit; which units are independent is decided in ``_samples``.
Intervals are 95 %. A "shift" is how far the second sample lies above the first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_LEVEL = 0.95


class Shift(NamedTuple):
    """An estimate with its interval; the edges are None where there are too few values for one."""

    estimate: float
    low: float | None
    high: float | None


# --- two independent samples of runs ---


def rank_sum_p(first: Sequence[float], second: Sequence[float], *, censored: Sequence[bool] | None = None) -> float:
    """Two-sided p-value of the Mann-Whitney test, exact, ties included: the chance, if the labels were dealt out at
    random, of ranks as uneven as these.

    Args:
        first: values of the first sample.
        second: values of the second sample.
        censored: per value of ``first`` then ``second``, whether the true value is only known to be larger. Pairs whose
            order is unknown count as ties (Gehan's test).
    """
    pooled = np.concatenate([np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)])
    cut = np.zeros(len(pooled), dtype=bool) if censored is None else np.asarray(censored, dtype=bool)
    # larger[i, j]: value i is known to be larger than value j
    larger = (pooled[:, None] > pooled[None, :]) | (cut[:, None] & ~cut[None, :] & (pooled[:, None] >= pooled[None, :]))
    larger &= ~cut[None, :]
    scores = larger.sum(axis=1) - larger.sum(axis=0) + len(pooled) + 1  # without censoring: twice the middle rank
    chances = _sum_chances(tuple(sorted(int(score) for score in scores)), len(first))
    return _both_tails(chances, int(scores[: len(first)].sum()))


def least_runs(alpha: float) -> int:
    """Return the fewest runs per side with which the rank-sum test can give a p-value below ``alpha`` at all."""
    count = 2
    while 2.0 / math.comb(2 * count, count) >= alpha:
        count += 1
    return count


def shift(first: Sequence[float], second: Sequence[float]) -> Shift:
    """Return the median of all differences, with the interval of all shifts that the rank-sum test would not reject."""
    differences = np.sort(np.subtract.outer(np.asarray(second), np.asarray(first)).ravel())
    # a shift is kept if more differences than the largest rejected U lie on either side of it
    return _rank_interval(differences, _untied_chances(len(first), len(second)))


# --- pairs ---


def signed_rank_p(differences: Sequence[float]) -> float:
    """Two-sided p-value of Wilcoxon's signed-rank test, exact, ties included; differences of zero are left out."""
    values = np.asarray([value for value in differences if value], dtype=np.float64)
    if not len(values):
        return 1.0
    sizes = np.abs(values)
    _, inverse, counts = np.unique(sizes, return_inverse=True, return_counts=True)
    doubled = (2 * np.cumsum(counts) - counts + 1)[inverse]
    chances = _signed_chances(tuple(sorted(int(rank) for rank in doubled)))
    return _both_tails(chances, int(doubled[values > 0].sum()))


def least_signed_rank_p(pairs: int) -> float:
    """Return the smallest p-value that the signed-rank test of so many pairs can give at all."""
    return 2.0 ** (1 - pairs)


def signed_rank_shift(differences: Sequence[float]) -> Shift:
    """Return the median of all averages of two differences, with the interval that belongs to the signed-rank test."""
    values = np.asarray(differences, dtype=np.float64)
    averages = np.sort(np.add.outer(values, values)[np.triu_indices(len(values))] / 2)
    return _rank_interval(averages, _signed_chances(tuple(range(2, 2 * len(values) + 1, 2)))[::2])


def t_test_p(differences: Sequence[float]) -> float:
    """Two-sided p-value of the paired t-test."""
    mean, spread, count = Moments.of(differences)
    if spread <= 1e-12 * abs(mean) or not spread:
        return 1.0 if not mean else 0.0
    return t_tail(mean / (spread / math.sqrt(count)), count - 1)


def t_shift(differences: Sequence[float]) -> Shift:
    """Return the mean difference with the interval of the t-test."""
    mean, spread, count = Moments.of(differences)
    half = t_quantile(count - 1) * spread / math.sqrt(count)
    return Shift(mean, mean - half, mean + half)


# --- episodes ---


def mcnemar_p(gained: int, lost: int) -> float:
    """Two-sided exact p-value for paired successes: ``gained`` pairs succeed only in the second, ``lost`` only in the
    first sample."""
    total = gained + lost
    if not total:
        return 1.0
    ways = [math.comb(total, k) for k in range(min(gained, lost) + 1)]
    return min(1.0, 2.0 * sum(ways) / 2**total)


def paired_rate_shift(gained: int, lost: int, pairs: int) -> Shift:
    """Difference of two rates over the same episodes; interval of Agresti and Min (half a pair added to each cell)."""
    count = pairs + 2.0
    difference = (gained - lost) / count
    half = _Z * math.sqrt(max(0.0, (gained + lost + 1.0) / count - difference**2) / count)
    return Shift((gained - lost) / pairs, max(-1.0, difference - half), min(1.0, difference + half))


def fisher_p(first: tuple[int, int], second: tuple[int, int]) -> float:
    """Two-sided exact p-value for (successes, trials) of two samples: Fisher's test."""
    (a, n), (b, m) = first, second
    total = a + b

    def log_chance(k: int) -> float:
        return _log_choose(n, k) + _log_choose(m, total - k) - _log_choose(n + m, total)

    observed = log_chance(a)
    possible = range(max(0, total - m), min(n, total) + 1)
    return min(1.0, sum(math.exp(c) for c in map(log_chance, possible) if c <= observed + 1e-9))


def rate_shift(first: tuple[int, int], second: tuple[int, int]) -> Shift:
    """Difference of two rates of (successes, trials); interval of Newcombe, from Wilson's intervals."""
    from headrace.statistics import wilson_interval

    one, other = wilson_interval(*first), wilson_interval(*second)
    difference = other.value - one.value
    down = math.hypot(other.value - other.low, one.high - one.value)
    up = math.hypot(other.high - other.value, one.value - one.low)
    return Shift(difference, difference - down, difference + up)


class Moments(NamedTuple):
    """Mean, standard deviation and number of values of a sample."""

    mean: float
    std: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Moments:
        """Of values; the deviation of fewer than two is 0, and the mean of none NaN."""
        data = np.asarray(values, dtype=np.float64)
        if not len(data):
            return cls(math.nan, 0.0, 0)
        return cls(float(data.mean()), float(data.std(ddof=1)) if len(data) > 1 else 0.0, len(data))


def welch(first: Moments, second: Moments) -> tuple[float, Shift]:
    """P-value and shift of the means of two independent samples of different spread."""
    parts = [sample.std**2 / sample.n for sample in (first, second)]
    error = math.sqrt(sum(parts))
    difference = second.mean - first.mean
    if not error:
        return (1.0 if not difference else 0.0), Shift(difference, difference, difference)
    degrees = sum(parts) ** 2 / sum(
        part**2 / (sample.n - 1) for part, sample in zip(parts, (first, second), strict=True)
    )
    half = t_quantile(degrees) * error
    return t_tail(difference / error, degrees), Shift(difference, difference - half, difference + half)


# --- many metrics, and how many runs they take ---


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted for their number: rejecting those below α, the chance of any false rejection is at most α."""
    count = len(p_values)
    order = sorted(range(count), key=lambda i: p_values[i])
    adjusted = [1.0] * count
    largest = 0.0
    for position, index in enumerate(order):
        largest = max(largest, min(1.0, (count - position) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def runs_needed(spread: float, effect: float, alpha: float, power: float = 0.9) -> int:
    """Pairs (or runs per side, ``spread`` being that of a difference of two runs) to show ``effect`` at level ``alpha``
    with the given power, and to rule it out where there is none."""
    if not spread:
        return 2
    normal = NormalDist()
    z = normal.inv_cdf(1 - alpha / 2) + normal.inv_cdf(power)
    return math.ceil((z * spread / effect) ** 2) + 2  # two for the t distribution's longer tails


# --- distributions ---


def t_tail(t: float, degrees: float) -> float:
    """Two-sided tail of Student's distribution."""
    return _incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t))


@functools.lru_cache(maxsize=256)
def t_quantile(degrees: float) -> float:
    """Return what |t| exceeds in 5 % of cases."""
    low, high = 0.0, 1e4
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, degrees) > 1 - _LEVEL else (low, middle)
    return high


_Z = NormalDist().inv_cdf((1 + _LEVEL) / 2)


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularized, by Lentz's continued fraction."""
    if x <= 0.0 or x >= 1.0:
        return min(max(x, 0.0), 1.0)
    if x > (a + 1) / (a + b + 2):
        return 1.0 - _incomplete_beta(b, a, 1.0 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    tiny = 1e-300
    c, d = 1.0, 1.0 / max(1.0 - (a + b) * x / (a + 1), tiny)
    fraction = d
    for m in range(1, 500):
        for factor in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 + factor * d
            c = 1.0 + factor / c
            d = 1.0 / (d if abs(d) > tiny else tiny)
            c = c if abs(c) > tiny else tiny
            fraction *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return front * fraction / a


def _both_tails(chances: NDArray[np.float64], observed: int) -> float:
    return min(1.0, 2.0 * min(float(chances[: observed + 1].sum()), float(chances[observed:].sum())))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _rank_interval(ordered: NDArray[np.float64], chances: NDArray[np.float64]) -> Shift:
    """Median of ordered candidates, and the ones that a rank test with these chances does not reject."""
    rejected = int((2.0 * np.cumsum(chances) <= 1.0 - _LEVEL + 1e-12).sum())
    estimate = float(np.median(ordered))
    if not rejected:
        return Shift(estimate, None, None)
    return Shift(estimate, float(ordered[rejected - 1]), float(ordered[-rejected]))


@functools.lru_cache(maxsize=256)
def _sum_chances(scores: tuple[int, ...], size: int) -> NDArray[np.float64]:
    """Chance of each sum of ``size`` of the scores drawn without replacement; index: the sum."""
    total = sum(scores)
    # ways[k, s]: subsets of k of the scores seen so far with sum s; floats hold these counts to 15 digits
    ways = np.zeros((size + 1, total + 1))
    ways[0, 0] = 1.0
    for score in scores:
        ways[1:, score:] += ways[:-1, : total + 1 - score]
    return ways[size] / ways[size].sum()


@functools.lru_cache(maxsize=256)
def _signed_chances(doubled_ranks: tuple[int, ...]) -> NDArray[np.float64]:
    """Chance of each sum of the ranks whose sign is positive; index: the sum (of doubled ranks)."""
    chances = np.zeros(sum(doubled_ranks) + 1)
    chances[0] = 1.0
    for rank in doubled_ranks:
        shifted = np.zeros_like(chances)
        shifted[rank:] = chances[: len(chances) - rank]
        chances = (chances + shifted) / 2
    return chances


@functools.lru_cache(maxsize=256)
def _untied_chances(n_first: int, n_second: int) -> NDArray[np.float64]:
    """Chance of each value of Mann-Whitney's U, from 0 to n·m, without ties."""
    count = n_first + n_second
    sums = _sum_chances(tuple(range(2, 2 * count + 1, 2)), n_first)[::2]
    least = n_first * (n_first + 1) // 2
    return sums[least : least + n_first * n_second + 1]
