"""Draws docs/images/cameras.png: what NativeCamera leaves out, beside MuJoCo's own picture. Needs EGL."""

from __future__ import annotations

import sys
from pathlib import Path

import mujoco
import numpy as np

from headrace.envs.viewer import png
from headrace.sim import CameraSpec, NativeCamera
from headrace.sim.camera.camera import PoseReader
from headrace.sim.camera.names import make_camera

SCENE = """
<mujoco>
  <statistic extent="2" center="0 0 0.5"/>
  <visual><map shadowclip="1.5"/><headlight ambient="0.25 0.25 0.25" diffuse="0.3 0.3 0.3"/></visual>
  <asset>
    <texture name="sky" type="skybox" builtin="gradient" rgb1="0.5 0.7 0.9" rgb2="0 0 0.2" width="128" height="768"/>
    <texture name="grid" type="2d" builtin="checker" rgb1="0.2 0.3 0.4" rgb2="0.35 0.45 0.55" width="256" height="256"/>
    <material name="mirror" texture="grid" texrepeat="4 4" reflectance="0.4"/>
    <material name="shiny" specular="0.9" shininess="0.6"/>
    <mesh name="wedge" vertex="-0.3 -0.25 0  0.3 -0.25 0  0.3 0.25 0  -0.3 0.25 0  -0.3 -0.25 0.5  -0.3 0.25 0.5"/>
  </asset>
  <worldbody>
    <light type="directional" castshadow="true" pos="0 0 3" dir="0.5 0.4 -1" diffuse="0.6 0.6 0.6"/>
    <geom type="plane" size="3 3 0.1" material="mirror"/>
    <geom type="sphere" size="0.3" pos="-0.7 0 0.31" material="shiny" rgba="0.9 0.3 0.2 1"/>
    <geom type="mesh" mesh="wedge" pos="0.1 0.4 0.01" euler="0 0 30" material="shiny" rgba="0.3 0.7 0.4 1"/>
    <geom type="capsule" size="0.1 0.35" pos="0.8 -0.1 0.5" euler="20 30 0" material="shiny" rgba="0.9 0.8 0.3 1"/>
    <geom type="box" size="0.25 0.02 0.3" pos="0.2 -0.6 0.31" euler="0 0 15" rgba="0.4 0.6 0.9 0.4"/>
    <camera name="view" pos="0 -2.4 1.3" xyaxes="1 0 0 0 0.4 0.9"/>
  </worldbody>
</mujoco>
"""


def main() -> None:
    """Four panels: native, with shadows, with highlights too, and MuJoCo through OpenGL."""
    model = mujoco.MjModel.from_xml_string(SCENE)
    poses = PoseReader(model).read(model.qpos0[None].copy())
    size = {"name": "view", "width": 320, "height": 240}
    panels = [
        NativeCamera(model, CameraSpec(**size)),
        NativeCamera(model, CameraSpec(**size, shadows=True)),
        NativeCamera(model, CameraSpec(**size, shadows=True, specular=True)),
        make_camera("gl", model, CameraSpec(**size)),
    ]
    images = [camera.render(poses).rgb[0] for camera in panels]
    gap = np.full((240, 4, 3), 255, np.uint8)
    sheet = np.concatenate([part for image in images for part in (image, gap)][:-1], 1)
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images/cameras.png")
    target.write_bytes(png(sheet))


if __name__ == "__main__":
    main()
