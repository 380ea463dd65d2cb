"""Videos of evaluations and tables of datasets."""

from __future__ import annotations

import contextlib

import av
import numpy as np
import pytest
import torch
from counting_env import CountingEnv, length_of, succeeded

from headrace.errors import ConfigError, DataError, ShapeError
from headrace.recording import EpisodeDataset, EpisodeRecorder, VideoObserver
from headrace.recording._video import Mp4Writer, decode_frames, frame_times
from headrace.recording.show import episode_table


def test_a_video_shows_the_first_environments_with_a_frame_a_step(tmp_path):
    path = tmp_path / "eval.mp4"
    env = CountingEnv(5, [], image=48)
    with VideoObserver(path, lambda ids: list(env.obs()["camera"][ids].numpy()), num_envs=3, fps=25) as video:
        env.observers = [video]
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


def test_only_the_environments_that_are_filmed_are_drawn(tmp_path):

    from headrace.envs.registry import make

    ant = make("ant", 3, threads=1)
    drawn: list[int] = []

    def render(ids):
        drawn.extend(ids.tolist())
        return ant.render_each(ids)

    with VideoObserver(tmp_path / "ant.mp4", render, num_envs=2, fps=20) as video:
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


def test_success_and_failure_frame_their_tile_in_the_step_that_ends_an_episode(tmp_path):
    env = CountingEnv(2, [])
    with VideoObserver(
        tmp_path / "v.mp4", lambda ids: [np.full((64, 64, 3), 90, np.uint8)] * len(ids), fps=10
    ) as video:
        env.observers = [video]
        env.reset()
        for _ in range(length_of(1)):  # episode 0 fails after 2 steps, episode 1 succeeds
            env.step()
    assert not succeeded(0)
    assert succeeded(1)
    plain, failed, *_, judged = [*decode_frames(tmp_path / "v.mp4")]
    assert plain.shape == (64, 128, 3)
    left, right = failed[40, 0].astype(int), judged[40, -1].astype(int)
    assert left[0] > left[1] + 60, "red"
    assert right[1] > right[0] + 60, "green"
    assert np.abs(plain[40, 0].astype(int) - 90).max() < 12
    assert plain[:12, 2:20].max() > 200, "white text"


def test_a_video_that_was_cut_off_can_be_played(tmp_path):
    generator, env = np.random.default_rng(0), CountingEnv(1, [])
    video = VideoObserver(tmp_path / "v.mp4", lambda _: [generator.integers(0, 256, (96, 96, 3)).astype(np.uint8)])
    env.observers = [video]
    env.reset()
    for _ in range(100):
        env.step()
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


def test_a_video_never_overwrites_and_sees_episodes_begin(tmp_path):
    (tmp_path / "v.mp4").touch()
    with pytest.raises(ConfigError, match="already exists"):
        VideoObserver(tmp_path / "v.mp4", lambda _: [])
    late = VideoObserver(tmp_path / "x.mp4", lambda _: [])
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


def test_a_table_of_episodes_has_totals(recorded):
    from rich.console import Console

    dataset = EpisodeDataset(recorded)
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115  (rich wants a file)
    console.print(episode_table(dataset, limit=3))
    text = console.export_text()
    console.file.close()
    assert f"{len(dataset)} in all" in text
    assert f"{len(dataset) - 3} more" in text
