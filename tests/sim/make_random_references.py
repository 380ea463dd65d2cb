"""Draw the references of the random scenes with MuJoCo's renderer and rays; see ``make_camera_references.py``.

MUJOCO_GL=egl python tests/sim/make_random_references.py
"""

from __future__ import annotations

from pathlib import Path

import mujoco
import numpy as np
from random_scenes import COUNT, HEIGHT, WIDTH, scene

HERE = Path(__file__).parent / "references" / "random.npz"


def draw(number: int) -> dict[str, np.ndarray]:
    model = mujoco.MjModel.from_xml_string(scene(number))
    model.vis.quality.offsamples = 0
    model.vis.quality.numslices = model.vis.quality.numstacks = 64
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    with mujoco.Renderer(model, HEIGHT, WIDTH) as renderer:
        renderer.update_scene(data, "eye")
        renderer.scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
        renderer.scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
        rgb = renderer.render()
        renderer.enable_depth_rendering()
        depth = renderer.render()
        renderer.disable_depth_rendering()
        renderer.enable_segmentation_rendering()
        ids = renderer.render()
    seg = np.where(ids[..., 1] == int(mujoco.mjtObj.mjOBJ_GEOM), ids[..., 0], -1).astype(np.int8)
    return {"rgb": rgb, "depth": depth.astype(np.float32), "segmentation": seg}


if __name__ == "__main__":
    every = [draw(number) for number in range(COUNT)]
    np.savez_compressed(HERE, **{name: np.stack([one[name] for one in every]) for name in every[0]})
