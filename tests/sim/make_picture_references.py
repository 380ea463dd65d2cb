"""Draw the scenes of ``picture_cases.py`` with MuJoCo's own renderer.

    MUJOCO_GL=egl python tests/sim/make_picture_references.py

needs EGL or, with MUJOCO_GL=osmesa, OSMesa. The arrays are committed, so the tests need neither.
"""

from __future__ import annotations

from pathlib import Path

import mujoco
import numpy as np
from picture_cases import CASES, HEIGHT, WIDTH, Case

REFERENCE = Path(__file__).parent / "references" / "cases.npz"


def draw(case: Case) -> dict[str, np.ndarray]:
    model = mujoco.MjModel.from_xml_string(case.xml)
    data = mujoco.MjData(model)
    data.qpos[: len(case.qpos)] = case.qpos
    mujoco.mj_forward(model, data)
    option = mujoco.MjvOption()
    groups = case.spec.get("groups", (0, 1, 2))
    for shown, wanted in ((option.geomgroup, groups), (option.sitegroup, case.spec.get("site_groups", groups))):
        shown[:] = [group in wanted for group in range(6)]
    pictures: dict[str, np.ndarray] = {}
    with mujoco.Renderer(model, HEIGHT, WIDTH) as renderer:
        renderer.update_scene(data, "eye", option)
        flags, names = renderer.scene.flags, mujoco.mjtRndFlag
        flags[names.mjRND_SHADOW] = case.spec.get("shadows", False)
        flags[names.mjRND_REFLECTION] = case.spec.get("reflections", False)
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
    arrays = {f"{name}/{kind}": values for name, case in CASES.items() for kind, values in draw(case).items()}
    np.savez_compressed(REFERENCE, **arrays)
