"""Bundles of Isaac Lab, schema 1.0 to 1.3, read into the schema of today."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from headrace.bench import schema

if TYPE_CHECKING:
    from pydantic import BaseModel

READ = ("1.0", "1.1", "1.2", "1.3")
Fields = dict[str, Any]


def upgrade(bundle: Mapping[str, Any]) -> Fields:
    """Return the fields of today's schema, not validated yet, of a bundle of schema 1.0 to 1.3.

    What its writer did not keep is null; what today's schema does not know is kept in ``extra``, by its dotted path.
    """
    kind = _kind(bundle)
    rest: Fields = {}
    new = _fitted(bundle, schema.BUNDLES[kind], "", rest)
    new |= {"kind": kind, "schema_version": schema.SCHEMA_VERSION}
    missing = dict.fromkeys(("num_envs", "max_iterations", "framework"))
    new["run"] = missing | _fitted(bundle.get("run"), schema.RunIdentity, "run.", rest)
    config = _fitted(_section(bundle, "run").get("config"), schema.RunConfig, "run.config.", rest)
    rendering = config.get("rendering_backend")
    new["run"]["config"] = config | {"rendering_backend": None if rendering == "none" else rendering}
    new["versions"] = _old_versions(_section(bundle, "versions"))
    new["hardware"] = _fitted(bundle.get("hardware"), schema.Hardware, "hardware.", rest)
    if kind == "startup":
        new |= _old_startup(bundle, rest)
    else:
        new["runtime"] = _old_runtime(_section(bundle, "runtime"), rest)
        resources = _section(bundle, "resources")
        new["resources"] = {name: _old_statistic(resources.get(name)) for name in schema.SAMPLED}
    if kind in ("training", "play"):
        rate = bundle.get("success_rate")
        rate = rate.get("mean") if isinstance(rate, dict) else rate
        new["success_rate"] = None if rate is None else {"rate": rate, "successes": None, "n": None, "interval": None}
        new |= {name: bundle.get(name) for name in ("checkpoint_path", "video_path")}
    if kind == "training":
        curves = _section(bundle, "learning")
        learning = _fitted(curves, schema.Learning, "learning.", rest)
        new["learning"] = learning | {
            name: _fitted(curves.get(name), schema.LearningCurve, f"learning.{name}.", rest) or None
            for name in ("reward", "ep_length", "success_rate")
        }
    if kind == "play":
        new |= {name: _old_statistic(bundle.get(name)) for name in ("reward", "ep_length")}
    new["extra"] = {**_section(bundle, "extra"), **rest}
    return new


def _kind(bundle: Mapping[str, Any]) -> schema.Kind:
    if "phases" in bundle:
        return "startup"
    if "learning" in bundle:
        return "training"
    return "play" if "ep_length" in bundle or "checkpoint_path" in bundle else "runtime"


def _old_versions(old: Fields) -> Fields:
    ours = [name for name in schema.Versions.model_fields if name != "packages"]
    packages = {name: str(value) for name, value in old.items() if name not in ours and value is not None}
    return {name: old.get(name) for name in ours} | {"packages": packages}


def _old_startup(bundle: Mapping[str, Any], rest: Fields) -> Fields:
    phases = {
        name: _fitted(phase, schema.StartupPhase, f"phases.{name}.", rest)
        for name, phase in _section(bundle, "phases").items()
    }
    config = _fitted(bundle.get("config"), schema.StartupConfig, "config.", rest)
    if isinstance(config.get("whitelist"), str):  # the path of a file; what it said is not kept
        rest["config.whitelist"] = config["whitelist"]
        config["whitelist"] = None
    return {"phases": phases, "config": {"top_n": 0, "whitelist": None} | config}


def _old_runtime(old: Fields, rest: Fields) -> Fields:
    new = _fitted(old, schema.Runtime, "runtime.", rest)
    new["startup_time_s"] = _fitted(old.get("startup_time_s"), schema.StartupTime, "runtime.startup_time_s.", rest)
    new["iteration_time_s"] = _old_statistic(old.get("iteration_time_s"))
    new |= {name: _mean(old.get(name)) for name in ("collection_fps", "total_fps", "iterations_per_s")}
    new.setdefault("steps_per_iteration", None)
    timing = old.get("environment_step_timing")
    new["environment_step_timing"] = _old_timing(timing, rest) if isinstance(timing, dict) else None
    return new


def _old_timing(old: Fields, rest: Fields) -> Fields | None:
    new = _fitted(old, schema.EnvironmentStepTiming, "runtime.environment_step_timing.", rest)
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
    """Return the fields that a record of today has; the others go to ``rest``."""
    fields = cast("Fields", section) if isinstance(section, dict) else {}
    rest |= {f"{where}{name}": value for name, value in fields.items() if name not in model.model_fields}
    return {name: value for name, value in fields.items() if name in model.model_fields}


def _section(bundle: Mapping[str, Any], name: str) -> Fields:
    section = bundle.get(name)
    return cast("Fields", section) if isinstance(section, dict) else {}
