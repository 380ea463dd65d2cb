"""Which of Gymnasium's vector wrappers work on our ids; the table is in docs/environments.md.

Each test is one row of it; the ones that refuse are there too, so that the table stays true when Gymnasium changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import VectorEnv
from gymnasium.wrappers import vector

import headrace
from headrace._gymnasium_ids import IDS
from headrace.errors import DtypeError

MODES = ("same_step", "disabled", "next_step")
N, LENGTH = 3, 6


def make(mode: str = "same_step", **more: Any) -> VectorEnv[Any, Any, Any]:
    settings = {"seed": 1, "threads": 1, "overrides": {"episode_length": LENGTH}, **more}
    return gymnasium.make_vec("headrace/Ant-v0", num_envs=N, autoreset=mode, **settings)


def walk(wrapped: VectorEnv[Any, Any, Any], mode: str, steps: int = 2 * LENGTH + 1) -> Iterator[tuple[Any, ...]]:
    """Steps with random actions; ended environments are reset by mask where nobody else does it."""
    wrapped.action_space.seed(0)
    for _ in range(steps):
        result = wrapped.step(wrapped.action_space.sample())
        yield result
        ended = np.asarray(result[2]) | np.asarray(result[3])
        if mode == "disabled" and ended.any():
            wrapped.reset(options={"reset_mask": ended})


def actions_of_walk(steps: int = 2 * LENGTH + 1) -> list[np.ndarray]:
    space = make().action_space
    space.seed(0)
    return [space.sample() for _ in range(steps)]


@pytest.mark.parametrize("env_id", IDS)
def test_every_id_gives_numpy_arrays_that_fit_its_spaces(env_id) -> None:
    env = gymnasium.make_vec(env_id, num_envs=2, threads=1)
    obs, info = env.reset(seed=3)
    env.action_space.seed(0)
    assert info == {}
    assert env.observation_space.contains(obs)
    obs, reward, terminated, truncated, _ = env.step(env.action_space.sample())
    assert env.observation_space.contains(obs)
    assert [array.dtype for array in (reward, terminated, truncated)] == [np.float32, np.bool_, np.bool_]
    assert env.unwrapped.batch.num_envs == 2
    env.close()


def test_numpy_arrays_equal_the_torch_tensors() -> None:
    env, batch = make(), headrace.make("ant", N, seed=1, threads=1, overrides={"episode_length": LENGTH})
    obs, expected = env.reset(seed=5)[0], batch.reset(seed=5)[0]
    assert np.array_equal(obs, expected["policy"].numpy())
    for actions in actions_of_walk():
        got, want = env.step(actions), batch.step(torch.from_numpy(actions))
        assert np.array_equal(got[0], want.obs["policy"].numpy())
        for array, tensor in zip(got[1:4], want[1:4], strict=True):
            assert np.array_equal(array, tensor.numpy())
        assert ("final_obs" in got[4]) == ("final_obs" in want.info)
        if "final_obs" in got[4]:
            assert np.array_equal(got[4]["final_obs"], want.info["final_obs"]["policy"].numpy())
            assert np.array_equal(got[4]["ends_lengths"], want.info["ends"].lengths.numpy())


def test_suspend_and_resume_take_numpy_masks_and_ids() -> None:
    env = make().unwrapped
    env.reset()
    env.suspend(np.array([True, False, True]))
    assert env.active.tolist() == [False, True, False]
    env.resume(np.array([2]))
    assert env.active.tolist() == [False, True, True]
    with pytest.raises(DtypeError, match="seed: expected one integer"):
        env.reset(seed=[1, 2, 3])


def test_one_group_is_an_array_and_a_dictionary_when_asked() -> None:
    flat, grouped = make(), make(dict_obs=True)
    assert isinstance(flat.single_observation_space, gymnasium.spaces.Box)
    assert flat.observation_space == grouped.observation_space["policy"]
    assert np.array_equal(flat.reset(seed=2)[0], grouped.reset(seed=2)[0]["policy"])
    several = gymnasium.make_vec("headrace/CartpoleCamera-v0", num_envs=1)
    assert list(several.reset()[0]) == ["critic", "policy"]


def test_next_step_autoreset_plays_the_same_episodes_with_one_step_between_them() -> None:
    """The reference: environments without autoreset, whose ended ones are reset by hand before each next step."""
    env, plain = make("next_step"), make("disabled")
    obs, expected = env.reset(seed=2)[0], plain.reset(seed=2)[0]
    assert np.array_equal(obs, expected)
    ended, restarts = np.zeros(N, bool), 0
    for actions in actions_of_walk(3 * LENGTH):
        got, want = env.step(actions), plain.step(actions)
        for array, other in zip(got[1:4], want[1:4], strict=True):
            assert np.array_equal(array, other)
        expected = plain.reset(options={"reset_mask": ended})[0] if ended.any() else want[0]
        assert np.array_equal(got[0], expected)
        assert not got[1][ended].any()
        assert not (got[2] | got[3])[ended].any()
        restarts += int(ended.sum())
        ended = got[2] | got[3]
    assert restarts == 2 * N
    assert env.metadata["autoreset_mode"] is gymnasium.vector.AutoresetMode.NEXT_STEP


@pytest.mark.parametrize("mode", MODES)
def test_record_episode_statistics_agrees_with_ours(mode) -> None:
    env = vector.RecordEpisodeStatistics(make(mode))
    env.reset()
    ended = 0
    for *_, info in walk(env, mode, 3 * LENGTH):
        if "episode" in info:
            ids = info["ends_env_ids"]
            ended += int(info["_episode"].sum())
            assert np.array_equal(info["episode"]["l"][ids], info["ends_lengths"])
            # the wrapper adds float32 rewards
            np.testing.assert_allclose(info["episode"]["r"][ids], info["ends_returns"], rtol=1e-5, atol=1e-6)
    assert ended == (2 if mode == "next_step" else 3) * N
    assert list(env.length_queue) == [LENGTH] * ended


def test_record_episode_statistics_counts_suspended_steps_and_ours_do_not() -> None:
    env = vector.RecordEpisodeStatistics(make())
    env.reset()
    env.unwrapped.suspend([0])
    steps = walk(env, "same_step", 4 * LENGTH)
    for _ in range(LENGTH):
        next(steps)
    env.unwrapped.resume([0])
    ends = [info for *_, info in steps if 0 in info.get("ends_env_ids", ())]
    assert ends[0]["episode"]["l"][0] == 2 * LENGTH
    assert ends[0]["ends_lengths"][list(ends[0]["ends_env_ids"]).index(0)] == LENGTH


@pytest.mark.parametrize("mode", MODES)
def test_dict_info_to_list_gives_each_env_its_own(mode) -> None:
    env = vector.DictInfoToList(vector.RecordEpisodeStatistics(make(mode)))
    env.reset()
    infos = [info for *_, info in walk(env, mode)]
    assert all(isinstance(info, list) and len(info) == N for info in infos)
    last = infos[LENGTH - 1]
    assert [one["episode"]["l"] for one in last] == [LENGTH] * N


LOW, HIGH = np.full(8, -2.0, np.float32), np.full(8, 2.0, np.float32)
ACTION_WRAPPERS: dict[str, tuple[Callable[[Any], Any], Callable[[np.ndarray], np.ndarray]]] = {
    "ClipAction": (vector.ClipAction, lambda a: np.clip(a, -1, 1)),
    "RescaleAction": (lambda e: vector.RescaleAction(e, LOW, HIGH), lambda a: a / 2),
    "TransformAction": (lambda e: vector.TransformAction(e, lambda a: a * np.float32(0.5)), lambda a: a / 2),
    "VectorizeTransformAction": (
        lambda e: vector.VectorizeTransformAction(e, gymnasium.wrappers.ClipAction),
        lambda a: np.clip(a, -1, 1),
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("wrap", "meaning"), ACTION_WRAPPERS.values(), ids=ACTION_WRAPPERS)
def test_action_wrappers_change_what_the_env_is_given(wrap, meaning, mode) -> None:
    env, plain = wrap(make(mode)), make(mode)
    env.reset(seed=2)
    plain.reset(seed=2)
    for actions in actions_of_walk(LENGTH):
        wide = 2 * actions
        got, expected = env.step(wide), plain.step(meaning(wide).astype(np.float32))
        # rescaling rounds: (a − low)·scale + low is not a/2 to the last bit
        np.testing.assert_allclose(got[0], expected[0], rtol=1e-3, atol=1e-4)


REWARD_WRAPPERS: dict[str, tuple[Callable[[Any], Any], Callable[[np.ndarray], np.ndarray]]] = {
    "ClipReward": (lambda e: vector.ClipReward(e, -0.1, 0.1), lambda r: np.clip(r, -0.1, 0.1)),
    "TransformReward": (lambda e: vector.TransformReward(e, lambda r: 2 * r), lambda r: 2 * r),
    "VectorizeTransformReward": (
        lambda e: vector.VectorizeTransformReward(e, gymnasium.wrappers.TransformReward, func=lambda r: 2 * r),
        lambda r: 2 * r,
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("wrap", "meaning"), REWARD_WRAPPERS.values(), ids=REWARD_WRAPPERS)
def test_reward_wrappers_change_the_reward(wrap, meaning, mode) -> None:
    env, plain = wrap(make(mode)), make(mode)
    env.reset(seed=2)
    plain.reset(seed=2)
    for got, expected in zip(walk(env, mode), walk(plain, mode), strict=True):
        np.testing.assert_allclose(got[1], meaning(expected[1]), rtol=1e-6)
        assert np.array_equal(got[0], expected[0])


@pytest.mark.parametrize("mode", MODES)
def test_normalize_reward_gives_finite_rewards_of_unit_scale(mode) -> None:
    env = vector.NormalizeReward(make(mode))
    env.reset()
    rewards = np.stack([reward for _, reward, *_ in walk(env, mode, 60)])
    assert np.isfinite(rewards).all()
    assert 0.01 < np.abs(rewards).mean() < 10


OBSERVATION_WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "TransformObservation": lambda e: vector.TransformObservation(e, lambda obs: obs),
    "FlattenObservation": vector.FlattenObservation,
    "VectorizeTransformObservation": lambda e: vector.VectorizeTransformObservation(
        e, gymnasium.wrappers.FlattenObservation
    ),
    "DtypeObservation": lambda e: vector.DtypeObservation(e, np.float64),
    "ReshapeObservation": lambda e: vector.ReshapeObservation(e, (9, 3)),
}


@pytest.mark.parametrize("mode", ["disabled", "next_step"])
@pytest.mark.parametrize("wrap", OBSERVATION_WRAPPERS.values(), ids=OBSERVATION_WRAPPERS)
def test_observation_wrappers_work_without_same_step_autoreset(wrap, mode) -> None:
    env, plain = wrap(make(mode)), make(mode)
    obs, expected = env.reset(seed=2)[0], plain.reset(seed=2)[0]
    assert env.observation_space.contains(obs)
    assert np.array_equal(obs.reshape(N, -1), expected)
    for got, want in zip(walk(env, mode), walk(plain, mode), strict=True):
        assert np.array_equal(got[0].reshape(N, -1), want[0])


def test_filter_observation_takes_groups_of_a_dictionary() -> None:
    env = vector.FilterObservation(make("disabled", dict_obs=True), ["policy"])
    assert list(env.reset(seed=2)[0]) == ["policy"]


@pytest.mark.parametrize("wrap", OBSERVATION_WRAPPERS.values(), ids=OBSERVATION_WRAPPERS)
def test_observation_wrappers_refuse_same_step_autoreset(wrap) -> None:
    with pytest.raises(ValueError, match="Expected autoreset_mode to be NEXT_STEP or DISABLED"):
        wrap(make("same_step"))


@pytest.mark.parametrize("mode", ["same_step", "disabled"])
def test_normalize_observation_wants_next_step_autoreset(mode) -> None:
    with pytest.raises(ValueError, match="autoreset_mode"):
        vector.NormalizeObservation(make(mode))


def test_rescale_observation_wants_bounds_that_our_observations_do_not_have() -> None:
    with pytest.raises(ValueError, match="unbounded components"):
        vector.RescaleObservation(make("disabled"), np.float32(-1), np.float32(1))


def test_the_usual_stack_of_wrappers_runs() -> None:
    env = vector.RecordEpisodeStatistics(make("next_step"))
    env = vector.NormalizeReward(vector.NormalizeObservation(vector.ClipAction(env)))
    env.reset(seed=0)
    steps = list(walk(env, "next_step", 10 * LENGTH))
    assert sum(int(info["_episode"].sum()) for *_, info in steps if "_episode" in info) >= 8 * N
    assert np.isfinite(np.stack([step[0] for step in steps])).all()
    assert np.abs(np.stack([step[0] for step in steps[-LENGTH:]])).mean() < 3
