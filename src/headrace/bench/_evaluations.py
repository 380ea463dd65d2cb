"""Evaluations as bundles of plays, so that they are compared and reported like them: episode by episode.

An evaluation keeps neither when it ran nor what it used, so its bundle has outcomes only: no rates, no resources.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.bench import _schema as schema
from headrace.bench._statistic import Proportion, Statistic
from headrace.errors import DataError

if TYPE_CHECKING:
    from headrace.rollout import Evaluation

EVALUATION_FILES = ("evaluation.json", "evaluation.jsonl")
"""What evaluations and their journals are called where a directory is searched for them; any name will do otherwise."""
_FORMAT = '"headrace-evaluation-'
_STATUSES: dict[str, schema.Status] = {"completed": "completed", "interrupted": "interrupted", "failed": "crashed"}
_NOT_PLAYING = ("source", "overrides", "seed", "policy")


def is_evaluation(text: str) -> bool:
    """Whether a file's text begins as those of ``Evaluation.save`` and of journals do."""
    return text[:40].replace(" ", "").lstrip("{\n").startswith(f'"format":{_FORMAT}')


def read_evaluation(path: Path) -> schema.PlayBundle:
    """The bundle of a saved evaluation or of a journal."""
    from headrace.rollout import Evaluation

    bundle = evaluation_bundle(Evaluation.load(path), str(path))
    label = path.parent.name if path.name in EVALUATION_FILES else path.stem
    return bundle.model_copy(update={"run": bundle.run.model_copy(update={"label": label})})


def evaluation_bundle(evaluation: Evaluation, name: str) -> schema.PlayBundle:
    """An evaluation as a bundle.

    Args:
        evaluation: with an identity: what was played, and by which policy.
        name: tells it from others of the same policy; part of the run id.
    """
    about, where = evaluation.identity, evaluation.circumstances or {}
    if about is None:
        raise DataError(
            f"{name}: expected an evaluation that says what was played, got one without an identity; pass policy_id= "
            "(--policy-id), journal= or output= to evaluate"
        )
    rows = evaluation.episodes
    measured = any(row.success is not None for row in rows)
    known = [row.success for row in rows if row.success is not None]
    status = _STATUSES[evaluation.status]
    return schema.PlayBundle(
        run=schema.RunIdentity(
            run_id=f"evaluation {name}",
            framework=None,
            config=_config(about),
            task=str(about["source"]),
            seed=int(about["seed"]),
            start_time_utc="",
            end_time_utc="",
            duration_s=evaluation.counters.seconds,
            status=status,
            num_envs=_one(where, "num_envs", int),
            max_iterations=None,
            status_reason=f"{evaluation.unfinished} episodes are unfinished" if evaluation.unfinished else None,
        ),
        versions=schema.Versions(
            **{name: _one(where, name, str) for name in ("headrace", "python", "torch")},
            **dict.fromkeys(("numpy", "mujoco", "gymnasium", "git_commit", "git_branch", "git_dirty")),
            packages={},
        ),
        hardware=schema.Hardware(
            hostname=None, gpu_devices=[], cpu_name=_one(where, "processor", str) or "", cpu_count=None, ram_gb=None
        ),
        runtime=schema.Runtime(
            startup_time_s=schema.StartupTime(),
            iterations_completed=evaluation.counters.batch_steps,
            total_wall_time_s=evaluation.counters.seconds,
            **dict.fromkeys(
                (
                    *("steps_per_iteration", "iteration_time_s", "collection_fps", "total_fps", "iterations_per_s"),
                    "environment_step_timing",
                )
            ),
            episodes=schema.EpisodeCounts(
                completed=len(rows), diverged=sum(row.diverged for row in rows), unfinished=evaluation.unfinished
            ),
        ),
        resources=schema.Resources(gpu_util_pct=None, gpu_mem_gb=None, cpu_util_pct=None, ram_gb=None),
        success_rate=Proportion.of(sum(known), len(known)),
        reward=Statistic.of((row.reward for row in rows), better="higher"),
        ep_length=Statistic.of((float(row.length) for row in rows), unit="steps"),
        checkpoint_path=None,
        video_path=None,
        policy=schema.PolicyDescriptor(kind="chunk", name=str(about["policy"]), deterministic=None),
        plan=schema.EpisodePlan(
            kind="episodes",
            episodes_planned=evaluation.planned,
            num_steps=None,
            first_episode_id=min(evaluation.plan, default=None),
            shorter_than_episode=False,
        ),
        per_episode=schema.PerEpisode(
            episode_ids=[row.episode_id for row in rows],
            rewards=[row.reward for row in rows],
            lengths=[row.length for row in rows],
            successes=[row.success for row in rows] if measured else None,
        ),
        extra={"counters": asdict(evaluation.counters)} if evaluation.counters.batch_steps else {},
    )


def _config(about: Mapping[str, Any]) -> schema.RunConfig:
    return schema.RunConfig(
        physics_backend="unknown",
        rendering_backend=None,
        overrides=dict(about.get("overrides") or {}),
        playing={name: value for name, value in about.items() if name not in _NOT_PLAYING},
    )


def _one(where: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    """A circumstance; None where parts of a merged evaluation differ in it."""
    value = where.get(name)
    return value if isinstance(value, kind) else None
