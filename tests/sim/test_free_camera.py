"""The free camera stands where MuJoCo's own viewer would, and draws as a camera of the model at that place does."""

from __future__ import annotations

from dataclasses import replace

import mujoco
import numpy as np
import pytest

from headrace.errors import ConfigError, UnknownNameError
from headrace.sim import CameraSpec, NativeCamera
from headrace.sim.camera.camera import FreeView, PoseReader, camera_names

SCENE = """<mujoco><visual><global azimuth="{azimuth}" elevation="{elevation}" fovy="50"/></visual>
<worldbody><geom type="plane" size="1 1 .1"/><geom type="box" size=".2 .1 .3" pos=".1 .2 .3" rgba=".9 .2 .2 1"/>
{camera}</worldbody></mujoco>"""


def build(azimuth: float = 120, elevation: float = -35, camera: str = "") -> mujoco.MjModel:
    return mujoco.MjModel.from_xml_string(SCENE.format(azimuth=azimuth, elevation=elevation, camera=camera))


@pytest.mark.parametrize(("azimuth", "elevation"), [(90, -45), (0, 0), (213, 30), (-17, -89)])
def test_it_stands_where_mujocos_viewer_begins(azimuth: float, elevation: float) -> None:
    model = build(azimuth, elevation)
    scene, view, data = mujoco.MjvScene(model, maxgeom=1), mujoco.MjvCamera(), mujoco.MjData(model)
    mujoco.mjv_defaultFreeCamera(model, view)
    mujoco.mjv_updateCamera(model, data, view, scene)
    eye, axes = FreeView.around(model).pose()
    # MuJoCo keeps float32; with two eyes, which stand side by side
    middle = (np.array(scene.camera[0].pos) + np.array(scene.camera[1].pos)) / 2
    np.testing.assert_allclose(eye, middle, atol=1e-6)
    np.testing.assert_allclose(axes.reshape(3, 3)[:, 1], scene.camera[0].up, atol=1e-6)
    np.testing.assert_allclose(-axes.reshape(3, 3)[:, 2], scene.camera[0].forward, atol=1e-6)


def test_it_draws_as_a_camera_of_the_model_at_its_place() -> None:
    free = build()
    eye, axes = FreeView.around(free).pose()
    x, y = axes.reshape(3, 3)[:, 0], axes.reshape(3, 3)[:, 1]
    numbers = " ".join(repr(float(value)) for value in (*x, *y))
    place = " ".join(repr(float(value)) for value in eye)
    fixed = build(camera=f'<camera name="eye" pos="{place}" xyaxes="{numbers}" fovy="50"/>')
    spec = CameraSpec(name="free", width=40, height=30, data_types=("segmentation", "depth"))
    ours, theirs = (
        NativeCamera(model, replace(spec, name=name)).render(PoseReader(model).read(np.zeros((1, 0))))
        for model, name in ((free, "free"), (fixed, "eye"))
    )
    assert len(np.unique(ours.segmentation)) == 3
    # the MJCF keeps an orientation as a quaternion, so a pixel on an edge may fall to the other side
    assert (ours.segmentation != theirs.segmentation).mean() <= 0.002
    same = ours.segmentation == theirs.segmentation
    np.testing.assert_allclose(ours.depth[same], theirs.depth[same], rtol=1e-4)


def test_another_view_shows_in_the_next_picture_and_coming_back_gives_the_first_again() -> None:
    model = build()
    camera, poses = NativeCamera(model, CameraSpec(name="free", width=40, height=30)), PoseReader(model)
    rows = poses.read(np.zeros((2, 0)))
    first = camera.render(rows).rgb.copy()
    begun = camera.free
    assert begun is not None
    camera.free = replace(begun, azimuth=begun.azimuth + 40, distance=2 * begun.distance)
    assert not np.array_equal(camera.render(rows).rgb, first)
    camera.free = begun
    assert np.array_equal(camera.render(rows).rgb, first)
    assert np.array_equal(first[0], first[1])


def test_a_camera_of_the_model_may_be_called_free() -> None:
    model = build(camera='<camera name="free" pos="0 0 5"/>')
    assert camera_names(model) == ["free"]
    assert NativeCamera(model, CameraSpec(name="free", width=8, height=8)).free is None
    with pytest.raises(UnknownNameError, match="camera"):
        NativeCamera(model, CameraSpec(name="fre", width=8, height=8))


def test_warp_has_no_free_camera() -> None:
    pytest.importorskip("mujoco_warp")
    from headrace.sim.camera.warp_camera import WarpCamera

    with pytest.raises(ConfigError, match="use native or gl"):
        WarpCamera(build(), CameraSpec(name="free", width=8, height=8))
