"""A bundle as named numbers, as a box of them to read, and in the forms in which a result is written.

There is one number per run and metric, with unit and direction; forms and comparisons read the numbers. A metric of
your own needs no change here::

    @headrace.bench.figures.register_metrics
    def grasp_force(bundle):
        value = bundle.extra.get("grasp_force")
        return [] if value is None else [Metric("play", "grasp_force", value, "N", "lower", role="outcome")]

A run is written in any number of forms; among them is Isaac Lab's schema 1.3, which has no null where headrace has one:
a number that was not measured is written as 0.0 there, a text as "". Learning curves are the exception: a curve without
episodes is null, and so is an iteration without one.
"""

from __future__ import annotations

import io
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, cast

from rich import box
from rich.console import Console
from rich.table import Table

from headrace._named import load
from headrace.bench import schema
from headrace.bench.schema import (
    Better,
    Bundle,
    Kind,
    PlayBundle,
    Proportion,
    RuntimeBundle,
    StartupBundle,
    Statistic,
    TrainingBundle,
    bundle_text,
)
from headrace.errors import ConfigError, UnknownNameError
from headrace.files import hide_secrets, write_whole

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
        found = _define_measured(bundle)
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


Found: TypeAlias = float | Statistic | Proportion | None


def _startup(spent: Mapping[str, float | None], suffix: str = "") -> list[Metric]:
    found = [_number("startup", name + suffix, seconds, "s", "lower", scales=True) for name, seconds in spent.items()]
    return [metric for metrics in found for metric in metrics]


def _define_measured(bundle: RuntimeBundle | TrainingBundle | PlayBundle) -> list[Metric]:
    runtime, resources = bundle.runtime, bundle.resources
    found = [
        *_startup(runtime.startup_time_s.model_dump()),
        *_number("runtime", "total_fps", runtime.total_fps, "frames/s", "higher"),
        *_number("runtime", "total_wall_time_s", runtime.total_wall_time_s, "s", None),
        *_number("runtime", "iteration_time_s", runtime.iteration_time_s, frames=runtime.steps_per_iteration),
    ]
    timing = runtime.environment_step_timing
    for part in ("environment", "simulation", "render", "task") if timing is not None else ():
        name = f"{part}_step_time_s"
        steps = _number("frametime", name, getattr(timing, name), frames=bundle.run.num_envs)
        # a task without cameras has a rendering time of exactly 0 in every run: nothing to compare
        found += [metric for metric in steps if metric.value or part != "render"]
    found += _number("runtime", "cpu_util_pct", resources.cpu_util_pct)
    found += _number("runtime", "gpu_util_pct", resources.gpu_util_pct)
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
            found += _number("play", name, getattr(bundle, name), role="outcome")
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
        *_number("train", "success_rate", bundle.success_rate, role="outcome"),
    ]
    stop = bundle.early_stop
    if stop is not None and stop.reached and bundle.run.resumed_from is None:  # else its clock began in the middle
        seconds = runtime.total_wall_time_s + (0.0 if runtime.warmup is None else runtime.warmup.seconds)
        found += _number("train", "time_to_success_s", seconds, "s", "lower")
    return found


def _number(phase: Phase, name: str, found: Found, *known: Any, **more: Any) -> list[Metric]:
    """Return a number, the mean of a statistic, or a rate."""
    if isinstance(found, Statistic):
        return [Metric(phase, name, found.mean, found.unit, found.better, found, **more)]
    if isinstance(found, Proportion):
        return [Metric(phase, name, found.rate, None, "higher", found, **more)]
    return [] if found is None else [Metric(phase, name, found, *known, **more)]


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


Form: TypeAlias = tuple[str, Callable[[Bundle], str]]
"""What the name of the file has after the kind, such as ``_summary.txt``, and what makes its text of a bundle."""


def find_form(name: str) -> Form:
    """Return a form by name, or the function that ``module:function`` names; an unknown name is an error with the
    nearest."""
    _, colon, function = name.partition(":")
    if colon:
        return f"_{function}.txt", cast("Callable[[Bundle], str]", load(name, "--formatter"))
    if name not in FORMATTERS:
        raise UnknownNameError("formatter", name, FORMATTERS)
    return FORMATTERS[name]


def check_formatters(names: Sequence[str]) -> tuple[str, ...]:
    """Return formatter names, each once, in the order given; an unknown one is an error."""
    for name in names:
        find_form(name)
    return tuple(dict.fromkeys(names))


def output_path(formatter: str, kind: Kind, folder: Path) -> Path:
    """Where a formatter writes: the bundle to ``runtime.json``, other forms to names with a suffix."""
    return folder / f"{kind}{find_form(formatter)[0]}"


def write_formats(bundle: Bundle, names: Sequence[str], folder: Path) -> list[Path]:
    """Write a bundle in every form asked for, each file whole or not at all; returns the files."""
    paths = [output_path(name, bundle.kind, folder) for name in names]
    for name, path in zip(names, paths, strict=True):
        write_whole(path, hide_secrets(find_form(name)[1](bundle)))
    return paths


_WRITTEN = "1.3"
Fields = dict[str, Any]
_PACKAGES = {
    "warp": "warp-lang",
    "mjwarp": "mujoco-warp",
    "rsl_rl": "rsl-rl-lib",
    "rl_games": "rl-games",
    "skrl": "skrl",
    "sb3": "stable-baselines3",
}
_VERSIONS = (
    *("isaaclab", "isaacsim", "kit", "newton", "warp", "mjwarp", "torch", "rsl_rl", "rl_games", "skrl", "sb3"),
    *("git_commit", "git_branch", "git_dirty", "numpy", "isaaclab_newton", "isaaclab_physx", "isaaclab_ov"),
    *("isaaclab_tasks", "isaaclab_rl", "ovrtx", "ovphysx", "mujoco", "cuda_bindings", "usd_core", "isaaclab_release"),
)
"""Its fields of versions, in its order; those that headrace knows nothing of are null."""
_OF_RUN = {
    *("run_id", "framework", "config", "task", "seed", "start_time_utc", "end_time_utc", "duration_s", "status"),
    *("num_envs", "max_iterations"),
}
_NOTHING: Fields = {"mean": 0.0, "std": 0.0, "peak": None}


def isaaclab_text(bundle: schema.Bundle) -> str:
    """Return the bundle as Isaac Lab writes it."""
    return json.dumps(isaaclab_fields(bundle), indent=2, allow_nan=False) + "\n"


def isaaclab_fields(bundle: schema.Bundle) -> Fields:
    """Return the fields of schema 1.3, in its order."""
    about: Fields = {
        "run": _run(bundle),
        "versions": _versions(bundle.versions),
        "hardware": _hardware(bundle.hardware),
    }
    scalars = {name: value for name, value in bundle.extra.items() if isinstance(value, (bool, int, float, str))}
    end: Fields = {"extra": scalars or None, "schema_version": _WRITTEN}
    if isinstance(bundle, schema.StartupBundle):
        phases = {name: phase.model_dump() for name, phase in bundle.phases.items()}
        whitelist = bundle.config.whitelist
        config = {"top_n": bundle.config.top_n, "whitelist": None if whitelist is None else json.dumps(whitelist)}
        return {**about, "phases": phases, "config": config, **end}
    about |= {"runtime": _runtime(bundle.runtime), "resources": _resources(bundle.resources)}
    if isinstance(bundle, schema.RuntimeBundle):
        return {**about, **end}
    rate = {"success_rate": bundle.success_rate and bundle.success_rate.rate}
    if isinstance(bundle, schema.TrainingBundle):
        curves = {name: _curve(getattr(bundle.learning, name)) for name in ("reward", "ep_length", "success_rate")}
        about |= {"learning": {"ema_alpha": bundle.learning.ema_alpha, **curves}, **rate}
    else:
        about |= rate | {name: mean_std(getattr(bundle, name)) for name in ("reward", "ep_length")}
    return {**about, "checkpoint_path": bundle.checkpoint_path, "video_path": bundle.video_path, **end}


def mean_std(statistic: Statistic | None) -> Fields | None:
    """``MeanStd``: the mean, the sample standard deviation (0.0 for one sample) and the peak."""
    if statistic is None:
        return None
    return {"mean": statistic.mean, "std": statistic.std or 0.0, "peak": statistic.peak}


def _rate(rate: float | None, seconds: Statistic | None, amount: float | None) -> Fields:
    """Return an effective rate, with the spread of the rates of single samples around their own mean."""
    if rate is None or seconds is None or not amount:
        return _NOTHING | {"mean": rate or 0.0}
    rates = [amount / sample for sample in seconds.samples or () if sample > 0]
    fastest = seconds.minimum if seconds.minimum else None
    peak = max(rate, amount / fastest) if fastest else None
    return {"mean": rate, "std": statistics.stdev(rates) if len(rates) > 1 else 0.0, "peak": peak}


def _run(bundle: schema.Bundle) -> Fields:
    run = bundle.run
    physics = "newton_mjwarp" if run.config.physics_backend == "warp" else run.config.physics_backend
    return run.model_dump(include=_OF_RUN) | {
        "config": {
            "physics_backend": physics,
            "rendering_backend": run.config.rendering_backend or "none",
            "presets": list(run.config.presets),
        },
        "status": "interrupted" if run.status == "running" else run.status,
        "num_envs": None if isinstance(bundle, schema.StartupBundle) else run.num_envs,
    }


def _versions(versions: schema.Versions) -> Fields:
    """Its block of versions: a field per package it knows."""
    packages = versions.packages
    known = {name: packages.get(distribution) for name, distribution in _PACKAGES.items()}
    known |= versions.model_dump(include={"git_commit", "git_branch", "numpy", "mujoco"})
    known |= {"torch": versions.torch or "", "git_dirty": bool(versions.git_dirty)}
    known["isaaclab"] = packages.get("isaaclab", f"headrace {versions.headrace}")
    return {name: known.get(name) for name in _VERSIONS}


def _hardware(hardware: schema.Hardware) -> Fields:
    return {
        "hostname": hardware.hostname or "",
        "gpu_devices": [{**gpu.model_dump(), "compute_cap": gpu.compute_cap or ""} for gpu in hardware.gpu_devices],
        "cpu_name": hardware.cpu_name,
        "cpu_count": hardware.cpu_physical or hardware.cpu_count or 0,
        "ram_gb": hardware.ram_gb or 0.0,
    }


def _runtime(runtime: schema.Runtime) -> Fields:
    startup = runtime.startup_time_s.model_dump()
    step = runtime.environment_step_timing
    seconds, collecting = runtime.iteration_time_s, runtime.collection_time_s
    if collecting is None and step is not None and step.environment_step_calls == runtime.iterations_completed:
        collecting = step.environment_step_time_s
    return {
        "startup_time_s": startup
        | {name: startup[name] or 0.0 for name in ("app_launch", "env_creation", "first_step")},
        # those of the wall time next to it: that of a training leaves its first iteration out
        "iterations_completed": seconds.n if seconds and seconds.n else runtime.iterations_completed,
        "total_wall_time_s": runtime.total_wall_time_s,
        "steps_per_iteration": runtime.steps_per_iteration or 0,
        "iteration_time_s": mean_std(seconds) or _NOTHING,
        "collection_fps": _rate(runtime.collection_fps, collecting, runtime.steps_per_iteration),
        "total_fps": _rate(runtime.total_fps, seconds, runtime.steps_per_iteration),
        "iterations_per_s": _rate(runtime.iterations_per_s, seconds, 1),
        "environment_step_timing": None if step is None else _timing(step),
    }


def _timing(step: schema.EnvironmentStepTiming) -> Fields | None:
    """Its two modes are all or nothing: host_return has no breakdown, serialized_synchronized has a whole one."""
    frames = round(step.environment_step_fps * step.environment_step_time_s.mean)
    found: Fields = {
        "environment_step_time_s": mean_std(step.environment_step_time_s),
        "environment_step_fps": _rate(step.environment_step_fps, step.environment_step_time_s, frames),
        "simulation_step_time_s": None,
        "outside_simulation_step_time_s": None,
        "outside_simulation_step_fraction": None,
        "environment_step_calls": step.environment_step_calls,
        "simulation_step_calls": None,
        "measurement_mode": "host_return",
    }
    if step.measurement_mode == "host_return":
        return found
    physics, calls = step.simulation_step_time_s, step.simulation_step_calls
    if physics is None or not physics.mean or not calls:
        return None
    outside = max(step.environment_step_time_s.mean - physics.mean, 0.0)
    spread = mean_std(step.outside_simulation_step_time_s) or {"std": 0.0, "peak": None}
    return found | {
        "simulation_step_time_s": mean_std(physics),
        "outside_simulation_step_time_s": {**spread, "mean": outside},
        "outside_simulation_step_fraction": outside / step.environment_step_time_s.mean,
        "simulation_step_calls": calls,
        "measurement_mode": "serialized_synchronized",
    }


def _resources(resources: schema.Resources) -> Fields:
    """Use has no peak in its schema: it is 100 % somewhere."""
    found = {name: mean_std(getattr(resources, name)) or _NOTHING for name in schema.SAMPLED}
    return {name: value | {"peak": None} if name.endswith("_pct") else value for name, value in found.items()}


def _curve(curve: schema.LearningCurve | None) -> Fields | None:
    """Return a curve with null for iterations in which no episode ended; None where none ended at all."""
    if curve is None or curve.final_raw is None:
        return None
    return curve.model_dump(exclude={"series_ema"})


FORMATTERS: dict[str, Form] = {
    "schema": (".json", bundle_text),
    "isaaclab": ("_isaaclab.json", isaaclab_text),
    "summary": ("_summary.txt", summary_text),
}
"""Name as in ``--formatter`` → how it is written."""
