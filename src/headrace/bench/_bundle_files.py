"""Bundles read back from JSON, in any version we know; evaluations as bundles of plays, to be compared like them.

An evaluation keeps neither when it ran nor what it used, so its bundle has outcomes only: no rates, no resources.

The JSON Schema of the bundles: ``python -m headrace.bench._bundle_files docs/schema`` writes it.

``versions.json`` beside it keeps a digest per schema version. Fields that change without a new version are refused.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError

from headrace.bench import _isaaclab_reader, schema
from headrace.bench._builders import EpisodeTally
from headrace.bench.schema import BUNDLES, SCHEMA_VERSION, Statistic, with_label
from headrace.errors import ConfigError, DataError
from headrace.files import write_whole

if TYPE_CHECKING:
    from headrace.evaluation import Evaluation

VERSIONS = "versions.json"


def json_schemas() -> dict[str, dict[str, object]]:
    """File name → JSON Schema of what is written; every field is there, missing values are null."""
    found: dict[str, dict[str, object]] = {}
    for kind, bundle in BUNDLES.items():
        schema = bundle.model_json_schema(mode="serialization")
        head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"headrace/{kind}-{SCHEMA_VERSION}"}
        found[f"{kind}.json"] = {**head, **schema}
    return found


def digest(schemas: dict[str, dict[str, object]]) -> str:
    """Return a hash that changes with any field, type or constraint, but not with wording."""
    return hashlib.sha256(json.dumps(_bare(schemas), sort_keys=True).encode()).hexdigest()


def write_schemas(folder: Path) -> None:
    """Write the files; refused if the version of today stands there with other fields."""
    schemas = json_schemas()
    known = _known(folder)
    if known.setdefault(SCHEMA_VERSION, digest(schemas)) != digest(schemas):
        raise ConfigError(
            f"schema: expected the fields of version {SCHEMA_VERSION} as published, got others; "
            "raise SCHEMA_VERSION in headrace/bench/schema.py and teach _bundle_files.py to read the old one"
        )
    for name, form in schemas.items():
        write_whole(folder / name, _text(form))
    write_whole(folder / VERSIONS, _text(known))


def _known(folder: Path) -> dict[str, str]:
    path = folder / VERSIONS
    return cast("dict[str, str]", json.loads(path.read_text())) if path.is_file() else {}


def _text(value: object) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def _bare(value: object) -> object:
    """Without descriptions and titles. A field of the name is a schema itself, not a text, and stays."""
    if isinstance(value, dict):
        items = cast("dict[str, object]", value).items()
        return {k: _bare(v) for k, v in items if k not in ("description", "title") or not isinstance(v, str)}
    return [_bare(item) for item in cast("list[object]", value)] if isinstance(value, list) else value


if __name__ == "__main__":
    write_schemas(Path(sys.argv[1]))


EVALUATION_FILES = ("evaluation.json", "evaluation.jsonl")
"""What evaluations and their journals are called where a directory is searched for them; any name will do otherwise."""

_STATUSES: dict[str, schema.Status] = {"completed": "completed", "interrupted": "interrupted", "failed": "crashed"}
_NOT_PLAYING = ("source", "overrides", "seed", "policy")
_NOT_TIMED = (
    *("steps_per_iteration", "iteration_time_s", "collection_fps", "total_fps", "iterations_per_s"),
    "environment_step_timing",
)
_BEFORE = "2.0"
_FEWER_FIELDS = "3.0"
"""Lacks fields of today that are null then."""


def parse_bundle(text: str, *, source: str = "bundle") -> schema.Bundle:
    """Return a bundle from its JSON, upgraded from an older schema where needed.

    Args:
        text: the JSON.
        source: named in errors.
    """
    try:
        data = json.loads(text)
        if "\\ud" in text.lower():  # half a character, which could not be printed or written
            json.dumps(data, ensure_ascii=False).encode()
    except ValueError as error:
        raise DataError(f"{source}: expected the JSON of a benchmark bundle, got text that is not JSON") from error
    except RecursionError as error:
        raise DataError(f"{source}: expected the JSON of a benchmark bundle, got JSON nested too deeply") from error
    if not isinstance(data, dict) or "schema_version" not in data or "run" not in data:
        raise DataError(f"{source}: expected a benchmark bundle, with schema_version and run; got another JSON value")
    fields = cast("dict[str, Any]", data)
    version = fields["schema_version"]
    if version == _BEFORE or version in _isaaclab_reader.READ:
        try:
            fields = _effective_rates(fields) if version == _BEFORE else _isaaclab_reader.upgrade(fields)
        except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:  # parts of another shape
            raise DataError(f"{source}: not a valid bundle of schema {version}: {error!r}") from error
    elif version == _FEWER_FIELDS:
        fields = {**fields, "schema_version": schema.SCHEMA_VERSION}
    elif version != schema.SCHEMA_VERSION:
        raise DataError(
            f"{source}: expected schema_version {schema.SCHEMA_VERSION}, {_FEWER_FIELDS}, {_BEFORE} or one of "
            f"Isaac Lab's ({', '.join(_isaaclab_reader.READ)}), got {version!r}; if a newer headrace wrote it: "
            "pip install -U headrace"
        )
    kind = fields.get("kind")
    if not isinstance(kind, str) or kind not in schema.BUNDLES:
        raise DataError(f"{source}: expected kind to be one of {', '.join(schema.BUNDLES)}; got {kind!r}")
    try:
        return schema.BUNDLES[kind].model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(
            f"{source}: not a valid {kind} bundle of schema {version}: {where}: {first['msg']} "
            f"({error.error_count()} problems)"
        ) from error


def read_bundle(path: Path | str) -> schema.Bundle:
    """Return a bundle from a file; an evaluation or its journal as the bundle of a play."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: expected the JSON of a benchmark bundle, got a file that is not text") from error
    except OSError as error:
        raise DataError(f"{path}: expected a benchmark bundle, got: {error.strerror or error}") from error
    # as the files of ``Evaluation.save`` and journals begin
    if not text[:40].replace(" ", "").lstrip("{\n").startswith('"format":"headrace-evaluation-'):
        return parse_bundle(text, source=str(path))
    from headrace.evaluation import Evaluation

    label = path.parent.name if path.name in EVALUATION_FILES else path.stem
    return with_label(evaluation_bundle(Evaluation.load(path), str(path)), label)


def read_bundles(paths: Sequence[Path | str]) -> tuple[list[schema.Bundle], list[str]]:
    """Return the bundles of files and directories, and a note for each file in a directory that is not a valid bundle.

    A file that is named itself must be one.
    """
    found: list[schema.Bundle] = []
    notes: list[str] = []
    for path in map(Path, paths):
        for file in bundle_paths(path):
            try:
                found.append(read_bundle(file))
            except DataError as error:
                if file == path:
                    raise
                notes.append(f"left out: {error}")
    if not found:
        raise DataError(f"{', '.join(map(str, paths))}: expected at least one valid bundle; " + "; ".join(notes))
    return found, notes


def bundle_paths(path: Path | str) -> list[Path]:
    """Return the bundle files that ``path`` means: itself, or the bundles anywhere below a directory, by name."""
    path = Path(path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{path}: expected a bundle file or a directory of them, got nothing there")
    names = [f"{kind}.json" for kind in schema.BUNDLES] + list(EVALUATION_FILES)
    found = sorted(file for name in names for file in path.rglob(name))
    if not found:
        raise DataError(f"{path}: expected bundles in it ({', '.join(names)}), found none")
    return found


def _effective_rates(old: dict[str, Any]) -> dict[str, Any]:
    """Compute the rates of schema 2.0 from frames and times: it kept means of rates, which overstate."""
    new: dict[str, Any] = {**old, "schema_version": schema.SCHEMA_VERSION}
    runtime = old.get("runtime")
    if not isinstance(runtime, dict):
        return new
    changed = cast("dict[str, Any]", {**runtime})
    frames, timing = changed.get("frames"), changed.get("environment_step_timing")
    rates = (changed.get("collection_fps") or {}).get("samples") or []
    if old.get("kind") == "training" and changed.get("steps_per_iteration") and rates:
        times = Statistic.of((changed["steps_per_iteration"] / rate for rate in rates), unit="s", better="lower")
        changed["collection_time_s"] = times and times.model_dump()
    changed["total_fps"] = changed.pop("throughput_fps", None)
    spent = None
    if isinstance(timing, dict):
        step = cast("dict[str, Any]", timing)
        seconds = step["environment_step_time_s"]
        spent = seconds["mean"] * (seconds["n"] or 0)
        rate = frames / spent if frames and spent else step["environment_step_fps"]["mean"]
        changed["environment_step_timing"] = {**step, "environment_step_fps": rate}
    if isinstance(old.get("time_split_s"), dict):
        spent = old["time_split_s"].get("collection")
    changed["collection_fps"] = frames / spent if frames and spent else None
    return new | {"runtime": changed}


def evaluation_bundle(evaluation: Evaluation, name: str) -> schema.PlayBundle:
    """Return an evaluation as a bundle.

    Args:
        evaluation: with an identity: what was played, and by which policy.
        name: tells it from others of the same policy; part of the run id.
    """
    from headrace.policies.identity import current_id

    about, where = evaluation.identity, evaluation.circumstances or {}
    if about is None:
        raise DataError(
            f"{name}: expected an evaluation that says what was played, got one without an identity; pass policy_id= "
            "(--policy-id), journal= or output= to evaluate"
        )
    played = EpisodeTally(0)
    for row in evaluation.episodes:
        played.add(0, row.reward, row.length, row.success, "diverged" if row.diverged else "truncated", row.episode_id)
    diverged = played.counts().diverged
    return schema.PlayBundle(
        run=schema.RunIdentity(
            run_id=f"evaluation {name}",
            framework=None,
            config=schema.RunConfig(
                physics_backend="unknown",
                rendering_backend=None,
                overrides=dict(about.get("overrides") or {}),
                playing={name: value for name, value in about.items() if name not in _NOT_PLAYING},
            ),
            task=str(about["source"]),
            seed=int(about["seed"]),
            start_time_utc="",
            end_time_utc="",
            duration_s=evaluation.counters.seconds,
            status=_STATUSES[evaluation.status],
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
            **dict.fromkeys(_NOT_TIMED),
            episodes=schema.EpisodeCounts(
                completed=len(played.ended), diverged=diverged, unfinished=evaluation.unfinished
            ),
        ),
        resources=schema.Resources(gpu_util_pct=None, gpu_mem_gb=None, cpu_util_pct=None, ram_gb=None),
        **played.outcomes(),
        checkpoint_path=None,
        video_path=None,
        policy=schema.PolicyDescriptor(kind="chunk", name=str(current_id(about["policy"])), deterministic=None),
        plan=schema.EpisodePlan(
            kind="episodes",
            episodes_planned=evaluation.planned,
            num_steps=None,
            first_episode_id=min(evaluation.plan, default=None),
            shorter_than_episode=False,
        ),
        extra={"counters": asdict(evaluation.counters)} if evaluation.counters.batch_steps else {},
    )


def _one(where: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    """Return a circumstance; None where parts of a merged evaluation differ in it."""
    value = where.get(name)
    return value if isinstance(value, kind) else None
