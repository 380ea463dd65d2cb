"""Physics and cameras: a ``Simulation`` protocol and a ``Camera`` protocol. Cameras load on use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports
from headrace.sim._camera import Camera, CameraFrames, CameraSpec, PoseReader
from headrace.sim._camera_names import make_camera, register_camera
from headrace.sim._mujoco_api import load_model
from headrace.sim._mujoco_sim import MujocoSim
from headrace.sim._simulation import Simulation

if TYPE_CHECKING:
    from headrace.sim._appearance import Appearance, AppearanceSpec
    from headrace.sim._native_camera import NativeCamera

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

__getattr__, __dir__ = lazy_exports(
    __name__,
    __all__,
    {
        "._appearance": ("Appearance", "AppearanceSpec"),
        "._native_camera": ("NativeCamera",),
    },
)
