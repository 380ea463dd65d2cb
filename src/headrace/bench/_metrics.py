"""A bundle as named numbers: one per run and metric, with unit and direction. Forms and comparisons read these.

A metric of your own needs no change here::

    @headrace.bench.register_metrics
    def grasp_force(bundle):
        value = bundle.extra.get("grasp_force")
        return [] if value is None else [Metric("play", "grasp_force", value, "N", "lower", role="outcome")]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias

from headrace.bench._schema import Bundle, PlayBundle, Resources, Runtime, StartupBundle, StartupTime, TrainingBundle
from headrace.bench._statistic import Better, Proportion, Statistic
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
        """The metric in a form that runs with different batch sizes can be compared by."""
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
    found = _built_in(bundle)
    for source in _SOURCES:
        taken = {metric.path for metric in found}
        for metric in source(bundle):
            if metric.path in taken:
                raise ConfigError(f"register_metrics: {metric.path!r} of {source} is taken; choose another name")
            found.append(metric)
    return found


def _built_in(bundle: Bundle) -> list[Metric]:
    if isinstance(bundle, StartupBundle):
        return _startup_phases(bundle)
    found = [
        *_startup(bundle.runtime.startup_time_s),
        *_runtime(bundle.runtime, bundle.run.num_envs),
        *_resources(bundle.resources),
    ]
    if isinstance(bundle, TrainingBundle):
        found += _training(bundle)
    if isinstance(bundle, PlayBundle):
        outcomes = [
            *_of("play", "reward", bundle.reward),
            *_of("play", "ep_length", bundle.ep_length),
            *_rate("play", "success_rate", bundle.success_rate),
        ]
        found += [metric._replace(role="outcome") for metric in outcomes]
    return found


def _startup_phases(bundle: StartupBundle) -> list[Metric]:
    found = [
        Metric("startup", name, phase.total_time_s, "s", "lower", scales=True) for name, phase in bundle.phases.items()
    ]
    if bundle.unprofiled_s is not None:
        found += [metric._replace(name=f"{metric.name}_unprofiled") for metric in _startup(bundle.unprofiled_s)]
    return found


def _startup(times: StartupTime) -> list[Metric]:
    spent: dict[str, float | None] = times.model_dump()
    return [
        Metric("startup", name, seconds, "s", "lower", scales=True)
        for name, seconds in spent.items()
        if seconds is not None
    ]


def _runtime(runtime: Runtime, num_envs: int | None) -> list[Metric]:
    found: list[Metric] = []
    if runtime.total_fps is not None:
        found.append(Metric("runtime", "total_fps", runtime.total_fps, "frames/s", "higher"))
    found.append(Metric("runtime", "total_wall_time_s", runtime.total_wall_time_s, "s", None))
    found += [
        metric._replace(frames=runtime.steps_per_iteration)
        for metric in _of("runtime", "iteration_time_s", runtime.iteration_time_s)
    ]
    timing = runtime.environment_step_timing
    if timing is not None:
        steps = [
            *_of("frametime", "environment_step_time_s", timing.environment_step_time_s),
            *_of("frametime", "simulation_step_time_s", timing.simulation_step_time_s),
            *_of("frametime", "render_step_time_s", timing.render_step_time_s),
            *_of("frametime", "task_step_time_s", timing.task_step_time_s),
        ]
        found += [metric._replace(frames=num_envs) for metric in steps]
    # a task without cameras has a rendering time of exactly 0 in every run: nothing to compare
    return [metric for metric in found if metric.value or metric.name != "render_step_time_s"]


def _resources(resources: Resources) -> list[Metric]:
    found = [*_of("runtime", "cpu_util_pct", resources.cpu_util_pct)]
    found += [*_of("runtime", "gpu_util_pct", resources.gpu_util_pct)]
    for name, memory in (("ram_gb", resources.ram_gb), ("gpu_mem_gb", resources.gpu_mem_gb)):
        if memory is not None:
            peak = memory.mean if memory.peak is None else memory.peak
            found.append(Metric("runtime", f"{name}_peak", peak, "GB", "lower", memory, role="memory", scales=True))
    return found


def _training(bundle: TrainingBundle) -> list[Metric]:
    found: list[Metric] = []
    if bundle.runtime.collection_fps is not None:
        found.append(Metric("train", "collection_fps", bundle.runtime.collection_fps, "frames/s", "higher"))
    split, frames = bundle.time_split_s, bundle.runtime.frames
    if split is not None and frames:
        found.append(Metric("train", "learning_s_per_kframe", 1000 * split.learning / frames, "s", "lower"))
    curves = bundle.learning
    if curves.reward is not None and curves.reward.final_ema is not None:
        found.append(Metric("train", "reward_final_ema", curves.reward.final_ema, None, "higher", role="outcome"))
    if curves.ep_length is not None and curves.ep_length.final_ema is not None:
        found.append(Metric("train", "ep_length_final_ema", curves.ep_length.final_ema, "steps", None, role="outcome"))
    found += [metric._replace(role="outcome") for metric in _rate("train", "success_rate", bundle.success_rate)]
    stop = bundle.early_stop
    if stop is not None and stop.enabled and bundle.run.resumed_from is None:  # else its clock began in the middle
        warmup = bundle.runtime.warmup
        seconds = bundle.runtime.total_wall_time_s + (0.0 if warmup is None else warmup.seconds)
        found.append(Metric("train", "time_to_success_s", seconds, "s", "lower", censored=not stop.reached))
    return found


def _of(phase: Phase, name: str, statistic: Statistic | None) -> list[Metric]:
    if statistic is None:
        return []
    return [Metric(phase, name, statistic.mean, statistic.unit, statistic.better, statistic)]


def _rate(phase: Phase, name: str, rate: Proportion | None) -> list[Metric]:
    return [] if rate is None else [Metric(phase, name, rate.rate, None, "higher", rate)]
