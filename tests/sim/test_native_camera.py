"""The native camera against MuJoCo's renderer (committed pictures) and against MuJoCo's own ray casting."""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from pathlib import Path

import mujoco
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigError, DtypeError, LifecycleError, ShapeError, UnknownNameError
from headrace.sim.camera.appearance import Appearance, AppearanceSpec
from headrace.sim.camera.camera import CameraFrames, CameraSpec, PoseReader, ScenePoses
from headrace.sim.camera.native_camera import NativeCamera

sys.path.insert(0, str(Path(__file__).parent))
from camera_scenes import SCENES, VIEWS

REFERENCES = Path(__file__).parent / "references"
ALL = ("rgb", "gray", "depth", "segmentation", "normals")


def model_of(scene: str) -> mujoco.MjModel:
    return mujoco.MjModel.from_xml_string(SCENES[scene])


def draw(model: mujoco.MjModel, camera: str, width: int, height: int) -> CameraFrames:
    spec = CameraSpec(name=camera, width=width, height=height, data_types=ALL)
    return NativeCamera(model, spec).render(PoseReader(model).read(model.qpos0[None].copy()))


def vars_of(frames: CameraFrames) -> dict[str, np.ndarray]:
    return {name: getattr(frames, name) for name in ALL}


def inside_regions(ids: np.ndarray) -> np.ndarray:
    """Pixels whose eight neighbors show the same geom: there a shift of a hundredth of a pixel changes nothing."""
    padded = np.pad(ids, 1, mode="edge")
    same = np.ones(ids.shape, bool)
    height, width = ids.shape
    for dy in range(3):
        for dx in range(3):
            same &= padded[dy : dy + height, dx : dx + width] == ids
    return same


@pytest.fixture(params=VIEWS, ids=lambda view: f"{view[0]}-{view[1]}")
def compared(request: pytest.FixtureRequest):
    scene, camera, width, height = request.param
    reference = dict(np.load(REFERENCES / f"{scene}_{camera}.npz"))
    model = model_of(scene)
    return model, draw(model, camera, width, height), reference


def test_segmentation_equals_mujocos_in_every_pixel_away_from_edges(compared):
    _, frames, reference = compared
    ours, theirs = frames.segmentation[0], reference["segmentation"]
    inside = inside_regions(theirs)
    assert (ours[inside] == theirs[inside]).all()
    # on edges a pixel may go either way: the triangles of a curved geom lie inside it
    assert (ours != theirs).mean() < 0.005


def test_depth_equals_mujocos_to_the_tessellation_of_curved_geoms(compared):
    model, frames, reference = compared
    ours, theirs, ids = frames.depth[0], reference["depth"], reference["segmentation"]
    inside = inside_regions(ids)
    error = np.abs(ours - theirs) / theirs
    kinds = mujoco.mjtGeom
    flat_types = (kinds.mjGEOM_PLANE, kinds.mjGEOM_BOX, kinds.mjGEOM_MESH, kinds.mjGEOM_HFIELD)
    flat = np.isin(ids, [g for g in range(model.ngeom) if model.geom_type[g] in flat_types]) & inside
    # GL's depth buffer has 24 bits over near … far, hence 5e-5; flat geoms have no tessellation
    assert error[flat].max(initial=0) < 5e-5
    curved = inside & ~flat & (ids >= 0)
    # a 64-sided ring lies within r(1 − cos(π/64)) = 0.12 % of its radius; seen at a grazing angle that grows
    assert np.quantile(error[curved], 0.99) < 3e-3 if curved.any() else True
    assert error[curved].max(initial=0) < 1e-2
    nothing = inside & (ids < 0)
    assert np.allclose(ours[nothing], theirs[nothing], rtol=1e-4)


def test_colors_are_mujocos_without_shadows_reflections_and_antialiasing(compared):
    _, frames, reference = compared
    inside = inside_regions(reference["segmentation"])
    error = np.abs(frames.rgb[0].astype(int) - reference["rgb"])[inside]
    # of 255: light per pixel instead of per vertex, texture positions rounded to 1/64 texel, two levels blended over
    # half their distance
    assert error.mean() < 2.0
    assert np.quantile(error, 0.95) <= 8


def test_colors_resemble_mujocos_default_picture(compared):
    _, frames, reference = compared
    ours, theirs = frames.rgb[0].astype(float), reference["rgb_default"].astype(float)
    # shadows, reflections and highlights are missing: a coarse likeness is what is promised
    assert np.abs(ours - theirs).mean() < 6
    assert np.corrcoef(ours.ravel(), theirs.ravel())[0, 1] > 0.9


GEOMS = st.tuples(
    st.sampled_from(["plane", "sphere", "capsule", "ellipsoid", "cylinder", "box"]),
    st.tuples(*[st.floats(0.05, 0.6)] * 3),
    st.tuples(*[st.floats(-1, 1)] * 3),
    st.tuples(*[st.floats(-180, 180)] * 3),
)


@settings(deadline=None, max_examples=80)
@given(geoms=st.lists(GEOMS, min_size=1, max_size=5), eye=st.tuples(*[st.floats(-2, 2)] * 3), fovy=st.floats(20, 110))
def test_any_heap_of_primitives_looks_as_mujocos_rays_see_it(geoms, eye, fovy):
    def xml(values) -> str:
        return " ".join(f"{value:.6f}" for value in values)

    bodies = "".join(
        f'<geom type="{kind}" size="{xml(size)}" pos="{xml(pos)}" euler="{xml(euler)}"/>'
        for kind, size, pos, euler in geoms
    )
    model = mujoco.MjModel.from_xml_string(
        '<mujoco><statistic extent="2" center="0 0 0"/><visual><map znear="0.0005" zfar="100"/></visual><worldbody>'
        f"{bodies}"
        f'<camera name="eye" pos="{xml(eye)}" mode="targetbody" target="world" fovy="{fovy:.6f}"/></worldbody></mujoco>'
    )
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    size = 24
    frames = draw(model, "eye", size, size)
    half = np.tan(np.radians(fovy) / 2)
    slopes = (np.arange(size) + 0.5) / size * 2 - 1
    x, y = np.meshgrid(slopes * half, -slopes * half)
    rays = np.stack([x, y, -np.ones_like(x)], -1).reshape(-1, 3) @ data.cam_xmat[0].reshape(3, 3).T
    ids, depth = np.full(size * size, -1, np.int32), np.full(size * size, -1.0)
    mujoco.mj_multiRay(
        model, data, data.cam_xpos[0], rays.ravel(), None, 1, -1, ids, depth, None, size * size, mujoco.mjMAXVAL
    )
    ids, depth = ids.reshape(size, size), depth.reshape(size, size)
    # MuJoCo's rays hit the far wall of a geom they start in and pass planes from behind; its pictures do the opposite
    assume(not any(_differs_in_pictures(model, data, g) for g in range(model.ngeom)))
    away = inside_regions(ids)
    hit = away & (ids >= 0)
    # two surfaces at the same depth may be told apart either way
    tie = hit & (np.abs(frames.depth[0] - depth) < 1e-4 * np.abs(depth))
    assert ((frames.segmentation[0] == ids) | tie)[away].all()
    # float32 spans: a few millionths of the distance, more where a surface is seen edge-on
    assert np.abs(frames.depth[0][hit] / depth[hit] - 1).max(initial=0) < 2e-3
    assert np.median(np.abs(frames.depth[0][hit] / depth[hit] - 1)) < 1e-5 if hit.any() else True


def _differs_in_pictures(model: mujoco.MjModel, data: mujoco.MjData, g: int) -> bool:
    """Whether the camera is behind plane g, or inside geom g, or within two millimeters of its surface."""
    local = data.geom_xmat[g].reshape(3, 3).T @ (data.cam_xpos[0] - data.geom_xpos[g])
    size = model.geom_size[g] + 2e-3
    match int(model.geom_type[g]):
        case mujoco.mjtGeom.mjGEOM_PLANE:
            return local[2] < 2e-3
        case mujoco.mjtGeom.mjGEOM_SPHERE:
            return np.linalg.norm(local) < size[0]
        case mujoco.mjtGeom.mjGEOM_ELLIPSOID:
            return np.linalg.norm(local / size) < 1
        case mujoco.mjtGeom.mjGEOM_BOX:
            return bool((np.abs(local) < size).all())
        case mujoco.mjtGeom.mjGEOM_CYLINDER:
            return np.hypot(local[0], local[1]) < size[0] and abs(local[2]) < size[1]
        case _:
            nearest = np.clip(local[2], -model.geom_size[g, 1], model.geom_size[g, 1])
            return np.linalg.norm(local - [0, 0, nearest]) < size[0]


def test_primitives_look_the_same_beside_a_mesh():
    mesh = '<asset><mesh name="m" vertex="0 0 0 1 0 0 0 1 0 0 0 1"/></asset>'
    far = '<body pos="900 0 -900"><geom type="mesh" mesh="m"/></body>'
    scene = SCENES["primitives"]
    with_mesh = scene.replace("<worldbody>", f"{mesh}<worldbody>").replace("</worldbody>", f"{far}</worldbody>")
    plain = draw(mujoco.MjModel.from_xml_string(scene), "front", 48, 36)
    beside = draw(mujoco.MjModel.from_xml_string(with_mesh), "front", 48, 36)
    for name in ALL:
        assert np.array_equal(getattr(plain, name), getattr(beside, name))


MOVING = SCENES["primitives"].replace('<body pos="-0.8 0.3 0.3">', '<body pos="-0.8 0.3 0.3"><freejoint/>')


def moving_rows(n: int) -> tuple[mujoco.MjModel, np.ndarray]:
    model = mujoco.MjModel.from_xml_string(MOVING)
    qpos = np.tile(model.qpos0, (n, 1))
    qpos[:, 0] += np.linspace(-0.5, 1.5, n)
    qpos[:, 2] += np.linspace(0, 0.6, n)
    return model, qpos


# few pixels on one thread, several pictures on all of them, one picture cut into bands
@pytest.mark.parametrize(("width", "height"), [(65, 43), (129, 87)])
def test_a_frame_does_not_depend_on_other_rows_their_number_its_slot_or_threads(width, height):
    model, qpos = moving_rows(7)
    spec = CameraSpec(name="front", width=width, height=height, data_types=ALL)
    reader = PoseReader(model, threads=2)
    together = NativeCamera(model, spec).render(reader.read(qpos))
    for threads in (1, 2):
        camera = NativeCamera(model, spec, threads=threads)
        for i in (0, 3, 6):
            alone = camera.render(PoseReader(model).read(qpos[i : i + 1]))
            for name in ALL:
                assert np.array_equal(getattr(alone, name)[0], getattr(together, name)[i])
        backwards = camera.render(reader.read(qpos[::-1].copy()))
        for name in ALL:
            assert np.array_equal(getattr(backwards, name)[::-1], getattr(together, name))
    assert len(np.unique(together.rgb.reshape(7, -1), axis=0)) == 7


def test_poses_kept_and_drawn_later_give_the_same_bits():
    model, qpos = moving_rows(5)
    spec = CameraSpec(name="front", width=32, height=32, data_types=ALL)
    camera, reader = NativeCamera(model, spec), PoseReader(model)
    first = [camera.render(reader.read(qpos[i : i + 1])).rgb[0] for i in range(5)]
    order = np.array([4, 0, 2])
    kept, read_again = reader.read(qpos).rows(order), reader.read(qpos[order])
    for later in (camera.render(kept), camera.render(read_again)):
        for k, i in enumerate(order):
            assert np.array_equal(later.rgb[k], first[i])


def test_reading_poses_follows_the_state_and_not_the_last_substep():
    model, qpos = moving_rows(3)
    data = mujoco.MjData(model)
    poses = PoseReader(model).read(qpos)
    for i in range(3):
        data.qpos[:] = qpos[i]
        mujoco.mj_forward(model, data)
        assert np.array_equal(poses.geom_pos[i], data.geom_xpos)
        assert np.array_equal(poses.geom_mat[i], data.geom_xmat)
        assert np.array_equal(poses.camera_pos[i], data.cam_xpos)
        assert np.array_equal(poses.light_dir[i], data.light_xdir)


def test_mocap_bodies_are_part_of_the_poses():
    model = mujoco.MjModel.from_xml_string(
        '<mujoco><worldbody><body name="b" mocap="true" pos="0 0 -3"><geom type="sphere" size="0.5"/></body>'
        '<camera name="down" pos="0 0 0"/></worldbody></mujoco>'
    )
    reader = PoseReader(model)
    camera = NativeCamera(model, CameraSpec(name="down", width=9, height=9, data_types=("segmentation",)))
    qpos = np.zeros((2, 0))
    assert camera.render(reader.read(qpos)).segmentation[:, 4, 4].tolist() == [0, 0]
    moved = np.array([[[0, 0, -3.0]], [[5, 0, -3.0]]])
    assert camera.render(reader.read(qpos, mocap_pos=moved)).segmentation[:, 4, 4].tolist() == [0, -1]


def test_a_cube_texture_has_no_direction_in_the_middle_of_a_plane_and_is_read_within_its_texels():
    model = mujoco.MjModel.from_xml_string(
        '<mujoco><asset><texture name="t" type="cube" builtin="flat" rgb1="1 0 0" rgb2="0 1 0" width="8" height="8"/>'
        '<material name="m" texture="t"/></asset><worldbody><geom type="plane" size="1 1 1" material="m"/>'
        '<camera name="above" pos="0 0 2"/></worldbody></mujoco>'
    )
    middle = draw(model, "above", 5, 5).rgb[0, 2, 2]
    assert middle.any()
    assert not middle[2], "a mix of red and green"


def without_numbers(poses: ScenePoses, row: int) -> ScenePoses:
    arrays = {field.name: np.array(getattr(poses, field.name)) for field in fields(poses)[:9]}
    for array in arrays.values():
        array[row] = np.nan
    return ScenePoses(**arrays)


def test_poses_that_are_not_numbers_draw_something_and_leave_other_rows_alone():
    # the camera of a diverged simulation: the sky has no direction to look in
    model = model_of("primitives")
    camera = NativeCamera(model, CameraSpec(name="front", width=16, height=12))
    poses = PoseReader(model).read(np.tile(model.qpos0, (3, 1)))
    drawn = camera.render(without_numbers(poses, 1)).rgb
    assert np.array_equal(drawn[[0, 2]], camera.render(poses).rgb[[0, 2]])


def test_a_subset_of_rows_and_no_rows_at_all_are_fine():
    model, qpos = moving_rows(4)
    camera = NativeCamera(model, CameraSpec(name="front", width=8, height=8))
    poses = PoseReader(model).read(qpos)
    every = camera.render(poses).rgb
    some = camera.render(poses.rows(np.array([1, 3]))).rgb
    assert np.array_equal(some, every[[1, 3]])
    assert camera.render(poses.rows(np.array([], np.int64))).rgb.shape == (0, 8, 8, 3)
    assert camera.render(PoseReader(model).read(qpos[:0])).rgb.shape == (0, 8, 8, 3)


def test_frames_land_in_the_given_memory():
    model, qpos = moving_rows(3)
    spec = CameraSpec(name="front", width=8, height=8, data_types=ALL)
    camera, poses = NativeCamera(model, spec), PoseReader(model).read(qpos)
    block = np.zeros((5, 8, 8, 3), np.uint8)
    out = CameraFrames(**{**vars_of(CameraFrames.empty(spec, 3)), "rgb": block[1:4]})
    assert camera.render(poses, out) is out
    assert np.array_equal(block[1:4], camera.render(poses).rgb)
    assert not block[[0, 4]].any()


def test_what_was_not_asked_for_is_none():
    model, qpos = moving_rows(1)
    frames = NativeCamera(model, CameraSpec(name="front", width=4, height=4, data_types=("depth",))).render(
        PoseReader(model).read(qpos)
    )
    assert frames.rgb is None
    assert frames.segmentation is None
    assert frames.depth.dtype == np.float32


def test_wrong_requests_are_refused_with_what_to_do():
    model, qpos = moving_rows(2)
    with pytest.raises(ConfigError, match="at least 1 pixel"):
        CameraSpec(name="front", width=0, height=4)
    with pytest.raises(ConfigError, match="once each"):
        CameraSpec(name="front", width=4, height=4, data_types=("rgb", "rgb"))
    with pytest.raises(UnknownNameError, match="did you mean 'depth'"):
        CameraSpec(name="front", width=4, height=4, data_types=("dpeth",))
    with pytest.raises(UnknownNameError, match="front"):
        NativeCamera(model, CameraSpec(name="fornt", width=4, height=4))
    spec = CameraSpec(name="front", width=4, height=4)
    camera, reader = NativeCamera(model, spec), PoseReader(model)
    poses = reader.read(qpos)
    with pytest.raises(ShapeError, match="qpos"):
        reader.read(qpos[:, :3])
    with pytest.raises(ShapeError, match=r"out\.rgb"):
        camera.render(poses, CameraFrames.empty(spec, 3))
    with pytest.raises(DtypeError, match=r"out\.rgb"):
        camera.render(poses, CameraFrames(rgb=np.zeros((2, 4, 4, 3)), depth=None, segmentation=None))
    strided = np.zeros((2, 4, 8, 3), np.uint8)[:, :, ::2]
    with pytest.raises(ShapeError, match="contiguous"):
        camera.render(poses, CameraFrames(rgb=strided, depth=None, segmentation=None))
    glass = model_of("glass")
    strangers = PoseReader(glass).read(glass.qpos0[None].copy())
    with pytest.raises(ShapeError, match="PoseReader of that model"):
        camera.render(strangers)
    with pytest.raises(DtypeError, match="float64"):
        replace(poses, geom_pos=poses.geom_pos.astype(np.float32))
    with pytest.raises(ShapeError, match=r"poses\.light_pos: expected 2 rows"):
        replace(poses, light_pos=poses.light_pos[:1])
    camera.close()
    with pytest.raises(LifecycleError, match="closed"):
        camera.render(poses)


@pytest.mark.parametrize("scene", sorted(SCENES))
def test_frames_over_a_static_layer_are_those_drawn_in_full(scene):
    # the first body of each scene moves; textures, glass, the sky and a height field do not
    xml = SCENES[scene].replace(
        "</worldbody>",
        '<body pos="0 -0.4 0.6"><freejoint/><geom size="0.2" rgba="1 0 0 1"/>'
        '<geom type="box" size="0.05 0.3 0.05" rgba="0 1 0 0.5"/></body></worldbody>',
    )
    model = mujoco.MjModel.from_xml_string(xml)
    qpos = np.tile(model.qpos0, (6, 1))
    qpos[:, -7] += np.linspace(-1, 1, 6)
    qpos[:, -5] += np.linspace(-0.5, 0.5, 6)
    poses = PoseReader(model).read(qpos)
    spec = CameraSpec(name=model.camera(0).name, width=51, height=37, data_types=ALL)
    full = NativeCamera(model, spec, layers=False).render(poses)
    camera = NativeCamera(model, spec)
    assert camera._layers is not None
    for rows in (np.arange(6), np.array([3]), np.array([3]), np.array([5, 1, 4])):
        over = camera.render(poses.rows(rows))
        for name in ALL:
            assert np.array_equal(getattr(over, name), getattr(full, name)[rows]), name
    assert len(camera._layers.stamps) == 1, "one layer serves all rows"


def test_rows_whose_world_differs_have_layers_of_their_own_and_memory_is_bounded(monkeypatch):
    model = mujoco.MjModel.from_xml_string(MOVING)
    poses = PoseReader(model).read(np.tile(model.qpos0, (5, 1)))
    spec = CameraSpec(name="front", width=40, height=30, data_types=ALL)
    looks = Appearance(model, AppearanceSpec(color=0.3, camera_position=0.1, light=0.2), seed=1)
    own = looks.apply(poses, np.array([0, 1, 2, 1, 0]))
    monkeypatch.setattr("headrace.sim.camera.native_camera.MOST_BYTES", 2 * 40 * 30 * (3 + 4 + 4 + 12))
    camera, full = NativeCamera(model, spec), NativeCamera(model, spec, layers=False).render(own)
    for order in (np.arange(5), np.array([2, 2, 0, 1, 4]), np.array([2]), np.array([0, 1, 2]), np.array([4, 3, 2])):
        over = camera.render(own.rows(order))
        for name in ALL:
            assert np.array_equal(getattr(over, name), getattr(full, name)[order]), name
        assert len(camera._layers.stamps) <= 2


def test_a_row_that_is_not_numbers_leaves_the_layers_of_others_alone():
    model, qpos = moving_rows(4)
    spec = CameraSpec(name="front", width=16, height=12, data_types=ALL)
    camera, poses = NativeCamera(model, spec), PoseReader(model).read(qpos)
    good = camera.render(poses)
    again = camera.render(without_numbers(poses, 2))
    for name in ALL:
        assert np.array_equal(getattr(again, name)[[0, 1, 3]], getattr(good, name)[[0, 1, 3]])


def test_an_orthographic_camera_sees_parallel_rays():
    model = mujoco.MjModel.from_xml_string(
        """<mujoco><statistic extent="1"/><visual><map znear="0.01" zfar="50"/></visual>
        <asset><mesh name="m" vertex="0 0 0 0.4 0 0 0 0.4 0 0 0 0.4"/></asset><worldbody>
        <camera name="flat" pos="0.1 0 3" euler="20 10 0" projection="orthographic" fovy="2.4"/>
        <geom type="sphere" size="0.3" pos="-0.5 0.3 0"/>
        <geom type="box" size="0.2 0.1 0.3" pos="0.4 0.3 0" euler="10 20 30"/>
        <geom type="capsule" size="0.1 0.2" pos="0 -0.4 0.1" euler="50 20 0"/>
        <geom type="mesh" mesh="m" pos="0.2 -0.1 0"/>
        <geom type="cylinder" size="0.15 0.2" pos="-0.5 -0.4 0" euler="60 0 0"/>
        <geom type="ellipsoid" size="0.1 0.2 0.3" pos="0.6 -0.4 0" euler="0 40 0"/>
        <geom type="plane" size="3 3 1" pos="0 0 -0.5"/></worldbody></mujoco>"""
    )
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    size = 48
    frames = draw(model, "flat", size, size)
    ids, depth, normals = cast_rays(model, data, size, 1.2, flat=True)
    away = inside_regions(ids)
    assert (frames.segmentation[0] == ids)[away].all()
    assert np.abs(frames.depth[0] - depth)[away].max() < 1e-5
    assert np.abs(frames.normals[0] - normals)[away].max() < 1e-3


def cast_rays(model, data, size: int, half: float, *, flat: bool = False):
    """Ids, depths and normals of the first camera by MuJoCo's rays, a pixel at a time."""
    mat, pos = data.cam_xmat[0].reshape(3, 3), data.cam_xpos[0]
    slopes = ((np.arange(size) + 0.5) / size * 2 - 1) * half
    ids, depth = np.full((size, size), -1, np.int32), np.zeros((size, size))
    normals = np.zeros((size, size, 3))
    hit, normal = np.zeros(1, np.int32), np.zeros(3)
    for i, v in enumerate(-slopes):
        for j, u in enumerate(slopes):
            offset = mat @ [u, v, 0] if flat else np.zeros(3)
            way = mat @ ([0, 0, -1] if flat else [u, v, -1])
            depth[i, j] = mujoco.mj_ray(model, data, pos + offset, way, None, 1, -1, hit, normal)
            ids[i, j], normals[i, j] = hit[0], normal
    return ids, depth, normals


def test_sites_are_drawn_and_are_no_geoms():
    model = mujoco.MjModel.from_xml_string(
        '<mujoco><worldbody><light pos="0 0 3"/><site name="s" size="0.3" rgba="1 0 0 1" pos="0 0 -2"/>'
        '<site type="box" size="0.3 0.3 0.3" pos="0 0 -1" group="4"/>'
        '<geom size="0.1" pos="0 0 -4"/><camera name="down"/></worldbody></mujoco>'
    )
    frames = draw(model, "down", 9, 9)
    assert frames.rgb[0, 4, 4, 0] > 50
    assert not frames.rgb[0, 4, 4, 1:].any()
    assert frames.segmentation[0, 4, 4] == -1
    assert frames.depth[0, 4, 4] == pytest.approx(1.7)


GROUPS = """<mujoco><worldbody><light pos="0 -1 2"/><camera name="front" pos="0 -2 0" xyaxes="1 0 0 0 0 1"/>
<geom name="collides" type="box" size="0.5 0.1 0.5" group="0"/><geom name="seen" type="sphere" size="0.4" group="1"/>
<geom name="hidden" type="sphere" pos="0 -0.5 0" size="0.1" group="3"/></worldbody></mujoco>"""


@pytest.mark.parametrize(("groups", "seen"), [((0, 1, 2), {-1, 0, 1}), ((1,), {-1, 1}), ((1, 3), {-1, 1, 2})])
def test_a_camera_shows_the_groups_that_it_is_told(groups, seen) -> None:
    model = mujoco.MjModel.from_xml_string(GROUPS)
    spec = CameraSpec(name="front", width=32, height=32, data_types=("segmentation",), groups=groups)
    frames = NativeCamera(model, spec).render(PoseReader(model).read(model.qpos0[None].copy()))
    assert set(np.unique(frames.segmentation)) == seen


@pytest.mark.parametrize("groups", [(), (6,), (-1,)])
def test_groups_that_there_are_not_are_refused(groups) -> None:
    with pytest.raises(ConfigError, match="0 to 5"):
        CameraSpec(name="front", width=32, height=32, groups=groups)
