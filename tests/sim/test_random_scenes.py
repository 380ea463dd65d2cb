"""The native camera on forty random scenes against MuJoCo's renderer (committed arrays) and MuJoCo's rays."""

from __future__ import annotations

import sys
from pathlib import Path

import mujoco
import numpy as np
import pytest

from headrace.sim import CameraSpec, NativeCamera
from headrace.sim.camera.camera import PoseReader

sys.path.insert(0, str(Path(__file__).parent))
from random_scenes import COUNT, HEIGHT, WIDTH, scene
from test_native_camera import inside_regions

REFERENCES = dict(np.load(Path(__file__).parent / "references" / "random.npz"))
KINDS = ("rgb", "depth", "segmentation", "normals")


@pytest.fixture(scope="module", params=range(COUNT))
def drawn(request: pytest.FixtureRequest):
    number = request.param
    model = mujoco.MjModel.from_xml_string(scene(number))
    spec = CameraSpec(name="eye", width=WIDTH, height=HEIGHT, data_types=KINDS)
    frames = NativeCamera(model, spec).render(PoseReader(model).read(np.zeros((1, 0))))
    return number, model, frames, {name: values[number] for name, values in REFERENCES.items()}


def test_segmentation_is_mujocos_away_from_edges(drawn):
    number, _, frames, reference = drawn
    ours, theirs = frames.segmentation[0], reference["segmentation"]
    inside = inside_regions(theirs)
    # two surfaces that cross are told apart by less than the 24 bits of OpenGL's depth: a pixel may go either way
    assert (ours[inside] != theirs[inside]).mean() < 0.002, number
    assert (ours != theirs).mean() < 0.02


def test_depth_is_mujocos_away_from_edges(drawn):
    _, _, frames, reference = drawn
    inside = inside_regions(reference["segmentation"]) & (frames.segmentation[0] == reference["segmentation"])
    error = np.abs(frames.depth[0] / reference["depth"] - 1)[inside]
    # OpenGL's curved geoms have 64 sides: 0.12 % of a radius, more where they are seen edge-on
    assert np.quantile(error, 0.99) < 5e-3
    assert np.median(error) < 1e-3


def test_normals_are_those_of_mujocos_rays(drawn):
    number, model, frames, _ = drawn
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    mat, pos = data.cam_xmat[0].reshape(3, 3), data.cam_xpos[0]
    flat = model.cam_projection[0] == 1
    half = model.cam_fovy[0] / 2 if flat else np.tan(np.radians(model.cam_fovy[0]) / 2)
    hit, normal = np.zeros(1, np.int32), np.zeros(3)
    inside = inside_regions(frames.segmentation[0]) & (frames.segmentation[0] >= 0)
    far_off = checked = 0
    for y, x in np.argwhere(inside)[::7]:
        u, v = ((x + 0.5) / WIDTH * 2 - 1) * half * WIDTH / HEIGHT, (1 - (y + 0.5) / HEIGHT * 2) * half
        start = pos + mat @ ([u, v, 0] if flat else [0, 0, 0])
        way = mat @ ([0, 0, -1] if flat else [u, v, -1])
        distance = mujoco.mj_ray(model, data, start, way, None, 1, -1, hit, normal)
        if hit[0] != frames.segmentation[0, y, x] or abs(distance - frames.depth[0, y, x]) > 1e-3 * distance:
            continue  # rays hit back faces and what lies before the near plane
        checked += 1
        far_off += np.abs(frames.normals[0, y, x] - normal).max() > 1e-2
    # within one geom, edges between faces are edges too
    assert far_off <= 0.05 * checked, (number, far_off, checked)
    assert checked > 0 or number % 5 == 0


def test_colors_are_mujocos_by_a_mean_difference(drawn):
    number, _, frames, reference = drawn
    inside = inside_regions(reference["segmentation"]) & (frames.segmentation[0] == reference["segmentation"])
    error = np.abs(frames.rgb[0].astype(int) - reference["rgb"])[inside]
    # OpenGL lights corners and blends between them; we light pixels. Textures are filtered alike, not equally
    assert error.mean() < 8, number
    assert np.median(error) <= 4
