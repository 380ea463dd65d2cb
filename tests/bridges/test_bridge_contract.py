"""Every check of the contract suite on every kind of bridge."""

from __future__ import annotations

from typing import Any

import gymnasium
import pytest
from toy_envs import DictEnv

from headrace.bridges import BridgeEnv
from headrace.bridges.make import bridge
from headrace.testing import check_env


def _not_claimed(make_env: Any, **more: Any) -> set[str]:
    return {result.check for result in check_env(make_env, **more) if result.not_claimed}


@pytest.mark.parametrize("env_id", ["CartPole-v1", "InvertedPendulum-v5"])
def test_bridged_gymnasium_ids_keep_the_whole_contract(env_id: str) -> None:
    def make(num_envs: int, **more: Any) -> BridgeEnv:
        return bridge(env_id, num_envs, **more)

    assert _not_claimed(make, sizes=(1, 5), steps=12, variants=[{}, {"executor": "threads"}]) == set()


def test_a_bridged_ant_keeps_the_whole_contract() -> None:
    def make(num_envs: int, **more: Any) -> BridgeEnv:
        short = {"max_episode_steps": 12, "reset_noise_scale": 0.1}
        return bridge([lambda: gymnasium.make("Ant-v5", **short)] * num_envs, **more)

    assert _not_claimed(make, sizes=(1, 3), steps=8) == set()


def test_a_bridge_to_dict_observations_keeps_the_whole_contract() -> None:
    def make(num_envs: int, **more: Any) -> BridgeEnv:
        return bridge([DictEnv] * num_envs, **more)

    assert _not_claimed(make, sizes=(1, 5), steps=12, variants=[{}, {"executor": "threads"}]) == set()


@pytest.mark.slow
def test_worker_processes_keep_the_whole_contract() -> None:
    def make(num_envs: int, **more: Any) -> BridgeEnv:
        return bridge([DictEnv] * num_envs, executor="processes", workers=2, **more)

    assert _not_claimed(make, sizes=(1, 3)) == set()
