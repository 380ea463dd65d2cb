"""``cartpole`` and ``cartpole-discrete``: what a perfect run scores, how a random one ends."""

from __future__ import annotations

import math

import pytest
import torch

from headrace.envs.batch_env import BatchEnv
from headrace.envs.registry import make


def feedback(obs: torch.Tensor) -> torch.Tensor:
    """A hand-tuned linear state feedback, (n, 4) → force (n, 1) in [-1, 1]."""
    position, angle, velocity, spin = obs.unbind(dim=1)
    force = 0.15 * position + 5.0 * angle + 0.4 * velocity + 1.2 * spin
    return force.clamp(-1.0, 1.0)[:, None]


def run_episodes(env: BatchEnv, policy, count: int) -> list[tuple[float, int, bool]]:
    """Return, length and success of the first ``count`` episodes to end."""
    obs, _ = env.reset()
    done: list[tuple[float, int, bool]] = []
    while len(done) < count:
        obs, _, _, _, info = env.step(policy(obs["policy"]))
        if "ends" in info:
            ends = info["ends"]
            done += zip(ends.returns.tolist(), ends.lengths.tolist(), ends.success.tolist(), strict=True)
    return done[:count]


def test_a_perfect_run_scores_about_300() -> None:
    episodes = run_episodes(make("cartpole", 128, seed=3), feedback, 128)
    returns, lengths, success = zip(*episodes, strict=True)
    assert set(lengths) == {300}
    assert all(success)
    assert 290.0 < sum(returns) / len(returns) <= 300.0
    assert min(returns) > 270.0
    assert max(returns) <= 300.0


def test_random_actions_let_the_pole_fall_and_score_low() -> None:
    generator = torch.Generator().manual_seed(0)
    episodes = run_episodes(
        make("cartpole", 64, seed=1), lambda obs: torch.rand((64, 1), generator=generator) * 2 - 1, 256
    )
    returns, lengths, success = zip(*episodes, strict=True)
    assert not any(success)
    assert 10 < sum(lengths) / len(lengths) < 100
    assert sum(returns) / len(returns) < 100.0


def test_no_actions_at_all_do_not_balance() -> None:
    episodes = run_episodes(make("cartpole", 64, seed=1), lambda obs: torch.zeros(64, 1), 64)
    assert not any(success for _, _, success in episodes)


def test_starts_differ_between_episodes_and_stay_within_the_settings() -> None:
    env = make("cartpole", 512, seed=9, overrides={"start_angle": 0.1})
    obs, _ = env.reset()
    start = obs["policy"]
    for column, bound in enumerate((0.5, 0.1, 0.25, 0.25)):
        assert 0.95 * bound < float(start[:, column].abs().max()) <= bound
    assert len(start.unique(dim=0)) == 512


def test_reward_is_one_less_lean_and_stray() -> None:
    env = make("cartpole", 4, seed=2)
    env.reset()
    step = env.step(torch.zeros(4, 1))
    position, angle = step.obs["policy"][:, 0].double(), step.obs["policy"][:, 1].double()
    # the observation is rounded to float32, hence the tolerance of a few of its ulps
    torch.testing.assert_close(step.reward.double(), 1.0 - angle**2 - 0.02 * position**2, rtol=0.0, atol=4 * 2.0**-24)


def test_discrete_actions_are_full_force_left_and_right() -> None:
    choices = make("cartpole-discrete", 2, seed=5)
    forces = make("cartpole", 2, seed=5)
    choices.reset()
    forces.reset()
    assert choices.single_action_space.n == 2
    for _ in range(10):
        a = choices.step(torch.tensor([0, 1]))
        b = forces.step(torch.tensor([[-1.0], [1.0]]))
        assert torch.equal(a.obs["policy"], b.obs["policy"])
        assert torch.equal(a.reward, b.reward)
    assert float(a.obs["policy"][0, 2]) < 0 < float(a.obs["policy"][1, 2])


def test_a_switching_policy_balances_the_discrete_form() -> None:
    episodes = run_episodes(make("cartpole-discrete", 32, seed=3), lambda obs: (feedback(obs)[:, 0] > 0).long(), 32)
    returns, _, success = zip(*episodes, strict=True)
    assert all(success)
    assert sum(returns) / len(returns) > 285.0


def test_random_choices_fall() -> None:
    generator = torch.Generator().manual_seed(0)
    episodes = run_episodes(
        make("cartpole-discrete", 64, seed=1), lambda obs: torch.randint(0, 2, (64,), generator=generator), 128
    )
    assert not any(success for _, _, success in episodes)


@pytest.mark.parametrize("side", [-1.0, 1.0])
def test_leaving_the_rail_ends_the_episode(side: float) -> None:
    env = make("cartpole", 1, seed=0, autoreset="disabled", overrides={"max_angle": 100.0})
    env.reset()
    for _ in range(300):
        step = env.step(torch.tensor([[side]]))
        if bool(step.terminated[0]):
            break
    assert bool(step.terminated[0])
    assert math.copysign(1.0, float(step.obs["policy"][0, 0])) == side
    assert abs(float(step.obs["policy"][0, 0])) > 2.4
