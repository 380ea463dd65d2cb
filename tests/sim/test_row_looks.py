"""Lenses, lights and materials that differ between rows: each row is the picture of a model with these numbers."""

from __future__ import annotations

import copy
from typing import Any

import mujoco
import numpy as np
import pytest
from picture_cases import CASES

from headrace.sim import CameraSpec, NativeCamera
from headrace.sim.camera import _scene
from headrace.sim.camera.camera import ROW_LOOKS, PoseReader

SCENE = """<mujoco><visual><headlight diffuse=".2 .2 .2" ambient=".1 .1 .1"/></visual><asset>
<texture name="checks" type="2d" builtin="checker" width="16" height="16" rgb1=".9 .2 .1" rgb2=".1 .8 .3"/>
<texture name="stripes" type="2d" builtin="gradient" width="32" height="8" rgb1="0 0 1" rgb2="1 1 0"/>
<texture name="box" type="cube" builtin="gradient" width="8" height="8" rgb1="1 1 1" rgb2=".2 .2 .9"/>
<texture name="red" type="2d" builtin="flat" width="4" height="4" rgb1=".8 .1 .1"/>
<texture type="skybox" builtin="gradient" width="16" height="16" rgb1=".4 .6 .9" rgb2=".9 .9 1"/>
<material name="floor" texture="checks" texrepeat="4 4" specular=".3" shininess=".4"/>
<material name="thing" texture="box" rgba=".9 .8 .7 1"/><material name="plain" rgba=".3 .9 .4 1" emission=".1"/></asset>
<worldbody><light pos="0 -1 3" dir="0 .3 -1" cutoff="50" exponent="4" attenuation="1 .05 0" diffuse=".7 .7 .7"/>
<light directional="true" castshadow="false" dir=".3 .2 -1" diffuse=".3 .3 .3"/>
<geom type="plane" size="3 3 .1" material="floor"/><geom type="box" size=".3 .3 .3" pos="-.6 .4 .3" material="thing"/>
<body pos=".5 0 .5"><freejoint/><geom size=".35" material="plain"/><geom type="cylinder" size=".1 .4" pos="0 0 .5"
rgba=".2 .2 .9 1"/></body><site pos="-.3 -.6 .2" size=".15" material="thing"/>
<camera name="eye" pos="0 -3 1.6" xyaxes="1 0 0 0 .45 1"/>
<camera name="lens" pos="0 -3 1.6" xyaxes="1 0 0 0 .45 1" resolution="64 48" sensorsize=".02 .015" focal=".02 .02"
principal=".001 .0005"/></worldbody></mujoco>"""
ROWS = 3


def values_of(model: Any, name: str) -> np.ndarray:
    """(ROWS, …): the model's own first, then others."""
    own, rng = np.array(getattr(model, name), np.float64), np.random.default_rng(0)
    if name == "geom_matid":
        return np.array([own, [1, 2, 0, -1], [2, 0, 1, 2]], np.float64)
    if name == "mat_texid":
        role, rows = int(mujoco.mjtTextureRole.mjTEXROLE_RGB), np.repeat(own[None], ROWS, 0)
        rows[1:, :, role] = [[1, 3, -1], [3, -1, 2]]
        return rows
    if name == "light_ambient":
        return np.stack([own + 0.1 * k for k in range(ROWS)])
    if name == "light_cutoff":
        return np.stack([own / (1 + k) for k in range(ROWS)])
    return np.stack([own * (1 + 0.4 * k * rng.uniform(0.5, 1, own.shape)) for k in range(ROWS)])


def draw(model: Any, camera: str, fields: dict[str, np.ndarray] | None, kept: NativeCamera | None = None, **spec: Any):
    looker = kept or NativeCamera(model, CameraSpec(name=camera, width=56, height=40, specular=True, **spec))
    qpos = np.repeat(model.qpos0[None], 1 if fields is None else ROWS, 0)
    return looker.render(PoseReader(model).read(qpos, fields=fields))


@pytest.mark.parametrize("name", [*ROW_LOOKS, "geom_rgba", "light_diffuse"])
@pytest.mark.parametrize("camera", ["eye", "lens"])
def test_a_row_is_the_picture_of_a_model_with_its_numbers(name: str, camera: str) -> None:
    model: Any = mujoco.MjModel.from_xml_string(SCENE)
    values, kinds = values_of(model, name), ("rgb", "depth", "segmentation")
    kept = NativeCamera(model, CameraSpec(name=camera, width=56, height=40, specular=True, data_types=kinds))
    # again over the layers that were made before
    for _ in range(3):
        rows = draw(model, camera, {name: values}, kept)
        for i in range(ROWS):
            other = copy.copy(model)
            getattr(other, name)[:] = values[i]
            expected = draw(other, camera, None, data_types=kinds)
            assert np.array_equal(rows.rgb[i], expected.rgb[0])
            assert np.array_equal(rows.depth[i], expected.depth[0])
            assert np.array_equal(rows.segmentation[i], expected.segmentation[0])
    changes = name not in {"eye": ("cam_intrinsic",), "lens": ("cam_fovy",)}[camera]
    assert (rows.rgb[0] != rows.rgb[1]).any() == changes


@pytest.mark.parametrize("name", ["strings", "skin", "cloth_rope_and_jelly"])
def test_strings_skins_and_cloth_follow_the_materials_of_a_row(name: str) -> None:
    model: Any = mujoco.MjModel.from_xml_string(CASES[name].xml)
    own = np.array(model.mat_rgba, np.float64)
    values = np.stack([own, own * 0.4 + [0.1, 0.3, 0, 0.6], np.where([1, 1, 1, 0], own * 0.7, 0)])
    rows = draw(model, "eye", {"mat_rgba": values, "mat_emission": np.zeros((ROWS, model.nmat))})
    for i in range(ROWS):
        other = copy.copy(model)
        other.mat_rgba[:] = values[i]
        assert np.array_equal(rows.rgb[i], draw(other, "eye", None).rgb[0])
    assert (rows.rgb[0] != rows.rgb[1]).any()
    assert (rows.rgb[0] != rows.rgb[2]).any()


def test_a_layer_is_kept_where_nothing_of_it_changes() -> None:
    model: Any = mujoco.MjModel.from_xml_string(SCENE)
    camera = NativeCamera(model, CameraSpec(name="eye", width=56, height=40))
    values = np.repeat(np.array(model.mat_emission, np.float64)[None], ROWS, 0)
    values[:, 2] = 0.1, 0.3, 0.5  # of the ball, which moves
    for _ in range(2):
        camera.render(PoseReader(model).read(np.repeat(model.qpos0[None], ROWS, 0), fields={"mat_emission": values}))
    assert camera._layers is not None
    assert len(camera._layers._places) == 1
    values[:, 0] = 0.1, 0.3, 0.5  # of the floor
    for _ in range(2):
        camera.render(PoseReader(model).read(np.repeat(model.qpos0[None], ROWS, 0), fields={"mat_emission": values}))
    assert len(camera._layers._places) == 4


def test_rows_with_looks_do_not_depend_on_batch_and_threads(use_threads) -> None:
    model: Any = mujoco.MjModel.from_xml_string(SCENE)
    fields = {name: values_of(model, name) for name in ROW_LOOKS if name != "mat_texid"}
    spec: dict[str, Any] = {"shadows": True, "reflections": True}
    use_threads(3)
    whole = draw(model, "eye", fields, **spec)
    use_threads(1)
    for i in range(ROWS):
        poses = PoseReader(model).read(
            model.qpos0[None], fields={name: part[i : i + 1] for name, part in fields.items()}
        )
        alone = NativeCamera(model, CameraSpec(name="eye", width=56, height=40, specular=True, **spec)).render(poses)
        assert np.array_equal(alone.rgb[0], whole.rgb[i])


@pytest.mark.parametrize("camera", ["eye", "lens"])
def test_each_lens_is_computed_once_without_a_model_of_its_own(camera: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = mujoco.MjModel.from_xml_string(SCENE)
    draw(model, camera, {"cam_fovy": values_of(model, "cam_fovy")})
    compiled, computed, build_frame = list[str](), list[str](), _scene.build_frame
    fields = {name: values_of(model, name) for name in ("cam_fovy", "cam_intrinsic", "mat_emission")}
    fields["cam_fovy"], fields["cam_intrinsic"] = fields["cam_fovy"] * 1.01, fields["cam_intrinsic"] * 1.01
    for name in ("cam_fovy", "cam_intrinsic"):
        fields[name][2] = fields[name][1]
    looker = NativeCamera(model, CameraSpec(name=camera, width=56, height=40, specular=True))
    monkeypatch.setattr(mujoco.MjModel, "from_xml_string", compiled.append)
    monkeypatch.setattr(_scene, "build_frame", lambda *args: computed.append("") or build_frame(*args))
    rows = draw(model, camera, fields, looker)
    assert not compiled
    assert len(computed) == 2
    assert (rows.rgb[1] != rows.rgb[2]).any()
