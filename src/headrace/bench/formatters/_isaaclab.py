"""Bundles as Isaac Lab's schema 1.2 has them, and the flat forms that its tools read: json, osmo and omniperf.

Its schema has no null where headrace has one: a number that was not measured is written as 0.0 there, a text as "".
"""

from __future__ import annotations

import itertools
import json
import statistics
from typing import Any

from headrace.bench import schema
from headrace.bench.schema import Statistic

_WRITTEN = "1.2"
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
_MODES: dict[schema.TimingMode, str] = {"host_return": "host_return", "synchronized": "serialized_synchronized"}
_NOTHING: Fields = {"mean": 0.0, "std": 0.0, "peak": None}
_STARTUP_NAMES = {
    "app_launch": "App Launch Time",
    "python_imports": "Python Imports Time",
    "task_config": "Task Creation and Start Time",
    "env_creation": "Scene Creation Time",
    "first_step": "Simulation Start Time",
}
_TYPES: dict[type, str] = {str: "string", int: "int", float: "float", bool: "int", type(None): "string"}
Measured = dict[str, tuple[float, str]]


def isaaclab_text(bundle: schema.Bundle) -> str:
    """Return the bundle as Isaac Lab 1.2 writes it."""
    return _dumped(isaaclab_fields(bundle), indent=2)


def isaaclab_fields(bundle: schema.Bundle) -> Fields:
    """Return the fields of schema 1.2, in its order."""
    about: Fields = {
        "run": _run(bundle),
        "versions": version_fields(bundle.versions),
        "hardware": _hardware(bundle.hardware),
    }
    scalars = {name: value for name, value in bundle.extra.items() if isinstance(value, (bool, int, float, str))}
    end: Fields = {"extra": scalars or None, "schema_version": _WRITTEN}
    if isinstance(bundle, schema.StartupBundle):
        phases = {name: phase.model_dump(exclude={"tree"}) for name, phase in bundle.phases.items()}
        whitelist = bundle.config.whitelist
        config = {"top_n": bundle.config.top_n, "whitelist": None if whitelist is None else json.dumps(whitelist)}
        return {**about, "phases": phases, "config": config, **end}
    about |= {"runtime": _runtime(bundle.runtime), "resources": _resources(bundle.resources)}
    if isinstance(bundle, schema.RuntimeBundle):
        return {**about, **end}
    rate = {"success_rate": bundle.success_rate and bundle.success_rate.rate}
    if isinstance(bundle, schema.TrainingBundle):
        curves = {name: _curve(getattr(bundle.learning, name)) for name in ("reward", "ep_length")}
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


def version_fields(versions: schema.Versions) -> Fields:
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
        "iterations_completed": runtime.iterations_completed,
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
        "measurement_mode": _MODES["synchronized"],
    }


def _resources(resources: schema.Resources) -> Fields:
    """Use has no peak in its schema: it is 100 % somewhere."""
    found = {name: mean_std(getattr(resources, name)) or _NOTHING for name in schema.SAMPLED}
    return {name: value | {"peak": None} if name.endswith("_pct") else value for name, value in found.items()}


def _curve(curve: schema.LearningCurve | None) -> Fields:
    """Fill iterations in which no episode ended with the value before them, the first ones with the first value."""
    if curve is None:
        return {"final_raw": 0.0, "final_ema": 0.0, "series_per_iter": None}
    series = curve.series_per_iter
    if series is not None:
        first = next((value for value in series if value is not None), 0.0)
        filled = itertools.accumulate(series, lambda last, value: last if value is None else value, initial=first)
        series = [*filled][1:]
    return {"final_raw": curve.final_raw or 0.0, "final_ema": curve.final_ema or 0.0, "series_per_iter": series}


def json_text(bundle: schema.Bundle) -> str:
    """Return a list of phases with ``measurements`` and ``metadata``; names have workflow and phase in front."""
    workflow = f"headrace_{bundle.kind}"
    phases = [
        {
            "phase_name": phase,
            "measurements": [
                {"name": f"{workflow} {phase} {name}", "value": value, "unit": unit, "type": "single"}
                for name, (value, unit) in measured.items()
            ],
            "metadata": [
                {"name": f"{workflow} {phase} {name}", "data": data, "type": _TYPES.get(type(data), "dict")}
                for name, data in {"phase": phase, **metadata}.items()
            ],
        }
        for phase, measured, metadata in _phases(bundle)
    ]
    return _dumped(phases)


def omniperf_text(bundle: schema.Bundle) -> str:
    """``{phase: {name: value}}``, metadata and measurements together."""
    return _dumped(
        {
            phase: {**metadata, **{name: value for name, (value, _) in measured.items()}}
            for phase, measured, metadata in _phases(bundle)
        }
    )


def osmo_text(bundle: schema.Bundle) -> str:
    """One flat object: metadata and measurements of all phases. Those of a start-up share their names, so the phase is
    in front of them."""
    flat: Fields = {}
    for phase, measured, metadata in _phases(bundle):
        front = f"{phase} " if isinstance(bundle, schema.StartupBundle) else ""
        flat |= metadata
        flat |= {f"{front}{name}": value for name, (value, _) in measured.items()}
    return _dumped(flat)


def _phases(bundle: schema.Bundle) -> list[tuple[str, Measured, Fields]]:
    info = [(phase, {}, metadata) for phase, metadata in _metadata(bundle).items()]
    return [*info, *((phase, measured, {}) for phase, measured in measurements(bundle).items() if measured)]


def measurements(bundle: schema.Bundle) -> dict[str, Measured]:
    """Phase → name → value and unit, by the names that Isaac Lab's forms have; times in milliseconds."""
    if isinstance(bundle, schema.StartupBundle):
        found: dict[str, Measured] = {}
        for name, phase in bundle.phases.items():
            found[name] = {"Wall Clock Time": (phase.total_time_s, "s")}
            for function in phase.top_functions:
                found[name] |= {
                    f"{function.name} Own Time": (function.own_time_s, "s"),
                    f"{function.name} Cumulative Time": (function.cum_time_s, "s"),
                    f"{function.name} Calls": (function.calls, "count"),
                }
        return found
    fields, times = isaaclab_fields(bundle), bundle.runtime.startup_time_s
    spent = {label: getattr(times, name) for name, label in _STARTUP_NAMES.items()}
    startup = {label: (1000.0 * seconds, "ms") for label, seconds in spent.items() if seconds is not None}
    if startup:
        startup["Total Start Time (Launch to Train)"] = (sum(value for value, _ in startup.values()), "ms")
    found = {"startup": startup, "runtime": _runtime_measured(fields["runtime"])}
    if isinstance(bundle, schema.RuntimeBundle):
        return found
    rate: Measured = {} if bundle.success_rate is None else {"success_rate": (bundle.success_rate.rate, "float")}
    if isinstance(bundle, schema.PlayBundle):
        reward = _spread("Reward", fields["reward"], "float")
        return found | {"play": reward | _spread("Episode Length", fields["ep_length"], "steps") | rate}
    train: Measured = {}
    for label, name in (("Reward", "reward"), ("Episode Length", "ep_length")):
        curve = fields["learning"][name]
        train |= {
            f"Last {label}": (curve["final_raw"], "float"),
            f"EMA {bundle.learning.ema_alpha:g} {label}": (curve["final_ema"], "float"),
        }
        if curve["series_per_iter"]:
            train[f"Max {label}s"] = (max(curve["series_per_iter"]), "float")
    return found | {"train": train | rate}


def _runtime_measured(runtime: Fields) -> Measured:
    timing = runtime["environment_step_timing"]
    synchronized = timing is not None and timing["measurement_mode"] == _MODES["synchronized"]
    prefix = "Serialized Diagnostic " if synchronized else ""
    found: Measured = {
        "Iterations Completed": (runtime["iterations_completed"], "count"),
        f"{prefix}Total Wall Time": (runtime["total_wall_time_s"], "s"),
        "Steps per Iteration": (runtime["steps_per_iteration"], "frames"),
        **_spread(f"{prefix}Iteration Time", runtime["iteration_time_s"], "ms", 1000.0),
        **_spread(f"{prefix}Collection FPS", runtime["collection_fps"], "FPS"),
        **_spread(f"{prefix}Total FPS", runtime["total_fps"], "FPS"),
    }
    if timing is not None:
        label = "Serialized Synchronized Environment Step FPS" if synchronized else "Environment Step Host-Return FPS"
        found |= _spread(label, timing["environment_step_fps"], "FPS")
    if timing is not None and synchronized:
        for label, name in (("Synchronized", "simulation"), ("Outside", "outside_simulation")):
            time = f"{label} Simulation Time per Environment Step"
            found |= _spread(time, timing[f"{name}_step_time_s"], "ms", 1000.0)
        found["Outside Simulation Step Fraction"] = (timing["outside_simulation_step_fraction"], "ratio")
    return found | _spread(f"{prefix}Iterations per Second", runtime["iterations_per_s"], "iterations/s")


def _spread(name: str, found: Fields | None, unit: str, scale: float = 1.0) -> Measured:
    if found is None:
        return {}
    measured = {f"Mean {name}": (found["mean"] * scale, unit), f"Std {name}": (found["std"] * scale, unit)}
    return measured if found["peak"] is None else measured | {f"Max {name}": (found["peak"] * scale, unit)}


def _metadata(bundle: schema.Bundle) -> dict[str, Fields]:
    run, hardware, versions = bundle.run, bundle.hardware, bundle.versions
    about: Fields = {
        "workflow_name": f"headrace_{bundle.kind}",
        "timestamp": run.start_time_utc,
        **{name: getattr(run, name) for name in ("task", "seed", "num_envs", "max_iterations")},
        "rl_library": run.framework,
        "status": run.status,
    }
    step = None if isinstance(bundle, schema.StartupBundle) else bundle.runtime.environment_step_timing
    if step is not None:
        about["environment_step_measurement_mode"] = _MODES[step.measurement_mode]
    machine: Fields = {
        "cpu_name": hardware.cpu_name,
        "physical_cores": hardware.cpu_physical or hardware.cpu_count,
        "total_ram_gb": hardware.ram_gb,
        "gpu_device_count": len(hardware.gpu_devices),
        "gpu_devices": {
            str(index): {"name": gpu.name, "total_memory_gb": gpu.mem_gb}
            for index, gpu in enumerate(hardware.gpu_devices)
        },
    }
    commit = versions.git_commit
    dev = {"commit_hash": commit, "commit_hash_short": commit and commit[:7], "branch": versions.git_branch}
    return {"benchmark_info": about, "hardware_info": machine, "version_info": {**version_fields(versions), "dev": dev}}


def _dumped(value: object, indent: int = 4) -> str:
    return json.dumps(value, indent=indent, allow_nan=False) + "\n"
