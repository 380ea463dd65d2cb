"""Odd models are drawn, never a crash: in-range values always, and no read out of bounds where bounds are checked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mujoco
import numpy as np
import pytest

from headrace.sim import CameraSpec, NativeCamera
from headrace.sim.camera.camera import PoseReader

sys.path.insert(0, str(Path(__file__).parent))
from bad_models import draw_bad_model


@pytest.mark.parametrize("seed", range(12))
def test_odd_models_give_values_in_range(seed: int) -> None:
    draw_bad_model(seed)


@pytest.mark.slow
def test_nothing_is_read_out_of_bounds(tmp_path: Path) -> None:
    # the compiled kernels of a run with checks must not be taken for those without
    checked = {**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    program = [sys.executable, str(Path(__file__).parent / "bad_models.py"), "150"]
    run = subprocess.run(program, capture_output=True, text=True, check=False, env=checked)
    assert run.returncode == 0, run.stderr
    assert "150 models drawn" in run.stdout


MESH = '<mesh name="m" {} vertex="-1 -1 -1  1 -1 -1  1 1 -1  -1 1 -1  -1 -1 1  1 -1 1  1 1 1  -1 1 1"/>'
SCENE = """<mujoco><asset><texture name="t" type="2d" builtin="checker" rgb1="1 0 0" rgb2="0 1 0" width="8" height="8"/>
<material name="t" texture="t"/><material name="none"/>{}</asset><worldbody>
<geom type="mesh" mesh="m" material="{}"/><camera name="c" pos="{}" xyaxes="1 0 0 0 0 1"/></worldbody></mujoco>"""


def picture(mesh: str, material: str, place: str):
    model = mujoco.MjModel.from_xml_string(SCENE.format(mesh, material, place))
    spec = CameraSpec(name="c", width=24, height=24, data_types=("rgb", "depth", "segmentation"))
    return NativeCamera(model, spec).render(PoseReader(model).read(model.qpos0[None].copy())), model


def test_a_texture_on_a_mesh_without_coordinates_lies_along_its_z_axis() -> None:
    frames, _ = picture(MESH.format(""), "t", "0 -4 0")
    seen = frames.rgb[0][frames.segmentation[0] == 0]
    # red and green stripes: the texture is projected along z, so that the front has columns of one color
    assert len(seen)
    assert (seen[:, 2] == 0).all()
    column = frames.rgb[0][8:16, 12]
    assert (column == column[0]).all()


def test_a_material_without_texture_has_its_plain_color() -> None:
    plain, _ = picture(MESH.format(""), "none", "0 -4 0")
    seen = plain.rgb[0][plain.segmentation[0] == 0]
    assert len(seen)
    assert (seen == seen[0]).all()


def test_a_camera_inside_a_mesh_sees_through_it() -> None:
    frames, model = picture(MESH.format(""), "t", "0 0 0")
    assert (frames.segmentation == -1).all()
    assert np.allclose(frames.depth, model.vis.map.zfar * model.stat.extent, rtol=1e-6)


def test_a_cylinder_seen_exactly_along_its_axis_is_a_disc() -> None:
    model = mujoco.MjModel.from_xml_string(
        """<mujoco><worldbody><geom type="cylinder" size="0.5 0.2"/>
        <camera name="c" pos="0 0 2" projection="orthographic" fovy="2"/></worldbody></mujoco>"""
    )
    spec = CameraSpec(name="c", width=64, height=64, data_types=("segmentation", "depth", "normals"))
    frames = NativeCamera(model, spec).render(PoseReader(model).read(model.qpos0[None].copy()))
    x, y = np.meshgrid(*[(np.arange(64) + 0.5) / 32 - 1] * 2)
    assert np.array_equal(frames.segmentation[0] == 0, x * x + y * y <= 0.25)
    assert np.allclose(frames.depth[0][frames.segmentation[0] == 0], 1.8, atol=1e-6)
    assert (frames.normals[0][frames.segmentation[0] == 0] == [0, 0, 1]).all()
