"""MuJoCo Playground in this process: run by ``make test-simulators`` in an environment that has both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from simulator_checks import evaluated, not_claimed, recorded

import headrace
from headrace.bridges import BridgeEnv
from headrace.bridges._batched import PlaygroundRows
from headrace.errors import ConfigError
from headrace.testing import check_row_simulator

LENGTH = 12


def _cartpole(num_envs: int, **settings: Any) -> BridgeEnv:
    return headrace.bridge("playground:CartpoleBalance", num_envs, env_kwargs={"episode_length": LENGTH}, **settings)


def test_the_whole_contract_holds() -> None:
    assert not_claimed(_cartpole, sizes=(1, 4)) == {}


def test_the_row_protocol_holds() -> None:
    results = check_row_simulator(lambda count: PlaygroundRows("CartpoleBalance", count), num_envs=4)
    assert [result for result in results if result.not_claimed] == []


def test_a_strict_table_does_not_depend_on_the_number_of_rows_and_is_recorded(tmp_path: Path) -> None:
    alone, dataset = recorded(_cartpole(1, autoreset="disabled"), tmp_path / "data", episodes=7)
    many = evaluated(_cartpole(4, autoreset="disabled"), episodes=7)
    assert (many.fidelity, many.seeded) == ("native", True)
    assert alone.episodes == many.episodes
    assert len({row.reward for row in alone.episodes}) == 7
    assert {episode.meta.episode_id: episode.meta.length for episode in dataset} == dict.fromkeys(range(7), LENGTH)


def test_episodes_are_those_of_playground_stepped_by_hand() -> None:
    import jax  # pyright: ignore[reportMissingImports]
    from mujoco_playground import registry  # pyright: ignore[reportMissingImports]

    from headrace.bridges.bridge_env import episode_seeds

    env = _cartpole(3, seed=9)
    obs, _ = env.reset()
    task = registry.load("CartpoleBalance")
    seeds = np.array(episode_seeds(9, torch.arange(3)), np.uint32)
    state = jax.jit(jax.vmap(task.reset))(jax.vmap(jax.random.PRNGKey)(seeds))
    stepped = jax.jit(jax.vmap(task.step))
    assert np.array_equal(obs["policy"].numpy(), np.asarray(state.obs))
    for k in range(LENGTH):
        actions = np.full((3, 1), np.sin(k), np.float32)
        state = stepped(state, actions)
        step = env.step(torch.from_numpy(actions))
        final = step.info["final_obs"] if k == LENGTH - 1 else step.obs
        assert np.array_equal(final["policy"].numpy(), np.asarray(state.obs))
        assert np.array_equal(step.reward.numpy(), np.asarray(state.reward))
    assert step.truncated.all()
    env.close()


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="CartpoleBalance"):
        headrace.bridge("playground:Cartpoles", 2)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
