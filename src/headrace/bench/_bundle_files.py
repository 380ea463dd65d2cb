"""Bundles read back from JSON, in any version we know; evaluations as bundles of plays, to be compared like them.

An evaluation keeps neither when it ran nor what it used, so its bundle has outcomes only: no rates, no resources.

The JSON Schema of the bundles: ``python -m headrace.bench._bundle_files docs/schema`` writes it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError

from headrace.bench import schema
from headrace.bench.builders import EpisodeTally
from headrace.bench.schema import BUNDLES, SCHEMA_VERSION, with_label
from headrace.errors import DataError
from headrace.files import read_text, write_whole

if TYPE_CHECKING:
    from headrace.evaluation import Evaluation


def json_schemas() -> dict[str, dict[str, Any]]:
    """File name → JSON Schema of what is written; every field is there, missing values are null."""
    found: dict[str, dict[str, Any]] = {}
    for kind, bundle in BUNDLES.items():
        head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"headrace/{kind}-{SCHEMA_VERSION}"}
        found[f"{kind}.json"] = head | bundle.model_json_schema(mode="serialization")
    return found


if __name__ == "__main__":
    for name, form in json_schemas().items():
        write_whole(Path(sys.argv[1]) / name, json.dumps(form, indent=1, ensure_ascii=False) + "\n")


EVALUATION_FILES = ("evaluation.json", "evaluation.jsonl")
"""What evaluations and their journals are called where a directory is searched for them; any name will do otherwise."""

_STATUSES: dict[str, schema.Status] = {"completed": "completed", "interrupted": "interrupted", "failed": "crashed"}
_NOT_PLAYING = ("source", "overrides", "seed", "policy")
_OLDER = "3.0"
"""Lacks fields of today, which are null then, and has fields that are not read any more."""


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
    if version not in (_OLDER, schema.SCHEMA_VERSION):
        raise DataError(
            f"{source}: expected schema_version {schema.SCHEMA_VERSION} or {_OLDER}, got {version!r}; "
            "if a newer headrace wrote it: pip install -U headrace"
        )
    fields = _without_old_fields(fields)
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
    text = read_text(path)
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


def _without_old_fields(old: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a bundle that are read today."""
    new = {**old, "schema_version": schema.SCHEMA_VERSION}
    new.pop("per_env", None)
    if isinstance(policy := old.get("policy"), dict):
        kept = cast("dict[str, Any]", policy).items()
        new["policy"] = {name: value for name, value in kept if name not in ("chunk_horizon", "chunk_execute")}
    if isinstance(phases := old.get("phases"), dict):
        new["phases"] = {
            name: {key: value for key, value in cast("dict[str, Any]", phase).items() if key != "tree"}
            for name, phase in cast("dict[str, object]", phases).items()
            if isinstance(phase, dict)
        }
    return new


def evaluation_bundle(evaluation: Evaluation, name: str) -> schema.PlayBundle:
    """Return an evaluation as a bundle.

    Args:
        evaluation: with an identity: what was played, and by which policy.
        name: tells it from others of the same policy; part of the run id.
    """
    from headrace.policies.step_policy import current_id

    about, where = evaluation.identity, evaluation.circumstances or {}
    if about is None:
        raise DataError(
            f"{name}: expected an evaluation that says what was played, got one without an identity; pass policy_id= "
            "(--policy-id), journal= or output= to evaluate"
        )
    played = EpisodeTally()
    for row in evaluation.episodes:
        played.add(0, row.reward, row.length, row.success, "diverged" if row.diverged else "truncated", row.episode_id)
    diverged = played.counts().diverged
    return schema.PlayBundle(
        run=schema.RunIdentity(
            run_id=f"evaluation {name}",
            config=schema.RunConfig(
                physics_backend="unknown",
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
            status_reason=f"{evaluation.unfinished} episodes are unfinished" if evaluation.unfinished else None,
        ),
        versions=schema.Versions(
            **{name: _one(where, name, str) for name in ("headrace", "python", "torch")}, packages={}
        ),
        hardware=schema.Hardware(gpu_devices=[], cpu_name=_one(where, "processor", str) or ""),
        runtime=schema.Runtime(
            startup_time_s=schema.StartupTime(),
            iterations_completed=evaluation.counters.batch_steps,
            total_wall_time_s=evaluation.counters.seconds,
            episodes=schema.EpisodeCounts(
                completed=len(played.ended), diverged=diverged, unfinished=evaluation.unfinished
            ),
        ),
        resources=schema.Resources(),
        **played.outcomes(),
        policy=schema.PolicyDescriptor(kind="chunk", name=str(current_id(about["policy"]))),
        plan=schema.EpisodePlan(
            kind="episodes",
            episodes_planned=evaluation.planned,
            first_episode_id=min(evaluation.plan, default=None),
        ),
        extra={"counters": asdict(evaluation.counters)} if evaluation.counters.batch_steps else {},
    )


def _one(where: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    """Return a circumstance; None where parts of a merged evaluation differ in it."""
    value = where.get(name)
    return value if isinstance(value, kind) else None
