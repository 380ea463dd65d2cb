"""Bundles of schema 1.0 to 1.3, Isaac Lab's shape, in the shape of today. What they did not keep is null."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from headrace.bench._schema import Kind

UPGRADED = ("1.0", "1.1", "1.2", "1.3")

_VERSIONS = ("headrace", "python", "torch", "numpy", "mujoco", "gymnasium")
_GIT = ("git_commit", "git_branch", "git_dirty")
_CURVES = ("reward", "ep_length", "success_rate")
_RUNTIME_STATISTICS = ("iteration_time_s", "collection_fps", "total_fps")
_STEP_STATISTICS = (
    *("environment_step_time_s", "environment_step_fps", "simulation_step_time_s", "outside_simulation_step_time_s"),
)
_RESOURCES = ("gpu_util_pct", "gpu_mem_gb", "cpu_util_pct", "ram_gb")

Fields = dict[str, object]


def upgraded(bundle: Fields) -> Fields:
    """The fields of a bundle of today's schema, not validated yet; the given ones are not changed.

    Fields that today's schema does not know are kept in ``extra``.
    """
    from headrace.bench._schema import BUNDLES, SCHEMA_VERSION

    kind = _kind(bundle)
    known = BUNDLES[kind].model_fields
    new = {name: value for name, value in bundle.items() if name in known}
    new["extra"] = {**_section(bundle, "extra"), **{n: v for n, v in bundle.items() if n not in known}}
    new |= {"kind": kind, "schema_version": SCHEMA_VERSION, "versions": _versions(_section(bundle, "versions"))}
    if kind == "startup":
        return new
    new["runtime"] = _runtime(_section(bundle, "runtime"))
    resources = _section(bundle, "resources")
    new["resources"] = {name: _statistic(resources.get(name)) for name in _RESOURCES}
    if kind in ("training", "play"):
        new["success_rate"] = _proportion(bundle.get("success_rate"))
        new.setdefault("checkpoint_path", None)
        new.setdefault("video_path", None)
    if kind == "training":
        learning = _section(bundle, "learning")
        new["learning"] = {"ema_alpha": learning.get("ema_alpha"), **{name: learning.get(name) for name in _CURVES}}
    if kind == "play":
        new |= {name: _statistic(bundle.get(name)) for name in ("reward", "ep_length")}
    return new


def _kind(bundle: Fields) -> Kind:
    if "phases" in bundle:
        return "startup"
    if "learning" in bundle:
        return "training"
    return "play" if "ep_length" in bundle or "checkpoint_path" in bundle else "runtime"


def _versions(old: Fields) -> Fields:
    packages = {n: str(v) for n, v in old.items() if n not in (*_VERSIONS, *_GIT) and v is not None}
    return {name: old.get(name) for name in (*_VERSIONS, *_GIT)} | {"packages": packages}


def _runtime(old: Fields) -> Fields:
    rate = old.get("iterations_per_s")
    new = old | {name: _statistic(old.get(name)) for name in _RUNTIME_STATISTICS}
    new["iterations_per_s"] = cast("Fields", rate).get("mean") if isinstance(rate, dict) else rate
    new.setdefault("steps_per_iteration", None)
    timing = old.get("environment_step_timing")
    new["environment_step_timing"] = _timing(cast("Fields", timing)) if isinstance(timing, dict) else None
    return new


def _timing(old: Fields) -> Fields:
    share = old.get("outside_simulation_step_fraction")
    new = old | {name: _statistic(old.get(name)) for name in _STEP_STATISTICS}
    new["outside_simulation_step_fraction"] = cast("Fields", share).get("mean") if isinstance(share, dict) else share
    if old.get("measurement_mode") == "serialized_synchronized":
        new["measurement_mode"] = "synchronized"
    return new


def _statistic(old: object) -> Fields | None:
    if isinstance(old, (int, float)):
        return {"n": None, "mean": old, "std": None, "peak": None}
    if not isinstance(old, dict):
        return None
    fields = cast("Fields", old)
    if fields.get("mean") is None:
        return None
    return {"n": None, "mean": fields["mean"], "std": fields.get("std"), "peak": fields.get("peak")}


def _proportion(old: object) -> Fields | None:
    if isinstance(old, dict):
        old = cast("Fields", old).get("mean")
    return None if old is None else {"rate": old, "successes": None, "n": None, "interval": None}


def _section(bundle: Fields, name: str) -> Fields:
    section = bundle.get(name)
    return cast("Fields", section) if isinstance(section, dict) else {}
