"""Files of trained policies, checked: those that ship with headrace, and those that headrace saved."""

from __future__ import annotations

import pickle
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import torch

from headrace.errors import DataError
from headrace.files import FileHash, Manifest, link_or_copy

_FORMAT, _VERSION = "headrace-checkpoints", 1


def published() -> dict[str, dict[str, Any]]:
    """Name → file, task, library, made_by, score; sha256 of the file is there, too."""
    manifest = _manifest()
    about = cast("dict[str, dict[str, Any]]", manifest.about)
    return {name: {**entry, "sha256": manifest.files[entry["file"]].sha256} for name, entry in about.items()}


def published_file(name: str) -> Path:
    """Return the file of a published checkpoint, by its name; checked to be the one that was published."""
    file = str(published()[name]["file"])
    try:
        _manifest().files[file].check(_folder() / file)
    except DataError as error:
        raise DataError(f"{file}: the checkpoint is not the one in manifest.json; reinstall headrace") from error
    return _folder() / file


def read_form(path: Path, what: str, form: str, *, trust: bool = False) -> dict[str, Any]:
    """Load the dictionary in a torch file whose entry ``format`` is ``form``; ``what`` names it in errors.

    ``trust`` unpickles whatever is in it, which can execute arbitrary code; load only files you trust.
    """
    try:
        content: object = torch.load(path, map_location="cpu", weights_only=not trust)
    # torch reports a file that was cut short as a seek that failed
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise DataError(f"{path}: expected {what}, got {error}") from error
    if not isinstance(content, dict) or cast("dict[str, Any]", content).get("format") != form:
        raise DataError(f"{path}: expected {what}, of format {form!r}, got another file")
    return cast("dict[str, Any]", content)


def publish(path: Path, name: str, entry: dict[str, Any]) -> None:
    """Put a checkpoint among the published ones, or in the place of one.

    Args:
        path: the checkpoint.
        name: its name, such as ``ant-rsl_rl``.
        entry: task, library, made_by and score.
    """
    target = _folder() / f"{name}{path.suffix}"
    target.unlink(missing_ok=True)
    link_or_copy(path, target)
    manifest = _manifest()
    about = {**manifest.about, name: {"file": target.name, **entry}}
    hashes = {str(each["file"]): FileHash.of(_folder() / str(each["file"])) for each in about.values()}
    Manifest(format=_FORMAT, version=_VERSION, about=dict(sorted(about.items())), files=hashes).write(
        _folder() / "manifest.json"
    )


def _manifest() -> Manifest:
    return Manifest.read(_folder() / "manifest.json", format=_FORMAT, versions=(_VERSION,))


def _folder() -> Path:
    return Path(str(files("headrace").joinpath("checkpoints")))
