"""Are two sets of runs different, and by how much? Rank statistics, exact for any number of runs. Pure functions.

One value a run: steps of one run are not independent of each other, so they are never pooled.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Shift(NamedTuple):
    """How far the second sample lies above the first."""

    estimate: float
    """Hodges-Lehmann: the median of all differences between a value of the second and one of the first."""
    low: float | None
    high: float | None
    """95 % interval that belongs to the rank test; None where there are too few values for one."""


def rank_sum_p(first: Sequence[float], second: Sequence[float]) -> float:
    """Two-sided p-value of the Mann-Whitney test, exact, ties included: the chance, if the labels were dealt out at
    random, of ranks as uneven as these."""
    pooled = np.concatenate([np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)])
    # doubled, so that the middle ranks of ties are whole numbers
    _, inverse, counts = np.unique(pooled, return_inverse=True, return_counts=True)
    upper = np.cumsum(counts)
    doubled = (2 * upper - counts + 1)[inverse]
    chances = _rank_sum_chances(tuple(sorted(int(rank) for rank in doubled)), len(first))
    observed = int(doubled[: len(first)].sum())
    below = float(chances[: observed + 1].sum())
    above = float(chances[observed:].sum())
    return min(1.0, 2.0 * min(below, above))


def least_p(n_first: int, n_second: int) -> float:
    """The smallest p-value that so many runs can give at all."""
    return 2.0 / math.comb(n_first + n_second, n_first)


def shift(first: Sequence[float], second: Sequence[float], *, level: float = 0.95) -> Shift:
    """How far ``second`` lies above ``first``, with the interval of all shifts that the rank test would not reject."""
    differences = np.sort(np.subtract.outer(np.asarray(second), np.asarray(first)).ravel())
    estimate = float(np.median(differences))
    chances = _untied_chances(len(first), len(second))
    below = np.cumsum(chances)
    rejected = int((2.0 * below <= 1.0 - level + 1e-12).sum())
    if not rejected:
        return Shift(estimate, None, None)
    # a shift is kept if more differences than the largest rejected U, rejected - 1, lie on either side of it
    return Shift(estimate, float(differences[rejected - 1]), float(differences[-rejected]))


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


@functools.lru_cache(maxsize=256)
def _rank_sum_chances(doubled_ranks: tuple[int, ...], size: int) -> NDArray[np.float64]:
    """Chance of each sum of ``size`` ranks drawn without replacement; index: the sum (of doubled ranks)."""
    total = sum(doubled_ranks)
    # ways[k, s]: subsets of k of the ranks seen so far with sum s; floats hold these counts to 15 digits
    ways = np.zeros((size + 1, total + 1))
    ways[0, 0] = 1.0
    for rank in doubled_ranks:
        ways[1:, rank:] += ways[:-1, : total + 1 - rank]
    return ways[size] / ways[size].sum()


@functools.lru_cache(maxsize=256)
def _untied_chances(n_first: int, n_second: int) -> NDArray[np.float64]:
    """Chance of each value of Mann-Whitney's U, from 0 to n·m, without ties."""
    count = n_first + n_second
    sums = _rank_sum_chances(tuple(range(2, 2 * count + 1, 2)), n_first)[::2]
    least = n_first * (n_first + 1) // 2
    return sums[least : least + n_first * n_second + 1]
