"""Files of trained policies, checked: those that ship with headrace, and those that headrace saved."""

from __future__ import annotations

import pickle
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import torch

from headrace.errors import DataError
from headrace.files import Manifest, open_archive, parsing

_FORMAT, _VERSION = "headrace-checkpoints", 1


def read_published() -> dict[str, dict[str, Any]]:
    """Name → file, task, library, made_by, score; sha256 of the file is there, too."""
    manifest = _manifest()
    about = cast("dict[str, dict[str, Any]]", manifest.about)
    return {name: {**entry, "sha256": manifest.files[entry["file"]].sha256} for name, entry in about.items()}


def find_published_file(name: str) -> Path:
    """Return the file of a published checkpoint, by its name; checked to be the one that was published."""
    file = str(read_published()[name]["file"])
    try:
        _manifest().files[file].check(_folder() / file)
    except DataError as error:
        raise DataError(f"{file}: the checkpoint is not the one in manifest.json; reinstall headrace") from error
    return _folder() / file


def read_form(path: Path, what: str, form: str, *, trust: bool = False) -> dict[str, Any]:
    """Load the dictionary in a torch file whose entry ``format`` is ``form``; ``what`` names it in errors.

    ``trust`` unpickles whatever is in it, which can execute arbitrary code; load only files you trust.
    """
    content = read_weights(path, trust=trust)
    if content.get("format") != form:
        raise DataError(f"{path}: expected {what}, of format {form!r}, got another file")
    return content


def read_weights(path: Path, *, trust: bool, mapped: bool = False) -> dict[str, Any]:
    """Return the dictionary in a torch file, every byte of which is as it was written.

    Args:
        path: a file that ``torch.save`` wrote.
        trust: unpickle whatever is in it, which can execute arbitrary code.
        mapped: leave the tensors on disk, to look at the rest only.
    """
    with parsing(path) if mapped else open_archive(path):
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


def _manifest() -> Manifest:
    return Manifest.read(_folder() / "manifest.json", format=_FORMAT, versions=(_VERSION,))


def _folder() -> Path:
    return Path(str(files("headrace").joinpath("checkpoints")))
