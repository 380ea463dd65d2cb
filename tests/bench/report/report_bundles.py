"""Bundles of every kind for a page, made of the golden ones."""

from __future__ import annotations

import json
import math
from pathlib import Path

from headrace.bench._bundle_files import parse_bundle
from headrace.bench.schema import SCHEMA_VERSION, Bundle

_GOLDEN = Path(__file__).parents[1] / "golden"


def varied(kind: str, number: int, **run: object) -> Bundle:
    """A golden bundle as another run; ``run`` changes its identity."""
    data = json.loads((_GOLDEN / f"{kind}-{SCHEMA_VERSION}.json").read_text())
    data["run"] |= {"run_id": f"{kind}-{number}", **run}
    if kind == "runtime":
        envs = data["run"]["num_envs"]
        data["runtime"]["total_fps"] = 9000 * envs / (envs + 60) * (1 + 0.02 * (number % 3))
    if kind == "training":
        frames = [2048 * (i + 1) for i in range(60)]
        rise = 8 + number % 5
        curve = [None] + [300 * (1 - math.exp(-i / rise)) + 6 * math.sin(i + number) for i in range(1, 60)]
        data["learning"]["frames"] = frames
        data["learning"]["reward"] |= {"series_ema": curve, "series_per_iter": curve, "final_ema": curve[-1]}
        data["learning"] |= {"wall_time_s": None, "episodes": None, "ep_length": None, "success_rate": None}
    return parse_bundle(json.dumps(data))


def a_set() -> list[Bundle]:
    """Twenty-odd runs: what a user has after an afternoon."""
    found = [
        varied("runtime", 10 * n + seed, num_envs=n, seed=seed, task=task)
        for task in ("cartpole", "ant")
        for n in (16, 64, 256)
        for seed in (0, 1)
    ]
    found = [
        bundle.model_copy(update={"run": bundle.run.model_copy(update={"run_id": f"runtime-{i}"})})
        for i, bundle in enumerate(found)
    ]
    found += [
        varied("training", 3 * i + s, framework=lib, seed=s)
        for i, lib in enumerate(("rsl_rl", "skrl"))
        for s in range(3)
    ]
    found += [
        varied("play", 0),
        varied("startup", 0),
        varied("runtime", 999, status="crashed", status_reason="RuntimeError: <no>"),
    ]
    return found
