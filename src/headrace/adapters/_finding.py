"""Where the checkpoint to play comes from: a path, a URI, an earlier run, or the package."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal, cast

from headrace._published import published, published_file
from headrace.adapters._training import INDEX, Kept, read_index
from headrace.errors import ConfigError, DataError
from headrace.files import write_whole

Source = Literal["explicit", "latest", "best", "published"]
_TIMEOUT = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCheckpoint:
    """A checkpoint as a local file."""

    path: Path
    source: Source
    uri: str | None = None
    """Where it was fetched from."""
    score: float | None = None


def bare_name(task: str) -> str:
    """The name that published checkpoints have: without a module or namespace before it, or ``-Play`` behind."""
    return re.split(r"[:/]", task)[-1].removesuffix("-Play")


def find_checkpoint(
    wanted: str | None, task: str, *, library: str | None = None, runs: Path = Path("runs")
) -> FoundCheckpoint:
    """The checkpoint to play.

    Args:
        wanted: a file, a training's directory (its last one), a URI, ``latest`` or ``best`` of earlier runs, or
            ``published``; None for the latest of earlier runs, and the published one where there are none.
        task: what it must be of.
        library: what it must be of; None for any.
        runs: the folder of earlier runs.
    """
    if wanted in ("latest", "best", None):
        found = _of_runs(wanted or "latest", task, library, runs)
        if found is not None:
            return found
        if wanted is not None:
            whose = f" with {library}" if library else ""
            raise ConfigError(
                f"--policy {wanted}: no training of {task!r}{whose} in {str(runs)!r}; "
                "train one with 'headrace train', or give a file with --policy"
            )
    if wanted is None or wanted == "published":
        return published_checkpoint(task, library)
    if "://" in wanted:
        return FoundCheckpoint(path=fetched(wanted), source="explicit", uri=wanted)
    path = Path(wanted)
    return FoundCheckpoint(path=read_index(path).last if path.is_dir() else path, source="explicit")


def published_checkpoint(task: str, library: str | None = None) -> FoundCheckpoint:
    """The checkpoint in the package for a task: of ``library``, or our own learner's, or whichever there is."""
    name = bare_name(task)
    entries = {
        key: entry
        for key, entry in published().items()
        if entry["task"] == name and library in (None, entry["library"])
    }
    if not entries:
        whose = f" with {library}" if library else ""
        raise ConfigError(
            f"play: no earlier run and no published checkpoint of {name!r}{whose}; "
            f"give one with --policy, or train one: headrace train {task}"
        )
    order = ("headrace", "headrace-chunk")
    key = min(entries, key=lambda key: (order.index(lib) if (lib := entries[key]["library"]) in order else 9, key))
    return FoundCheckpoint(path=published_file(key), source="published", score=_value(entries[key].get("score")))


def fetched(uri: str) -> Path:
    """A local copy of what a URI names, anew each time; http and https, and whatever fsspec has installed."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace" / "checkpoints"
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", uri.rsplit("/", 1)[-1]) or "checkpoint"
    path = cache / hashlib.sha256(uri.encode()).hexdigest()[:16] / name
    write_whole(path, lambda part: _download(uri, part))
    return path


def _download(uri: str, path: Path) -> None:
    hint = "check the address, or give a local file"
    if uri.startswith(("http://", "https://")):
        try:
            with urllib.request.urlopen(uri, timeout=_TIMEOUT) as answer, path.open("wb") as file:
                shutil.copyfileobj(answer, file)
        except (OSError, HTTPException) as error:  # URLError is an OSError
            raise DataError(f"{uri}: cannot be fetched: {error}; {hint}") from error
        return
    import fsspec

    try:
        with fsspec.open(uri, "rb") as source, path.open("wb") as file:
            shutil.copyfileobj(cast("Any", source), file)
    except Exception as error:  # every file system of fsspec raises kinds of its own, and asks for its own packages
        raise DataError(f"{uri}: cannot be fetched: {error}; {hint}") from error


def _of_runs(which: Literal["latest", "best"], task: str, library: str | None, runs: Path) -> FoundCheckpoint | None:
    kept: list[tuple[Path, Kept]] = []
    broken: list[str] = []
    for index in sorted(runs.glob(f"*/{INDEX}"), key=lambda path: _natural(path.parent.name)):
        try:
            run = read_index(index.parent)
        except DataError as error:  # one broken run must not keep the others from being played
            broken.append(str(error))
            continue
        if run.task == task and library in (None, run.library) and run.last.is_file():
            kept.append((index.parent, run))
    if not kept and broken:
        raise DataError(f"no training of {task!r} can be read: {'; '.join(broken)}")
    if not kept:
        return None
    if which == "latest":
        _, run = max(kept, key=lambda pair: (pair[1].saved_at, _natural(pair[0].name)))
        return FoundCheckpoint(path=run.last, source="latest", score=run.score)
    lowest = float("-inf")
    _, run = max(
        kept, key=lambda pair: (lowest if pair[1].best_score is None else pair[1].best_score, pair[1].saved_at)
    )
    return FoundCheckpoint(path=run.best, source="best", score=run.best_score)


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that puts run_10 after run_9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _value(score: object) -> float | None:
    value = cast("dict[str, object]", score).get("value") if isinstance(score, dict) else score
    return float(value) if isinstance(value, (int, float)) else None
