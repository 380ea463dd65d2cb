"""Physics and cameras: a ``Simulation`` protocol and a ``Camera`` protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.sim._simulation import Simulation
    from headrace.sim.camera.appearance import Appearance, AppearanceSpec
    from headrace.sim.camera.camera import Camera, CameraFrames, CameraSpec, PoseReader
    from headrace.sim.camera.names import make_camera, register_camera
    from headrace.sim.camera.native_camera import NativeCamera
    from headrace.sim.mujoco_api import load_model
    from headrace.sim.mujoco_sim import MujocoSim

__all__ = [
    "Appearance",
    "AppearanceSpec",
    "Camera",
    "CameraFrames",
    "CameraSpec",
    "MujocoSim",
    "NativeCamera",
    "PoseReader",
    "Simulation",
    "load_model",
    "make_camera",
    "register_camera",
]

__getattr__, __dir__ = lazy_exports(__name__, __file__, __all__)
