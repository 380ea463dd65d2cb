"""The forms in which a result is written, any number of them in one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.bench.bundle_files import bundle_text, write_atomically
from headrace.bench.schema import Bundle, Kind
from headrace.errors import UnknownNameError

Formatter = Callable[[Bundle, Path], None]
"""Writes a bundle to the path it is given, whole or not at all."""


def _schema(bundle: Bundle, path: Path) -> None:
    write_atomically(path, bundle_text(bundle))


FORMATTERS: dict[str, Formatter] = {"schema": _schema}


def checked_formatters(names: Sequence[str]) -> tuple[str, ...]:
    """Formatter names, each once, in the order given; an unknown one raises an error that suggests the nearest."""
    for name in names:
        if name not in FORMATTERS:
            raise UnknownNameError("formatter", name, FORMATTERS)
    return tuple(dict.fromkeys(names))


def output_path(formatter: str, kind: Kind, folder: Path) -> Path:
    """Where a formatter writes: the bundle to ``runtime.json``, other forms to names with a suffix."""
    if formatter == "schema":
        return folder / f"{kind}.json"
    return folder / f"{kind}_{formatter}.json"


def write_formats(bundle: Bundle, names: Sequence[str], folder: Path) -> list[Path]:
    """Write a bundle in every form asked for; returns the files."""
    paths: list[Path] = []
    for name in names:
        path = output_path(name, bundle.kind, folder)
        FORMATTERS[name](bundle, path)
        paths.append(path)
    return paths
