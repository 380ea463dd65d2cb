"""Functions of headrace with the fields of their settings records by name: tests vary one setting at a time."""

from __future__ import annotations

import dataclasses
from typing import Any

import headrace
from headrace.evaluation import Evaluation, JournalCfg, PlayCfg, WorkersCfg
from headrace.evaluation.suites import SuiteResult
from headrace.policies import RemoteCfg, RemoteEngine
from headrace.policies.batching import answer_rows, tell_episodes
from headrace.recording import FilmCfg

FILM = {"video": "video", "film": "episodes", "films": "directory", "renderer": "renderer"}
WORKERS = ("block", "cpus", "gpus", "ray_address")


def take(settings: dict[str, Any], record: type[Any]) -> dict[str, Any]:
    """Remove the fields of a record from settings, and return them."""
    return {field.name: settings.pop(field.name) for field in dataclasses.fields(record) if field.name in settings}


def records(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``headrace.evaluate`` for settings by name."""
    given = {"play": PlayCfg(**take(settings, PlayCfg))}
    if film := {FILM[name]: settings.pop(name) for name in FILM if name in settings}:
        given["film"] = FilmCfg(**film)
    if settings.pop("resume", False):
        given["journal"] = JournalCfg(path=settings.pop("journal"), resume=True)
    if more := {name: settings.pop(name) for name in WORKERS if name in settings}:
        given["workers"] = WorkersCfg(count=settings.pop("workers"), **more)
    if "on_episodes" in settings:
        given["progress"] = settings.pop("on_episodes")
        settings.pop("progress", None)
    return settings | given


def evaluate(env: Any, policy: Any = None, **settings: Any) -> Evaluation:
    """Evaluate with settings by name; a new environment's threads, too."""
    if "threads" in settings:
        changes = {name: settings.pop(name, None) for name in ("num_envs", "seed", "threads", "overrides")}
        env = headrace.EnvRecipe.of(env, 16, **changes)
    return headrace.evaluate(env, policy, **records(settings))


def evaluate_suite(suite: Any, policy: Any = None, **settings: Any) -> SuiteResult:
    """Evaluate a suite with settings by name."""
    return headrace.evaluation.evaluate_suite(suite, policy, **records(settings))


def remote_engine(address: str, **settings: Any) -> RemoteEngine:
    """Connect to a server with settings by name."""
    return RemoteEngine(RemoteCfg(address, **take(settings, RemoteCfg)), **settings)


def ask(policy: Any, obs: Any, context: Any, batching: Any, *, ended: Any = None) -> Any:
    """Tell a policy which episodes end and begin, and run it over rows in batches."""
    tell_episodes(policy, context, ended)
    return answer_rows(policy, obs, context, batching)
