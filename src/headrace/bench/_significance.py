"""Permutation tests and intervals for two samples: of runs, of pairs of runs, of episodes. Pure functions, no scipy.

Every function takes plain numbers, one per independent unit; which units are independent is decided in ``_samples``.
If the labels of the sides were dealt out at random, or the sides are equal, every relabeling of the data was equally
likely: a p-value is the share of relabelings that look at least as uneven as what was seen, so it is exact and never
smaller than the number of relabelings allows. Several metrics of the same units are relabeled together, and the largest
statistic among them counts (max-T): their p-values hold for all of them at once.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MISS = 0.05
"""Chance that an interval misses what it is of, both ends together."""
_EXACT = 9_999
"""Relabelings up to which all of them are looked at; beyond, a seeded sample of them."""
_WORK = 4_000_000
"""Numbers that a sample of relabelings has."""
_CLIP = 3.0
_NORMAL = 1e5
"""Degrees of freedom from which the t distribution is taken to be the normal one."""


class Shift(NamedTuple):
    """How far the second sample lies above the first; the edges are None where there are too few values for them."""

    estimate: float
    low: float | None
    high: float | None

    def widen(self, by: float) -> Shift:
        """Return the shift with both edges moved outwards."""
        if self.low is None or self.high is None:
            return self
        return Shift(self.estimate, self.low - by, self.high + by)


class Moments(NamedTuple):
    """Mean, standard deviation and number of values of a sample."""

    mean: float
    std: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Moments:
        """Compute them; the deviation of fewer than two values is 0, and the mean of none NaN."""
        data = np.asarray(values, dtype=np.float64)
        if not len(data):
            return cls(math.nan, 0.0, 0)
        return cls(float(data.mean()), float(data.std(ddof=1)) if len(data) > 1 else 0.0, len(data))


# --- tests ---


def sign_flip_p(differences: Sequence[Sequence[float]]) -> list[float]:
    """Return two-sided p-values (metrics) of paired differences (metrics, pairs), adjusted for all metrics together.

    Exact if it was decided at random which unit of a pair is of which side, whatever the load was meanwhile.
    """
    scores = _unit_rows(np.asarray(differences, dtype=np.float64))
    return _share(scores, _sign_patterns(scores.shape[1]), 2 ** (scores.shape[1] - 1), scores.sum(axis=1))


def relabel_p(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> list[float]:
    """Return two-sided p-values (metrics) of two samples, (metrics, n) and (metrics, m), for all metrics together."""
    pooled = np.concatenate([np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)], axis=1)
    size, count = len(first[0]), pooled.shape[1]
    scores = _unit_rows(pooled - pooled.mean(axis=1, keepdims=True))
    return _share(scores, _labels(count, size), math.comb(count, size), scores[:, :size].sum(axis=1))


def least_p(first: int, second: int, *, paired: bool) -> float:
    """Return the smallest p-value that so many units can give at all."""
    return 2.0 ** (1 - first) if paired else min(1.0, 2 / math.comb(first + second, first))


def least_units(alpha: float, *, paired: bool) -> int:
    """Return the fewest pairs, or units per side, that can give a p-value below ``alpha``."""
    return next(count for count in itertools.count(2) if least_p(count, count, paired=paired) < alpha)


def clip(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Limit (n,) values to three times their median size, so that one disturbed run does not hide a change.

    The limit depends on sizes only, which relabeling keeps: the tests stay exact.
    """
    limit = _CLIP * float(np.median(np.abs(values)))
    return np.clip(values, -limit, limit) if limit else values


# --- intervals; ``miss`` is the chance that one misses, both ends together ---


def measure_paired_shift(differences: Sequence[float], miss: float = MISS) -> Shift:
    """Return the median of all averages of two differences, with the interval that the signed-rank test keeps."""
    values = np.asarray(differences, dtype=np.float64)
    averages = np.sort(np.add.outer(values, values)[np.triu_indices(len(values))] / 2)
    return _rank_interval(averages, _rank_sum_chances(len(values)), miss)


def shift(first: Sequence[float], second: Sequence[float], miss: float = MISS) -> Shift:
    """Return the median of all differences, with the interval of shifts that the rank-sum test would not reject."""
    differences = np.sort(np.subtract.outer(np.asarray(second), np.asarray(first)).ravel())
    return _rank_interval(differences, _rank_chances(len(first), len(second)), miss)


def mean_shift(first: Moments, second: Moments, miss: float = MISS) -> Shift:
    """Return the difference of two means with Welch's interval; of pairs, ``first`` is (0, 0, n)."""
    difference = second.mean - first.mean
    error = math.sqrt(first.std**2 / max(first.n, 1) + second.std**2 / max(second.n, 1))
    half = t_quantile(_welch_degrees(first, second), miss) * error if error else 0.0
    return Shift(difference, difference - half, difference + half)


def rate_shift(first: tuple[int, int], second: tuple[int, int], miss: float = MISS) -> Shift:
    """Return the difference of two rates, each (count, trials), from the exact interval of each.

    Of pairs, the rates are those of pairs that succeed only in the first and only in the second sample.
    """
    (one_low, one_high), (low, high) = (exact_rate_interval(*side, miss) for side in (first, second))
    return Shift(second[0] / second[1] - first[0] / first[1], low - one_high, high - one_low)


def exact_rate_interval(count: int, trials: int, miss: float = MISS) -> tuple[float, float]:
    """Return the interval of Clopper and Pearson: rates of which neither tail is below ``miss / 2``."""
    return _least_rate(count, trials, miss / 2), 1.0 - _least_rate(trials - count, trials, miss / 2)


def _least_rate(count: int, trials: int, tail: float) -> float:
    """Return the rate at which at least ``count`` successes in ``trials`` have chance ``tail``; 0 for no success."""
    if not count:
        return 0.0
    factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, trials + 1)))])
    k = np.arange(count, trials + 1)
    ways = factorials[-1] - factorials[k] - factorials[trials - k]

    def chance(rate: float) -> float:
        return float(np.exp(ways + k * math.log(rate) + (trials - k) * math.log1p(-rate)).sum())

    return _bisect(lambda rate: 0.0 < rate < 1.0 and chance(rate) < tail)


def unseen(count: int, miss: float = MISS) -> float:
    """Return the largest share of a population of which ``count`` draws show nothing with chance ``miss / 2``."""
    return 1.0 - (miss / 2) ** (1.0 / count)


def units_needed(spread: float, effect: float, alpha: float, power: float = 0.9) -> int:
    """Return the pairs (or units per side, ``spread`` being that of a difference of two) to show ``effect`` at level
    ``alpha`` with the given power, and to rule it out where there is none."""
    if not spread:
        return 2
    normal = NormalDist()
    z = normal.inv_cdf(1 - alpha / 2) + normal.inv_cdf(power)
    return math.ceil((z * spread / effect) ** 2) + 2  # two for the t distribution's longer tails


# --- distributions ---


@functools.lru_cache(maxsize=256)
def t_quantile(degrees: float, miss: float = MISS) -> float:
    """Return what |t| exceeds with chance ``miss``, by quadrature over its angle: t = sqrt(degrees) tan(angle)."""
    if degrees > _NORMAL:
        return NormalDist().inv_cdf(1 - miss / 2)
    angles = np.linspace(0.0, math.pi / 2, 200_001)
    density = np.cos(angles) ** (degrees - 1)
    beyond = np.cumsum((density[1:] + density[:-1])[::-1])[::-1]
    return math.sqrt(degrees) * math.tan(float(np.interp(-miss * beyond[0], -beyond, angles[:-1])))


def _welch_degrees(first: Moments, second: Moments) -> float:
    parts = [(sample.std**2 / sample.n, sample.n) for sample in (first, second) if sample.std]
    return sum(part for part, _ in parts) ** 2 / sum(part**2 / (n - 1) for part, n in parts) if parts else math.inf


def _bisect(below: Callable[[float], bool]) -> float:
    """Return where, within 0 to 1, ``below`` turns from true to false."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return high


@functools.lru_cache(maxsize=8)
def _sign_patterns(count: int) -> NDArray[np.float64]:
    """Return (count, patterns) signs: all of them, or a seeded sample."""
    if 2 ** (count - 1) > _EXACT:
        return 1.0 - 2.0 * np.random.default_rng(0).integers(0, 2, (count, _draws(count))).astype(np.float64)
    # flipping every sign leaves |sum| as it is: the last sign is kept
    bits = (np.arange(2 ** (count - 1))[None, :] >> np.arange(count)[:, None]) & 1
    return 1.0 - 2.0 * bits.astype(np.float64)


@functools.lru_cache(maxsize=8)
def _labels(count: int, size: int) -> NDArray[np.float64]:
    """Return (count, choices) ones where a unit is of the first side: all choices of ``size``, or a seeded sample."""
    if math.comb(count, size) > _EXACT:
        chosen = np.argsort(np.random.default_rng(0).random((_draws(count), count)), axis=1)[:, :size]
    else:
        chosen = np.array(list(itertools.combinations(range(count), size)))
    labels = np.zeros((len(chosen), count))
    np.put_along_axis(labels, chosen, 1.0, axis=1)
    return np.ascontiguousarray(labels.T)


def _draws(count: int) -> int:
    return max(1_999, min(_EXACT, _WORK // count))


def _unit_rows(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return rows of length 1, so that the statistics of several metrics are on one scale; rows of zeros stay."""
    lengths = np.linalg.norm(scores, axis=1, keepdims=True)
    return np.divide(scores, lengths, out=np.zeros_like(scores), where=lengths > 0)


def _share(
    scores: NDArray[np.float64], labels: NDArray[np.float64], possible: int, seen: NDArray[np.float64]
) -> list[float]:
    """Return per row the share of relabelings (columns of ``labels``) whose largest |sum| is at least that seen."""
    largest = np.abs(scores @ labels).max(axis=0)
    counts = (largest[None, :] >= np.abs(seen)[:, None] - 1e-9).sum(axis=1)
    drawn = labels.shape[1]
    # a sample of relabelings does not hold what was seen, which is one of them
    return [float(count / drawn if drawn == possible else (count + 1) / (drawn + 1)) for count in counts]


def _rank_interval(ordered: NDArray[np.float64], chances: NDArray[np.float64], miss: float) -> Shift:
    """Return the median of ordered candidates, and the edges of those that a test with these chances keeps."""
    rejected = int((2.0 * np.cumsum(chances) <= miss + 1e-12).sum())
    estimate = float(np.median(ordered))
    if not rejected:
        return Shift(estimate, None, None)
    return Shift(estimate, float(ordered[rejected - 1]), float(ordered[-rejected]))


@functools.lru_cache(maxsize=256)
def _rank_sum_chances(pairs: int) -> NDArray[np.float64]:
    """Return the chance of each sum of the ranks 1 … pairs whose sign is positive."""
    chances = np.zeros(pairs * (pairs + 1) // 2 + 1)
    chances[0] = 1.0
    for rank in range(1, pairs + 1):
        chances[rank:] += chances[: len(chances) - rank].copy()
    return chances / 2.0**pairs


@functools.lru_cache(maxsize=256)
def _rank_chances(first: int, second: int) -> NDArray[np.float64]:
    """Return the chance of each number of (first, second) pairs whose first value is the larger, ties aside."""
    # ways[k, u]: k of the ranks so far are of the first sample, with u smaller values of the second
    ways = np.zeros((first + 1, first * second + 1))
    ways[0, 0] = 1.0
    for rank in range(first + second):
        for k in range(min(rank + 1, first), 0, -1):
            others = rank - (k - 1)
            if others <= second:
                ways[k, others:] += ways[k - 1, : ways.shape[1] - others].copy()
    return ways[first] / ways[first].sum()
