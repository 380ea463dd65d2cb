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

MODES = ("same_step", "disabled")
N, LENGTH = 3, 6


def make(mode: str = "same_step") -> VectorEnv[Any, Any, Any]:
    overrides = {"episode_length": LENGTH}
    return gymnasium.make_vec("headrace/Ant-v0", num_envs=N, seed=1, threads=1, autoreset=mode, overrides=overrides)


def policy_group(env: VectorEnv[Any, Any, Any]) -> VectorEnv[Any, Any, Any]:
    """Only the group that a policy reads, as a plain array."""
    spaces = {
        f"{kind}observation_space": getattr(env, f"{kind}observation_space")["policy"] for kind in ("", "single_")
    }
    return vector.TransformObservation(env, lambda obs: obs["policy"], **spaces)


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
    assert np.array_equal(obs["policy"], expected["policy"].numpy())
    for actions in actions_of_walk():
        got, want = env.step(actions), batch.step(torch.from_numpy(actions))
        assert np.array_equal(got[0]["policy"], want.obs["policy"].numpy())
        for array, tensor in zip(got[1:4], want[1:4], strict=True):
            assert np.array_equal(array, tensor.numpy())
        assert ("final_obs" in got[4]) == ("final_obs" in want.info)
        if "final_obs" in got[4]:
            assert np.array_equal(got[4]["final_obs"]["policy"], want.info["final_obs"]["policy"].numpy())
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


@pytest.mark.parametrize("mode", MODES)
def test_record_episode_statistics_works_under_a_key_of_its_own_and_agrees_with_ours(mode) -> None:
    env = vector.RecordEpisodeStatistics(make(mode), stats_key="statistics")
    env.reset()
    ended = 0
    for *_, info in walk(env, mode):
        if "statistics" in info:
            ended += int(info["_statistics"].sum())
            assert np.array_equal(info["statistics"]["l"], info["episode"]["l"])
            # the wrapper adds float32 rewards
            np.testing.assert_allclose(info["statistics"]["r"], info["episode"]["r"], rtol=1e-5, atol=1e-6)
    assert ended == 2 * N
    assert list(env.length_queue) == [LENGTH] * 2 * N


def test_record_episode_statistics_under_its_default_key_says_that_it_is_there_already() -> None:
    env = vector.RecordEpisodeStatistics(make())
    env.reset()
    with pytest.raises(ValueError, match="key 'episode' but this key already exists"):
        list(walk(env, "same_step"))


def test_record_episode_statistics_counts_suspended_steps_and_ours_do_not() -> None:
    env = vector.RecordEpisodeStatistics(make(), stats_key="statistics")
    env.reset()
    env.unwrapped.suspend([0])
    steps = walk(env, "same_step", 4 * LENGTH)
    for _ in range(LENGTH):
        next(steps)
    env.unwrapped.resume([0])
    lengths = [(info["statistics"]["l"][0], info["episode"]["l"][0]) for *_, info in steps if info.get("episode")]
    assert (2 * LENGTH, LENGTH) in lengths


@pytest.mark.parametrize("mode", MODES)
def test_dict_info_to_list_gives_each_env_its_own(mode) -> None:
    env = vector.DictInfoToList(make(mode))
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
        np.testing.assert_allclose(got[0]["policy"], expected[0]["policy"], rtol=1e-3, atol=1e-4)


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
        assert np.array_equal(got[0]["policy"], expected[0]["policy"])


@pytest.mark.parametrize("mode", MODES)
def test_normalize_reward_gives_finite_rewards_of_unit_scale(mode) -> None:
    env = vector.NormalizeReward(make(mode))
    env.reset()
    rewards = np.stack([reward for _, reward, *_ in walk(env, mode, 60)])
    assert np.isfinite(rewards).all()
    assert 0.01 < np.abs(rewards).mean() < 10


OBSERVATION_WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "TransformObservation": policy_group,
    "FlattenObservation": vector.FlattenObservation,
    "VectorizeTransformObservation": lambda e: vector.VectorizeTransformObservation(
        e, gymnasium.wrappers.FlattenObservation
    ),
    "FilterObservation": lambda e: policy_group(vector.FilterObservation(e, ["policy"])),
    "DtypeObservation": lambda e: vector.DtypeObservation(policy_group(e), np.float64),
    "ReshapeObservation": lambda e: vector.ReshapeObservation(policy_group(e), (9, 3)),
}


@pytest.mark.parametrize("wrap", OBSERVATION_WRAPPERS.values(), ids=OBSERVATION_WRAPPERS)
def test_observation_wrappers_work_without_autoreset(wrap) -> None:
    env, plain = wrap(make("disabled")), make("disabled")
    obs, expected = env.reset(seed=2)[0], plain.reset(seed=2)[0]
    assert env.observation_space.contains(obs)
    assert np.array_equal(obs.reshape(N, -1), expected["policy"])
    for got, want in zip(walk(env, "disabled"), walk(plain, "disabled"), strict=True):
        assert np.array_equal(got[0].reshape(N, -1), want[0]["policy"])


@pytest.mark.parametrize("wrap", OBSERVATION_WRAPPERS.values(), ids=OBSERVATION_WRAPPERS)
def test_observation_wrappers_refuse_same_step_autoreset(wrap) -> None:
    with pytest.raises(ValueError, match="Expected autoreset_mode to be NEXT_STEP or DISABLED"):
        wrap(make("same_step"))


@pytest.mark.parametrize("mode", MODES)
def test_normalize_observation_wants_next_step_autoreset_which_we_do_not_have(mode) -> None:
    with pytest.raises(ValueError, match="autoreset_mode"):
        vector.NormalizeObservation(policy_group(make(mode)) if mode == "disabled" else make(mode))


def test_rescale_observation_wants_bounds_that_our_observations_do_not_have() -> None:
    with pytest.raises(ValueError, match="unbounded components"):
        vector.RescaleObservation(policy_group(make("disabled")), np.float32(-1), np.float32(1))


def test_wrappers_can_be_stacked() -> None:
    env = vector.RecordEpisodeStatistics(
        vector.NormalizeReward(vector.ClipAction(policy_group(make("disabled")))), stats_key="statistics"
    )
    env.reset(seed=0)
    ended = sum(int(info["_statistics"].sum()) for *_, info in walk(env, "disabled") if "_statistics" in info)
    assert ended == 2 * N
