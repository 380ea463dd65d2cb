"""Every check of the contract suite on every kind of bridge."""

from __future__ import annotations

import pickle
from typing import Any

import gymnasium
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorWrapper
from toy_envs import DictEnv

from headrace.bridges import BridgeEnv
from headrace.bridges.make import bridge
from headrace.testing import check_env


class Opaque(VectorWrapper):
    """A vector environment that cannot be taken apart by its type."""


def _save(vector: Any, i: int) -> bytes:
    return pickle.dumps(vars(vector.unwrapped.envs[i]))


def _restore(vector: Any, i: int, saved: Any) -> None:
    vars(vector.unwrapped.envs[i]).update(pickle.loads(saved))


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


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_vector_bridge_with_save_and_restore_keeps_the_whole_contract(mode: AutoresetMode) -> None:
    def make(num_envs: int, **more: Any) -> BridgeEnv:
        vector = Opaque(SyncVectorEnv([DictEnv] * num_envs, autoreset_mode=mode))
        return bridge(vector, save=_save, restore=_restore, **more)

    assert _not_claimed(make, sizes=(1, 7)) == set()


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_held_vector_bridge_keeps_all_that_it_claims(mode: AutoresetMode) -> None:
    def make(num_envs: int, **more: Any) -> BridgeEnv:
        return bridge(Opaque(SyncVectorEnv([DictEnv] * num_envs, autoreset_mode=mode)), **more)

    not_claimed = _not_claimed(make, sizes=(1, 7))
    assert {"resume_continues_exactly", "snapshot_round_trip"} <= not_claimed
    assert {"autoreset", "bad_input_changes_nothing", "gymnasium_spaces"}.isdisjoint(not_claimed)


@pytest.mark.slow
def test_worker_processes_keep_the_whole_contract() -> None:
    def make(num_envs: int, **more: Any) -> BridgeEnv:
        return bridge([DictEnv] * num_envs, executor="processes", workers=2, **more)

    assert _not_claimed(make, sizes=(1, 3)) == set()
