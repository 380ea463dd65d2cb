"""``headrace.viewing.picture`` and ``headrace picture``: what a camera sees, as values and as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import headrace
from headrace.cli import main
from headrace.errors import ConfigError, UnknownNameError
from headrace.recording import FilmCfg
from headrace.sim import CameraSpec, NativeCamera
from headrace.sim.camera.camera import PoseReader
from headrace.sim.camera.names import register_camera

SIZE = {"width": 40, "height": 30}
KINDS = ("rgb", "gray", "depth", "segmentation", "normals")


@pytest.mark.parametrize("kind", KINDS)
def test_the_values_are_those_of_the_camera_after_the_same_steps(kind) -> None:
    result = headrace.viewing.picture("pusher-camera", camera="table", kind=kind, num_steps=3, seed=4, **SIZE)
    env = headrace.make("pusher-camera", 1, seed=4)
    env.reset()
    for _ in range(3):
        env.step(torch.zeros(1, 7))
    model = env.sim.model
    poses = PoseReader(model).read(env.sim.field("qpos").numpy().copy())
    camera = NativeCamera(model, CameraSpec(name="table", data_types=(kind,), **SIZE))
    assert np.array_equal(result.values, getattr(camera.render(poses), kind)[0])
    assert result.path is None
    assert result.image.shape == (30, 40, 3)
    assert result.image.dtype == np.uint8
    env.close()


def test_people_see_near_things_bright_and_each_geom_in_its_color() -> None:
    depth = headrace.viewing.picture("pusher-camera", kind="depth", **SIZE)
    ids = headrace.viewing.picture("pusher-camera", kind="segmentation", **SIZE)
    nothing = ids.values == -1
    assert nothing.any()
    assert not depth.image[nothing].any()
    assert not ids.image[nothing].any()
    seen = depth.values[~nothing]
    gray = depth.image[~nothing][:, 0].astype(int)
    assert gray[seen.argmin()] == 255
    assert gray[seen.argmax()] == gray.min() > 0
    assert np.all(np.diff(gray[np.argsort(seen)]) <= 0)
    for number in np.unique(ids.values):
        assert len(np.unique(ids.image[ids.values == number], axis=0)) == 1
    normals = headrace.viewing.picture("pusher-camera", kind="normals", **SIZE)
    np.testing.assert_allclose(normals.image / 127.5 - 1, normals.values, atol=0.5 / 127.5 + 1e-6)


def test_the_command_writes_the_picture_or_the_values(tmp_path: Path, capsys) -> None:
    options = ["picture", "pusher-camera", "--camera", "table", "--kind", "depth", "--width", "40", "--height", "30"]
    expected = headrace.viewing.picture("pusher-camera", camera="table", kind="depth", **SIZE)
    assert main([*options, "-o", str(tmp_path / "new" / "depth.png")]) == 0
    assert "depth, 30 × 40" in capsys.readouterr().out
    assert np.array_equal(np.asarray(Image.open(tmp_path / "new" / "depth.png")), expected.image)
    assert main([*options, "--output", str(tmp_path / "depth.npy")]) == 0
    assert np.array_equal(np.load(tmp_path / "depth.npy"), expected.values)
    assert main([*options, "-o", str(tmp_path / "depth.npy")]) == 2
    assert "already exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"kind": "dpth"}, UnknownNameError, "did you mean 'depth'"),
        ({"renderer": "gpu"}, UnknownNameError, "renderer"),
        ({"renderer": "gl", "kind": "normals"}, ConfigError, "no normals"),
        ({"camera": "tabel"}, UnknownNameError, "did you mean 'table'"),
        ({"width": 0}, ConfigError, "at least 1 pixel"),
        ({"num_steps": -1}, ConfigError, "0 or more"),
        ({"output": "picture.jpg"}, ConfigError, r"\.png or \.npy"),
    ],
)
def test_what_cannot_be_drawn_is_refused(wrong, error, message) -> None:
    with pytest.raises(error, match=message):
        headrace.viewing.picture("pusher-camera", **wrong)


class Negative(NativeCamera):
    """A renderer of one's own: every color inverted."""

    def render(self, poses, out=None):
        frames = super().render(poses, out)
        np.subtract(255, frames.rgb, out=frames.rgb)
        return frames


def test_a_renderer_is_chosen_for_pictures_videos_and_the_view(tmp_path: Path, capsys) -> None:
    register_camera("negative", lambda model, spec, threads: Negative(model, spec, threads=threads))
    plain, negative = (
        headrace.viewing.picture("pusher-camera", renderer=name, **SIZE).values for name in ("native", "negative")
    )
    assert np.array_equal(negative, 255 - plain)
    env = headrace.make("cartpole-camera", 2)
    env.reset()
    shown = env.render_each([1])[0]
    assert np.array_equal(env.render_each([1], renderer="negative")[0], 255 - shown)
    assert np.array_equal(env.render_each([1])[0], shown)
    env.close()
    assert main(["view", "cartpole", "--port", "0", "--num-steps", "2", "--renderer", "negative"]) == 0
    for command in (["view", "ant"], ["play", "cartpole", "--video", str(tmp_path / "a.mp4")]):
        assert main([*command, "--renderer", "negatve"]) == 2
        assert "did you mean 'negative'" in capsys.readouterr().err


def test_a_picture_knows_the_renderers_that_the_module_of_the_task_registers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pictured_task.py").write_text(
        "from headrace.envs.registry import task_entry\n"
        "from headrace.sim import NativeCamera\n"
        "from headrace.sim.camera.names import register_camera\n"
        "register_camera('of-a-module', lambda model, spec, threads: NativeCamera(model, spec, threads=threads))\n"
        "TASK = task_entry('pusher-camera')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = headrace.viewing.picture("pictured_task:TASK", renderer="of-a-module", **SIZE)
    assert np.array_equal(found.values, headrace.viewing.picture("pusher-camera", **SIZE).values)


def test_a_video_is_drawn_with_the_chosen_renderer(tmp_path: Path) -> None:
    from headrace.recording._video import decode_frames

    register_camera("negative-film", lambda model, spec, threads: Negative(model, spec, threads=threads))
    brightness = []
    for name in ("native", "negative-film"):
        headrace.play(
            "cartpole",
            policy=f"{__name__}:push",
            num_envs=1,
            num_steps=2,
            film=FilmCfg(video=tmp_path / f"{name}.mp4", renderer=name),
            run=headrace.RunCfg(output=tmp_path / name),
        )
        brightness.append(float(np.mean(next(decode_frames(tmp_path / f"{name}.mp4")))))
    # the caption and the compression are the same in both
    assert sum(brightness) == pytest.approx(255, abs=12)


def push(obs):
    return torch.zeros(len(obs["policy"]), 1)


def _without_opengl(*_: object) -> Any:
    raise ConfigError("no egl context; apt-get install libegl1")


def test_a_renderer_that_cannot_work_is_refused_before_a_video_or_the_view_begins(tmp_path: Path, capsys) -> None:
    register_camera("broken", _without_opengl)
    env = headrace.make("cartpole", 2)
    with pytest.raises(ConfigError, match="libegl1"):
        env.open_renderer("broken")
    env.close()
    assert main(["view", "cartpole", "--port", "0", "--num-steps", "2", "--renderer", "broken"]) == 2
    shown = capsys.readouterr()
    assert "libegl1" in shown.err
    assert "http" not in shown.out
    video = tmp_path / "film.mp4"
    with pytest.raises(ConfigError, match="libegl1"):
        headrace.play(
            "cartpole",
            policy=f"{__name__}:push",
            num_envs=1,
            num_steps=2,
            film=FilmCfg(video=video, renderer="broken"),
            run=headrace.RunCfg(output=tmp_path / "run"),
        )
    assert not video.exists()


def test_people_see_the_groups_that_the_images_of_the_task_show() -> None:
    plain = headrace.viewing.picture("cartpole-camera-terms", kind="segmentation", **SIZE)
    nothing = {"images.policy.camera.groups": (5,)}
    bare = headrace.viewing.picture("cartpole-camera-terms", kind="segmentation", overrides=nothing, **SIZE)
    assert (plain.values >= 0).any()
    assert (bare.values == -1).all()
    env = headrace.make("cartpole-camera-terms", 1, overrides=nothing)
    env.reset()
    assert len(np.unique(env.render_each()[0].reshape(-1, 3), axis=0)) == 1
    env.close()


URDF = """<robot name="arm"><link name="base"><visual><geometry><box size=".2 .2 .4"/></geometry></visual>
<inertial><mass value="1"/><inertia ixx="1" iyy="1" izz="1" ixy="0" ixz="0" iyz="0"/></inertial>
<collision><geometry><box size=".2 .2 .4"/></geometry></collision></link></robot>"""
MJCF = """<mujoco><worldbody><body name="ball"><freejoint/><geom size=".1"/></body></worldbody>
<keyframe><key qpos="0 0 .05 1 0 0 0"/></keyframe></mujoco>"""


@pytest.mark.parametrize(("name", "text"), [("arm.urdf", URDF), ("ball.xml", MJCF), ("ball.mjcf", MJCF)])
def test_a_bare_model_file_is_seen_by_the_free_camera(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    seen = headrace.viewing.picture(str(file), kind="segmentation", **SIZE).values
    assert set(np.unique(seen)) == {-1, 0}
    with pytest.raises(ConfigError, match="a model file"):
        headrace.viewing.picture(str(file), seed=3, **SIZE)
    assert main(["picture", str(file), "--output", str(tmp_path / "a.png"), "--width", "40"]) == 0
    with Image.open(tmp_path / "a.png") as written:
        assert written.size == (40, 480)


def test_a_picture_without_a_name_is_named_after_its_model_or_task(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "ball.xml").write_text(MJCF)
    monkeypatch.chdir(tmp_path)
    for source in ("ball.xml", "cartpole"):
        assert main(["picture", source, "--width", "40", "--height", "30", "--kind", "depth"]) == 0
    assert {file.name for file in tmp_path.glob("*.png")} == {"ball-depth.png", "cartpole-depth.png"}


def test_a_model_file_is_drawn_in_its_first_keyframe_and_after_steps_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "ball.xml"
    # seen from the side, so that falling shows
    file.write_text(MJCF.replace("<worldbody>", '<worldbody><camera name="side" pos="0 -3 .05" xyaxes="1 0 0 0 0 1"/>'))

    def height(**more: Any) -> float:
        seen = headrace.viewing.picture(str(file), kind="segmentation", **SIZE, **more).values
        return float(np.nonzero(seen == 0)[0].mean())

    assert height() == pytest.approx(14.5, abs=0.6)
    assert height(num_steps=200) > height() + 4
