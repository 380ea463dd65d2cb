"""Two sets of runs, metric by metric: improved, regressed, unchanged or inconclusive.

The design of the data (``_design``) arranges the values (``_samples``) and so chooses the test (``_verdicts``).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.bench._alike import Difference, check_alike, circumstances, usable
from headrace.bench._metrics import Metric
from headrace.bench._samples import Arrangement, named_metrics
from headrace.bench._schema import Bundle, Kind, PlayBundle, StartupBundle
from headrace.bench._verdicts import MetricComparison, Verdict, judge
from headrace.errors import ConfigError, UnknownNameError


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
    sides = [usable(runs, side, notes) for side, runs in (("A", before), ("B", after))]
    everyone = sides[0] + sides[1]
    check_alike(everyone, cfg.allow)
    notes += circumstances(*sides)
    per_frame = len({(run.run.num_envs, _frames(run)) for run in everyone}) > 1
    if per_frame:
        notes.append("the batches differ in size: times are per frame; memory and start-up are shown only")
    first, second = (_chosen(named_metrics(side, per_frame=per_frame), cfg.metrics) for side in sides)
    for pattern in cfg.metrics:
        if not fnmatch.filter((*first, *second), pattern):
            known = {path for side in sides for path in named_metrics(side, per_frame=per_frame)}
            raise UnknownNameError("metric", pattern, known)
    arranged = Arrangement(sides[0], sides[1], notes, accept_drift=cfg.accept_drift, per_frame=per_frame)
    shared = [arranged.of(first[path]) for path in first if path in second]
    crashed = [sum(run.run.status == "crashed" for run in runs) for runs in (before, after)]
    return Comparison(
        kind=before[0].kind,
        task=sides[1][0].run.task,
        rows=judge(shared, alpha=cfg.alpha, min_effect=cfg.min_effect),
        only_before=[path for path in first if path not in second],
        only_after=[path for path in second if path not in first],
        runs=(len(sides[0]), len(sides[1])),
        notes=notes,
        failed_after=crashed[1] if not crashed[0] else 0,
    )


def _frames(run: Bundle) -> int | None:
    # a play ends with the environments that still have an episode: how many act says nothing of the batch
    return None if isinstance(run, StartupBundle | PlayBundle) else run.runtime.steps_per_iteration


def _chosen(side: dict[str, Metric], patterns: tuple[str, ...]) -> dict[str, Metric]:
    if not patterns:
        return side
    return {path: metric for path, metric in side.items() if any(fnmatch.fnmatchcase(path, p) for p in patterns)}
