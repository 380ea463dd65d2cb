"""Physics and cameras: a ``Simulation`` protocol and a ``Camera`` protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.sim.camera.camera import CameraSpec as CameraSpec
    from headrace.sim.camera.native_camera import NativeCamera as NativeCamera
    from headrace.sim.mujoco_api import load_model as load_model
    from headrace.sim.mujoco_sim import MujocoSim as MujocoSim
    from headrace.sim.mujoco_sim import Simulation as Simulation

__getattr__, __dir__ = lazy_exports(__name__, __file__)
