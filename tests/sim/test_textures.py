"""Textures: by reference as in the model, and mip levels against the general rule."""

from __future__ import annotations

from pathlib import Path

import mujoco
import numpy as np
import pytest
from PIL import Image

from headrace.sim import mujoco_api
from headrace.sim.camera import _textures
from headrace.sim.camera.camera import CameraSpec, PoseReader
from headrace.sim.camera.native_camera import NativeCamera

XML = """<mujoco><asset>
<texture name="flat" type="2d" file="{path}"/> <texture name="again" type="2d" file="{path}"/>
<texture name="cube" type="cube" file="{path}"/>
<material name="flat" texture="flat"/> <material name="again" texture="again"/> <material name="cube" texture="cube"/>
</asset><worldbody><light pos="0 0 3"/><camera name="eye" pos="0 0 2"/>
<geom type="plane" size="1 1 1" material="flat"/> <geom type="box" size=".2 .2 .2" material="cube"/>
<geom type="box" size=".1 .1 .3" pos=".5 0 0" material="again"/>
</worldbody></mujoco>"""


def draw(path: Path, *, embed: bool) -> tuple[NativeCamera, np.ndarray]:
    spec = mujoco.MjSpec.from_string(XML.format(path=path))
    for texture in spec.textures:
        texture.embed = embed
    model = spec.compile()
    camera = NativeCamera(model, CameraSpec(name="eye", width=40, height=30), threads=1)
    return camera, camera.render(PoseReader(model).read(np.zeros((1, 0)))).rgb


@pytest.fixture
def path(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "t.png")
    return tmp_path / "t.png"


def test_a_texture_by_reference_is_drawn_as_one_in_the_model(path: Path) -> None:
    inside, drawn = draw(path, embed=True)
    outside, same = draw(path, embed=False)
    assert outside.model.ntexdata < inside.model.ntexdata
    assert np.array_equal(drawn, same)


def test_a_referenced_file_is_decoded_once_and_again_when_it_changes(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    load = mujoco.mj_loadTexture
    monkeypatch.setattr(mujoco_api.mujoco, "mj_loadTexture", lambda model, k: (decoded.append(k), load(model, k))[1])
    first, drawn = draw(path, embed=False)
    assert len(decoded) == 2  # as a flat one, which the model has twice, and as a cube
    second, _ = draw(path, embed=False)
    assert len(decoded) == 2
    assert second._tables.textures.texels is first._tables.textures.texels
    Image.fromarray(np.full((8, 8, 3), 9, np.uint8)).save(path)
    _, other = draw(path, embed=False)
    assert not np.array_equal(other, drawn)


@pytest.mark.parametrize("size", [(8, 8), (7, 8), (8, 5), (2, 2), (1, 6), (1, 1)])
def test_a_mip_level_is_the_finer_one_read_at_its_centers(size: tuple[int, int]) -> None:
    high, wide = size
    fine = np.random.default_rng(high * wide).integers(0, 1 << 24, size, dtype=np.uint32)
    out = np.zeros((max(high // 2, 1), max(wide // 2, 1)), np.uint32)
    _textures.halve(fine, out)
    ys, xs = ((np.arange(o) + 0.5) * (f / o) - 0.5 for o, f in zip(out.shape, size, strict=True))
    for y, place_y in enumerate(ys):
        for x, place_x in enumerate(xs):
            for color in (0, 8, 16):
                part = ((fine >> color) & 255).astype(float)
                low_y, low_x = int(place_y), int(place_x)
                high_y, high_x = min(low_y + 1, high - 1), min(low_x + 1, wide - 1)
                upper, lower = (
                    part[row, low_x] * (1 - place_x % 1) + part[row, high_x] * (place_x % 1) for row in (low_y, high_y)
                )
                wanted = int(upper * (1 - place_y % 1) + lower * (place_y % 1) + 0.5)
                # weights of odd sizes are float32: a tie may be rounded either way
                assert abs(int((out[y, x] >> color) & 255) - wanted) <= (high % 2 or wide % 2)
