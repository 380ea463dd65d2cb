"""What camera environments show, compared with lists of single frames: only drawn frames are kept, and only once."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

import headrace
from headrace.envs._observations import EnvImages
from headrace.envs.batch_env import BatchEnv
from headrace.history import normalize_image

NUM_ENVS = 4


def _make(frames: int, layout: str = "channels_last", normalize: bool = False, start_velocity: float = 0.0) -> BatchEnv:
    overrides = {"frame_stack": frames, "pixels": 10, "episode_length": 9, "start_velocity": start_velocity}
    overrides |= {"layout": layout, "normalize": normalize}
    return headrace.make("cartpole-camera", NUM_ENVS, seed=5, threads=2, overrides=overrides)


def _arrays(thing: object, seen: set[int]) -> Iterator[Tensor | np.ndarray]:
    """Every tensor and array that objects of headrace hold."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor | np.ndarray):
        yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from _arrays(value, seen)
    elif isinstance(thing, list | tuple | set):
        for value in thing:
            yield from _arrays(value, seen)
    elif type(thing).__module__.startswith("headrace.") and hasattr(thing, "__dict__"):
        yield from _arrays(vars(thing), seen)


class Lists:
    """The frames of every environment's episode so far, and what it showed when it was last read."""

    def __init__(self, frames: int, zeros: bool, layout: str, normalize: bool) -> None:
        self._frames, self._zeros, self._first, self._normalize = frames, zeros, layout == "channels_first", normalize
        self.episodes: list[list[Tensor]] = [[] for _ in range(NUM_ENVS)]
        self.held: list[Tensor] = []

    def stack(self, history: list[Tensor]) -> Tensor:
        before = torch.zeros_like(history[0]) if self._zeros else history[0]
        newest = [*[before] * (self._frames - len(history)), *history][-self._frames :]
        seen = [normalize_image(frame) if self._normalize else frame for frame in newest]
        return torch.cat([frame.movedim(-1, 0) if self._first else frame for frame in seen], 0 if self._first else -1)

    def read(self, env: int) -> None:
        self.held[env] = self.stack(self.episodes[env])


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    ("frames", "layout", "zeros"),
    [
        (1, "channels_last", False),
        (3, "channels_last", False),
        (4, "channels_first", False),
        (3, "channels_last", True),
    ],
)
def test_any_history_shows_what_lists_of_frames_show(
    frames: int, layout: str, zeros: bool, normalize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # fast enough for coarse pixels to change
    single, env, other = _make(1, start_velocity=8.0), *(_make(frames, layout, normalize, 8.0) for _ in range(2))
    if zeros:
        for camera in [*env._held._cameras, *other._held._cameras]:
            monkeypatch.setattr(camera, "_repeats", False)
    lists = Lists(frames, zeros, layout, normalize)
    random = torch.Generator().manual_seed(frames)

    def flags(chance: float) -> Tensor:
        return torch.rand(NUM_ENVS, generator=random) < chance

    frame, shown = single.reset()[0]["policy"], env.reset()[0]["policy"]
    lists.episodes = [[row] for row in frame]
    lists.held = [lists.stack(history) for history in lists.episodes]
    assert torch.equal(shown, torch.stack(lists.held))
    finals = 0
    for turn in range(40):
        resting, wanted = flags(0.3), flags(0.5)
        for each in (single, env):
            each.suspend(resting)
            each.resume(~resting)
        actions = torch.rand((NUM_ENVS, 1), generator=random) * 2 - 1
        one, step = single.step(actions), env.step(actions, observe=wanted)
        done = one.terminated | one.truncated
        for i in range(NUM_ENVS):
            if resting[i]:
                continue
            if done[i]:
                finals += 1
                last = [*lists.episodes[i], one.info["final_obs"]["policy"][i]]
                assert torch.equal(step.info["final_obs"]["policy"][i], lists.stack(last))
                lists.episodes[i] = []
            lists.episodes[i].append(one.obs["policy"][i])
            if wanted[i] or done[i]:
                lists.read(i)
        assert torch.equal(step.obs["policy"], torch.stack(lists.held)), turn
        if bool(done.any()):
            assert not step.info["final_obs"]["policy"][~done].any(), "rows that did not end are zeros"
        if turn % 5 == 3:
            ids = flags(0.5).nonzero().squeeze(1).flip(0)
            read = env.observe(ids)["policy"]
            for row, i in enumerate(ids.tolist()):
                lists.read(i)
                assert torch.equal(read[row], lists.held[i])
        if turn % 7 == 4:
            mask, wanted = flags(0.6), flags(0.5)
            frame = single.reset(options={"reset_mask": mask})[0]["policy"]
            shown = env.reset(options={"reset_mask": mask, "observe": wanted})[0]["policy"]
            for i in mask.nonzero().squeeze(1).tolist():
                lists.episodes[i] = [frame[i]]
                if wanted[i]:
                    lists.read(i)
            assert torch.equal(shown, torch.stack(lists.held)), "who is not read holds what it showed"
        if turn % 11 == 6:
            other.load_state_dict(env.state_dict())
            env, other = other, env
    assert finals >= 3


@pytest.mark.parametrize("frames", [1, 4])
def test_a_normalized_environment_keeps_frames_as_bytes_and_nothing_else(frames: int) -> None:
    env = _make(frames, normalize=True)
    env.reset()
    env.step(torch.zeros(NUM_ENVS, 1))
    size = NUM_ENVS * frames * 10 * 10 * 3
    large = [array for array in _arrays(env, set()) if math.prod(array.shape) >= size]
    assert {str(array.dtype).removeprefix("torch.") for array in large} == {"uint8"}
    (camera,) = env._held._cameras
    assert isinstance(camera, EnvImages)
    assert [(p.copy().dtype, p._frames.nbytes) for p in camera.pixels.values()] == [(torch.uint8, size)]


def test_a_step_with_an_end_writes_the_observation_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.history.ordered import OrderedFrames

    env = _make(2, normalize=True)
    env.reset()
    rows: list[int] = []
    written = OrderedFrames.gather_normalized

    def count(frames, ids, out, to, pictures):
        rows.append(frames.num_envs if ids is None else len(ids))
        written(frames, ids, out, to, pictures)

    monkeypatch.setattr(OrderedFrames, "gather_normalized", count)
    env.suspend([1, 2, 3])
    for _ in range(8):
        env.step(torch.zeros(NUM_ENVS, 1))
    rows.clear()
    env.resume([1, 2, 3])
    step = env.step(torch.zeros(NUM_ENVS, 1))
    assert step.info["_final_obs"].tolist() == [True, False, False, False]
    assert rows == [1, NUM_ENVS], "the last observation of the one that ended, then what everybody shows"


def test_large_last_observations_are_zeros_where_no_episode_ended() -> None:
    env, plain = (
        headrace.make("cartpole-camera", 40, seed=5, overrides={"episode_length": 3, "normalize": normalize})
        for normalize in (True, False)
    )
    for each in (env, plain):
        each.reset()
        each.suspend(torch.arange(1, 40, 2))
    for _ in range(3):
        step, expected = env.step(torch.zeros(40, 1)), plain.step(torch.zeros(40, 1))
    last, ended = step.info["final_obs"]["policy"], step.info["_final_obs"]
    assert ended.tolist() == [True, False] * 20
    assert last.nbytes > 1 << 20
    assert not last[~ended].any()
    assert torch.equal(last[ended], normalize_image(expected.info["final_obs"]["policy"][ended]))
    last += 1  # the caller's own
    assert not torch.equal(last, env.observe()["policy"])


def test_an_observer_sees_every_row_of_a_step_that_ends_an_episode() -> None:
    class Watcher:
        needs = frozenset[str]()

        def __init__(self) -> None:
            self.seen: list[Tensor] = []

        def after_reset(self, record: object) -> None:
            """Nothing."""

        def after_step(self, record: headrace.types.StepRecord) -> None:
            self.seen.append(record.step.obs["policy"])

    env, plain = _make(1), _make(1)
    watcher = Watcher()
    env.attach(watcher)
    env.reset(), plain.reset()
    for each in (env, plain):
        each.suspend([1])
        each.step(torch.zeros(NUM_ENVS, 1))
        each.resume([1])
    for _ in range(8):
        shown = env.step(torch.zeros(NUM_ENVS, 1))
        expected = plain.step(torch.zeros(NUM_ENVS, 1))
    assert shown.info["_final_obs"].tolist() == [True, False, True, True]
    assert torch.equal(shown.info["final_obs"]["policy"], expected.info["final_obs"]["policy"])
    ended = shown.info["_final_obs"]
    assert torch.equal(watcher.seen[-1][ended], shown.info["final_obs"]["policy"][ended])
    assert torch.equal(watcher.seen[-1][~ended], shown.obs["policy"][~ended])
