"""Isaac Lab's benchmark files: bundles of its schema 1.2 written field by field, bundles of 1.0 to 1.3 read, and the
measurement names that its ``json``, ``osmo`` and ``omniperf`` forms have.

Its schema has no null where headrace has one: a number that was not measured is written as 0.0 there, a text as "".
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from headrace.bench._learning_schema import Learning, LearningCurve
from headrace.bench._schema import (
    BUNDLES,
    SCHEMA_VERSION,
    Bundle,
    EnvironmentStepTiming,
    Hardware,
    Kind,
    PlayBundle,
    Resources,
    RunConfig,
    RunIdentity,
    Runtime,
    StartupBundle,
    StartupConfig,
    StartupPhase,
    StartupTime,
    TrainingBundle,
    Versions,
)
from headrace.bench._statistic import Statistic

if TYPE_CHECKING:
    from pydantic import BaseModel

WRITTEN = "1.2"
READ = ("1.0", "1.1", "1.2", "1.3")

Fields = dict[str, Any]
_PACKAGES = {
    "warp": "warp-lang",
    "mjwarp": "mujoco-warp",
    "rsl_rl": "rsl-rl-lib",
    "rl_games": "rl-games",
    "skrl": "skrl",
    "sb3": "stable-baselines3",
}
_ABSENT = (
    *("isaacsim", "kit", "newton"),
    *("isaaclab_newton", "isaaclab_physx", "isaaclab_ov", "isaaclab_tasks", "isaaclab_rl", "ovrtx", "ovphysx"),
)
_STARTUP_NAMES = {
    "app_launch": "App Launch Time",
    "python_imports": "Python Imports Time",
    "task_config": "Task Creation and Start Time",
    "env_creation": "Scene Creation Time",
    "first_step": "Simulation Start Time",
}


# --- writing ---


def isaaclab_text(bundle: Bundle) -> str:
    """The bundle as Isaac Lab 1.2 writes it."""
    return json.dumps(isaaclab_fields(bundle), indent=2, allow_nan=False) + "\n"


def isaaclab_fields(bundle: Bundle) -> Fields:
    """The fields of schema 1.2, in its order."""
    about: Fields = {
        "run": _run(bundle),
        "versions": _versions(bundle.versions),
        "hardware": _hardware(bundle.hardware),
    }
    scalars = {name: value for name, value in bundle.extra.items() if isinstance(value, (bool, int, float, str))}
    end: Fields = {"extra": scalars or None, "schema_version": WRITTEN}
    if isinstance(bundle, StartupBundle):
        phases = {
            name: {
                "total_time_s": phase.total_time_s,
                "top_functions": [function.model_dump() for function in phase.top_functions],
            }
            for name, phase in bundle.phases.items()
        }
        whitelist = bundle.config.whitelist
        config = {"top_n": bundle.config.top_n, "whitelist": None if whitelist is None else json.dumps(whitelist)}
        return {**about, "phases": phases, "config": config, **end}
    about |= {"runtime": _runtime(bundle.runtime), "resources": _resources(bundle.resources)}
    if isinstance(bundle, TrainingBundle):
        learning = bundle.learning
        about["learning"] = {
            "ema_alpha": learning.ema_alpha,
            "reward": _curve(learning.reward),
            "ep_length": _curve(learning.ep_length),
        }
    if isinstance(bundle, (TrainingBundle, PlayBundle)):
        about["success_rate"] = None if bundle.success_rate is None else bundle.success_rate.rate
    if isinstance(bundle, PlayBundle):
        about |= {"reward": mean_std(bundle.reward), "ep_length": mean_std(bundle.ep_length)}
    if isinstance(bundle, (TrainingBundle, PlayBundle)):
        about |= {"checkpoint_path": bundle.checkpoint_path, "video_path": bundle.video_path}
    return {**about, **end}


def mean_std(statistic: Statistic | None) -> Fields | None:
    """``MeanStd``: the mean, the sample standard deviation (0.0 for one sample) and the peak."""
    if statistic is None:
        return None
    return {"mean": statistic.mean, "std": statistic.std or 0.0, "peak": statistic.peak}


def _rate(rate: float | None, seconds: Statistic | None, amount: float | None) -> Fields:
    """An effective rate, with the spread of the rates of single samples around their own mean."""
    if rate is None or seconds is None or not amount:
        return {"mean": rate or 0.0, "std": 0.0, "peak": None}
    rates = [amount / sample for sample in seconds.samples or () if sample > 0]
    fastest = seconds.minimum if seconds.minimum else None
    peak = max(rate, amount / fastest) if fastest else None
    return {"mean": rate, "std": statistics.stdev(rates) if len(rates) > 1 else 0.0, "peak": peak}


def _run(bundle: Bundle) -> Fields:
    run = bundle.run
    physics = "newton_mjwarp" if run.config.physics_backend == "warp" else run.config.physics_backend
    return {
        "run_id": run.run_id,
        "framework": run.framework,
        "config": {
            "physics_backend": physics,
            "rendering_backend": run.config.rendering_backend or "none",
            "presets": list(run.config.presets),
        },
        "task": run.task,
        "seed": run.seed,
        "start_time_utc": run.start_time_utc,
        "end_time_utc": run.end_time_utc,
        "duration_s": run.duration_s,
        "status": "interrupted" if run.status == "running" else run.status,
        "num_envs": None if isinstance(bundle, StartupBundle) else run.num_envs,
        "max_iterations": run.max_iterations,
    }


def _versions(versions: Versions) -> Fields:
    packages = versions.packages
    found: Fields = {"isaaclab": packages.get("isaaclab", f"headrace {versions.headrace}")}
    found |= dict.fromkeys(_ABSENT[:3])
    found |= {"warp": packages.get(_PACKAGES["warp"]), "mjwarp": packages.get(_PACKAGES["mjwarp"])}
    found["torch"] = versions.torch or ""
    found |= {name: packages.get(_PACKAGES[name]) for name in ("rsl_rl", "rl_games", "skrl", "sb3")}
    found |= {
        "git_commit": versions.git_commit,
        "git_branch": versions.git_branch,
        "git_dirty": bool(versions.git_dirty),
        "numpy": versions.numpy,
    }
    found |= dict.fromkeys(_ABSENT[3:])
    return found | {"mujoco": versions.mujoco, "cuda_bindings": None, "usd_core": None, "isaaclab_release": None}


def _hardware(hardware: Hardware) -> Fields:
    return {
        "hostname": hardware.hostname,
        "gpu_devices": [{**gpu.model_dump(), "compute_cap": gpu.compute_cap or ""} for gpu in hardware.gpu_devices],
        "cpu_name": hardware.cpu_name,
        "cpu_count": hardware.cpu_physical or hardware.cpu_count,
        "ram_gb": hardware.ram_gb,
    }


def _runtime(runtime: Runtime) -> Fields:
    startup = runtime.startup_time_s
    step = runtime.environment_step_timing
    seconds, collecting = runtime.iteration_time_s, runtime.collection_time_s
    if collecting is None and step is not None and step.environment_step_calls == runtime.iterations_completed:
        collecting = step.environment_step_time_s
    return {
        "startup_time_s": {
            "app_launch": startup.app_launch or 0.0,
            "env_creation": startup.env_creation or 0.0,
            "first_step": startup.first_step or 0.0,
            "python_imports": startup.python_imports,
            "task_config": startup.task_config,
        },
        "iterations_completed": runtime.iterations_completed,
        "total_wall_time_s": runtime.total_wall_time_s,
        "steps_per_iteration": runtime.steps_per_iteration or 0,
        "iteration_time_s": mean_std(seconds) or {"mean": 0.0, "std": 0.0, "peak": None},
        "collection_fps": _rate(runtime.collection_fps, collecting, runtime.steps_per_iteration),
        "total_fps": _rate(runtime.total_fps, seconds, runtime.steps_per_iteration),
        "iterations_per_s": _rate(runtime.iterations_per_s, seconds, 1),
        "environment_step_timing": None if step is None else _timing(step),
    }


def _timing(step: EnvironmentStepTiming) -> Fields | None:
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


def _resources(resources: Resources) -> Fields:
    """Use has no peak in its schema: it is 100 % somewhere."""
    nothing = {"mean": 0.0, "std": 0.0, "peak": None}
    found = {name: mean_std(getattr(resources, name)) or nothing for name in Resources.model_fields if name in _SAMPLED}
    return {name: value | {"peak": None} if name.endswith("_pct") else value for name, value in found.items()}


_SAMPLED = ("gpu_util_pct", "gpu_mem_gb", "cpu_util_pct", "ram_gb")


def _curve(curve: LearningCurve | None) -> Fields:
    """An iteration in which no episode ended keeps the value before it; the first ones get the first value."""
    if curve is None:
        return {"final_raw": 0.0, "final_ema": 0.0, "series_per_iter": None}
    series = curve.series_per_iter
    if series is not None:
        last = next((value for value in series if value is not None), 0.0)
        filled: list[float] = []
        for value in series:
            last = last if value is None else value
            filled.append(last)
        series = filled
    return {"final_raw": curve.final_raw or 0.0, "final_ema": curve.final_ema or 0.0, "series_per_iter": series}


# --- flat forms ---


def json_text(bundle: Bundle) -> str:
    """A list of phases with ``measurements`` and ``metadata``; names have workflow and phase in front."""
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


def omniperf_text(bundle: Bundle) -> str:
    """``{phase: {name: value}}``, metadata and measurements together."""
    return _dumped(
        {
            phase: {**metadata, **{name: value for name, (value, _) in measured.items()}}
            for phase, measured, metadata in _phases(bundle)
        }
    )


def osmo_text(bundle: Bundle) -> str:
    """One flat object: metadata and measurements of all phases."""
    flat: Fields = {}
    for _, measured, metadata in _phases(bundle):
        flat |= metadata
        flat |= {name: value for name, (value, _) in measured.items()}
    return _dumped(flat)


_TYPES: dict[type, str] = {str: "string", int: "int", float: "float", bool: "int", type(None): "string"}
Measured = dict[str, tuple[float, str]]


def _phases(bundle: Bundle) -> list[tuple[str, Measured, Fields]]:
    info = [(phase, {}, metadata) for phase, metadata in _metadata(bundle).items()]
    return [*info, *((phase, measured, {}) for phase, measured in measurements(bundle).items() if measured)]


def measurements(bundle: Bundle) -> dict[str, Measured]:
    """Phase → name → value and unit, by the names that Isaac Lab's forms have; times in milliseconds."""
    if isinstance(bundle, StartupBundle):
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
    fields = isaaclab_fields(bundle)
    found = {
        "startup": _startup_measured(bundle.runtime.startup_time_s),
        "runtime": _runtime_measured(fields["runtime"]),
    }
    if isinstance(bundle, TrainingBundle):
        train: Measured = {}
        for label, name, plural in (
            ("Reward", "reward", "Rewards"),
            ("Episode Length", "ep_length", "Episode Lengths"),
        ):
            curve = fields["learning"][name]
            train |= {
                f"Last {label}": (curve["final_raw"], "float"),
                f"EMA {bundle.learning.ema_alpha:g} {label}": (curve["final_ema"], "float"),
            }
            if curve["series_per_iter"]:
                train[f"Max {plural}"] = (max(curve["series_per_iter"]), "float")
        found["train"] = train
    if isinstance(bundle, PlayBundle):
        found["play"] = _spread("Reward", fields["reward"], "float") | _spread(
            "Episode Length", fields["ep_length"], "steps"
        )
    if isinstance(bundle, (TrainingBundle, PlayBundle)) and bundle.success_rate is not None:
        found["train" if isinstance(bundle, TrainingBundle) else "play"]["success_rate"] = (
            bundle.success_rate.rate,
            "float",
        )
    return found


def _startup_measured(times: StartupTime) -> Measured:
    spent = {label: getattr(times, name) for name, label in _STARTUP_NAMES.items()}
    found = {label: (1000.0 * seconds, "ms") for label, seconds in spent.items() if seconds is not None}
    if found:
        found["Total Start Time (Launch to Train)"] = (sum(value for value, _ in found.values()), "ms")
    return found


def _runtime_measured(runtime: Fields) -> Measured:
    timing = runtime["environment_step_timing"]
    synchronized = timing is not None and timing["measurement_mode"] == "serialized_synchronized"
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
        for label, name in (
            ("Synchronized Simulation Time per Environment Step", "simulation_step_time_s"),
            ("Outside Simulation Time per Environment Step", "outside_simulation_step_time_s"),
        ):
            found |= _spread(label, timing[name], "ms", 1000.0)
        found["Outside Simulation Step Fraction"] = (timing["outside_simulation_step_fraction"], "ratio")
    return found | _spread(f"{prefix}Iterations per Second", runtime["iterations_per_s"], "iterations/s")


def _spread(name: str, found: Fields | None, unit: str, scale: float = 1.0) -> Measured:
    if found is None:
        return {}
    measured = {f"Mean {name}": (found["mean"] * scale, unit), f"Std {name}": (found["std"] * scale, unit)}
    return measured if found["peak"] is None else measured | {f"Max {name}": (found["peak"] * scale, unit)}


def _metadata(bundle: Bundle) -> dict[str, Fields]:
    run, hardware, versions = bundle.run, bundle.hardware, bundle.versions
    about: Fields = {
        "workflow_name": f"headrace_{bundle.kind}",
        "timestamp": run.start_time_utc,
        "task": run.task,
        "seed": run.seed,
        "num_envs": run.num_envs,
        "max_iterations": run.max_iterations,
        "rl_library": run.framework,
        "status": run.status,
    }
    if not isinstance(bundle, StartupBundle) and bundle.runtime.environment_step_timing is not None:
        about["environment_step_measurement_mode"] = (
            "serialized_synchronized"
            if bundle.runtime.environment_step_timing.measurement_mode == "synchronized"
            else "host_return"
        )
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
    dev = {
        "commit_hash": commit,
        "commit_hash_short": None if commit is None else commit[:7],
        "branch": versions.git_branch,
    }
    return {"benchmark_info": about, "hardware_info": machine, "version_info": {**_versions(versions), "dev": dev}}


def _dumped(value: object) -> str:
    return json.dumps(value, indent=4, allow_nan=False) + "\n"


# --- reading ---


def upgrade(bundle: Mapping[str, Any]) -> Fields:
    """The fields of today's schema, not validated yet, of a bundle of schema 1.0 to 1.3.

    What its writer did not keep is null; what today's schema does not know is kept in ``extra``, by its dotted path.
    """
    kind = _kind(bundle)
    rest: Fields = {}
    new = _fitted(bundle, BUNDLES[kind], "", rest)
    new |= {"kind": kind, "schema_version": SCHEMA_VERSION}
    new["run"] = _fitted(bundle.get("run"), RunIdentity, "run.", rest) | {
        "num_envs": _section(bundle, "run").get("num_envs")
    }
    new["run"].setdefault("max_iterations", None)
    new["run"].setdefault("framework", None)
    config = _fitted(_section(bundle, "run").get("config"), RunConfig, "run.config.", rest)
    rendering = config.get("rendering_backend")
    new["run"]["config"] = config | {"rendering_backend": None if rendering == "none" else rendering}
    new["versions"] = _old_versions(_section(bundle, "versions"))
    new["hardware"] = _fitted(bundle.get("hardware"), Hardware, "hardware.", rest)
    if kind == "startup":
        new |= _old_startup(bundle, rest)
    else:
        new["runtime"] = _old_runtime(_section(bundle, "runtime"), rest)
        resources = _section(bundle, "resources")
        new["resources"] = {name: _old_statistic(resources.get(name)) for name in _SAMPLED}
    if kind in ("training", "play"):
        rate = bundle.get("success_rate")
        rate = rate.get("mean") if isinstance(rate, dict) else rate
        new["success_rate"] = None if rate is None else {"rate": rate, "successes": None, "n": None, "interval": None}
        new |= {name: bundle.get(name) for name in ("checkpoint_path", "video_path")}
    if kind == "training":
        curves = _section(bundle, "learning")
        learning = _fitted(curves, Learning, "learning.", rest)
        new["learning"] = learning | {
            name: _fitted(curves.get(name), LearningCurve, f"learning.{name}.", rest) or None
            for name in ("reward", "ep_length", "success_rate")
        }
    if kind == "play":
        new |= {name: _old_statistic(bundle.get(name)) for name in ("reward", "ep_length")}
    new["extra"] = {**_section(bundle, "extra"), **rest}
    return new


def _kind(bundle: Mapping[str, Any]) -> Kind:
    if "phases" in bundle:
        return "startup"
    if "learning" in bundle:
        return "training"
    return "play" if "ep_length" in bundle or "checkpoint_path" in bundle else "runtime"


def _old_versions(old: Fields) -> Fields:
    ours = [name for name in Versions.model_fields if name != "packages"]
    packages = {name: str(value) for name, value in old.items() if name not in ours and value is not None}
    return {name: old.get(name) for name in ours} | {"packages": packages}


def _old_startup(bundle: Mapping[str, Any], rest: Fields) -> Fields:
    phases = {
        name: _fitted(phase, StartupPhase, f"phases.{name}.", rest)
        for name, phase in _section(bundle, "phases").items()
    }
    config = _fitted(bundle.get("config"), StartupConfig, "config.", rest)
    if isinstance(config.get("whitelist"), str):  # the path of a file; what it said is not kept
        rest["config.whitelist"] = config["whitelist"]
        config["whitelist"] = None
    return {"phases": phases, "config": {"top_n": 0, "whitelist": None} | config}


def _old_runtime(old: Fields, rest: Fields) -> Fields:
    new = _fitted(old, Runtime, "runtime.", rest)
    new["startup_time_s"] = _fitted(old.get("startup_time_s"), StartupTime, "runtime.startup_time_s.", rest)
    new["iteration_time_s"] = _old_statistic(old.get("iteration_time_s"))
    new |= {name: _mean(old.get(name)) for name in ("collection_fps", "total_fps", "iterations_per_s")}
    new.setdefault("steps_per_iteration", None)
    timing = old.get("environment_step_timing")
    new["environment_step_timing"] = _old_timing(timing, rest) if isinstance(timing, dict) else None
    return new


def _old_timing(old: Fields, rest: Fields) -> Fields | None:
    new = _fitted(old, EnvironmentStepTiming, "runtime.environment_step_timing.", rest)
    names = ("environment_step_time_s", "simulation_step_time_s", "outside_simulation_step_time_s")
    new |= {name: _old_statistic(old.get(name)) for name in names}
    new |= {name: _mean(old.get(name)) for name in ("environment_step_fps", "outside_simulation_step_fraction")}
    new.setdefault("simulation_step_calls", None)
    if new.get("measurement_mode") == "serialized_synchronized":
        new["measurement_mode"] = "synchronized"
    return new if new["environment_step_time_s"] is not None else None


def _old_statistic(old: object) -> Fields | None:
    mean = _mean(old)
    if mean is None:
        return None
    fields = cast("Fields", old) if isinstance(old, dict) else {}
    return {"n": None, "mean": mean, "std": fields.get("std"), "peak": fields.get("peak")}


def _mean(old: object) -> float | None:
    value = cast("Fields", old).get("mean") if isinstance(old, dict) else old
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _fitted(section: object, model: type[BaseModel], where: str, rest: Fields) -> Fields:
    """The fields that a record of today has; the others go to ``rest``."""
    fields = cast("Fields", section) if isinstance(section, dict) else {}
    rest |= {f"{where}{name}": value for name, value in fields.items() if name not in model.model_fields}
    return {name: value for name, value in fields.items() if name in model.model_fields}


def _section(bundle: Mapping[str, Any], name: str) -> Fields:
    section = bundle.get(name)
    return cast("Fields", section) if isinstance(section, dict) else {}
