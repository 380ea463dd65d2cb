"""Physics and cameras: a ``Simulation`` protocol and a ``Camera`` protocol. Cameras load on use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from headrace.sim.camera import Camera, CameraFrames, CameraSpec, PoseReader, ScenePoses
from headrace.sim.mujoco_sim import MujocoSim, default_threads
from headrace.sim.simulation import Simulation

if TYPE_CHECKING:
    from headrace.sim.appearance import Appearance, AppearanceSpec
    from headrace.sim.gl_camera import GLCamera
    from headrace.sim.native_camera import NativeCamera
    from headrace.sim.warp_camera import WarpCamera

__all__ = [
    "Appearance",
    "AppearanceSpec",
    "Camera",
    "CameraFrames",
    "CameraSpec",
    "GLCamera",
    "MujocoSim",
    "NativeCamera",
    "PoseReader",
    "ScenePoses",
    "Simulation",
    "WarpCamera",
    "default_threads",
]

_HOME_OF = {
    "Appearance": "headrace.sim.appearance",
    "AppearanceSpec": "headrace.sim.appearance",
    "GLCamera": "headrace.sim.gl_camera",
    "NativeCamera": "headrace.sim.native_camera",
    "WarpCamera": "headrace.sim.warp_camera",
}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'headrace.sim' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
