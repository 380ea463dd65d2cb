"""A bundle as named numbers: one per run and metric, with unit and direction; and as a box of them to read. Forms and
comparisons read the numbers.

A metric of your own needs no change here::

    @headrace.bench.figures.register_metrics
    def grasp_force(bundle):
        value = bundle.extra.get("grasp_force")
        return [] if value is None else [Metric("play", "grasp_force", value, "N", "lower", role="outcome")]
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from rich import box
from rich.console import Console
from rich.table import Table

from headrace.bench.schema import (
    Better,
    Bundle,
    PlayBundle,
    Proportion,
    RuntimeBundle,
    StartupBundle,
    Statistic,
    TrainingBundle,
)
from headrace.errors import ConfigError

Phase = Literal["startup", "runtime", "train", "play", "frametime"]
Role = Literal["time", "memory", "outcome"]
"""What makes two runs differ: the machine (time, memory), or task, policy and seed alone (outcome)."""


class Metric(NamedTuple):
    """One number of one run."""

    phase: Phase
    name: str
    value: float
    unit: str | None
    better: Better | None
    """None: shown, but neither direction is an improvement."""
    spread: Statistic | Proportion | None = None
    """What the number is the mean, peak or rate of, within the run."""
    role: Role = "time"
    frames: int | None = None
    """For the time of a batch: its frames. Batches of different sizes are compared per frame."""
    scales: bool = False
    """Whether the number grows with the batch in a way that no division undoes (memory, start-up)."""
    censored: bool = False
    """The true value is only known to be larger: the run ended before."""

    @property
    def path(self) -> str:
        """``phase.name``, by which metrics of two runs are matched."""
        return f"{self.phase}.{self.name}"

    def per_frame(self) -> Metric:
        """Return the metric in a form that runs with different batch sizes can be compared by."""
        if self.frames is not None:
            return self._replace(name=f"{self.name}_per_frame", value=self.value / self.frames, frames=None)
        return self._replace(better=None) if self.scales else self


MetricSource: TypeAlias = Callable[[Bundle], Sequence[Metric]]
"""Reads metrics off a bundle; none where the bundle does not have them."""
_SOURCES: list[MetricSource] = []


def register_metrics(source: MetricSource) -> MetricSource:
    """Add metrics of your own to comparisons and to the forms that list metrics; also as a decorator."""
    if source not in _SOURCES:
        _SOURCES.append(source)
    return source


def metrics(bundle: Bundle) -> list[Metric]:
    """Every number of a bundle that can be compared, each idea once; what is null is left out."""
    if isinstance(bundle, StartupBundle):
        found = _startup({name: phase.total_time_s for name, phase in bundle.phases.items()})
        found += _startup(bundle.unprofiled_s.model_dump() if bundle.unprofiled_s else {}, "_unprofiled")
    else:
        found = _measured(bundle)
    for source in _SOURCES:
        taken = {metric.path for metric in found}
        for metric in source(bundle):
            if metric.path in taken:
                raise ConfigError(f"register_metrics: {metric.path!r} of {source} is taken; choose another name")
            found.append(metric)
    return found


def number(value: float, unit: str | None, *, percent: bool = False) -> str:
    """Return a value with its unit, for people; a dash for NaN."""
    if math.isnan(value):
        return "–"
    if percent:
        return f"{value:.1%}"
    if unit == "s":
        for factor, name in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
            if abs(value) * factor >= 0.1 or name == "µs":
                return f"{value * factor:.3f} {name}"
    digits = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return digits if unit is None else f"{digits} {unit}"


def _startup(spent: Mapping[str, float | None], suffix: str = "") -> list[Metric]:
    return [
        Metric("startup", name + suffix, seconds, "s", "lower", scales=True)
        for name, seconds in spent.items()
        if seconds is not None
    ]


def _measured(bundle: RuntimeBundle | TrainingBundle | PlayBundle) -> list[Metric]:
    runtime, resources = bundle.runtime, bundle.resources
    found = [
        *_startup(runtime.startup_time_s.model_dump()),
        *_number("runtime", "total_fps", runtime.total_fps, "frames/s", "higher"),
        *_number("runtime", "total_wall_time_s", runtime.total_wall_time_s, "s", None),
        *_spread("runtime", "iteration_time_s", runtime.iteration_time_s, frames=runtime.steps_per_iteration),
    ]
    timing = runtime.environment_step_timing
    for part in ("environment", "simulation", "render", "task") if timing is not None else ():
        name = f"{part}_step_time_s"
        steps = _spread("frametime", name, getattr(timing, name), frames=bundle.run.num_envs)
        # a task without cameras has a rendering time of exactly 0 in every run: nothing to compare
        found += [metric for metric in steps if metric.value or part != "render"]
    found += _spread("runtime", "cpu_util_pct", resources.cpu_util_pct)
    found += _spread("runtime", "gpu_util_pct", resources.gpu_util_pct)
    frames = runtime.frames
    if frames:
        for name, work, unit in (
            ("cpu_s_per_kframe", resources.cpu_s, "s"),
            ("instructions_per_kframe", resources.instructions, None),
        ):
            found += _number("runtime", name, work and 1000 * work / frames, unit, "lower")
    for name, memory in (("ram_gb", resources.ram_gb), ("gpu_mem_gb", resources.gpu_mem_gb)):
        if memory is not None:
            peak = memory.mean if memory.peak is None else memory.peak
            found.append(Metric("runtime", f"{name}_peak", peak, "GB", "lower", memory, role="memory", scales=True))
    if isinstance(bundle, TrainingBundle):
        found += _training(bundle)
    if isinstance(bundle, PlayBundle):
        for name in ("reward", "ep_length", "success_rate"):
            found += _spread("play", name, getattr(bundle, name), role="outcome")
    return found


def _training(bundle: TrainingBundle) -> list[Metric]:
    runtime, split = bundle.runtime, bundle.time_split_s
    reward, length = (curve and curve.final_ema for curve in (bundle.learning.reward, bundle.learning.ep_length))
    learning = 1000 * split.learning / runtime.frames if split is not None and runtime.frames else None
    found = [
        *_number("train", "collection_fps", runtime.collection_fps, "frames/s", "higher"),
        *_number("train", "learning_s_per_kframe", learning, "s", "lower"),
        *_number("train", "reward_final_ema", reward, None, "higher", role="outcome"),
        *_number("train", "ep_length_final_ema", length, "steps", None, role="outcome"),
        *_spread("train", "success_rate", bundle.success_rate, role="outcome"),
    ]
    stop = bundle.early_stop
    if stop is not None and stop.enabled and bundle.run.resumed_from is None:  # else its clock began in the middle
        seconds = runtime.total_wall_time_s + (0.0 if runtime.warmup is None else runtime.warmup.seconds)
        found.append(Metric("train", "time_to_success_s", seconds, "s", "lower", censored=not stop.reached))
    return found


def _number(
    phase: Phase, name: str, value: float | None, unit: str | None, better: Better | None, *, role: Role = "time"
) -> list[Metric]:
    return [] if value is None else [Metric(phase, name, value, unit, better, role=role)]


def _spread(
    phase: Phase, name: str, found: Statistic | Proportion | None, *, role: Role = "time", frames: int | None = None
) -> list[Metric]:
    """Return the mean of a statistic, or a rate."""
    if isinstance(found, Statistic):
        return [Metric(phase, name, found.mean, found.unit, found.better, found, role, frames)]
    return [] if found is None else [Metric(phase, name, found.rate, None, "higher", found, role, frames)]


_WIDTH = 100


def summary_text(bundle: Bundle) -> str:
    """Return the box as plain text."""
    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None, force_terminal=False)
    console.print(summary_table(bundle))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def summary_table(bundle: Bundle) -> Table:
    """Return the box as a table to print."""
    run = bundle.run
    title = f"{bundle.kind}: {run.task}, {run.num_envs or 0:,} environments, seed {run.seed}"
    table = Table(title=title, caption=_caption(bundle), box=box.ROUNDED, show_header=False)
    table.add_column(style="bold", overflow="fold")
    table.add_column(justify="right", overflow="fold")
    for name, value in _rows(bundle):
        table.add_row(name, value)
    return table


def _rows(bundle: Bundle) -> list[tuple[str, str]]:
    run = bundle.run
    rows = [("status", run.status if run.status_reason is None else f"{run.status} ({run.status_reason})")]
    rows += [(metric.path, _value(metric)) for metric in metrics(bundle)]
    if isinstance(bundle, StartupBundle):
        for phase, profile in bundle.phases.items():
            rows += [
                (f"  {phase}: {function.name}", f"{function.own_time_s:.3f} s own, {function.cum_time_s:.3f} s in all")
                for function in profile.top_functions[:3]
            ]
        return rows
    warmup = bundle.runtime.warmup
    if warmup is not None:
        judged = f"{warmup.steps} steps, {'steady' if warmup.steady else 'NOT steady'}"
        rows.append(("warm-up", warmup.rule if warmup.steady is None else judged))
    if isinstance(bundle, TrainingBundle) and bundle.checkpoint_path is not None:
        rows.append(("checkpoint", bundle.checkpoint_path))
    episodes = bundle.runtime.episodes
    if episodes is not None:
        rows.append(("episodes completed", f"{episodes.completed:,}"))
    rows += [("not sampled", problem) for problem in bundle.resources.problems]
    return rows


def _caption(bundle: Bundle) -> str:
    hardware, versions = bundle.hardware, bundle.versions
    git = "" if versions.git_commit is None else f", {versions.git_commit[:9]}{'+' if versions.git_dirty else ''}"
    load = "" if hardware.load_average is None else f", load {hardware.load_average[0]:.1f}"
    return f"{hardware.cpu_name}, {hardware.cpu_count} cores{load}; headrace {versions.headrace}{git}"


def _value(metric: Metric) -> str:
    spread = metric.spread
    if isinstance(spread, Proportion):
        around = "" if spread.interval is None else f" [{spread.interval.low:.1%}, {spread.interval.high:.1%}]"
        return f"{metric.value:.1%}{around}" + ("" if spread.n is None else f" of {spread.n:,}")
    shown = number(metric.value, metric.unit)
    if isinstance(spread, Statistic) and spread.percentiles is not None and metric.value == spread.mean:
        percentiles = spread.percentiles
        shown += f"  (median {number(percentiles.p50, metric.unit)}, p95 {number(percentiles.p95, metric.unit)})"
    return shown
