"""Run ``export.py`` in an interpreter that has LIBERO, and say what is exported and what is missing."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.envs.tasks.libero import export
from headrace.envs.tasks.libero.exported import export_directory, find_assets, load_exported
from headrace.envs.tasks.libero.names import libero_names, split_name
from headrace.errors import ConfigError, DataError, EnvError


@dataclass(frozen=True, kw_only=True)
class ExportLine:
    """What became of one task."""

    name: str
    cached: bool
    """Whether its file was up to date."""
    error: str | None
    seconds: float


def export_tasks(names: Sequence[str], python: str | Path, assets: str | Path | None = None) -> Iterator[ExportLine]:
    """Export tasks of LIBERO, yielding a line per task as it is done.

    What is there and up to date is left as it is: an export that was interrupted is resumed by running it again. A
    task that fails does not keep the others from being exported.

    Args:
        names: ``libero_spatial/0``, …
        python: interpreter with hf-libero 0.1.4, robosuite 1.4.0 and MuJoCo below 3.10.
        assets: directory of LIBERO's assets; None to find them (see ``find_assets``).
    """
    for name in names:
        split_name(name)
    place = find_assets() if assets is None else Path(assets).resolve()
    program = Path(python).expanduser()
    if not program.is_file():
        raise ConfigError(f"python: expected the interpreter of an environment with LIBERO, got {str(python)!r}")
    command = [str(program), export.__file__, "--out", str(export_directory()), "--assets", str(place), *names]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        done = 0
        try:
            for line in child.stdout:
                done += 1
                yield ExportLine(**json.loads(line))
            words = child.stderr.read().strip().splitlines()
        finally:
            child.terminate()
    if done < len(names):
        told = words[-1] if words else "without a message"
        raise EnvError(f"{program} ended after {done} of {len(names)} tasks: {told}")


def list_tasks() -> list[tuple[str, str | None]]:
    """Return all 130 names with their instructions; None where a task is not exported."""
    found: list[tuple[str, str | None]] = []
    for name in libero_names():
        try:
            found.append((name, str(load_exported(name).record["instruction"])))
        except DataError:
            found.append((name, None))
    return found
