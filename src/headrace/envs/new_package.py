"""``headrace new``: a package with a task around a robot model, its tests, and a training that starts."""

from __future__ import annotations

import re
import shutil
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from headrace.errors import ConfigError
from headrace.sim.mujoco_api import mujoco

_EXAMPLE = """<mujoco>
  <option timestep="0.005"/>
  <worldbody>
    <light pos="0 -1 3" dir="0 0.3 -1"/>
    <geom type="plane" size="2 2 .1" rgba=".8 .8 .8 1"/>
    <body name="upper" pos="0 0 1">
      <joint name="shoulder" axis="0 1 0" damping="0.2"/>
      <geom type="capsule" fromto="0 0 0 0.3 0 0" size="0.04" rgba=".1 .5 .5 1"/>
      <body name="lower" pos="0.3 0 0">
        <joint name="elbow" axis="0 1 0" damping="0.2"/>
        <geom type="capsule" fromto="0 0 0 0.3 0 0" size="0.03" rgba=".8 .5 .1 1"/>
      </body>
    </body>
  </worldbody>
</mujoco>
"""
_FILES = {"pyproject.toml": "", "README.md": "", "test_task.py": "tests/", "__init__.py": "$module/"}
_USUAL_TORQUE = 1.0
_SECONDS_PER_ACTION = 0.02


def new_package(name: str, output: str | Path | None = None, *, model: str | Path | None = None) -> Path:
    """Write a package with tasks around a robot: torque, position, delta joint and camera, with tests.

    Args:
        name: of the task, lower case with dashes; the module is the same with underscores.
        output: a new directory; None for ``name`` in the current one.
        model: an MJCF or URDF file; the meshes and textures that it names are copied. A motor is added for each joint
            of a model without actuators. None for a small arm.

    Returns:
        The directory.
    """
    if re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", name) is None:
        raise ConfigError(f"new: expected a name such as my-robot, in lower case, got {name!r}")
    name, module = name.replace("_", "-"), name.replace("-", "_")
    root = Path(output or name)
    if root.exists():
        raise ConfigError(f"output (--output): expected a directory that is not there yet, got {root}")
    spec, source = _read(model)
    values = {"name": name, "module": module, "model": "robot.xml", **_describe(spec)}
    assets = {} if source is None else _find_assets(spec, source.resolve().parent)
    home = root / module / "model"
    home.mkdir(parents=True)
    for place, file in assets.items():
        (home / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, home / place)
    (home / "robot.xml").write_text(spec.to_xml(), encoding="utf-8")
    templates = resources.files("headrace.envs") / "package_template"
    for file, place in _FILES.items():
        target = root / Template(place).substitute(values) / file
        target.parent.mkdir(parents=True, exist_ok=True)
        text = (templates / f"{file}.txt").read_text(encoding="utf-8")
        target.write_text(Template(text).substitute(values), encoding="utf-8")
    return root


def _read(model: str | Path | None) -> tuple[Any, Path | None]:
    """Return the specification of a model, with a motor per joint if it had no actuator, and its file."""
    path = None if model is None else Path(model)
    if path is not None and not path.is_file():
        raise ConfigError(f"from (--from): expected an MJCF or URDF file, got {path}: there is none")
    try:
        spec = mujoco.MjSpec.from_string(_EXAMPLE) if path is None else mujoco.MjSpec.from_file(str(path))
        if not spec.actuators:
            hinges = (mujoco.mjtJoint.mjJNT_HINGE, mujoco.mjtJoint.mjJNT_SLIDE)
            for joint in (joint for joint in spec.joints if joint.type in hinges):
                limit = float(np.max(np.abs(joint.actfrcrange))) or _USUAL_TORQUE
                motor = spec.add_actuator(name=joint.name, target=joint.name, trntype=mujoco.mjtTrn.mjTRN_JOINT)
                motor.ctrllimited, motor.ctrlrange = True, [-1, 1]
                motor.gear[0] = limit
        spec.compile()
    except ValueError as error:
        raise ConfigError(f"from (--from): {path} cannot be compiled: {error}") from error
    return spec, path


def _find_assets(spec: Any, folder: Path) -> dict[Path, Path]:
    """Return the files that a model names: place below its directory → file."""
    found: dict[Path, Path] = {}
    for name in re.findall(r'file\w*="([^"]+)"', spec.to_xml()):
        for below in (spec.meshdir, spec.texturedir, ""):
            file = (folder / below / name).resolve()
            if file.is_file():
                if not file.is_relative_to(folder):
                    raise ConfigError(
                        f"from (--from): expected meshes and textures below {folder}, the directory of the model, got "
                        f"{file}; put them there, and name them from there"
                    )
                found[file.relative_to(folder)] = file
                break
    return found


def _describe(spec: Any) -> dict[str, object]:
    """Return what the template of the task is filled with."""
    model = spec.compile()
    joints = [int(joint) for joint, kind in zip(model.actuator_trnid[:, 0], model.actuator_trntype, strict=True)
              if kind == 0]  # fmt: skip
    if len(joints) < model.nu or not joints or len(set(joints)) < model.nu:
        raise ConfigError(
            f"from (--from): expected one actuator per joint, as position targets need it, got {model.nu} actuators on "
            f"{len(set(joints))} joints; write the task by hand (docs/tasks.md)"
        )
    start = model.key_qpos[0] if model.nkey else model.qpos0
    gear = np.abs(model.actuator_gear[:, 0])
    gain = np.abs(model.actuator_gainprm[:, 0])
    reach = np.where(model.actuator_ctrllimited, np.abs(model.actuator_ctrlrange).max(axis=1), 1.0)
    forced = np.where(model.actuator_forcelimited, np.abs(model.actuator_forcerange).max(axis=1), gain * reach)
    torque = np.maximum(gear * forced, 1e-3)
    decimation = max(1, round(_SECONDS_PER_ACTION / float(model.opt.timestep)))
    places = tuple(round(float(start[model.jnt_qposadr[joint]]), 6) for joint in joints)
    return {
        "joints": tuple(str(model.joint(joint).name) for joint in joints),
        "start": places,
        "offset": places,
        "kp": tuple(float(f"{2 * value:.3g}") for value in torque),
        "kd": tuple(float(f"{0.2 * value:.3g}") for value in torque),
        "decimation": decimation,
        "rate": f"{1 / (decimation * float(model.opt.timestep)):g}",
    }
