"""Checkpoint files: recognized without executing anything in them, read and written."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch

from headrace.errors import DataError
from headrace.files import open_archive, parsing
from headrace.learning.ppo import PPOCfg
from headrace.libraries.registry import LibrarySpec, libraries, library

FileKind = Literal["library", "torchscript", "onnx", "chunk"]

META_KEY = "headrace"
"""The name of our description in a checkpoint; in a zip archive it is a member of this name + .json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMeta:
    """Our description in a checkpoint, next to the library's own content."""

    library: str
    task: str
    iteration: int
    score: float | None
    """Mean return of recent training episodes, where some had ended."""
    settings: PPOCfg
    overrides: Mapping[str, object] = field(default_factory=dict[str, object])
    """Of the task's settings, by path."""

    def plain(self) -> dict[str, object]:
        """Return what a checkpoint holds of it: numbers, words, lists and dicts."""
        return {
            "format": 1,
            **asdict(self),
            "settings": plain(asdict(self.settings)),
            "overrides": plain(self.overrides),
        }


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers, words and lists, as JSON has them: tuples become lists."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}  # pyright: ignore[reportUnknownArgumentType]  # of anything


def recognize(path: Path, *, trust: bool = False) -> tuple[FileKind, LibrarySpec | None]:
    """Return what a file is, from its content, and whose checkpoint; anything damaged or unknown is a
    :class:`DataError`."""
    if not path.is_file():
        got = "a directory; name a file in it, such as checkpoints/last" if path.is_dir() else "nothing there"
        raise DataError(f"{path}: expected a checkpoint file, got {got}")
    if path.suffix == ".onnx":
        return "onnx", None
    with open_archive(path) as archive:
        names = archive.namelist()
    # a TorchScript file has its code in the archive, next to the pickle that every torch file has
    if any(name.split("/", 2)[1:2] == ["code"] for name in names):
        return "torchscript", None
    entries = frozenset(read_weights(path, trust=trust, mapped=True) if _is_torch_file(names) else names)
    if {"format", "cfg", "weights"} <= entries:
        return "chunk", None
    matching = [spec for spec in libraries() if spec.marks <= entries]
    if not matching:
        raise DataError(
            f"{path}: not a checkpoint of any known library: expected one of "
            f"{', '.join(spec.name for spec in libraries())}, a TorchScript or ONNX file or a chunk policy, got the "
            f"entries {sorted(entries)}"
        )
    return "library", max(matching, key=lambda spec: len(spec.marks))


def read_meta(path: Path, spec: LibrarySpec, *, trust: bool = False) -> CheckpointMeta | None:
    """Our description in a checkpoint of a library; None in one that the library wrote without us."""
    with open_archive(path) as archive:
        names, member = archive.namelist(), f"{META_KEY}.json"
        found: Any = json.loads(archive.read(member)) if member in names else None
    if _is_torch_file(names):
        found = read_weights(path, trust=trust, mapped=True)
        for key in spec.meta_key:
            found = found.get(key) if isinstance(found, Mapping) else None
    if not isinstance(found, dict):
        return None
    entry = cast("dict[str, Any]", found)
    try:
        settings: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in entry["settings"].items()
        }
        return CheckpointMeta(
            library=library(entry["library"]).name,
            task=entry["task"],
            iteration=entry["iteration"],
            score=entry["score"],
            settings=PPOCfg(**settings),
            overrides=dict(entry["overrides"]),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(f"{path}: its description cannot be read: {error!r}; another version wrote it") from error


def read_weights(path: Path, *, trust: bool, mapped: bool = False) -> Mapping[str, Any]:
    """Return the dictionary in a torch file.

    Args:
        path: a file that ``torch.save`` wrote.
        trust: unpickle whatever is in it, which can execute arbitrary code.
        mapped: leave the tensors on disk, to look at the rest only.
    """
    with parsing(path):
        try:
            content: object = torch.load(path, map_location="cpu", weights_only=not trust, mmap=mapped or None)
        except pickle.UnpicklingError as error:
            raise DataError(
                f"{path}: holds more than weights, and loading it can execute arbitrary code: "
                f"{str(error).splitlines()[0]} If you trust its author, pass --trust-checkpoint (trust=True)"
            ) from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected a dictionary of weights, got {type(content).__name__}")
    return cast("dict[str, Any]", content)


def checked_fit(path: Path, library_name: str, load: Callable[[], object]) -> None:
    """Run ``load``; weights that do not match the networks become an error that says what to do."""
    try:
        load()
    except (RuntimeError, KeyError, ValueError, AttributeError, TypeError) as error:
        raise DataError(
            f"{path}: its weights do not match the networks of {library_name} here: {error}\n"
            "Use the task and settings it was trained with; a policy of your own plays as module:name"
        ) from error


def _is_torch_file(members: list[str]) -> bool:
    """Whether an archive is what ``torch.save`` writes."""
    return any(name.endswith("/data.pkl") for name in members)
