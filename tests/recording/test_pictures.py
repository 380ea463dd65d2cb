"""Videos of evaluations and contact sheets."""

from __future__ import annotations

import contextlib

import av
import numpy as np
import pytest
import torch
from counting_env import CountingEnv
from PIL import Image

import headrace
from headrace.errors import ConfigError, DataError, ShapeError
from headrace.recording import DatasetInfo, EpisodeDataset, EpisodeRecorder, VideoObserver
from headrace.recording._video import Mp4Writer, TiledVideo, decode_frames, frame_times
from headrace.recording.show import contact_sheet, episode_table


def test_a_video_shows_the_first_environments_with_a_frame_a_step(tmp_path):
    path = tmp_path / "eval.mp4"
    with VideoObserver(path, num_envs=3, fps=25) as video:
        env = CountingEnv(5, [video], image=48)
        env.reset()
        for _ in range(20):
            env.step()
        assert not path.exists()
    frames = [*decode_frames(path)]
    assert len(frames) == 20
    # three tiles in two columns, enlarged twice; the fourth place is black
    assert frames[0].shape == (192, 192, 3)
    assert frames[0][110:, 110:].max() < 30
    np.testing.assert_allclose(np.diff(frame_times(path)), 1 / 25, atol=1e-6)  # the file counts in whole ticks


def test_a_task_without_a_camera_and_one_with_stacked_frames_can_be_filmed(tmp_path):
    import torch

    from headrace.envs.registry import make
    from headrace.types import StackSpec

    ant = make("ant", 3, threads=1)
    drawn: list[int] = []

    def render(ids):
        drawn.extend(ids.tolist())
        return ant.render_each(ids)

    with VideoObserver(tmp_path / "ant.mp4", render=render, num_envs=2, fps=20) as video:
        assert video.needs == frozenset()
        ant.attach(video)
        ant.reset()
        for _ in range(4):
            ant.step(torch.zeros(3, 8))
    assert drawn == [0, 1] * 4, "the third environment is not filmed, so it is not drawn"
    for one, other in zip(ant.render_each([2, 0]), [ant.render_each()[2], ant.render_each()[0]], strict=True):
        np.testing.assert_array_equal(one, other)
    ant.close()
    frames = [*decode_frames(tmp_path / "ant.mp4")]
    assert len(frames) == 4
    assert frames[0].std() > 5, "there is something to see"
    cartpole = make("cartpole-camera", 2, threads=1)
    with VideoObserver(tmp_path / "pole.mp4", stack=StackSpec(frames=2, dim=-1), fps=20) as video:
        cartpole.attach(video)
        cartpole.reset()
        for _ in range(4):
            step = cartpole.step(torch.ones(2, 1))
    cartpole.close()
    last = [*decode_frames(tmp_path / "pole.mp4")][-1]
    newest = step.obs["policy"][0, :, :, 3:].numpy().repeat(2, 0).repeat(2, 1)
    shown = last[: newest.shape[0], : newest.shape[1]].astype(int)
    # below the text, and up to what H.264 loses
    assert np.abs(shown[20:] - newest[20:]).mean() < 8


def test_success_and_failure_frame_their_tile_in_the_step_that_ends_an_episode(tmp_path):
    pictures = np.full((2, 64, 64, 3), 90, np.uint8)
    with TiledVideo(tmp_path / "v.mp4", fps=10, tiles=2) as video:
        video.add(pictures, ["1.0", "2.0"], [None, None])
        video.add(pictures, ["1.0 success", "2.0 failed"], [True, False])
    plain, judged = [*decode_frames(tmp_path / "v.mp4")]
    assert plain.shape == (64, 128, 3)
    left, right = judged[40, 0].astype(int), judged[40, -1].astype(int)
    assert left[1] > left[0] + 60, "green"
    assert right[0] > right[1] + 60, "red"
    assert np.abs(plain[40, 0].astype(int) - 90).max() < 12
    assert plain[:12, 2:20].max() > 200, "white text"


def test_a_video_that_was_cut_off_can_be_played(tmp_path):
    video = TiledVideo(tmp_path / "v.mp4", fps=10, tiles=1)
    generator = np.random.default_rng(0)
    for _ in range(100):
        video.add(generator.integers(0, 256, (1, 96, 96, 3)).astype(np.uint8), [""], [None])
    # nothing was closed: what is on disk so far plays up to a key frame
    copy = tmp_path / "copy.mp4"
    copy.write_bytes((tmp_path / "v.mp4.partial").read_bytes())
    shown = 0
    with av.open(str(copy)) as container, contextlib.suppress(av.error.InvalidDataError):
        for _ in container.decode(video=0):
            shown += 1
    assert shown >= 30
    video.close()
    assert len([*decode_frames(tmp_path / "v.mp4")]) == 100


def test_a_video_never_overwrites_and_wants_one_camera(tmp_path):
    (tmp_path / "v.mp4").touch()
    with pytest.raises(ConfigError, match="already exists"):
        TiledVideo(tmp_path / "v.mp4", fps=10, tiles=1)
    observer = VideoObserver(tmp_path / "w.mp4", camera="front")
    with pytest.raises(ConfigError, match="no images named 'front'"):
        CountingEnv(2, [observer]).reset()
    late = VideoObserver(tmp_path / "x.mp4")
    env = CountingEnv(2, [])
    env.reset()
    env.observers = [late]
    with pytest.raises(DataError, match="before reset"):
        env.step()


def test_channels_may_come_first_or_be_gray():
    from headrace.recording.fields import as_rgb

    pictures = np.arange(2 * 5 * 7 * 3, dtype=np.uint8).reshape(2, 5, 7, 3)
    np.testing.assert_array_equal(as_rgb(pictures), pictures)
    np.testing.assert_array_equal(as_rgb(np.moveaxis(pictures, -1, -3)), pictures)
    np.testing.assert_array_equal(as_rgb(pictures[..., :1]), np.repeat(pictures[..., :1], 3, -1))


def test_odd_sizes_and_single_frames_can_be_encoded(tmp_path):
    writer = Mp4Writer(tmp_path / "v.mp4", 30, 33, 47)
    writer.add(np.full((33, 47, 3), 128, np.uint8))
    with pytest.raises(ShapeError, match="expected uint8"):
        writer.add(np.zeros((33, 46, 3), np.uint8))
    writer.close()
    (frame,) = [*decode_frames(tmp_path / "v.mp4")]
    assert frame.shape == (33, 47, 3)
    assert np.abs(frame.astype(int) - 128).max() <= 2


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures") / "d"
    with EpisodeRecorder(path) as recorder:
        env = CountingEnv(3, [recorder])
        env.reset()
        for _ in range(30):
            env.step()
    return path


def test_a_contact_sheet_shows_first_to_last_frames_of_the_first_episodes(recorded, tmp_path):
    dataset = EpisodeDataset(recorded)
    path = contact_sheet(dataset, tmp_path / "sheets" / "sheet.png", episodes=4, frames=5)
    sheet = np.asarray(Image.open(path))
    # 8 pixel pictures are shown at 64, below a line of text
    assert sheet.shape == (4 * (64 + 14), 5 * 64, 3)
    for line in range(4):
        pictures = dataset[line].read("obs/camera")
        top = line * (64 + 14) + 14
        for column, picture in ((0, pictures[0]), (4, pictures[-1])):
            shown = sheet[top : top + 64, column * 64 : (column + 1) * 64]
            np.testing.assert_array_equal(shown[::8, ::8], picture)


def test_a_table_of_episodes_has_totals(recorded):
    from rich.console import Console

    dataset = EpisodeDataset(recorded)
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115  (rich wants a file)
    console.print(episode_table(dataset, limit=3))
    text = console.export_text()
    console.file.close()
    assert f"{len(dataset)} in all" in text
    assert f"{len(dataset) - 3} more" in text


def test_a_contact_sheet_of_a_stack_shows_its_newest_frames(tmp_path):
    env = headrace.make("cartpole-camera", 1, overrides={"episode_length": 3})
    with EpisodeRecorder(tmp_path / "stacked", info=DatasetInfo.of(env)) as recorder:
        env.attach(recorder)
        env.reset()
        for _ in range(3):
            env.step(torch.ones(1, 1))
    env.close()
    dataset = EpisodeDataset(tmp_path / "stacked")
    sheet = np.asarray(Image.open(contact_sheet(dataset, tmp_path / "sheet.png", frames=2)))
    stack = dataset.info.stack("obs/policy")
    newest = stack.newest(torch.from_numpy(dataset[0].read("obs/policy", 0, 1)))[0].numpy()
    assert np.array_equal(sheet[14:62, :48], newest)
