"""Vector environments that step all or none: every autoreset mode, put back or held."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from test_native_bridge import _episodes
from toy_envs import DictEnv, PlainEnv

from headrace.bridges import BridgeEnv
from headrace.bridges.make import bridge
from headrace.errors import ConfigError, DataError, EnvError, UnsupportedError

MODES = list(AutoresetMode)


class Opaque(VectorWrapper):
    """A vector environment that cannot be taken apart by its type."""


def _opaque(count: int, mode: AutoresetMode, env: Any = DictEnv) -> Opaque:
    return Opaque(SyncVectorEnv([env] * count, autoreset_mode=mode))


def _save(vector: Any, i: int) -> object:
    return copy.deepcopy(vars(vector.unwrapped.envs[i]))


def _restore(vector: Any, i: int, saved: Any) -> None:
    vars(vector.unwrapped.envs[i]).update(copy.deepcopy(saved))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [1, 3])
def test_every_autoreset_mode_gives_the_same_episodes(mode: AutoresetMode, count: int) -> None:
    wanted = set(range(7))
    reference = _episodes(bridge([DictEnv] * 7, seed=5), wanted, None)
    env = bridge(_opaque(count, mode), seed=5)
    assert (env.fidelity, env.reseeds) == ("hold", True)
    assert _episodes(env, wanted, None) == reference


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pattern", range(4))
def test_put_back_environments_continue_exactly_in_every_mode(mode: AutoresetMode, pattern: int) -> None:
    wanted = set(range(7))
    reference = _episodes(bridge([DictEnv] * 7, seed=5), wanted, None)
    env = bridge(_opaque(3, mode), seed=5, save=_save, restore=_restore)
    assert env.fidelity == "restore"
    assert _episodes(env, wanted, np.random.default_rng(pattern)) == reference


@pytest.mark.parametrize("mode", MODES)
def test_a_long_rest_through_ends_of_the_resting_environment_changes_nothing_when_put_back(mode: AutoresetMode) -> None:
    env = bridge(_opaque(2, mode), save=_save, restore=_restore)
    twin = bridge([DictEnv] * 2)
    for one in (env, twin):
        one.reset()
        one.step(torch.full((2, 2), 0.5))
        one.suspend([1])
    # longer than any episode, so that the resting environment ends underneath, and at every phase of its reset
    for k in range(40):
        nan = torch.full((2, 2), 0.25)
        nan[1] = torch.nan
        ours, theirs = env.step(nan), twin.step(nan)
        assert torch.equal(ours.obs["policy"], theirs.obs["policy"])
        if k in (11, 12, 13, 14, 25):
            env.resume([1])
            twin.resume([1])
            ours, theirs = env.step(torch.zeros(2, 2)), twin.step(torch.zeros(2, 2))
            assert torch.equal(ours.obs["policy"], theirs.obs["policy"])
            assert torch.equal(ours.reward, theirs.reward)
            env.suspend([1])
            twin.suspend([1])
    assert torch.equal(env.episode_ids, twin.episode_ids)


@pytest.mark.parametrize("mode", MODES)
def test_disabled_autoreset_parks_over_every_mode(mode: AutoresetMode) -> None:
    env, twin = bridge(_opaque(3, mode), autoreset="disabled"), bridge([DictEnv] * 3, autoreset="disabled")
    for one in (env, twin):
        one.reset()
    for k in range(30):
        if k in (14, 20):
            mask = ~env.active
            for one in (env, twin):
                one.reset(options={"reset_mask": mask})
        ours, theirs = env.step(torch.full((3, 2), 0.1)), twin.step(torch.full((3, 2), 0.1))
        assert torch.equal(env.active, twin.active)
        for group in ours.obs:
            assert torch.equal(ours.obs[group], theirs.obs[group])
        assert torch.equal(ours.terminated, theirs.terminated)
        assert ("ends" in ours.info) == ("ends" in theirs.info)
        if "ends" in ours.info:
            assert ours.info["ends"].success is not None
            assert theirs.info["ends"].success is not None
            assert ours.info["ends"].success.tolist() == theirs.info["ends"].success.tolist()
    assert env.episode_ids.max() > 3


@pytest.mark.parametrize("mode", MODES)
def test_held_environments_mask_their_rows_and_count_what_was_cut(mode: AutoresetMode) -> None:
    vector = _opaque(2, mode, PlainEnv)
    inner: Any = vector.unwrapped
    env = bridge(vector, hold_action=np.array(2))
    env.reset()
    env.suspend([1])
    for _ in range(13):
        step = env.step(torch.tensor([0, 99]))
        assert step.obs["policy"][1].item() == 0.0
        assert (step.reward[1].item(), step.terminated[1].item(), step.truncated[1].item()) == (0.0, False, False)
        assert not step.info.get("_episode", torch.zeros(2))[1]
    assert inner.envs[1].steps_ever == 13
    assert set(map(int, inner.envs[1].actions)) == {2}
    backend: Any = env.backend
    assert backend.held_ends == 2
    assert env.episode_ids.tolist() == [4, 1]
    assert env.episode_steps.tolist() == [3, 0]
    with pytest.raises(UnsupportedError, match="save="):
        env.state_dict()


def test_an_async_vector_environment_is_bridged_with_seeded_episodes() -> None:
    wanted = set(range(4))
    reference = _episodes(bridge([DictEnv] * 4, seed=2), wanted, None)
    env = bridge(AsyncVectorEnv([DictEnv] * 2, context="spawn"), seed=2)
    assert env.fidelity == "hold"
    assert _episodes(env, wanted, None) == reference


def test_vector_wrappers_stay_in_place() -> None:
    env = bridge(RecordEpisodeStatistics(SyncVectorEnv([DictEnv] * 2, autoreset_mode=AutoresetMode.SAME_STEP)))
    env.reset()
    for _ in range(20):
        env.step(torch.zeros(2, 2))
    assert env.episode_ids.max() > 1


def test_snapshots_of_a_vector_environment_use_its_save_and_restore() -> None:
    envs = [bridge(_opaque(2, AutoresetMode.NEXT_STEP), save=_save, restore=_restore) for _ in range(2)]
    envs[0].reset()
    for _ in range(3):
        envs[0].step(torch.zeros(2, 2))
    envs[1].load_state_dict(envs[0].state_dict())
    for _ in range(20):
        steps = [env.step(torch.zeros(2, 2)) for env in envs]
        assert torch.equal(steps[0].obs["policy"], steps[1].obs["policy"])
        assert torch.equal(steps[0].reward, steps[1].reward)


class Counting(VectorEnv[Any, Any, Any]):
    """A vector environment of its own kind: it resets all or none, and its last observations are batched."""

    def __init__(self, mode: AutoresetMode | None = AutoresetMode.SAME_STEP, final_obs: bool = True) -> None:
        self.num_envs = 2
        self.metadata = {} if mode is None else {"autoreset_mode": mode}
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.observation_space = spaces.Box(-np.inf, np.inf, (2, 1), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.action_space = spaces.MultiDiscrete([2, 2])
        self.counts = np.zeros(2)
        self.gives_final_obs = final_obs

    def _obs(self) -> Any:
        return self.counts[:, None].astype(np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        assert options is None
        assert isinstance(seed, int)
        self.counts = np.array([0.0, 2.0])
        return self._obs(), {}

    def step(self, actions: Any) -> Any:
        self.counts += 1
        done = self.counts >= 4
        final = self._obs()
        self.counts[done] = 0
        infos = {"final_obs": final, "_final_obs": done, "final_info": {"success": final[:, 0] > 3}}
        return self._obs(), np.ones(2), done, ~done & False, infos if done.any() and self.gives_final_obs else {}


def test_a_vector_environment_that_resets_all_or_none_keeps_its_own_resets() -> None:
    env: BridgeEnv = bridge(Counting())
    assert not env.reseeds
    env.reset()
    seen = [env.step(torch.zeros(2, dtype=torch.int64)) for _ in range(4)]
    assert [step.obs["policy"][:, 0].tolist() for step in seen] == [[1, 3], [2, 0], [3, 1], [0, 2]]
    assert seen[1].info["final_obs"]["policy"][:, 0].tolist() == [2, 4]
    assert seen[1].info["ends"].success is not None
    assert seen[1].info["ends"].success.tolist() == [True]
    with pytest.raises(UnsupportedError, match="all of its environments or none"):
        env.reset(options={"reset_mask": torch.tensor([True, False])})
    assert env.episode_steps.tolist() == [0, 2]
    env.reset(seed=3)


def test_vector_environments_that_cannot_keep_the_contract_are_refused() -> None:
    with pytest.raises(ConfigError, match="autoreset_mode"):
        bridge(Counting(None))
    with pytest.raises(ConfigError, match="NEXT_STEP"):
        bridge(Counting(AutoresetMode.NEXT_STEP))
    with pytest.raises(ConfigError, match="disabled"):
        bridge(Counting(), autoreset="disabled")
    with pytest.raises(ConfigError, match="executor"):
        bridge(Counting(), executor="threads")
    with pytest.raises(ConfigError, match="both or neither"):
        bridge(Counting(), save=_save)
    with pytest.raises(ConfigError, match="hold_action"):
        bridge(Counting(), hold_action=np.array(7))
    env = bridge(Counting(final_obs=False))
    env.reset()
    env.step(torch.zeros(2, dtype=torch.int64))
    with pytest.raises(DataError, match="final_obs=False"):
        env.step(torch.zeros(2, dtype=torch.int64))
    careless = bridge(Counting(final_obs=False), final_obs=False)
    careless.reset()
    for _ in range(4):
        step = careless.step(torch.zeros(2, dtype=torch.int64))
    assert "final_obs" not in step.info


def test_a_vector_environment_that_raises_is_named() -> None:
    env = bridge(_opaque(2, AutoresetMode.NEXT_STEP, lambda: PlainEnv(raise_at=1)))
    env.reset()
    with pytest.raises(EnvError, match="the gripper is stuck"):
        env.step(torch.zeros(2, dtype=torch.int64))


def test_gymnasium_sync_vector_environments_are_taken_apart() -> None:
    vector = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
    env = bridge(vector)
    assert env.fidelity == "native"
    assert env.name == "CartPole-v1"
    env.reset()
    env.close()
    assert vector.closed
