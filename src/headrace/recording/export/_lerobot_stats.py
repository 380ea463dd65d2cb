"""LeRobot's statistics: per feature min, max, mean, std, count and quantiles, per episode and of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.recording.fields import Array

Numbers: TypeAlias = NDArray[np.float64]
Stats: TypeAlias = dict[str, Numbers]
"""min, max, mean, std, q01, q10, q50, q90, q99 in the feature's shape; count (1,)."""

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}


def vector_stats(values: Array) -> Stats:
    """Of numbers (T, …), per element; a feature without dimensions has shape (1,)."""
    rows = np.asarray(values, np.float64)
    if rows.ndim == 1:
        rows = rows[:, None]
    stats = {"min": rows.min(0), "max": rows.max(0), "mean": rows.mean(0), "std": rows.std(0)}
    stats |= zip(QUANTILES, np.quantile(rows, list(QUANTILES.values()), axis=0), strict=True)
    return stats | {"count": np.array([len(rows)], np.float64)}


def image_stats(pictures: NDArray[np.uint8]) -> Stats:
    """Of images (T, H, W, 3), per channel in the range 0 to 1, shape (3, 1, 1); exact, from a histogram of bytes."""
    levels = np.arange(256) / 255.0
    channels: list[Numbers] = []
    for channel in range(3):
        histogram = np.bincount(pictures[..., channel].reshape(-1), minlength=256)
        total, below = histogram.sum(), np.cumsum(histogram)
        present = np.flatnonzero(histogram)
        mean = (histogram * levels).sum() / total
        std = np.sqrt((histogram * (levels - mean) ** 2).sum() / total)
        at = [levels[np.searchsorted(below, share * total)] for share in QUANTILES.values()]
        channels.append(np.array([levels[present[0]], levels[present[-1]], mean, std, *at]))
    columns = np.array(channels).T.reshape(-1, 3, 1, 1)
    stats = dict(zip(("min", "max", "mean", "std", *QUANTILES), columns, strict=True))
    return stats | {"count": np.array([pictures.shape[0]], np.float64)}


def sample_rows(length: int) -> NDArray[np.int64]:
    """Return the frames of which LeRobot takes image statistics: all of a short episode, fewer of a long one."""
    fewest = min(100, length)
    count = max(fewest, min(int(length**0.75), 10_000))
    return np.round(np.linspace(0, length - 1, count)).astype(np.int64)


def combine(parts: Sequence[Mapping[str, Stats]]) -> dict[str, Stats]:
    """Statistics of all episodes from those of each.

    min, max, mean and std are those of all rows; quantiles are the average of the episodes', weighted by their rows, as
    LeRobot has them.
    """
    combined: dict[str, Stats] = {}
    for feature in parts[0]:
        each = [part[feature] for part in parts]
        counts = np.array([stats["count"][0] for stats in each])
        weights = (counts / counts.sum()).reshape(-1, *[1] * each[0]["mean"].ndim)
        means = np.stack([stats["mean"] for stats in each])
        mean = (weights * means).sum(0)
        spread = np.stack([stats["std"] ** 2 for stats in each]) + (means - mean) ** 2
        combined[feature] = {
            "min": np.min([stats["min"] for stats in each], axis=0),
            "max": np.max([stats["max"] for stats in each], axis=0),
            "mean": mean,
            "std": np.sqrt((weights * spread).sum(0)),
            "count": np.array([counts.sum()]),
        }
        for name in QUANTILES:
            combined[feature][name] = (weights * np.stack([stats[name] for stats in each])).sum(0)
    return combined
