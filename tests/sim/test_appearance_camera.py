"""Random looks: a function of seed and episode alone, within their bounds, and visible."""

from __future__ import annotations

import sys
from pathlib import Path

import mujoco
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigError, ShapeError
from headrace.sim.camera.appearance import Appearance, AppearanceSpec
from headrace.sim.camera.camera import CameraSpec, PoseReader
from headrace.sim.camera.native_camera import NativeCamera

sys.path.insert(0, str(Path(__file__).parent))
from camera_scenes import SCENES

LOOKS = AppearanceSpec(color=0.3, light=0.4, light_direction=0.2, camera_position=0.05, camera_rotation=0.05)
CHANGED = ("geom_rgba", "light_diffuse", "light_dir", "camera_pos", "camera_mat")


@pytest.fixture(scope="module")
def model() -> mujoco.MjModel:
    return mujoco.MjModel.from_xml_string(SCENES["primitives"])


def poses_of(model: mujoco.MjModel, n: int):
    return PoseReader(model).read(np.tile(model.qpos0, (n, 1)))


def test_a_look_is_a_function_of_seed_and_episode_alone(model):
    looks = Appearance(model, LOOKS, seed=3)
    together = looks.apply(poses_of(model, 5), np.array([10, 11, 12, 13, 14]))
    alone = looks.apply(poses_of(model, 1), np.array([13]))
    assert all(np.array_equal(getattr(together, name)[3], getattr(alone, name)[0]) for name in CHANGED)
    other = Appearance(model, LOOKS, seed=4).apply(poses_of(model, 1), np.array([13]))
    assert not any(np.array_equal(getattr(other, name), getattr(alone, name)) for name in CHANGED)
    assert all(len(np.unique(getattr(together, name).reshape(5, -1), axis=0)) == 5 for name in CHANGED)


def test_no_looks_at_all_leave_every_pixel_as_it_was(model):
    camera = NativeCamera(model, CameraSpec(name="front", width=32, height=24))
    poses = poses_of(model, 2)
    same = Appearance(model, AppearanceSpec(), seed=0).apply(poses, np.array([0, 1]))
    assert np.array_equal(camera.render(poses).rgb, camera.render(same).rgb)


def test_each_look_shows_in_the_picture_and_rows_differ(model):
    camera = NativeCamera(model, CameraSpec(name="front", width=32, height=24))
    poses = poses_of(model, 3)
    plain = camera.render(poses).rgb
    for name in ("color", "light", "light_direction", "camera_position", "camera_rotation"):
        spec = AppearanceSpec(**{name: 0.3})
        drawn = camera.render(Appearance(model, spec, seed=1).apply(poses, np.arange(3))).rgb
        assert len(np.unique(drawn.reshape(3, -1), axis=0)) == 3, name
        assert (drawn != plain).any(axis=(1, 2, 3)).all(), name


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**40), episode=st.integers(0, 2**40))
def test_looks_stay_within_their_bounds(model, seed, episode):
    poses = poses_of(model, 1)
    drawn = Appearance(model, LOOKS, seed=seed).apply(poses, np.array([episode]))
    assert drawn.geom_rgba.min() >= 0
    assert drawn.geom_rgba.max() <= 1
    assert (
        np.abs(
            drawn.geom_rgba - Appearance(model, AppearanceSpec(), seed=0).apply(poses, np.array([0])).geom_rgba
        ).max()
        <= 0.3
    )
    assert np.abs(np.linalg.norm(drawn.light_dir, axis=-1) - 1).max() < 1e-12
    # up to 5 cm along each of three axes
    assert np.linalg.norm(drawn.camera_pos - poses.camera_pos, axis=-1).max() <= 0.05 * np.sqrt(3)
    turned = drawn.camera_mat.reshape(-1, 3, 3)
    assert np.abs(turned @ turned.transpose(0, 2, 1) - np.eye(3)).max() < 1e-12
    cosine = (np.einsum("nij,nij->n", turned, poses.camera_mat.reshape(-1, 3, 3)) - 1) / 2
    assert np.arccos(np.clip(cosine, -1, 1)).max() <= 0.05 * np.sqrt(3) + 1e-6
    # neither geoms nor the state move
    assert np.array_equal(drawn.geom_pos, poses.geom_pos)
    assert np.array_equal(drawn.state, poses.state)


def test_wrong_looks_are_refused(model):
    with pytest.raises(ConfigError, match="color"):
        AppearanceSpec(color=-0.1)
    for name in ("cam_fovy", "cam_intrinsic", "light_attenuation", "light_cutoff", "mat_rgba", "mat_texrepeat"):
        with pytest.raises(ConfigError, match=f"{name}: expected less than 1"):
            AppearanceSpec(**{name: 1.0})
    for name in ("light", "light_ambient", "light_specular"):
        AppearanceSpec(**{name: 1.0})
        with pytest.raises(ConfigError, match=f"{name}: expected at most 1"):
            AppearanceSpec(**{name: 1.1})
    with pytest.raises(ShapeError, match="one per row"):
        Appearance(model, LOOKS, seed=0).apply(poses_of(model, 2), np.array([1]))
    with pytest.raises(ShapeError, match="made for"):
        Appearance(mujoco.MjModel.from_xml_string(SCENES["glass"]), LOOKS, seed=0).apply(
            poses_of(model, 1), np.array([1])
        )


WORN = """<mujoco><asset><material name="red" rgba="1 0 0 1"/><material name="green" rgba="0 1 0 1"/></asset><worldbody>
<geom name="own" size=".1" material="red"/><geom name="worn" size=".1" material="red"/>
<camera name="front" fovy="80" pos="0 -1 0" xyaxes="1 0 0 0 0 1"/></worldbody></mujoco>"""


@pytest.mark.parametrize("spec", [AppearanceSpec(mat_rgba=0.2), AppearanceSpec(materials=("green",))])
def test_a_color_of_the_row_stays_where_materials_stray(spec):
    model = mujoco.MjModel.from_xml_string(WORN)
    blue, plain = np.array([0, 0, 1, 1.0]), np.array(model.geom_rgba[1])
    rows = np.repeat(np.array([blue, plain])[None], 3, 0)
    for fields in ({"geom_rgba": rows}, {"geom_rgba": rows, "mat_rgba": np.full((3, 2, 4), 0.5)}):
        poses = PoseReader(model).read(np.tile(model.qpos0, (3, 1)), fields=fields)
        drawn = Appearance(model, spec, seed=0).apply(poses, np.arange(3))
        assert (drawn.geom_rgba[:, 0] == blue).all()
        number = 1 if spec.materials else 0
        material = drawn.looks.get("mat_rgba", np.array(model.mat_rgba, np.float64)[None])[:, number]
        assert np.array_equal(*np.broadcast_arrays(drawn.geom_rgba[:, 1, :3], np.clip(material[:, :3], 0, 1)))


def test_materials_whose_color_strays_are_as_opaque_as_before():
    model = mujoco.MjModel.from_xml_string(WORN.replace("0 1 0 1", "0 1 0 .5"))
    drawn = Appearance(model, AppearanceSpec(mat_rgba=0.2), seed=0).apply(poses_of(model, 3), np.arange(3))
    assert (drawn.looks["mat_rgba"][..., 3] == [1, 0.5]).all()
    assert (drawn.geom_rgba[..., 3] == 1).all()
    assert len(np.unique(drawn.looks["mat_rgba"][:, 0, 0])) == 3


@pytest.mark.parametrize("fovy", [100, 0, -80])
def test_fields_of_view_outside_0_to_180_degrees_are_refused(fovy):
    model = mujoco.MjModel.from_xml_string(WORN)
    looks, places = Appearance(model, AppearanceSpec(cam_fovy=0.9), seed=0), np.tile(model.qpos0, (2, 1))
    looks.apply(PoseReader(model).read(places), np.arange(2))
    with pytest.raises(ConfigError, match="could leave 0 to 180"):
        looks.apply(PoseReader(model).read(places, fields={"cam_fovy": np.array([[80.0], [fovy]])}), np.arange(2))
