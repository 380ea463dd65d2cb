"""Loops that were written for Gymnasium run on our ids: SB3's ``make_vec_env``, and CleanRL's chain of wrappers."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest

import headrace  # noqa: F401  (registers the ids)


def cleanrl_env(env_id: str, gamma: float = 0.99) -> gymnasium.Env[Any, Any]:
    """Wrap one environment as ``ppo_continuous_action.py`` of CleanRL does."""
    env = gymnasium.make(env_id, overrides={"episode_length": 10})
    env = gymnasium.wrappers.FlattenObservation(env)
    env = gymnasium.wrappers.RecordEpisodeStatistics(env)
    env = gymnasium.wrappers.ClipAction(env)
    env = gymnasium.wrappers.NormalizeObservation(env)
    env = gymnasium.wrappers.TransformObservation(env, lambda obs: np.clip(obs, -10, 10), env.observation_space)
    env = gymnasium.wrappers.NormalizeReward(env, gamma=gamma)
    return gymnasium.wrappers.TransformReward(env, lambda reward: float(np.clip(reward, -10, 10)))


def test_cleanrls_chain_of_wrappers_runs_in_a_vector_of_single_environments() -> None:
    envs = gymnasium.vector.SyncVectorEnv([lambda: cleanrl_env("headrace/Ant-v0")] * 2)
    assert isinstance(envs.single_action_space, gymnasium.spaces.Box)
    obs, _ = envs.reset(seed=1)
    assert obs.shape == (2, 27)
    envs.action_space.seed(0)
    lengths: list[int] = []
    for _ in range(33):
        obs, reward, *_, info = envs.step(envs.action_space.sample())
        assert np.isfinite(obs).all()
        assert np.isfinite(reward).all()
        if "episode" in info:
            lengths += info["episode"]["l"][info["_episode"]].tolist()
    assert lengths == [10] * 6


def test_sb3_trains_on_an_id_through_its_own_make_vec_env() -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.env_util import make_vec_env

    env = make_vec_env("headrace/Ant-v0", n_envs=2, seed=3, env_kwargs={"overrides": {"episode_length": 10}})
    model = sb3.PPO("MlpPolicy", env, n_steps=16, batch_size=16, n_epochs=1, device="cpu").learn(64)
    assert model.num_timesteps == 64
    assert [episode["l"] for episode in model.ep_info_buffer] == [10] * 6
    env.close()


def first_observation(**settings: Any) -> np.ndarray:
    env = gymnasium.make("headrace/Ant-v0", **settings)
    return env.reset()[0]


def test_environments_without_a_seed_differ_and_with_one_agree() -> None:
    assert not np.array_equal(first_observation(), first_observation())
    assert np.array_equal(first_observation(seed=4), first_observation(seed=4))
    env = gymnasium.make("headrace/Ant-v0", seed=4)
    first, second = env.reset()[0], env.reset()[0]
    assert not np.array_equal(first, second)
    assert np.array_equal(env.reset(seed=4)[0], first)
    assert np.array_equal(env.reset()[0], second)


def test_an_id_with_its_module_is_found_without_an_import() -> None:
    code = 'import gymnasium; print(gymnasium.make("headrace:headrace/Ant-v0").reset(seed=0)[0].shape)'
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "(27,)\n"
