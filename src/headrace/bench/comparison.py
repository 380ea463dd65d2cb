"""Two sets of runs, metric by metric: improved, regressed, unchanged or inconclusive.

The design of the data arranges the values (``_samples``) and so chooses the test (``_verdicts``).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from headrace.bench._samples import Arrangement, named_metrics
from headrace.bench._verdicts import MetricComparison, Verdict, judge
from headrace.bench.schema import Bundle, Kind, PlayBundle, RuntimeBundle, StartupBundle, TrainingBundle
from headrace.errors import ConfigError, DataError, UnknownNameError

if TYPE_CHECKING:
    from rich.table import Table

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
    allow: Iterable[str] = ()
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
        from headrace.bench.comparison_output import table

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
    named = [named_metrics(side, per_frame=per_frame) for side in sides]
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
            told = "; ".join(f"{name}: {reference[difference].get(name)} and {traits[name]}" for name in names)
            raise ConfigError(
                f"compare: expected runs with the same {difference}, got {told} "
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
