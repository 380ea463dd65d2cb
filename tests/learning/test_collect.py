"""Collecting from a real environment, in full and compact form, and into a replay buffer."""

from __future__ import annotations

import pytest
import torch

from headrace.envs.recipe import EnvRecipe
from headrace.envs.registry import make
from headrace.errors import ConfigError, EnvError
from headrace.learning import collect
from headrace.learning.collecting import Collector
from headrace.replay import ReplayBuffer
from headrace.replay.forms import reconstruct_next

STEPS = 60


def policy(obs):
    """Pushes hard enough that cartpoles fall within the steps collected."""
    return torch.sign(obs["policy"][:, :1])


def collected(**settings):
    env = make("cartpole", num_envs=3, seed=1)
    env.reset(seed=4)
    if settings.pop("suspend", False):
        env.suspend([1])
    batch = collect(env, policy, STEPS, reset=False, **settings)
    env.close()
    return batch


def test_a_full_batch_has_true_next_observations():
    batch = collected()
    assert batch.shape == (3, STEPS)
    done = batch["next", "done"][..., 0]
    assert done.any()
    obs, following = batch["observation", "policy"], batch["next", "observation", "policy"]
    inside = ~done[:, :-1]
    assert torch.equal(following[:, :-1][inside], obs[:, 1:][inside])
    # at ends the next observation is the last of the old episode, not the first of the new one
    ends = done[:, :-1]
    assert (following[:, :-1][ends] != obs[:, 1:][ends]).any(-1).all()
    ids, counts = batch["collector", "traj_ids"], batch["step_count"][..., 0]
    assert torch.equal(ids[:, 1:] != ids[:, :-1], ends)
    assert (counts[:, 1:][ends] == 0).all()


def test_a_compact_batch_is_the_same_without_next_observations():
    full, compact = collected(), collected(compact=True)
    assert ("next", "observation") not in compact.keys(True)
    assert (compact == full.exclude(("next", "observation"))).all()
    back = reconstruct_next(compact)["next", "observation", "policy"]
    known = ~back.isnan().any(-1)
    done = full["next", "done"][..., 0]
    assert torch.equal(back[known], full["next", "observation", "policy"][known])
    expected = ~done
    expected[:, -1] = False
    assert torch.equal(known, expected)


def test_suspended_environments_are_marked():
    batch = collected(suspend=True)
    assert batch["active"].all(1).tolist() == [True, False, True]
    assert not batch["active"][1].any()


def test_a_replay_buffer_fed_with_the_same_steps_gives_the_same_transitions():
    env = make("cartpole", num_envs=3, seed=1)
    buffer = ReplayBuffer(3 * STEPS, 3, env.single_observation_space, env.single_action_space)
    obs, _ = env.reset(seed=4)
    for _ in range(STEPS):
        active = env.active
        action = policy(obs)
        step = env.step(action)
        buffer.extend(obs, action, step, active)
        obs = step.obs
    env.close()
    full, stored = collected().reshape(-1), buffer.get(buffer.indices())
    for key in (("observation", "policy"), "action", ("next", "observation", "policy"), "step_count",
                ("next", "reward"), ("next", "terminated"), ("next", "truncated"), ("next", "done")):  # fmt: skip
        assert torch.equal(stored[key], full[key]), key


def test_no_steps_are_refused():
    env = make("cartpole", num_envs=1)
    with pytest.raises(ConfigError, match="at least 1 step"):
        collect(env, policy, 0)
    env.close()


def test_workers_collect_what_one_process_collects():
    recipe = EnvRecipe("cartpole", num_envs=5, seed=3)
    env = recipe.make()
    expected = [collect(env, policy, 30), collect(env, policy, 20, reset=False, compact=True)]
    expected.append(collect(env, policy, 10, seed=9, delta=torch.float16))
    expected.append(collect(env, policy, 10))
    env.close()
    with Collector(recipe, policy, workers=2) as collector:
        found = [collector.collect(30), collector.collect(20, compact=True)]
        found.append(collector.collect(10, seed=9, delta=torch.float16))
        found.append(collector.collect(10, reset=True))
        buffer = ReplayBuffer(500, 5, recipe.make().single_observation_space, recipe.make().single_action_space)
        for ours, theirs in zip(found, expected, strict=True):
            assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
            for key in theirs.keys(True, True):
                assert torch.equal(ours[key], theirs[key]), key
            buffer.extend(ours)
        with pytest.raises(ConfigError, match="at least 1 step"):
            collector.collect(0)
        processes = collector._workers  # it closes itself at the death of one
        processes[1].kill()
        processes[1].join()
        with pytest.raises(EnvError, match="a worker process died"):
            collector.collect(1)
        assert not any(process.is_alive() for process in processes)
    assert len(buffer) == 5 * 70
    assert expected[0]["next", "done"].any()
    with pytest.raises(ConfigError, match="closed"):
        collector.collect(1)


def broken_policy(obs):
    """Fails in the second worker only: the first waits for its memory then."""
    if len(obs["policy"]) == 1:
        raise ValueError("no weights")
    return policy(obs)


def test_a_worker_that_fails_says_why_and_ends_the_others(capfd):
    recipe = EnvRecipe("cartpole", num_envs=3)
    with pytest.raises(EnvError, match="no weights"):
        collect(recipe, broken_policy, 3, workers=2)
    assert "Traceback" not in capfd.readouterr().err  # the one that was told to end says nothing
    with pytest.raises(ConfigError, match="cannot be pickled"):
        Collector(recipe, lambda obs: policy(obs), workers=2)
    env = recipe.make()
    with pytest.raises(ConfigError, match="pass a recipe"):
        collect(env, policy, 3, workers=2)
    with pytest.raises(ConfigError, match="workers: expected 1 to 3"):
        Collector(recipe, policy, workers=4)
    with pytest.raises(ConfigError, match="choose one"):
        collect(env, policy, 3, compact=True, delta=torch.float16)
    env.close()


def cart_policy(obs):
    """A force for Gymnasium's cart pole: its action is one number, 0 or 1."""
    return (obs["policy"][:, 0] > 0).long()


def test_workers_step_bridged_environments_themselves():
    recipe = EnvRecipe("gym:CartPole-v1", num_envs=3, executor="processes", workers=2)
    env = recipe.make(executor="inline", workers=None)
    expected = collect(env, cart_policy, 25)
    env.close()
    found = collect(recipe, cart_policy, 25, workers=2)
    for key in expected.keys(True, True):
        assert torch.equal(found[key], expected[key]), key
