"""EnvPool in this process: run by ``make test-simulators`` in an environment that has both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from simulator_checks import evaluated, not_claimed, recorded

import headrace
from headrace.bridges import BridgeEnv
from headrace.errors import ConfigError, UnsupportedError

LENGTH = 12


def _ant(num_envs: int, **settings: Any) -> BridgeEnv:
    return headrace.bridge("envpool:Ant-v4", num_envs, env_kwargs={"max_episode_steps": LENGTH}, **settings)


def test_the_contract_holds_for_what_it_claims() -> None:
    left_out = not_claimed(_ant, sizes=(1, 4))
    assert set(left_out) == {
        "resume_continues_exactly",
        "episodes_do_not_depend_on_the_batch",
        "autoreset",  # of which only the next episode's first observation is left out
        "snapshot_round_trip",
    }
    assert all("identity" in reason for name, reason in left_out.items() if name != "snapshot_round_trip")


def test_an_environment_that_rests_goes_on_bit_for_bit() -> None:
    env, twin = _ant(5, seed=3), _ant(5, seed=3)
    for one in (env, twin):
        one.reset()
    env.suspend([1, 4])
    for k in range(4):  # the neighbors go elsewhere
        env.step(torch.full((5, 8), 0.2 * k))
    env.resume([1, 4])
    for k in range(6):
        ours, theirs = (one.step(torch.full((5, 8), -0.1 * k)) for one in (env, twin))
        assert torch.equal(ours.obs["policy"][[1, 4]], theirs.obs["policy"][[1, 4]])
        assert torch.equal(ours.reward[[1, 4]], theirs.reward[[1, 4]])
    assert env.episode_steps.tolist() == [10, 6, 10, 10, 6]
    env.close()
    twin.close()


def test_it_reports_that_episodes_have_no_identity(tmp_path: Path) -> None:
    env = _ant(4, autoreset="disabled")
    assert (env.fidelity, env.reseeds) == ("native", False)
    env.reset()
    with pytest.raises(UnsupportedError):
        env.state_dict()
    with pytest.raises(ConfigError, match="EnvPool seeds its environments when they are made"):
        evaluated(env, episodes=3)
    result, dataset = recorded(_ant(4, autoreset="disabled"), tmp_path / "data", episodes=6, batching="fast")
    assert not result.seeded
    assert [row.length for row in result.episodes] == [LENGTH] * 6
    assert len(dataset) == 6


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="list_all_envs"):
        headrace.bridge("envpool:Antelope-v4", 2)


def test_settings_that_the_pool_does_not_take_are_refused() -> None:
    for settings in ({"max_episode_step": 5}, {"max_episode_steps": "five"}):
        with pytest.raises(ConfigError, match="EnvPool does not take the settings"):
            headrace.bridge("envpool:CartPole-v1", 2, env_kwargs=settings)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
