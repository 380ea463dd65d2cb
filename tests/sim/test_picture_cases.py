"""The native camera on one small scene for each thing that it once got wrong, against MuJoCo's renderer."""

from __future__ import annotations

import copy
import gc
import sys
from dataclasses import replace
from pathlib import Path

import mujoco
import numpy as np
import pytest

from headrace.errors import ConfigError, ShapeError
from headrace.sim import CameraSpec, NativeCamera
from headrace.sim.camera.camera import PoseReader
from headrace.sim.camera.names import make_camera

sys.path.insert(0, str(Path(__file__).parent))
from picture_cases import CASES, HEIGHT, WIDTH
from random_scenes import scene
from test_native_camera import inside_regions

REFERENCES = dict(np.load(Path(__file__).parent / "references" / "cases.npz"))
KINDS = ("rgb", "depth", "segmentation")


@pytest.mark.parametrize("name", CASES)
def test_the_picture_is_mujocos(name: str) -> None:
    case = CASES[name]
    model = mujoco.MjModel.from_xml_string(case.xml)
    qpos = model.qpos0[None].copy()
    qpos[0, : len(case.qpos)] = case.qpos
    spec = CameraSpec(name="eye", width=WIDTH, height=HEIGHT, data_types=KINDS, **case.spec)
    frames = NativeCamera(model, spec).render(PoseReader(model).read(qpos))
    theirs = {kind: REFERENCES[f"{name}/{kind}"] for kind in KINDS}
    inside = inside_regions(theirs["segmentation"])
    assert (frames.segmentation[0] == theirs["segmentation"])[inside].all()
    assert (frames.segmentation[0] == theirs["segmentation"]).mean() > 0.98
    distance = np.abs(frames.depth[0] / theirs["depth"] - 1)
    away = inside & (theirs["segmentation"] >= 0)
    assert not away.any() or np.quantile(distance[away], 0.99) < 5e-3
    # what is no geom has no id, but a depth; edges may go either way
    assert (distance < 0.01).mean() > 0.97
    error = np.abs(frames.rgb[0].astype(int) - theirs["rgb"])
    assert error[inside].mean() < case.mean
    assert (error.max(-1) <= 8).mean() >= case.within


_WORN = """<mujoco><statistic extent="2" center="0 0 0"/><visual><quality offsamples="0"/></visual><asset>
  <texture name="t" type="2d" builtin="checker" rgb1="0.9 0.8 0.6" rgb2="0.3 0.2 0.1" width="32" height="32"/>
  <texture name="c" type="cube" builtin="checker" rgb1="0.2 0.8 0.6" rgb2="0.3 0.2 0.6" width="32" height="192"/>
  <material name="t" texture="t" texrepeat="3 2" texuniform="{uniform}"/>
  <material name="c" texture="c" texuniform="{uniform}"/></asset><worldbody>
  <geom type="{kind}" size="{size}" material="{material}"/>
  <camera name="eye" pos="0.3 -1.6 0.9" xyaxes="1 0.1 0 -0.05 0.5 0.87" fovy="40"/></worldbody></mujoco>"""
_SIZES = {"before": (0.4, 0.5, 0.2), "after": (0.6, 0.3, 0.3)}


def _worn(kind: str, material: str, uniform: str, size: str) -> tuple[mujoco.MjModel, np.ndarray]:
    numbers = _SIZES[size][: {"sphere": 1, "capsule": 2, "cylinder": 2}.get(kind, 3)]
    text = _WORN.format(kind=kind, material=material, uniform=uniform, size=" ".join(map(str, numbers)))
    model = mujoco.MjModel.from_xml_string(text)
    return model, model.geom_size[None].copy()


@pytest.mark.parametrize("uniform", ["true", "false"])
@pytest.mark.parametrize("material", ["t", "c"])
@pytest.mark.parametrize("kind", ["plane", "box", "cylinder", "ellipsoid", "capsule", "sphere"])
def test_a_geom_of_another_size_wears_its_texture_as_in_a_model_of_that_size(kind, material, uniform) -> None:
    spec = CameraSpec(name="eye", width=WIDTH, height=HEIGHT, data_types=KINDS)
    model, _ = _worn(kind, material, uniform, "before")
    other, sizes = _worn(kind, material, uniform, "after")
    resized = NativeCamera(model, spec).render(PoseReader(model).read(np.zeros((1, 0)), fields={"geom_size": sizes}))
    compiled = NativeCamera(other, spec).render(PoseReader(other).read(np.zeros((1, 0))))
    for kind_of_image in KINDS:
        assert np.array_equal(getattr(resized, kind_of_image), getattr(compiled, kind_of_image))


@pytest.mark.system
@pytest.mark.parametrize("kind", ["plane", "box"])
def test_opengl_draws_a_geom_of_another_size_as_in_a_model_of_that_size(kind) -> None:
    spec = CameraSpec(name="eye", width=WIDTH, height=HEIGHT)
    model, _ = _worn(kind, "t", "true", "before")
    other, sizes = _worn(kind, "t", "true", "after")
    pictures: list[np.ndarray] = []
    for drawn, fields in ((model, {"geom_size": sizes}), (other, {})):
        camera = make_camera("gl", drawn, spec)
        pictures.append(camera.render(PoseReader(drawn).read(np.zeros((1, 0)), fields=fields)).rgb.astype(int))
        camera.close()
    # the grid that corners are lit on differs
    assert np.abs(pictures[0] - pictures[1]).mean() < 0.5


@pytest.mark.parametrize("name", ["strings", "skin", "cloth_rope_and_jelly"])
def test_soft_parts_are_those_of_their_row_whatever_is_drawn_with_it(name: str) -> None:
    model = mujoco.MjModel.from_xml_string(CASES[name].xml)
    spec = CameraSpec(name="eye", width=WIDTH, height=HEIGHT, data_types=KINDS, shadows=True)
    qpos = model.qpos0 + np.random.default_rng(0).normal(0, 0.2, (5, model.nq))
    reader = PoseReader(model)
    poses = reader.read(qpos)
    together = NativeCamera(model, spec, threads=2).render(poses)
    alone = NativeCamera(model, spec, threads=1, layers=False)
    for row in (3, 0, 4):
        frame = alone.render(reader.read(qpos[row : row + 1]))
        picked = alone.render(poses.rows(np.array([row])))
        for kind in KINDS:
            assert np.array_equal(getattr(frame, kind)[0], getattr(together, kind)[row])
            assert np.array_equal(getattr(picked, kind)[0], getattr(together, kind)[row])
    assert len(np.unique(together.rgb.reshape(5, -1), axis=0)) == 5
    with pytest.raises(ShapeError, match="use a PoseReader"):
        alone.render(replace(poses, soft=None))


def test_what_cannot_be_drawn_is_named_unless_it_may_be_skipped() -> None:
    text = CASES["strings"].xml.replace("</mujoco>", '<sensor><rangefinder name="eyes" site="a"/></sensor></mujoco>')
    model = mujoco.MjModel.from_xml_string(text)
    with pytest.raises(ConfigError, match=r'rays of rangefinders \(eyes\).*missing="skip"'):
        NativeCamera(model, CameraSpec(name="eye", width=8, height=8))
    NativeCamera(model, CameraSpec(name="eye", width=8, height=8, missing="skip"))
    with pytest.raises(ConfigError, match="expected 'raise' or 'skip'"):
        CameraSpec(name="eye", width=8, height=8, missing="ignore")


_WRITES = {
    "geom_rgba": lambda model: model.geom_rgba.__setitem__((0, slice(0, 3)), (0.1, 0.9, 0.2)),
    "mat_rgba": lambda model: model.mat_rgba.__setitem__(0, (0.2, 0.3, 0.9, 1)),
    "mat_texrepeat": lambda model: model.mat_texrepeat.__setitem__(0, (5, 1)),
    "mat_emission": lambda model: model.mat_emission.__setitem__(0, 0.5),
    "geom_group": lambda model: model.geom_group.__setitem__(0, 4),
    "cam_fovy": lambda model: model.cam_fovy.__setitem__(0, 70.0),
    "cam_pos": lambda model: model.cam_pos.__setitem__(0, (0.0, -1.2, 1.1)),
    "light_diffuse": lambda model: model.vis.headlight.diffuse.__setitem__(slice(None), 0.1),
}


@pytest.mark.parametrize("renderer", ["native", pytest.param("gl", marks=pytest.mark.system)])
@pytest.mark.parametrize("field", _WRITES)
def test_a_write_to_the_model_shows_in_the_next_picture(field: str, renderer: str) -> None:
    model, _ = _worn("plane", "t", "true", "before")
    spec = CameraSpec(name="eye", width=WIDTH, height=HEIGHT)
    reader, camera = PoseReader(model), make_camera(renderer, model, spec)
    before = camera.render(reader.read(np.zeros((2, 0)))).rgb
    _WRITES[field](model)
    after = camera.render(reader.read(np.zeros((2, 0)))).rgb
    fresh = make_camera(renderer, model, spec)
    assert not np.array_equal(before, after)
    assert np.array_equal(after, fresh.render(PoseReader(model).read(np.zeros((2, 0)))).rgb)
    camera.close()
    fresh.close()


def test_cameras_of_the_same_scene_share_triangles_and_textures() -> None:
    model = mujoco.MjModel.from_xml_string(scene(1))
    wide, narrow = (CameraSpec(name="eye", width=width, height=8) for width in (8, 4))
    first, second, third = NativeCamera(model, wide), NativeCamera(model, narrow), NativeCamera(copy.copy(model), wide)
    for other in (second, third):
        assert other._tables.textures.texels is first._tables.textures.texels
        assert other._tables.triangles.vertices is first._tables.triangles.vertices
    # other bytes are another texture, whatever model they are in
    model.tex_data[:] = 255 - model.tex_data
    changed = NativeCamera(model, wide)
    assert changed._tables.triangles.vertices is first._tables.triangles.vertices
    poses = PoseReader(model).read(model.qpos0[None].copy())
    assert not np.array_equal(changed.render(poses).rgb, first.render(poses).rgb)


def test_textures_are_freed_with_the_last_camera_that_shows_them() -> None:
    from headrace.sim.camera._textures import _shared

    gc.collect()
    before = len(_shared)
    model = mujoco.MjModel.from_xml_string(CASES["srgb_texture"].xml.replace("0.8 0.7 0.6", "0.81 0.7 0.6"))
    cameras = [NativeCamera(model, CameraSpec(name="eye", width=8, height=8)) for _ in range(2)]
    assert len(_shared) == before + 1
    del cameras
    gc.collect()
    assert len(_shared) == before


def test_groups_of_sites_that_there_are_not_are_refused() -> None:
    with pytest.raises(ConfigError, match="site_groups: expected numbers from 0 to 5"):
        CameraSpec(name="eye", width=8, height=8, site_groups=(6,))
