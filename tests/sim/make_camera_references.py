"""Draw the reference pictures of the camera tests with MuJoCo's own renderer.

    MUJOCO_GL=egl python tests/sim/make_camera_references.py

needs EGL (Debian: libegl1 libegl-mesa0 libgl1-mesa-dri) or, with MUJOCO_GL=osmesa, OSMesa (libosmesa6). The arrays are
committed, so the tests need neither. ``rgb`` is without shadows, reflections and antialiasing, which the native camera
leaves out; ``rgb_default`` is the picture with all of MuJoCo's defaults. Curved geoms are tessellated finely (64 slices
and stacks) so that the comparison is about us and not about triangles.
"""

from __future__ import annotations

from pathlib import Path

import mujoco
import numpy as np
from camera_scenes import SCENES, VIEWS

HERE = Path(__file__).parent / "references"


def draw(scene: str, camera: str, width: int, height: int) -> dict[str, np.ndarray]:
    pictures: dict[str, np.ndarray] = {}
    for plain in (True, False):
        model = mujoco.MjModel.from_xml_string(SCENES[scene])
        if plain:
            model.vis.quality.offsamples = 0
            model.vis.quality.numslices = model.vis.quality.numstacks = 64
        data = mujoco.MjData(model)
        mujoco.mj_forward(model, data)
        with mujoco.Renderer(model, height, width) as renderer:
            renderer.update_scene(data, camera)
            if not plain:
                pictures["rgb_default"] = renderer.render()
                continue
            renderer.scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
            renderer.scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
            pictures["rgb"] = renderer.render()
            renderer.enable_depth_rendering()
            pictures["depth"] = renderer.render()
            renderer.enable_segmentation_rendering()
            ids = renderer.render()
            is_geom = ids[:, :, 1] == int(mujoco.mjtObj.mjOBJ_GEOM)
            pictures["segmentation"] = np.where(is_geom, ids[:, :, 0], -1).astype(np.int16)
    assert pictures["rgb"].any(), "a blank picture: the context was freed under another one"
    return pictures


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    for view in VIEWS:
        np.savez_compressed(HERE / f"{view[0]}_{view[1]}.npz", **draw(*view))
