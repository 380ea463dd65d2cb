"""Camera observations: drawn on demand, equal to the bit to being drawn every step."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import headrace
from headrace.envs.batch_env import BatchEnv

PIXELS = 12


def _make(
    num_envs: int = 3, *, frames: int = 2, length: int = 7, autoreset: str = "same_step", **more: object
) -> BatchEnv:
    overrides = {"frame_stack": frames, "pixels": PIXELS, "episode_length": length, **more}
    return headrace.make("cartpole-camera", num_envs, seed=5, threads=1, autoreset=autoreset, overrides=overrides)


def _actions(env: BatchEnv, step: int) -> Tensor:
    """A function of episode and step alone, so that two batches act alike."""
    return torch.sin(env.episode_ids * 1.7 + step)[:, None].float()


@settings(deadline=None, max_examples=25)
@given(data=st.data(), frames=st.integers(1, 4), rule=st.sampled_from(["same_step", "disabled"]))
def test_a_stack_drawn_on_demand_equals_the_stack_drawn_every_step(data: st.DataObject, frames: int, rule: str) -> None:
    always, lazily = (_make(frames=frames, autoreset=rule) for _ in range(2))
    always.reset()
    lazily.reset()
    for step in range(data.draw(st.integers(3, 18))):
        resting = torch.tensor(data.draw(st.lists(st.booleans(), min_size=3, max_size=3)))
        for env in (always, lazily):
            env.suspend(resting)
            env.resume(~resting & ~env._active_set.parked)
        wanted = torch.tensor(data.draw(st.lists(st.booleans(), min_size=3, max_size=3)))
        expected = always.step(_actions(always, step))
        got = lazily.step(_actions(lazily, step), observe=wanted)
        observed = got.info["observed"]
        assert torch.equal(got.obs["policy"][observed], expected.obs["policy"][observed])
        assert torch.equal(got.obs["critic"], expected.obs["critic"]), "numbers are always current"
        if "final_obs" in expected.info:
            ended = expected.info["_final_obs"]
            assert torch.equal(got.info["final_obs"]["policy"][ended], expected.info["final_obs"]["policy"][ended])
        if rule == "disabled" and bool(always._active_set.parked.any()):
            for env in (always, lazily):
                env.reset(options={"reset_mask": env._active_set.parked.clone()})
    everyone = lazily.observe()
    assert torch.equal(everyone["policy"], always.observe()["policy"])
    assert lazily.frames_drawn <= always.frames_drawn


def test_rows_that_are_not_observed_hold_their_last_picture() -> None:
    env = _make(length=50, start_velocity=8.0)  # fast enough for coarse pixels to change
    first, _ = env.reset()
    nobody = torch.zeros(3, dtype=torch.bool)
    for i in range(4):
        step = env.step(_actions(env, i), observe=nobody)
    assert torch.equal(step.obs["policy"], first["policy"])
    assert step.info["observed"].tolist() == [False] * 3
    assert not torch.equal(env.observe([1])["policy"], first["policy"][1:2])


@pytest.mark.parametrize("frames", [1, 2, 4])
def test_a_stack_read_once_in_sixteen_steps_draws_only_its_own_frames(frames: int) -> None:
    env = _make(4, frames=frames, length=100, start_angle=0.01)
    env.reset()
    at_start = env.frames_drawn
    assert at_start == 4, "the first frame fills the stack and is drawn once"
    nobody, everyone = torch.zeros(4, dtype=torch.bool), torch.ones(4, dtype=torch.bool)
    for step in range(16):
        env.step(torch.zeros(4, 1), observe=everyone if step == 15 else nobody)
    assert env.frames_drawn - at_start == 4 * frames


def test_a_suspended_environment_draws_nothing() -> None:
    env = _make(4, length=100)
    env.reset()
    env.suspend([0, 1, 2])
    before = env.frames_drawn
    env.step(torch.zeros(4, 1))
    assert env.frames_drawn - before == 1


def test_without_final_observations_an_end_draws_the_new_episode_only() -> None:
    counts = []
    for final_obs in (True, False):
        overrides = {"frame_stack": 1, "pixels": PIXELS, "episode_length": 1}
        env = headrace.make("cartpole-camera", 2, threads=1, final_obs=final_obs, overrides=overrides)
        env.reset()
        before = env.frames_drawn
        step = env.step(torch.zeros(2, 1))
        assert ("final_obs" in step.info) == final_obs
        counts.append(env.frames_drawn - before)
    assert counts == [4, 2]


def test_at_the_start_of_an_episode_the_first_frame_fills_the_stack() -> None:
    env = _make(2, frames=3, start_velocity=8.0)  # fast enough for coarse pixels to change
    obs, _ = env.reset()
    stack = obs["policy"].unflatten(-1, (3, 3))
    assert torch.equal(stack[..., 0, :], stack[..., 2, :])
    assert torch.equal(stack[..., 1, :], stack[..., 2, :])
    later = env.step(torch.ones(2, 1)).obs["policy"].unflatten(-1, (3, 3))
    assert torch.equal(later[..., 1, :], stack[..., 2, :]), "oldest to newest"
    assert not torch.equal(later[..., 2, :], stack[..., 2, :])


def test_a_stack_has_the_single_frames_of_its_own_episode_and_none_from_before() -> None:
    single, stacked = (_make(3, frames=frames, length=4, start_velocity=8.0) for frames in (1, 3))
    first = single.reset()[0]["policy"]
    stacked.reset()
    history = [[frame] * 3 for frame in first]
    for step in range(10):
        one, three = single.step(_actions(single, step)), stacked.step(_actions(stacked, step))
        done = one.terminated | one.truncated
        for env in range(3):
            if done[env]:
                final = [*history[env][1:], one.info["final_obs"]["policy"][env]]
                assert torch.equal(three.info["final_obs"]["policy"][env], torch.cat(final, -1))
            frame = one.obs["policy"][env]
            history[env] = [frame] * 3 if done[env] else [*history[env][1:], frame]
            assert torch.equal(three.obs["policy"][env], torch.cat(history[env], -1))


@pytest.mark.parametrize(
    ("more", "shape", "dtype"),
    [
        ({}, (PIXELS, PIXELS, 6), torch.uint8),
        ({"layout": "channels_first"}, (6, PIXELS, PIXELS), torch.uint8),
        ({"color": "gray"}, (PIXELS, PIXELS, 2), torch.uint8),
        ({"normalize": True}, (PIXELS, PIXELS, 6), torch.float32),
    ],
)
def test_layouts_colors_and_normalization_match_the_declared_space(
    more: dict[str, object], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    env = _make(2, **more)
    obs, _ = env.reset()
    assert tuple(obs["policy"].shape) == (2, *shape)
    assert obs["policy"].dtype == dtype
    assert env.single_observation_space["policy"].contains(obs["policy"][0].numpy())


def test_channels_first_has_the_same_pixels_as_channels_last() -> None:
    last, first = _make(2), _make(2, layout="channels_first")
    a, b = last.reset()[0]["policy"], first.reset()[0]["policy"]
    assert torch.equal(a.movedim(-1, 1), b)


def test_pictures_do_not_depend_on_the_number_of_environments_or_threads() -> None:
    seen = set()
    for num_envs, threads in ((1, 1), (5, 2)):
        overrides = {"frame_stack": 2, "pixels": PIXELS}
        env = headrace.make("cartpole-camera", num_envs, seed=9, threads=threads, overrides=overrides)
        env.reset(options={"episode_ids": torch.arange(num_envs)})
        for step in range(5):
            picture = env.step(_actions(env, step)).obs["policy"][0]
        seen.add(hashlib.sha256(picture.numpy().tobytes()).hexdigest())
    assert len(seen) == 1


def test_snapshots_keep_the_history_of_a_stack(tmp_path: object) -> None:
    env = _make(3, frames=3, length=50)
    env.reset()
    for step in range(4):
        env.step(_actions(env, step), observe=torch.tensor([True, False, False]))
    saved = env.state_dict()
    other = _make(3, frames=3, length=50)
    other.load_state_dict(saved)
    for step in range(4, 7):
        expected, got = env.step(_actions(env, step)), other.step(_actions(other, step))
        assert torch.equal(got.obs["policy"], expected.obs["policy"])


def test_returned_pictures_are_the_callers_own() -> None:
    env = _make(2)
    obs, _ = env.reset()
    kept = obs["policy"].clone()
    step = env.step(torch.zeros(2, 1))
    held = step.obs["policy"].clone()
    env.step(torch.ones(2, 1))
    assert torch.equal(obs["policy"], kept)
    assert torch.equal(step.obs["policy"], held)


def test_the_camera_task_has_the_state_for_the_critic_and_pusher_camera_both() -> None:
    env = headrace.make("pusher-camera", 2, overrides={"pixels": PIXELS})
    obs, _ = env.reset()
    assert {name: tuple(values.shape) for name, values in obs.items()} == {
        "critic": (2, 23),
        "image": (2, PIXELS, PIXELS, 3),
        "policy": (2, 17),
    }


def test_the_camera_task_written_as_a_table_shows_the_same_pictures() -> None:
    direct, table = (headrace.make(f"cartpole-camera{kind}", 3, seed=2) for kind in ("", "-terms"))
    assert torch.equal(direct.reset()[0]["policy"], table.reset()[0]["policy"])
    for step in range(6):
        expected, got = direct.step(_actions(direct, step)), table.step(_actions(table, step))
        assert torch.equal(got.obs["policy"], expected.obs["policy"])
        assert torch.equal(got.obs["critic"], expected.obs["critic"])
        assert torch.equal(got.reward, expected.reward)


LOOKS = {"looks.color": 0.4, "looks.light": 0.5, "looks.camera_position": 0.05}


def test_every_episode_has_looks_of_its_own_which_neither_slot_nor_batch_decide() -> None:
    # every episode begins in the same pose: what differs between their first pictures are looks
    still = {"start_position": 0.0, "start_angle": 0.0, "start_velocity": 0.0}
    few, many, plain = (_make(n, length=3, **still, **looks) for n, looks in ((2, LOOKS), (5, LOOKS), (2, {})))
    first, more, bare = few.reset()[0]["policy"], many.reset()[0]["policy"], plain.reset()[0]["policy"]
    assert torch.equal(first, more[:2])
    assert torch.equal(bare[0], bare[1])
    assert not torch.equal(first[0], bare[0])
    episodes = {0: first[0], 1: first[1]}
    for step in range(9):
        shown = few.step(_actions(few, step))
        if "ends" in shown.info:
            episodes |= {int(few.episode_ids[slot]): shown.obs["policy"][slot] for slot in range(2)}
    # episode 4 is the third of slot 0 here and the first of slot 4 there
    assert torch.equal(episodes[4], more[4])
    assert len({tuple(picture.flatten().tolist()) for picture in episodes.values()}) == len(episodes)


def test_with_looks_a_stack_drawn_on_demand_or_after_a_restart_has_the_same_bits() -> None:
    always, lazily, restored = (_make(length=4, **LOOKS) for _ in range(3))
    for env in (always, lazily, restored):
        env.reset()
    nobody = torch.zeros(3, dtype=torch.bool)
    for step in range(6):
        expected = always.step(_actions(always, step))
        got = lazily.step(_actions(lazily, step), observe=nobody)
        if "final_obs" in expected.info:
            assert torch.equal(got.info["final_obs"]["policy"], expected.info["final_obs"]["policy"])
    restored.load_state_dict(lazily.state_dict())
    assert torch.equal(lazily.observe()["policy"], expected.obs["policy"])
    assert torch.equal(restored.observe()["policy"], expected.obs["policy"])
