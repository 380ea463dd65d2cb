"""The journal of an evaluation: a header, then one JSON line per finished episode, on disk before the next step.

An episode is a function of (task, seed, id, policy), so an evaluation that was cut off goes on where it ended, and
parts of a plan that were played elsewhere belong to the same table, if what decides the rows, the *identity*, is the
same.
"""

from __future__ import annotations

import hashlib
import json
import platform
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from headrace.errors import ConfigError, DataError
from headrace.files import append, storage_error, truncate
from headrace.rollout._evaluation import EpisodeResult

_FORMAT = "headrace-evaluation-1"
_ROW = {field.name for field in fields(EpisodeResult)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a journal is of."""

    identity: dict[str, Any]
    """What decides the rows; must be equal to resume or merge."""
    circumstances: dict[str, Any]
    """What should not change a row: number of environments, versions, processor. A difference is warned about."""


class Journal:
    """Appends rows to a file; each call is one write and one sync."""

    def __init__(self, path: Path, header: Header, *, resume: bool) -> None:
        """Begin a journal, or with ``resume`` go on with one of the same identity; an absent one begins.

        A last line that was cut off is removed.
        """
        self.path = path
        self.rows: list[EpisodeResult] = []
        """Of the file, when it was opened."""
        if path.exists():
            if not resume:
                raise ConfigError(f"journal: {path} already exists; pass resume=True (--resume) to go on with it")
            before, self.rows, size = _read(path)
            check_same(header, before, str(path))
            if size != path.stat().st_size:
                truncate(path, size)
        else:
            self._append({"format": _FORMAT, "identity": header.identity, "circumstances": header.circumstances})

    def add(self, rows: Sequence[EpisodeResult]) -> None:
        """Write the episodes that ended in one step."""
        self._append(*[asdict(row) for row in rows])

    def _append(self, *lines: dict[str, Any]) -> None:
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        try:
            append(self.path, text.encode())
        except OSError as error:
            raise storage_error(self.path, error, "make room and resume: the rows before are safe") from error


def read_journals(paths: Iterable[Path]) -> tuple[Header, list[EpisodeResult]]:
    """The rows of journals of one identity, in order of their ids; an id that is in several must have equal rows."""
    header: Header | None = None
    found: dict[int, EpisodeResult] = {}
    for path in paths:
        own, rows, _ = _read(path)
        if header is not None:
            check_same(header, own, str(path))
        header = header or own
        for row in rows:
            if found.setdefault(row.episode_id, row) != row:
                raise DataError(
                    f"{path}: episode {row.episode_id} was played twice with different results, {row} and "
                    f"{found[row.episode_id]}; the policy or the environment is not a function of the episode"
                )
    if header is None:
        raise ConfigError("merge: expected at least one journal, got none")
    return header, sorted(found.values())


def check_same(expected: Header, got: Header, name: str) -> None:
    """Refuse another identity, naming what differs; warn of other circumstances."""
    keys = sorted(expected.identity.keys() | got.identity.keys())
    for key in keys:
        mine, theirs = expected.identity.get(key), got.identity.get(key)
        if mine != theirs:
            raise ConfigError(f"{name}: expected a journal of {key} {mine!r}, got one of {theirs!r}")
    changed = [key for key in expected.circumstances if expected.circumstances[key] != got.circumstances.get(key)]
    if changed:
        told = ", ".join(f"{key} {got.circumstances.get(key)!r} → {expected.circumstances[key]!r}" for key in changed)
        warnings.warn(f"{name}: played under other circumstances: {told}", stacklevel=3)


def policy_hash(policy: object) -> str:
    """A hash of a module's weights and class; ConfigError for what cannot be seen through."""
    own: object = getattr(policy, "policy", policy)
    if not isinstance(own, nn.Module):
        raise ConfigError(
            f"policy_id: expected a text that names the policy, since {type(own).__name__} has no weights to tell it "
            "apart by; a journal is resumed and merged for equal policies only"
        )
    digest = hashlib.sha256(f"{type(own).__module__}.{type(own).__qualname__}".encode())
    for name, values in sorted(own.state_dict().items()):
        flat = cast("torch.Tensor", values).detach().cpu().contiguous()
        digest.update(f"{name} {flat.dtype} {tuple(flat.shape)}".encode())
        digest.update(flat.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def circumstances(env: object, engine: str) -> dict[str, Any]:
    """Where an evaluation runs."""
    return {
        "num_envs": getattr(env, "num_envs", None),
        "engine": engine,
        "torch": torch.__version__,
        "headrace": version("headrace"),
        "python": platform.python_version(),
        "processor": _processor(),
    }


def source_of(env: object) -> dict[str, Any]:
    """What is evaluated on: the recipe's source and overrides, or the name of what was made by hand."""
    recipe: Any = getattr(env, "recipe", None)
    if recipe is not None:
        return {"source": recipe.source, "overrides": recipe.to_json()["overrides"]}
    task: Any = getattr(env, "task", None)
    return {"source": getattr(task, "identity", None) or getattr(env, "name", type(env).__name__), "overrides": {}}


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _read(path: Path) -> tuple[Header, list[EpisodeResult], int]:
    """Header, rows, and the bytes up to the end of the last whole line."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    whole = raw[: raw.rfind(b"\n") + 1]
    try:
        first, *others = [json.loads(line) for line in whole.splitlines()]
        if first.get("format") != _FORMAT:
            raise DataError(f"{path}: expected a journal of format {_FORMAT!r}, got {first.get('format')!r}")
        rows = [EpisodeResult(**line) for line in others if set(line) == _ROW]
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not the journal of an evaluation, or damaged: {error}") from error
    if len(rows) != len(others):
        raise DataError(f"{path}: expected rows with {sorted(_ROW)}, got others")
    return Header(identity=first["identity"], circumstances=first["circumstances"]), rows, len(whole)
