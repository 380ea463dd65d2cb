"""The flat forms that Isaac Lab's tools read: ``json``, ``osmo`` and ``omniperf``, with its names of measurements."""

from __future__ import annotations

import json

from headrace.bench._formatters._isaaclab import Fields, isaaclab_fields, version_fields
from headrace.bench._schema import Bundle, PlayBundle, RuntimeBundle, StartupBundle, StartupTime

_STARTUP_NAMES = {
    "app_launch": "App Launch Time",
    "python_imports": "Python Imports Time",
    "task_config": "Task Creation and Start Time",
    "env_creation": "Scene Creation Time",
    "first_step": "Simulation Start Time",
}
_TYPES: dict[type, str] = {str: "string", int: "int", float: "float", bool: "int", type(None): "string"}
Measured = dict[str, tuple[float, str]]


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
    """One flat object: metadata and measurements of all phases. Those of a start-up share their names, so the phase is
    in front of them."""
    flat: Fields = {}
    for phase, measured, metadata in _phases(bundle):
        front = f"{phase} " if isinstance(bundle, StartupBundle) else ""
        flat |= metadata
        flat |= {f"{front}{name}": value for name, (value, _) in measured.items()}
    return _dumped(flat)


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
    if isinstance(bundle, RuntimeBundle):
        return found
    rate: Measured = {} if bundle.success_rate is None else {"success_rate": (bundle.success_rate.rate, "float")}
    if isinstance(bundle, PlayBundle):
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
    return {"benchmark_info": about, "hardware_info": machine, "version_info": {**version_fields(versions), "dev": dev}}


def _dumped(value: object) -> str:
    return json.dumps(value, indent=4, allow_nan=False) + "\n"
