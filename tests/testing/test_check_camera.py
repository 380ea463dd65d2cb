"""``check_camera`` finds what differs from MuJoCo's renderer, and what does not."""

from __future__ import annotations

import sys
from pathlib import Path

import mujoco
import pytest

import headrace.testing.parts as module
from headrace.cli.main import main
from headrace.sim import NativeCamera
from headrace.testing import check_camera

sys.path.insert(0, str(Path(__file__).parents[1] / "sim"))
from picture_cases import CASES

SHADOW = """<mujoco><worldbody><light pos="0 0 3" dir="0 0 -1"/><geom type="plane" size="1 1 .1"/>
<geom name="ball" type="sphere" size=".3" pos="0 0 .5" rgba=".9 .2 .2 1"/>
<camera name="eye" pos="0 -2 1" xyaxes="1 0 0 0 .4 .9"/></worldbody></mujoco>"""


@pytest.mark.system
def test_a_scene_that_is_alike_agrees_and_the_rest_of_mujocos_picture_is_named() -> None:
    (check,) = check_camera(mujoco.MjModel.from_xml_string(SHADOW))
    assert check.agrees
    assert any("shadows" in cause for cause in check.causes)
    assert any("antialiasing" in cause for cause in check.causes)


@pytest.mark.system
def test_a_camera_that_draws_something_else_does_not_agree_and_the_geom_is_named(monkeypatch) -> None:
    def painted(model: mujoco.MjModel, spec: object) -> NativeCamera:
        model.geom_rgba[1] = 0, 0, 1, 1
        return NativeCamera(model, spec)

    monkeypatch.setattr(module, "NativeCamera", painted)
    (check,) = check_camera(mujoco.MjModel.from_xml_string(SHADOW))
    assert not check.agrees
    assert check.segmentation == check.depth == 0
    assert any("geom ball" in cause for cause in check.causes)


@pytest.mark.system
def test_the_command_compares_a_file_and_a_task(tmp_path, capsys) -> None:
    path = tmp_path / "model.xml"
    path.write_text(CASES["mirror_floor"].xml)
    assert main(["picture", str(path), "--check-against", "gl", "--width", "64", "--height", "48"]) == 0
    assert "camera 'eye': pixels that differ: segmentation 0.00%" in capsys.readouterr().out
    assert main(["picture", "cartpole-camera", "--check-against", "gl", "--width", "64", "--height", "48"]) == 0


@pytest.mark.system
def test_a_model_without_a_camera_is_seen_by_the_free_one() -> None:
    bare = SHADOW.replace('<camera name="eye" pos="0 -2 1" xyaxes="1 0 0 0 .4 .9"/>', "")
    (check,) = check_camera(mujoco.MjModel.from_xml_string(bare))
    assert check.camera == "free"
    assert check.agrees


def test_the_command_names_a_file_after_the_task_where_it_compares_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["picture", "cartpole-camera"]) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["cartpole-camera-rgb.png"]
