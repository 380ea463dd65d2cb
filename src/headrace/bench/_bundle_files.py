"""Bundles read back from JSON, in any version we know."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from headrace.bench import _isaaclab_reader
from headrace.bench._evaluations import EVALUATION_FILES, is_evaluation, read_evaluation
from headrace.bench._schema import BUNDLES, SCHEMA_VERSION, Bundle
from headrace.bench._statistic import Statistic
from headrace.errors import DataError

_BEFORE = "2.0"


def parse_bundle(text: str, *, source: str = "bundle") -> Bundle:
    """A bundle from its JSON, upgraded from an older schema where needed.

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
    elif version != SCHEMA_VERSION:
        raise DataError(
            f"{source}: expected schema_version {SCHEMA_VERSION}, {_BEFORE} or one of Isaac Lab's "
            f"({', '.join(_isaaclab_reader.READ)}), got {version!r}; if a newer headrace wrote it: "
            "pip install -U headrace"
        )
    kind = fields.get("kind")
    if not isinstance(kind, str) or kind not in BUNDLES:
        raise DataError(f"{source}: expected kind to be one of {', '.join(BUNDLES)}; got {kind!r}")
    try:
        return BUNDLES[kind].model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(
            f"{source}: not a valid {kind} bundle of schema {version}: {where}: {first['msg']} "
            f"({error.error_count()} problems)"
        ) from error


def read_bundle(path: Path | str) -> Bundle:
    """A bundle from a file; an evaluation or its journal as the bundle of a play."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: expected the JSON of a benchmark bundle, got a file that is not text") from error
    except OSError as error:
        raise DataError(f"{path}: expected a benchmark bundle, got: {error.strerror or error}") from error
    return read_evaluation(path) if is_evaluation(text) else parse_bundle(text, source=str(path))


def read_bundles(paths: Sequence[Path | str]) -> tuple[list[Bundle], list[str]]:
    """The bundles of files and directories, and a note for each file in a directory that is not a valid bundle.

    A file that is named itself must be one.
    """
    found: list[Bundle] = []
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
    """The bundle files that ``path`` means: itself, or the bundles anywhere below a directory, by name."""
    path = Path(path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{path}: expected a bundle file or a directory of them, got nothing there")
    names = [f"{kind}.json" for kind in BUNDLES] + list(EVALUATION_FILES)
    found = sorted(file for name in names for file in path.rglob(name))
    if not found:
        raise DataError(f"{path}: expected bundles in it ({', '.join(names)}), found none")
    return found


def _effective_rates(old: dict[str, Any]) -> dict[str, Any]:
    """Schema 2.0 kept means of rates, which overstate: the rates are made of its frames and times."""
    new: dict[str, Any] = {**old, "schema_version": SCHEMA_VERSION}
    runtime = old.get("runtime")
    if not isinstance(runtime, dict):
        return new
    changed = cast("dict[str, Any]", {**runtime})
    frames, timing = changed.get("frames"), changed.get("environment_step_timing")
    rates = (changed.get("collection_fps") or {}).get("samples") or []
    if old.get("kind") == "training" and changed.get("steps_per_iteration") and rates:
        times = Statistic.of((changed["steps_per_iteration"] / rate for rate in rates), unit="s", better="lower")
        changed["collection_time_s"] = None if times is None else times.model_dump()
    changed["total_fps"] = changed.pop("throughput_fps", None)
    changed["collection_fps"] = None
    split = old.get("time_split_s")
    if isinstance(timing, dict):
        step = cast("dict[str, Any]", timing)
        seconds = step["environment_step_time_s"]
        total = seconds["mean"] * (seconds["n"] or 0)
        changed["collection_fps"] = frames / total if frames and total else None
        rate = frames / total if frames and total else step["environment_step_fps"]["mean"]
        changed["environment_step_timing"] = {**step, "environment_step_fps": rate}
    if isinstance(split, dict):
        spent = cast("dict[str, Any]", split).get("collection")
        changed["collection_fps"] = frames / spent if frames and spent else None
    return new | {"runtime": changed}
