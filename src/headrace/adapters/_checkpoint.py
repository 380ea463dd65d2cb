"""Checkpoint files: what they are, told without running anything in them, and how they are read and written."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, cast

import torch

from headrace.adapters._learner import CheckpointMeta
from headrace.adapters._settings import LibraryName, PPOSettings, checked_library, plain_settings
from headrace.errors import ConfigError, DataError

FileKind = Literal["headrace", "rl_games", "rsl_rl", "sb3", "skrl", "torchscript", "onnx", "chunk"]

META_KEY = "headrace"
"""Where our description is in a library's own dictionary; SB3's archive has it as a member of this name + .json."""
_MARKS: tuple[tuple[LibraryName, frozenset[str]], ...] = (
    ("rsl_rl", frozenset({"actor_state_dict", "critic_state_dict"})),
    ("headrace", frozenset({"format", "network", "state_dict"})),
    ("rl_games", frozenset({"model", "optimizer", "epoch"})),
    ("skrl", frozenset({"policy", "value"})),
)
_UNREADABLE = (pickle.UnpicklingError, RuntimeError, EOFError, zipfile.BadZipFile, KeyError, ValueError, OSError)


def describe(meta: CheckpointMeta) -> dict[str, object]:
    """``meta`` as plain numbers, words and lists."""
    found: dict[str, object] = {"format": 1, **asdict(meta)}
    found["settings"] = plain_settings(meta.settings)
    found["overrides"] = {
        path: list(cast("tuple[object, ...]", value)) if isinstance(value, tuple) else value
        for path, value in meta.overrides.items()
    }
    return found


def file_kind(path: Path, *, trust: bool = False) -> FileKind:
    """What a file is, from its content; anything damaged or unknown is a :class:`DataError`."""
    if not path.is_file():
        got = "a folder; name a file in it, such as checkpoints/last" if path.is_dir() else "nothing there"
        raise DataError(f"{path}: expected a checkpoint file, got {got}")
    if path.suffix == ".onnx":
        return "onnx"
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError) as error:
        raise DataError(f"{path}: not a checkpoint, or cut off: {error}") from error
    if damaged is not None:
        raise DataError(f"{path}: the checkpoint is damaged: its part {damaged!r} does not match its checksum")
    if "policy.pth" in names:
        return "sb3"
    # a TorchScript file has its code in the archive, next to the pickle that every torch file has
    if any(name.split("/", 2)[1:2] == ["code"] for name in names):
        return "torchscript"
    keys = frozenset(read_weights(path, trust=trust, mapped=True))
    if {"format", "cfg", "weights"} <= keys:
        return "chunk"
    for library, marks in _MARKS:
        if marks <= keys:
            return library
    raise DataError(
        f"{path}: no library wrote this: expected a checkpoint of {', '.join(name for name, _ in _MARKS)} or sb3, "
        f"a TorchScript or ONNX file or a chunk policy, got the entries {sorted(keys)}"
    )


def read_meta(path: Path, kind: FileKind, *, trust: bool = False) -> CheckpointMeta | None:
    """Our description in a checkpoint; None in one that the library wrote without us."""
    found: object
    if kind == "sb3":
        with zipfile.ZipFile(path) as archive:
            member = f"{META_KEY}.json"
            found = json.loads(archive.read(member)) if member in archive.namelist() else None
    elif kind in ("headrace", "rl_games", "rsl_rl", "skrl"):
        content = read_weights(path, trust=trust, mapped=True)
        found = (content.get("infos") or {}).get(META_KEY) if kind == "rsl_rl" else content.get(META_KEY)
    else:
        return None
    if not isinstance(found, dict):
        return None
    entry = cast("dict[str, Any]", found)
    try:
        settings = dict(entry["settings"])
        settings["hidden"] = tuple(settings["hidden"])
        return CheckpointMeta(
            library=checked_library(entry["library"]),
            task=entry["task"],
            iteration=entry["iteration"],
            score=entry["score"],
            settings=PPOSettings(**settings),
            overrides=dict(entry["overrides"]),
        )
    except (KeyError, TypeError, ConfigError) as error:
        raise DataError(f"{path}: its description cannot be read: {error!r}; it is of another version") from error


def read_weights(path: Path, *, trust: bool, mapped: bool = False) -> Mapping[str, Any]:
    """The dictionary in a torch file.

    Args:
        path: a file that ``torch.save`` wrote.
        trust: unpickle whatever is in it, which can run code.
        mapped: leave the tensors on disk, for a look at the rest.
    """
    try:
        content: object = torch.load(path, map_location="cpu", weights_only=not trust, mmap=mapped or None)
    except pickle.UnpicklingError as error:
        raise DataError(
            f"{path}: holds more than weights, and loading that can run code: {str(error).splitlines()[0]} "
            "If you trust whoever wrote it, pass --trust-checkpoint (trust=True)"
        ) from error
    except _UNREADABLE as error:
        raise DataError(f"{path}: the checkpoint is damaged or cut off: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected a dictionary of weights, got {type(content).__name__}")
    return cast("dict[str, Any]", content)


def checked_fit(path: Path, library: str, load: Callable[[], object]) -> None:
    """Run ``load``; weights that do not fit the networks become an error that says what to do."""
    try:
        load()
    except (RuntimeError, KeyError, ValueError, AttributeError, TypeError) as error:
        raise DataError(
            f"{path}: its weights do not fit the networks that {library} was built with here: {error}\n"
            "Use the task and settings it was trained with; a policy of your own plays as module:name"
        ) from error
