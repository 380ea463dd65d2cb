"""A metric over the commits at which it was measured, and where it changed."""

from __future__ import annotations

import fnmatch
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from headrace.bench.figures import Metric, metrics
from headrace.bench.schema import Bundle

USUAL = ("runtime.total_fps", "runtime.cpu_s_per_kframe", "train.reward_final_ema", "play.reward", "play.success_rate")
"""Metrics that are drawn where none is named."""
_DRAWS = 1_999


class History(NamedTuple):
    """One metric of runs that differ in nothing but their commit."""

    what: str
    """Kind, task and circumstances of the runs."""
    metric: Metric
    commits: list[str]
    """In the order in which they were first measured."""
    values: list[list[float]]
    """Of the runs of each commit."""
    changes: list[tuple[int, float]]
    """Index of the first commit that differs from those before it, and the change of the median as a share."""


def histories(bundles: Sequence[Bundle], patterns: Sequence[str], *, alpha: float, min_effect: float) -> list[History]:
    """Return the metrics that were measured at two commits or more.

    Args:
        bundles: of completed runs, with the commit of their project.
        patterns: of metrics.
        alpha: chance that a history without changes is given one.
        min_effect: smallest change that matters.
    """
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    first: dict[tuple[str, str], Metric] = {}
    for bundle in sorted(bundles, key=lambda bundle: bundle.run.start_time_utc):
        run, commit = bundle.run, bundle.versions.git_commit
        if commit is None or run.status != "completed":
            continue
        parts = (bundle.kind, run.task, run.framework, f"{run.num_envs} environments", bundle.hardware.cpu_name)
        what = ", ".join(filter(None, parts))
        for metric in metrics(bundle):
            if any(fnmatch.fnmatchcase(metric.path, pattern) for pattern in patterns or USUAL):
                key = (what, metric.path)
                first.setdefault(key, metric)
                commits = found.setdefault(key, {})
                commits.setdefault(commit + ("+" if bundle.versions.git_dirty else ""), []).append(metric.value)
    made: list[History] = []
    for (what, path), commits in found.items():
        if len(commits) > 1:
            values = list(commits.values())
            changes = change_points(values, alpha=alpha, min_effect=min_effect)
            made.append(History(what, first[what, path], list(commits), values, changes))
    return made


def change_points(
    groups: Sequence[Sequence[float]], *, alpha: float = 0.01, min_effect: float = 0.05, first: int = 0
) -> list[tuple[int, float]]:
    """Return where values change: the group that begins a new level, and the change of the median as a share.

    The groups are cut where two levels explain the values best. The cut stands if values in random order can rarely be
    cut as well, and both sides are then cut again: binary segmentation with a permutation test.
    """
    values = np.concatenate([np.asarray(group, dtype=np.float64) for group in groups])
    edges = np.cumsum([len(group) for group in groups])[:-1]
    if not len(edges) or not values.std():
        return []
    scores = _cut_scores(values[None], edges)[0]
    best = int(scores.argmax())
    shuffled = np.random.default_rng(0).permuted(np.tile(values, (_DRAWS, 1)), axis=1)
    p = (1 + int((_cut_scores(shuffled, edges).max(axis=1) >= scores[best] - 1e-12).sum())) / (_DRAWS + 1)
    before, after = (statistics.median(part) for part in np.split(values, [edges[best]]))
    change = (after - before) / abs(before) if before else float("inf")
    if p >= alpha or abs(change) < min_effect:
        return []
    cut = best + 1
    rest = {"alpha": alpha, "min_effect": min_effect}
    return [
        *change_points(groups[:cut], **rest, first=first),
        (first + cut, change),
        *change_points(groups[cut:], **rest, first=first + cut),
    ]


def _cut_scores(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return how far apart the means of (rows, n) values are on both sides of each edge, in their standard errors."""
    count = values.shape[1]
    left = values.cumsum(axis=1)[:, edges - 1]
    difference = left / edges - (values.sum(axis=1, keepdims=True) - left) / (count - edges)
    return np.abs(difference) * np.sqrt(edges * (count - edges) / count)
