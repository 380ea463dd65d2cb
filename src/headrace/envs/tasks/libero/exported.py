"""LIBERO's tasks as files: their names, where assets and exported files are, and the models that they compile to."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from headrace._interrupts import Child
from headrace.envs.tasks.libero import export
from headrace.envs.tasks.libero.names import libero_names, split_name
from headrace.envs.tasks.libero.plain import soften_tables
from headrace.errors import ConfigError, DataError, EnvError
from headrace.files import open_archive
from headrace.sim.mujoco_api import Model, mujoco

ASSETS_VARIABLE, EXPORT_VARIABLE = "HEADRACE_LIBERO_ASSETS", "HEADRACE_LIBERO_EXPORT"
_ARENA = 64 << 20
"""Bytes of MuJoCo's arena per simulation, of which only used pages cost memory; robosuite's sizes mean 1.3 GB."""
_MARKS = ("articulated_objects", "scenes", "stable_scanned_objects", "textures")
"""Directories by which the assets are recognized."""


def export_directory() -> Path:
    """Return where exported tasks are: ``$HEADRACE_LIBERO_EXPORT``, by default ``~/.cache/headrace/libero``."""
    given = os.environ.get(EXPORT_VARIABLE)
    home = os.environ.get("XDG_CACHE_HOME")
    return Path(given) if given else (Path(home) if home else Path.home() / ".cache") / "headrace" / "libero"


def find_assets() -> Path:
    """Return the directory of LIBERO's assets, from ``$HEADRACE_LIBERO_ASSETS`` or LIBERO's own configuration."""
    looked: list[str] = []
    given = os.environ.get(ASSETS_VARIABLE)
    if given:
        looked.append(f"{given} (${ASSETS_VARIABLE})")
        if _has_assets(Path(given)):
            return Path(given).resolve()
    else:
        place = Path(os.environ.get("LIBERO_CONFIG_PATH") or Path.home() / ".libero") / "config.yaml"
        looked.append(str(place))
        if place.is_file():
            from headrace.envs.recipe import read_yaml

            told = read_yaml(place, "LIBERO's configuration")
            assets = cast("dict[str, object]", told).get("assets") if isinstance(told, dict) else None
            looked.append(f"{assets} (its 'assets')")
            if isinstance(assets, str) and _has_assets(Path(assets)):
                return Path(assets).resolve()
    raise ConfigError(
        f"LIBERO's assets: expected a directory with {', '.join(_MARKS)}, looked in {', '.join(looked)}; download the "
        f"repository Lifelong-Robot-Learning/LIBERO and set {ASSETS_VARIABLE} to its libero/libero/assets"
    )


def _has_assets(path: Path) -> bool:
    return all((path / mark).is_dir() for mark in _MARKS)


def find_missing_files(assets: Path) -> list[str]:
    """Return files that the assets' XML names and that are not there, as ``XML: FILE``; absolute paths are not ours."""
    missing: list[str] = []
    for source in sorted(assets.rglob("*.xml")):
        text = re.sub(r"<!--.*?-->", "", source.read_text(errors="replace"), flags=re.DOTALL)
        named = sorted(set(cast("list[str]", re.findall(r'\bfile="([^"/][^"]*)"', text))))
        gone = [file for file in named if not (source.parent / file).exists()]
        missing += [f"{source.relative_to(assets)}: {file}" for file in gone]
    return missing


@dataclass(frozen=True, kw_only=True)
class ExportedTask:
    """What a task is, as ``export.py`` writes it."""

    name: str
    xml: str
    record: Mapping[str, Any]
    """Instruction, goal, controller, names of bodies; see ``export.export_task``."""
    states: NDArray[np.float64]
    """(initial states, 1 + nq + nv): time, positions, velocities."""
    fixtures: NDArray[np.float64]
    """(fixtures, draws, 7): poses of the bodies ``record["fixtures"]``, drawn by LIBERO's own samplers."""
    site_rgba: NDArray[np.float32]
    geom_rgba: NDArray[np.float32]

    def compile(self, *, textures: bool = True) -> Model:
        """Compile the model, with a sensor per pair of things whose contacts the goal is about.

        Without ``textures`` it loads quicker: physics does not read them.
        """
        files = sorted(set(cast("list[str]", re.findall(r'\bfile="([^"]+)"', self.xml))))
        gone = [file for file in files if not Path(file).is_file()]
        if gone:
            raise DataError(
                f"{self.name}: {len(gone)} files of its model are not there, the first is {gone[0]}; they belong to "
                "LIBERO's assets or to robosuite: put them back, or run headrace libero export again"
            )
        spec: Any = mujoco.MjSpec.from_string(self.xml)
        spec.memory, spec.njmax, spec.nconmax = _ARENA, -1, -1
        for texture in spec.textures:
            # a model of 70 MB instead of 260, which physics and cameras copy; cameras read the files
            texture.embed = not texture.file
            # MuJoCo 3.3.2 knows no color spaces: LIBERO's files in sRGB are shown as they are
            texture.colorspace = mujoco.mjtColorSpace.mjCOLORSPACE_LINEAR
        if not textures:
            for material in spec.materials:
                material.textures = [""] * len(material.textures)
            for texture in list(spec.textures):
                spec.delete(texture)
        for first, second in self.touch_pairs:
            kinds = [mujoco.mjtObj.mjOBJ_GEOM if geom else mujoco.mjtObj.mjOBJ_XBODY for _, geom in (first, second)]
            spec.add_sensor(
                name=f"{first[0]} touches {second[0]}",
                type=mujoco.mjtSensor.mjSENS_CONTACT,
                objtype=kinds[0],
                objname=first[0],
                reftype=kinds[1],
                refname=second[0],
                intprm=[1, 0, 1],  # found (1 << 0), no reduction, one slot: its number is that of all contacts
            )
        model: Any = spec.compile()
        model.site_rgba[:], model.geom_rgba[:] = self.site_rgba, self.geom_rgba
        soften_tables(model)
        return cast("Model", model)

    @property
    def touch_pairs(self) -> list[tuple[tuple[str, bool], tuple[str, bool]]]:
        """Two by two, the bodies (with all below them) or geoms whose contacts are counted: name, whether it is a geom.

        For each predicate that needs contacts its two bodies; then, to be taken off, every geom that LIBERO leaves out
        with the other body.
        """
        pairs: list[tuple[tuple[str, bool], tuple[str, bool]]] = []
        for touch in (goal["touch"] for goal in self.record["goal"] if goal.get("touch")):
            first, second = touch["bodies"]
            pairs.append(((first, False), (second, False)))
            pairs += [((geom, True), (second, False)) for geom in touch["except"][0]]
            pairs += [((geom, True), (first, False)) for geom in touch["except"][1]]
        return pairs


def exported_file(name: str) -> Path:
    """Return where the exported file of a task is, or would be."""
    suite, index = split_name(name)
    return export_directory() / f"{suite}-{index}.npz"


def load_exported(name: str, path: Path | None = None) -> ExportedTask:
    """Read the exported file of a task."""
    file = path or exported_file(name)
    if not file.is_file():
        raise DataError(
            f"{name}: expected the exported task {file}, got no such file; "
            f"run: headrace libero export {split_name(name)[0]} --python PYTHON, with an interpreter that has LIBERO "
            "(scripts/setup_libero.sh makes one)"
        )
    with open_archive(file), np.load(file) as data:
        arrays = {key: data[key] for key in ("states", "fixtures", "site_rgba", "geom_rgba")}
        return ExportedTask(name=name, xml=str(data["xml"]), record=json.loads(str(data["record"])), **arrays)


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
    with Child(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
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
