"""mjlab, in an interpreter of its own: run by ``make test-simulators``, which makes that environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from simulator_checks import evaluated, not_claimed, recorded

import headrace
from headrace.bridges import MJLAB_ENTRY, BridgeEnv
from headrace.errors import ConfigError, EnvError

ROOT = Path(__file__).parents[2]
PYTHON = str(ROOT / ".venv-mjlab" / "bin" / "python")
CARTPOLE = {"task": "Mjlab-Cartpole-Balance", "overrides": {"episode_length_s": 0.5}, "instruction": "balance the pole"}


def _cartpole(num_envs: int, *, more: dict[str, Any] | None = None, **settings: Any) -> BridgeEnv:
    return headrace.bridge(
        python=PYTHON,
        entry=MJLAB_ENTRY,
        num_envs=num_envs,
        workers=1,
        timeout=900,
        env_kwargs=CARTPOLE | (more or {}),
        **settings,
    )


def test_the_whole_contract_holds_for_cartpole() -> None:
    assert not_claimed(_cartpole, sizes=(1, 3)) == {}


def test_a_strict_table_does_not_depend_on_the_number_of_rows_and_is_recorded(tmp_path: Path) -> None:
    alone, dataset = recorded(_cartpole(1, autoreset="disabled"), tmp_path / "data", episodes=5)
    many = evaluated(_cartpole(4, autoreset="disabled"), episodes=5)
    assert (many.fidelity, many.seeded) == ("restore", True)
    assert alone.episodes == many.episodes
    assert len({row.reward for row in alone.episodes}) == 5
    assert {row.instruction for row in alone.episodes} == {"balance the pole"}
    assert {episode.meta.episode_id: episode.meta.length for episode in dataset} == dict.fromkeys(range(5), 10)


def test_groups_time_outs_and_last_observations_are_those_of_the_task() -> None:
    env = _cartpole(2)
    obs, _ = env.reset()
    assert sorted(obs) == ["critic", "policy"]
    assert env.instructions() == ("balance the pole",) * 2
    for _ in range(10):
        step = env.step(torch.zeros(2, 1))
    assert step.truncated.all()
    assert not step.terminated.any()
    assert not torch.equal(step.info["final_obs"]["policy"], step.obs["policy"])
    env.close()


def test_histories_that_lie_in_a_ring_are_put_back_exactly() -> None:
    """The slot of a frame moves with every step of the batch, also while a row rests."""
    history = {"overrides": {"episode_length_s": 5.0, "observations.actor.history_length": 4}}
    env, twin = _cartpole(3, more=history), _cartpole(3, more=history)
    assert env.single_observation_space["policy"].shape == (20,)
    for one in (env, twin):
        one.reset()
        for k in range(5):
            one.step(torch.full((3, 1), 0.1 * k))
    env.suspend([1])
    for k in range(6):  # no multiple of the length
        env.step(torch.full((3, 1), -0.2 * k))
    env.resume([1])
    for k in range(3):
        ours, theirs = (one.step(torch.full((3, 1), 0.3 * k)) for one in (env, twin))
        assert torch.equal(ours.obs["policy"][1], theirs.obs["policy"][1])
    env.close()
    twin.close()


@pytest.mark.parametrize("task", ["Mjlab-Velocity-Flat-Unitree-Go1", "Mjlab-Lift-Cube-Yam"])
def test_robots_that_rest_at_random_go_on_as_if_they_had_not(task: str) -> None:
    """As many rows as a Go1 has joints: what belongs to a joint must not be taken for a row."""
    rows, steps = 12, 8
    env = headrace.bridge(
        python=PYTHON,
        entry=MJLAB_ENTRY,
        num_envs=rows,
        workers=1,
        timeout=900,
        env_kwargs={"task": task, "noise": False},
    )
    assert env.fidelity == "restore"
    assert env.no_identity
    env.reset()
    saved = env.state_dict()
    width = env.single_action_space.shape
    assert width is not None
    actions = 0.5 * torch.randn((steps, rows, *width), generator=torch.Generator().manual_seed(3))
    straight = [env.step(actions[k]) for k in range(steps)]
    assert not any((step.terminated | step.truncated).any() for step in straight)
    env.load_state_dict(saved)
    chance = torch.Generator().manual_seed(4)
    taken = torch.zeros(rows, dtype=torch.int64)
    while (taken < steps).any():
        rest = (torch.rand(rows, generator=chance) < 0.5) | (taken >= steps)
        env.resume(~rest)
        env.suspend(rest)
        step = env.step(actions[taken.clamp(max=steps - 1), torch.arange(rows)])
        for row in torch.nonzero(~rest).flatten().tolist():
            expected = straight[int(taken[row])]
            assert torch.equal(step.reward[row], expected.reward[row])
            assert all(torch.equal(values[row], expected.obs[group][row]) for group, values in step.obs.items())
        taken += ~rest
    env.close()


def test_what_keeps_a_task_from_having_identity_is_said_and_evaluate_refuses_it() -> None:
    lag = {"overrides": {"episode_length_s": 0.5, "observations.actor.terms.cart_pos.delay_max_lag": 2}}
    delayed = _cartpole(2, autoreset="disabled", more=lag)
    assert delayed.fidelity == "restore"
    assert not delayed.reseeds
    with pytest.raises(ConfigError, match="a random delay of actor/cart_pos"):
        evaluated(delayed, episodes=2)
    sample = evaluated(_cartpole(2, autoreset="disabled", more=lag), episodes=3, batching="fast")
    assert not sample.seeded
    assert [row.length for row in sample.episodes] == [10, 10, 10]


def test_an_unknown_task_is_refused_with_the_names_of_those_there_are() -> None:
    with pytest.raises(EnvError, match="Mjlab-Cartpole-Balance"):
        _cartpole(1, more={"task": "Mjlab-Cartpoles"})


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
