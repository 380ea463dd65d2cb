"""The forms that dashboards read: lists of phases with their measurements, nested, or flat."""

from __future__ import annotations

import json

from pydantic import JsonValue

from headrace.bench._metrics import Metric, metrics
from headrace.bench._schema import Bundle
from headrace.bench._statistic import Statistic

Facts = dict[str, JsonValue]


def json_text(bundle: Bundle) -> str:
    """A list of phases, each with ``measurements`` (single or statistical) and ``metadata``."""
    phases: list[dict[str, object]] = [
        {"phase_name": phase, "measurements": [], "metadata": [_metadata(name, fact) for name, fact in facts.items()]}
        for phase, facts in _facts(bundle).items()
    ]
    for phase, found in _by_phase(bundle).items():
        phases.append({"phase_name": phase, "measurements": [_measurement(metric) for metric in found], "metadata": []})
    return _dumped(phases)


def omniperf_text(bundle: Bundle) -> str:
    """``{phase: {name: value}}``; a statistic is three numbers: ``_mean``, ``_std``, ``_n``."""
    nested: dict[str, Facts] = dict(_facts(bundle))
    for phase, found in _by_phase(bundle).items():
        values = nested.setdefault(phase, {})
        for metric in found:
            values.update(_expanded(metric))
    return _dumped(nested)


def osmo_text(bundle: Bundle) -> str:
    """A list with one flat object per phase: ``{"phase": …, name: value, …}``."""
    flat: list[Facts] = [{"phase": phase, **facts} for phase, facts in _facts(bundle).items()]
    for phase, found in _by_phase(bundle).items():
        flat.append({"phase": phase, **{metric.name: metric.value for metric in found}})
    return _dumped(flat)


def _facts(bundle: Bundle) -> dict[str, Facts]:
    run, hardware, versions = bundle.run, bundle.hardware, bundle.versions
    names = ("run_id", "framework", "task", "seed", "num_envs", "max_iterations", "status", "status_reason")
    about: Facts = {name: getattr(run, name) for name in names}
    about |= {"start_time_utc": run.start_time_utc, "end_time_utc": run.end_time_utc, "duration_s": run.duration_s}
    about |= {"physics_backend": run.config.physics_backend, "rendering_backend": run.config.rendering_backend}
    about |= {"presets": [*run.config.presets], "kind": bundle.kind, "schema_version": bundle.schema_version}
    machine: Facts = hardware.model_dump(mode="json")
    packages: Facts = versions.model_dump(mode="json", exclude={"packages"})
    return {"benchmark_info": about, "hardware_info": machine, "version_info": {**packages, **versions.packages}}


def _by_phase(bundle: Bundle) -> dict[str, list[Metric]]:
    found: dict[str, list[Metric]] = {}
    for metric in metrics(bundle):
        found.setdefault(metric.phase, []).append(metric)
    return found


def _measurement(metric: Metric) -> Facts:
    single: Facts = {"name": metric.name, "value": metric.value, "unit": metric.unit, "type": "single"}
    if not isinstance(metric.spread, Statistic) or metric.value != metric.spread.mean:
        return single
    spread = metric.spread
    percentiles = None if spread.percentiles is None else spread.percentiles.model_dump()
    return {
        "name": metric.name,
        "type": "statistical",
        "unit": metric.unit,
        "mean": spread.mean,
        "std": spread.std,
        "n": spread.n,
        "peak": spread.peak,
        "percentiles": percentiles,
    }


def _expanded(metric: Metric) -> Facts:
    spread = metric.spread
    if isinstance(spread, Statistic) and metric.value == spread.mean:
        return {f"{metric.name}_mean": spread.mean, f"{metric.name}_std": spread.std, f"{metric.name}_n": spread.n}
    return {metric.name: metric.value}


def _metadata(name: str, fact: JsonValue) -> Facts:
    return {"name": name, "data": fact, "type": type(fact).__name__ if fact is not None else "null"}


def _dumped(value: object) -> str:
    return json.dumps(value, indent=1, allow_nan=False) + "\n"
