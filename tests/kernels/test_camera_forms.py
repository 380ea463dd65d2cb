"""A camera calls each large kernel in one form: none is compiled twice for the same scene."""

from __future__ import annotations

import mujoco
import numba
import numpy as np
import pytest

from headrace.sim import CameraSpec, NativeCamera
from headrace.sim.camera import native_camera
from headrace.sim.camera.camera import PoseReader

KERNELS = ("place", "paint", "cast_primitives", "cast_triangles", "find_normals")
SCENE = """<mujoco><asset><texture name="t" type="2d" builtin="checker" width="8" height="8"/>
    <material name="t" texture="t"/><mesh name="m" vertex="0 0 0 1 0 0 0 1 0 0 0 1"/></asset><worldbody>
    <light type="directional" castshadow="true" pos="0 0 3"/>
    <light type="directional" castshadow="true" pos="0 0 3" dir="0.3 0 -1"/>
    <geom type="plane" size="2 2 1" material="t"/><geom type="sphere" size="0.2" rgba="1 0 0 0.5"/>
    <body><freejoint/><geom type="mesh" mesh="m" material="t"/></body>
    <camera name="c" pos="0 -3 1" xyaxes="1 0 0 0 0.3 1"/></worldbody></mujoco>"""


@pytest.mark.parametrize("own_looks", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_each_kernel_is_called_in_one_form_for_any_number_of_rows_with_looks_and_without(
    rows: int, own_looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: set[tuple[str, tuple[object, ...]]] = set()

    def watch(name: str, kernel):
        def call(*args: object) -> None:
            called.add((name, tuple(numba.typeof(arg) for arg in args)))
            kernel(*args)

        return call

    for name in KERNELS:
        monkeypatch.setattr(native_camera, name, watch(name, getattr(native_camera, name)))
    model = mujoco.MjModel.from_xml_string(SCENE)
    spec = CameraSpec(
        name="c", width=12, height=9, data_types=("rgb", "depth", "segmentation", "normals"), shadows=True,
        specular=True,
    )  # fmt: skip
    looks = ("geom_rgba", "geom_size", "light_diffuse") if own_looks else ()
    fields = {name: np.stack([getattr(model, name).astype(float)] * rows) for name in looks}
    NativeCamera(model, spec).render(PoseReader(model).read(np.tile(model.qpos0, (rows, 1)), fields=fields))
    assert sorted(name for name, _ in called) == sorted(KERNELS)
    arrays = [part for _, kinds in called for kind in kinds for part in getattr(kind, "types", (kind,))]
    assert {part.layout for part in arrays if hasattr(part, "layout")} == {"C"}
