"""The cameras that need more than pip: OpenGL (system) and mujoco-warp (slow: it compiles), against the native one."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest

from headrace.errors import ConfigError, LifecycleError
from headrace.sim.camera._gl_camera import GLCamera
from headrace.sim.camera.appearance import Appearance, AppearanceSpec
from headrace.sim.camera.camera import CameraSpec, PoseReader
from headrace.sim.camera.native_camera import NativeCamera
from headrace.sim.camera.warp_camera import WarpCamera

sys.path.insert(0, str(Path(__file__).parent))
from camera_scenes import SCENES

ALL = ("rgb", "depth", "segmentation")


def scene(name: str = "primitives"):
    model = mujoco.MjModel.from_xml_string(SCENES[name])
    return model, PoseReader(model).read(np.tile(model.qpos0, (3, 1)))


def assert_same_geometry(ours, theirs) -> None:
    same = ours.segmentation == theirs.segmentation
    # edges of tessellated geoms may go either way
    assert same.mean() > 0.99
    error = np.abs(ours.depth / theirs.depth - 1)[same]
    assert np.quantile(error, 0.95) < 5e-3


@pytest.mark.system
def test_a_camera_that_is_never_closed_ends_quietly() -> None:
    program = (
        "import mujoco\nfrom headrace.sim import CameraSpec\n"
        "from headrace.sim.camera._gl_camera import GLCamera\n"
        'xml = \'<mujoco><worldbody><camera name="c"/><geom size="1"/></worldbody></mujoco>\'\n'
        "kept = GLCamera(mujoco.MjModel.from_xml_string(xml), CameraSpec(name='c', width=8, height=8))\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.system
def test_opengl_shows_the_same_scene_with_mujocos_lighting():
    model, poses = scene()
    spec = CameraSpec(name="front", width=64, height=48, data_types=ALL)
    camera = GLCamera(model, spec)
    theirs, ours = camera.render(poses), NativeCamera(model, spec).render(poses)
    assert theirs.rgb.std() > 10
    assert_same_geometry(ours, theirs)
    assert np.abs(ours.rgb.astype(int) - theirs.rgb).mean() < 6
    with mujoco.Renderer(model, 48, 64) as renderer:
        data = mujoco.MjData(model)
        mujoco.mj_forward(model, data)
        renderer.update_scene(data, "front")
        assert np.array_equal(renderer.render(), theirs.rgb[0])
    camera.close()


@pytest.mark.system
def test_closing_or_dropping_one_opengl_camera_leaves_the_pictures_of_another():
    model, poses = scene()
    spec = CameraSpec(name="front", width=32, height=24)
    first, second, third = (GLCamera(model, spec) for _ in range(3))
    before = first.render(poses).rgb.copy()
    second.close()
    del third
    gc.collect()
    assert np.array_equal(first.render(poses).rgb, before)
    assert before.std() > 10
    with pytest.raises(LifecycleError, match="closed"):
        second.render(poses)
    first.close()


@pytest.mark.system
def test_opengl_draws_looks_and_forgets_them():
    model, poses = scene()
    spec = CameraSpec(name="front", width=32, height=24)
    camera = GLCamera(model, spec)
    plain = camera.render(poses).rgb
    looks = Appearance(model, AppearanceSpec(color=0.4, light=0.5), seed=2).apply(poses, np.arange(3))
    drawn = camera.render(looks).rgb
    assert len(np.unique(drawn.reshape(3, -1), axis=0)) == 3
    native = NativeCamera(model, spec).render(looks).rgb
    assert np.abs(native.astype(int) - drawn).mean() < 8
    assert np.array_equal(camera.render(poses).rgb, plain)
    camera.close()


@pytest.mark.system
def test_opengl_takes_away_the_texture_of_a_row_without_one():
    model: Any = mujoco.MjModel.from_xml_string(
        """<mujoco><asset><texture name="t" type="cube" builtin="gradient" rgb1="0 0 1" rgb2="0 .2 .9" width="16"/>
        <material name="worn" texture="t"/></asset><worldbody><geom type="box" size=".4 .4 .4" material="worn"/>
        <camera name="c" pos="0 -2 .5" xyaxes="1 0 0 0 .25 1"/></worldbody></mujoco>"""
    )
    fields = {"mat_texid": np.stack([model.mat_texid, np.full_like(model.mat_texid, -1)]).astype(np.float64)}
    poses = PoseReader(model).read(np.zeros((2, 0)), fields=fields)
    spec = CameraSpec(name="c", width=40, height=30)
    drawn, ours = GLCamera(model, spec).render(poses).rgb, NativeCamera(model, spec).render(poses).rgb
    assert np.abs(drawn.astype(int) - ours).mean() < 3
    assert np.abs(drawn[0].astype(int) - drawn[1]).mean() > 10
    model.mat_texid[:] = -1
    assert np.array_equal(GLCamera(model, spec).render(PoseReader(model).read(np.zeros((1, 0)))).rgb[0], drawn[1])


def test_an_unknown_backend_is_refused():
    model, _ = scene()
    with pytest.raises(ConfigError, match="egl, osmesa"):
        GLCamera(model, CameraSpec(name="front", width=4, height=4), backend="vulkan")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_mujoco_warp_shows_the_same_scene():
    pytest.importorskip("mujoco_warp")
    model, poses = scene()
    spec = CameraSpec(name="front", width=64, height=48, data_types=ALL)
    camera = WarpCamera(model, spec, device="cpu")
    theirs, ours = camera.render(poses), NativeCamera(model, spec).render(poses)
    assert (ours.segmentation == theirs.segmentation).mean() > 0.999
    assert np.quantile(np.abs(ours.depth / theirs.depth - 1), 0.99) < 1e-4
    # its lights and haze are its own
    assert np.abs(ours.rgb.astype(int) - theirs.rgb).mean() < 10
    fewer = camera.render(poses.rows(slice(0, 1)))
    assert np.array_equal(fewer.segmentation[0], theirs.segmentation[0])
    with pytest.raises(ConfigError, match="use native or gl"):
        camera.render(Appearance(model, AppearanceSpec(), seed=0).apply(poses, np.arange(3)))
    camera.close()
    with pytest.raises(LifecycleError, match="closed"):
        camera.render(poses)


@pytest.mark.parametrize(
    "kind", [pytest.param(GLCamera, marks=pytest.mark.system), pytest.param(WarpCamera, marks=pytest.mark.slow)]
)
def test_other_cameras_show_the_groups_that_the_native_one_shows(kind) -> None:
    text = SCENES["primitives"].replace("<geom ", '<geom group="1" ', 3)
    model = mujoco.MjModel.from_xml_string(text)
    poses = PoseReader(model).read(model.qpos0[None].copy())
    for groups in ((1,), (0, 1, 2)):
        spec = CameraSpec(name="front", width=64, height=48, data_types=("segmentation",), groups=groups)
        ours, theirs = NativeCamera(model, spec).render(poses), kind(model, spec).render(poses)
        assert (ours.segmentation == theirs.segmentation).mean() > 0.99
        assert set(np.unique(ours.segmentation)) == set(np.unique(theirs.segmentation))


@pytest.mark.parametrize(("groups", "warned"), [((0,), True), ((1,), False)])
def test_mujoco_warp_says_which_sites_it_leaves_out(groups, warned, caplog) -> None:
    pytest.importorskip("mujoco_warp")
    caplog.set_level("WARNING", logger="headrace.sim")
    model = mujoco.MjModel.from_xml_string(
        '<mujoco><worldbody><camera name="c"/><geom size="1"/><site size=".1"/></worldbody></mujoco>'
    )
    WarpCamera(model, CameraSpec(name="c", width=8, height=8, groups=groups), device="cpu").close()
    assert ("draws no sites, and 1 of this model would be shown" in caplog.text) == warned
