"""``pusher-goal``: random goals, an end on success, success in the record of ends."""

from __future__ import annotations

import pytest
import torch

from headrace.envs.batch_env import BatchEnv
from headrace.envs.registry import make


def places(env: BatchEnv) -> tuple[torch.Tensor, torch.Tensor]:
    """Object and goal on the table, float64 (N, 2) each."""
    policy = env.task.observe(env.rows())["policy"]
    return policy[:, 17:19], policy[:, 20:22]


def put_object(env: BatchEnv, i: int, offset: tuple[float, float]) -> None:
    """Move the object of environment ``i`` to the goal plus ``offset`` (in the joints' order), and stop it."""
    qpos, qvel = env.sim.field("qpos"), env.sim.field("qvel")
    qpos[i, -4:-2] = qpos[i, -2:] + torch.tensor(offset, dtype=torch.float64)
    qvel[i, -4:] = 0.0


def test_goals_are_random_and_no_episode_begins_near_its_goal() -> None:
    env = make("pusher-goal", 4096, seed=0)
    env.reset()
    objects, goals = places(env)
    assert len(goals.unique(dim=0)) == 4096
    spread = goals.amax(dim=0) - goals.amin(dim=0)
    assert bool(((spread > 0.29) & (spread <= 0.3)).all())
    distance = (objects - goals).norm(dim=1)
    # 0.17 in the coordinates of the joints; the model's own frames add some ulps
    assert float(distance.min()) > 0.17 - 1e-12
    assert float(distance.min()) < 0.18


def test_goals_and_starts_belong_to_the_episode_not_to_the_slot() -> None:
    one, many = make("pusher-goal", 1, seed=6), make("pusher-goal", 8, seed=6)
    many.reset()
    one.reset(options={"episode_ids": torch.tensor([5])})
    for a, b in zip(places(one), places(many), strict=True):
        assert torch.equal(a[0], b[5])


@pytest.mark.parametrize(("offset", "succeeds"), [((0.0, 0.079), True), ((0.079, 0.0), True), ((0.0, 0.081), False)])
def test_an_episode_ends_in_success_exactly_when_the_object_is_within_8_cm(offset, succeeds) -> None:
    env = make("pusher-goal", 3, seed=1)
    env.reset()
    before = env.episode_ids
    put_object(env, 1, offset)
    step = env.step(torch.zeros(3, 7))
    assert step.terminated.tolist() == [False, succeeds, False]
    assert not bool(step.truncated.any())
    if not succeeds:
        assert "ends" not in step.info
        return
    ends = step.info["ends"]
    assert ends.env_ids.tolist() == [1]
    assert ends.episode_ids.tolist() == [int(before[1])]
    assert ends.success.tolist() == [True]
    assert ends.lengths.tolist() == [1]
    assert env.episode_ids.tolist() == [0, 4, 2]


def test_a_resting_arm_never_succeeds_and_episodes_are_cut_at_100_steps() -> None:
    env = make("pusher-goal", 16, seed=2)
    env.reset()
    for at in range(100):
        step = env.step(torch.zeros(16, 7))
        assert bool(step.truncated.any()) == (at == 99)
    assert bool(step.truncated.all())
    assert not bool(step.info["ends"].success.any())
    assert set(step.info["ends"].lengths.tolist()) == {100}


def test_the_success_radius_is_a_setting() -> None:
    env = make("pusher-goal", 1, seed=1, overrides={"success_radius": 0.05})
    env.reset()
    put_object(env, 0, (0.0, 0.06))
    assert not bool(env.step(torch.zeros(1, 7)).terminated[0])
    put_object(env, 0, (0.0, 0.04))
    assert bool(env.step(torch.zeros(1, 7)).terminated[0])
