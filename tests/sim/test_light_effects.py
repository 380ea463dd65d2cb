# ruff: noqa: E501  (one element a line reads better than wrapped MJCF)
"""Shadows and highlights against what MuJoCo's rays and OpenGL's formula say, and cameras that ride on bodies."""

from __future__ import annotations

import mujoco
import numpy as np
import pytest

from headrace.sim import CameraSpec, NativeCamera
from headrace.sim.camera.camera import PoseReader

SIZE = 96
TABLE = """
<mujoco>
  <statistic extent="2" center="0 0 0.5"/>
  <visual><map shadowclip="1.5" znear="0.01" zfar="20"/><headlight ambient="0.2 0.2 0.2" diffuse="0 0 0" specular="0 0 0"/>
  </visual>
  <asset>
    <mesh name="wedge" vertex="-0.3 -0.2 0  0.3 -0.2 0  0.3 0.2 0  -0.3 0.2 0  -0.3 -0.2 0.3  -0.3 0.2 0.3"/>
    <material name="shiny" specular="0.8" shininess="0.25"/>
    <material name="dull" specular="0"/>
  </asset>
  <worldbody>
    <light name="sun" type="directional" castshadow="true" pos="0 0 3" dir="0.4 0.2 -1" diffuse="0.6 0.6 0.6"
           ambient="0 0 0" specular="0.5 0.4 0.3"/>
    <geom name="floor" type="plane" size="2 2 0.1" material="dull" rgba="0.8 0.8 0.8 1"/>
    <body pos="0 0 0.8"><freejoint/><geom name="box" type="box" size="0.25 0.2 0.1" material="dull" rgba="0.8 0.3 0.3 1"/></body>
    <body pos="-0.7 0.3 0.4"><freejoint/><geom name="mesh" type="mesh" mesh="wedge" material="dull" rgba="0.3 0.8 0.3 1"/></body>
    <body pos="0.8 -0.2 0.35"><freejoint/><geom name="ball" type="sphere" size="0.3" material="shiny" rgba="0.3 0.3 0.8 1"/>
      <camera name="wrist" pos="-0.5 -0.1 0.2" xyaxes="0 -1 0 0 0 1" fovy="80"/></body>
    <camera name="front" pos="0 -2.5 2" xyaxes="1 0 0 0 0.62 0.78"/>
  </worldbody>
</mujoco>
"""


def setup(**effects: bool):
    model = mujoco.MjModel.from_xml_string(TABLE)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    poses = PoseReader(model).read(data.qpos[None].copy())
    kinds = ("rgb", "depth", "segmentation", "normals")
    spec = CameraSpec(name="front", width=SIZE, height=SIZE, data_types=kinds, **effects)
    return model, data, NativeCamera(model, spec).render(poses)


def seen_points(model, data, depth, name: str = "front") -> np.ndarray:
    """(H, W, 3): what each pixel sees, in the world."""
    cam = model.camera(name).id
    half = np.tan(np.radians(model.cam_fovy[cam]) / 2)
    slopes = (np.arange(SIZE) + 0.5) / SIZE * 2 - 1
    x, y = np.meshgrid(slopes * half, -slopes * half)
    local = np.stack([x, y, -np.ones_like(x)], -1) * depth[..., None]
    return data.cam_xpos[cam] + local @ data.cam_xmat[cam].reshape(3, 3).T


def away_from_changes(mask: np.ndarray, pixels: int = 2) -> np.ndarray:
    """Pixels around which a mask is constant."""
    same = np.ones_like(mask)
    for dy in range(-pixels, pixels + 1):
        for dx in range(-pixels, pixels + 1):
            same &= np.roll(mask, (dy, dx), (0, 1)) == mask
    return same


def test_the_floor_is_dark_exactly_where_a_ray_to_the_light_meets_something():
    model, data, frames = setup(shadows=True)
    _, _, bright = setup()
    floor = frames.segmentation[0] == model.geom("floor").id
    to_light = -data.light_xdir[0]
    points = seen_points(model, data, frames.depth[0])
    blocked = np.zeros_like(floor)
    for y, x in np.argwhere(floor):
        hit = np.zeros(1, np.int32)
        mujoco.mj_ray(model, data, points[y, x] + 1e-3 * to_light, to_light, None, 1, -1, hit)
        blocked[y, x] = hit[0] >= 0
    dark = frames.rgb[0].astype(int).sum(-1) < bright.rgb[0].astype(int).sum(-1) - 30
    # a texel of the map is 3 m / 384, under a pixel here: the border of a shadow may go either way
    sure = floor & away_from_changes(blocked)
    assert 100 < (blocked & sure).sum() < floor.sum() / 2
    assert (dark == blocked)[sure].all()
    # in full shadow only the ambient light is left
    ambient = np.round(0.2 * 0.8 * 255)
    assert np.abs(frames.rgb[0][sure & blocked].astype(int) - ambient).max() <= 1
    assert np.array_equal(frames.rgb[0][sure & ~blocked], bright.rgb[0][sure & ~blocked])


def test_highlights_follow_blinns_formula_and_dull_geoms_have_none():
    model, data, frames = setup(specular=True)
    _, _, dull = setup()
    ball = frames.segmentation[0] == model.geom("ball").id
    assert np.array_equal(frames.rgb[0][~ball], dull.rgb[0][~ball])
    eye = data.cam_xpos[model.camera("front").id] - seen_points(model, data, frames.depth[0])
    eye /= np.linalg.norm(eye, axis=-1, keepdims=True)
    to_light = -data.light_xdir[0]
    half = eye + to_light
    half /= np.linalg.norm(half, axis=-1, keepdims=True)
    normals = frames.normals[0].astype(float)
    lit = normals @ to_light > 0
    strength = 0.8 * np.maximum((normals * half).sum(-1), 0) ** (0.25 * 128) * lit
    diffuse = 0.2 + 0.6 * np.maximum(normals @ to_light, 0)
    colors = diffuse[..., None] * [0.3, 0.3, 0.8] + strength[..., None] * [0.5, 0.4, 0.3]
    expected = np.minimum(colors, 1) * 255
    sure = ball & away_from_changes(ball, 1)
    assert strength[sure].max() > 0.7
    # a rounding, and normals in float32
    assert np.abs(frames.rgb[0].astype(float) - expected)[sure].max() <= 1.0


def test_a_highlight_in_the_shadow_is_gone():
    _, _, frames = setup(specular=True, shadows=True)
    _, _, open_sky = setup(specular=True)
    darker = (frames.rgb[0].astype(int) <= open_sky.rgb[0]).all()
    assert darker
    assert (frames.rgb[0] != open_sky.rgb[0]).any()


@pytest.mark.parametrize("effects", [{}, {"shadows": True, "specular": True}])
def test_frames_with_effects_do_not_depend_on_their_neighbors_or_threads(effects):
    model = mujoco.MjModel.from_xml_string(TABLE)
    rng = np.random.default_rng(0)
    qpos = np.tile(model.qpos0, (7, 1))
    qpos[:, :3] += rng.normal(size=(7, 3)) * 0.1
    poses = PoseReader(model).read(qpos)
    spec = CameraSpec(name="front", width=40, height=32, **effects)
    together = NativeCamera(model, spec, threads=2).render(poses).rgb
    alone = NativeCamera(model, spec, threads=1, layers=False)
    for row in range(7):
        assert np.array_equal(alone.render(poses.rows(slice(row, row + 1))).rgb[0], together[row])


def test_a_wrist_camera_sees_what_a_fixed_one_in_its_place_sees():
    model = mujoco.MjModel.from_xml_string(TABLE)
    rng = np.random.default_rng(1)
    qpos = np.tile(model.qpos0, (6, 1))
    qpos[:, 14:17] += rng.normal(size=(6, 3)) * 0.15  # the ball's body
    turns = rng.normal(size=(6, 4)) * 0.3 + [1, 0, 0, 0]
    qpos[:, 17:21] = turns / np.linalg.norm(turns, axis=1, keepdims=True)
    kinds = ("rgb", "depth", "segmentation", "normals")
    spec = CameraSpec(name="wrist", width=SIZE, height=SIZE, data_types=kinds)
    riding = NativeCamera(model, spec).render(PoseReader(model).read(qpos))
    assert len({image.tobytes() for image in riding.rgb}) == 6
    data = mujoco.MjData(model)
    for row in range(6):
        data.qpos[:] = qpos[row]
        mujoco.mj_forward(model, data)
        fixed = mujoco.MjSpec.from_string(TABLE)
        cam = model.camera("wrist").id
        quat = np.zeros(4)
        mujoco.mju_mat2Quat(quat, data.cam_xmat[cam])
        fixed.worldbody.add_camera(name="place", pos=data.cam_xpos[cam], quat=quat, fovy=80)
        still = fixed.compile()
        there = CameraSpec(name="place", width=SIZE, height=SIZE, data_types=kinds)
        seen = NativeCamera(still, there).render(PoseReader(still).read(qpos[row][None]))
        same = seen.segmentation[0] == riding.segmentation[row]
        # the pose goes through a quaternion: edges may move by a rounding
        assert same.mean() > 0.998
        assert np.abs(seen.depth[0] - riding.depth[row])[same].max() < 1e-4
        assert np.abs(seen.rgb[0].astype(int) - riding.rgb[row])[same].max() <= 2


def test_highlights_in_a_mirror_do_not_depend_on_shadows() -> None:
    # the light has highlights alone, and the mirror none of its own: a shadow changes nothing on the mirror
    model = mujoco.MjModel.from_xml_string(
        """<mujoco><visual><headlight active="0"/></visual><asset><material name="glass" reflectance=".8" specular="0"/>
        <material name="shiny" specular="1" shininess=".3"/></asset><worldbody>
        <light directional="true" dir="0 .3 1" pos="0 0 -2" diffuse="0 0 0" ambient="0 0 0" specular="1 1 1"/>
        <light directional="true" castshadow="false" dir="0 .3 -1" diffuse=".3 .3 .3" specular="0 0 0"/>
        <geom type="plane" size="2 2 .1" material="glass"/><geom size=".4" pos="0 0 .9" material="shiny"/>
        <camera name="eye" pos="0 -3 1.5" xyaxes="1 0 0 0 .5 1"/></worldbody></mujoco>"""
    )
    poses = PoseReader(model).read(model.qpos0[None])
    pictures = [
        NativeCamera(
            model,
            CameraSpec(name="eye", width=80, height=60, specular=True, reflections=True, shadows=shadows),
        ).render(poses)
        for shadows in (False, True)
    ]
    kinds = CameraSpec(name="eye", width=80, height=60, data_types=("segmentation",))
    mirror = NativeCamera(model, kinds).render(poses).segmentation[0] == 0
    plain, shaded = (picture.rgb[0][mirror] for picture in pictures)
    assert plain.max() > 150, "a highlight is seen in the mirror"
    assert np.array_equal(plain, shaded)
