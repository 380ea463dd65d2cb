"""The reference learner: it learns cart-pole, its parts are exact, and what it saves is what it loads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import headrace
from headrace import errors
from headrace.envs.batch_env import BatchEnv
from headrace.learning import ppo
from headrace.learning.actor_critic import (
    ImageNormalizer,
    NetworkCfg,
    Normalizer,
    Policy,
    load_actor_critic,
    save_actor_critic,
)
from headrace.learning.ppo import PPO, PPOCfg


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def evaluate(policy: Policy, env: BatchEnv) -> float:
    """Mean return of the first episode of every environment, acting without noise."""
    returns = torch.full((env.num_envs,), torch.nan, dtype=torch.float64)
    obs, _ = env.reset(seed=100)
    state, reset = policy.initial_state(env.num_envs), None
    while returns.isnan().any():
        action, state = policy.act(obs, state, reset)
        step = env.step(action)
        obs, reset = step.obs, step.terminated | step.truncated
        if "ends" in step.info:
            ends = step.info["ends"]
            first = returns[ends.env_ids].isnan()
            returns[ends.env_ids[first]] = ends.returns[first]
    return float(returns.mean())


@pytest.mark.parametrize("memory", ["none", "gru"])
def test_cartpole_improves_within_seconds(memory: str) -> None:
    """Twelve rollouts are enough to stay up clearly longer; being solved is for the slow tier."""
    short = {"episode_length": 100}
    learner = PPO(
        headrace.make("cartpole", num_envs=32, seed=1, threads=1, overrides=short),
        PPOCfg(memory=memory, memory_size=32, hidden=(32,)),
    )
    judge = headrace.make("cartpole", num_envs=16, threads=1, overrides=short)
    before = evaluate(learner.policy, judge)
    for report in learner.learn(12):
        assert report.kl >= 0
    after = evaluate(learner.policy, judge)
    assert learner.steps == report.steps == 32 * 32 * 12
    assert after > before + 15, f"{before:.0f} → {after:.0f}"


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["none", "gru"])
def test_cartpole_is_solved(memory: str) -> None:
    learner = PPO(headrace.make("cartpole", num_envs=64, seed=0), PPOCfg(memory=memory))
    for _ in learner.learn(80):
        pass
    assert evaluate(learner.policy, headrace.make("cartpole", num_envs=32)) > 285


@pytest.mark.slow
def test_cartpole_is_solved_from_pictures() -> None:
    gray = {"color": "gray"}
    cfg = PPOCfg(epochs=4, minibatches=8, max_learning_rate=1e-3)
    learner = PPO(headrace.make("cartpole-camera", num_envs=64, seed=0, overrides=gray), cfg)
    for _ in learner.learn(100):
        pass
    assert evaluate(learner.policy, headrace.make("cartpole-camera", num_envs=16, overrides=gray)) > 285


def test_a_policy_on_pictures_runs_and_learns_a_step() -> None:
    env = headrace.make("cartpole-camera", num_envs=4, threads=1)
    learner = PPO(env, PPOCfg(steps=4, epochs=1, minibatches=2))
    before = [p.detach().clone() for p in learner.policy.parameters()]
    (report,) = learner.learn(1)
    assert report.steps == 16
    assert all(not torch.equal(a, b) for a, b in zip(before, learner.policy.parameters(), strict=True))


def test_features_of_pictures_learn_what_the_critic_is_told() -> None:
    """``guess`` is there for pictures beside a state, and its error falls."""
    env = headrace.make("cartpole-camera", num_envs=16, threads=1, overrides={"color": "gray", "pixels": 32})
    learner = PPO(env, PPOCfg(steps=16, minibatches=2, max_learning_rate=1e-3))
    errors_: list[float] = []
    for _ in learner.learn(8):
        rollout = learner.buffer.rollout()
        obs = {name: group.flatten(0, 1) for name, group in rollout.obs.items()}
        with torch.no_grad():
            seen, told, _ = learner.policy.features(obs, learner.policy.initial_state(256))
            errors_.append(float((learner.policy.guess(seen) - told).square().mean()))
    assert errors_[-1] < 0.5 * errors_[0], errors_
    assert PPO(headrace.make("cartpole", num_envs=4, threads=1)).policy.guess is None


@pytest.mark.parametrize("memory", ["none", "gru"])
def test_stacks_stored_as_frames_train_the_same_policy_bit_for_bit(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a buffer of whole stacks, over ends, a reset in between and suspension; frames take a quarter of it."""
    picture = {"frame_stack": 4, "pixels": 24, "episode_length": 7}

    def train() -> PPO:
        env = headrace.make("cartpole-camera", num_envs=6, seed=3, threads=1, overrides=picture)
        learner = PPO(env, PPOCfg(steps=48, epochs=2, minibatches=3, memory=memory, actor_groups=("policy",)))
        env.suspend([1, 4])
        list(learner.learn(1))
        env.resume([4])
        learner._obs = learner._read.of(env.reset(options={"reset_mask": torch.arange(6) == 2})[0])
        list(learner.learn(1))
        return learner

    frames = train()
    monkeypatch.setattr(ppo, "_stacks_of", lambda _: {})
    stacks = train()
    assert torch.equal(frames.buffer.rollout().obs["policy"], stacks.buffer.rollout().obs["policy"])
    for name, weights in stacks.policy.state_dict().items():
        assert torch.equal(frames.policy.state_dict()[name], weights), name
    pixels = 6 * 49 * 24 * 24 * 3
    assert pixels < frames.buffer.nbytes < 1.5 * pixels
    assert stacks.buffer.nbytes > 4 * pixels


@pytest.mark.parametrize("memory", ["none", "gru"])
def test_what_is_loaded_acts_as_what_was_saved(memory: str, tmp_path: Path) -> None:
    env = headrace.make("cartpole", num_envs=4, threads=1)
    learner = PPO(env, PPOCfg(memory=memory, steps=8, epochs=1))
    for _ in learner.learn(2):
        pass
    save_actor_critic(learner.policy, tmp_path / "policy.pt", task="cartpole", overrides={"episode_length": 7})
    saved = load_actor_critic(tmp_path / "policy.pt")
    loaded = saved.policy
    assert (saved.task, saved.overrides) == ("cartpole", {"episode_length": 7})
    # the observation normalizer moved from where it began, and came along
    theirs, ours = loaded.encoder.encoders[0], learner.policy.encoder.encoders[0]
    assert isinstance(theirs, Normalizer)
    assert theirs.count > 60
    assert torch.equal(theirs.mean, ours.mean)
    obs, _ = env.reset()
    state = torch.randn_like(learner.policy.initial_state(4))
    for ours, theirs in zip(learner.policy.act(obs, state), loaded.act(obs, state), strict=True):
        assert torch.equal(ours, theirs)
    if memory == "none":
        assert torch.equal(saved.act(obs), learner.policy.act(obs, state)[0])
    else:
        with pytest.raises(errors.ConfigError, match="has a memory"):
            saved.act(obs)


def test_files_that_are_not_policies_are_refused_with_the_reason(tmp_path: Path) -> None:
    policy = Policy({"policy": (4,)}, [-1.0], [1.0], NetworkCfg())
    save_actor_critic(policy, tmp_path / "good.pt", task="cartpole")
    good = torch.load(tmp_path / "good.pt", weights_only=True)
    bad = {
        "expected a file written by save_actor_critic": {"weights": {}},
        "expected version 2 of the format, got 3": good | {"version": 3},
        "weights do not match the saved network sizes": good
        | {"network": good["network"] | {"low": [-1.0] * 2, "high": [1.0] * 2}},
    }
    for reason, content in bad.items():
        torch.save(content, tmp_path / "bad.pt")
        with pytest.raises(errors.DataError, match=reason):
            load_actor_critic(tmp_path / "bad.pt")
    (tmp_path / "bad.pt").write_text("words")
    with pytest.raises(errors.DataError, match="damaged, or not the expected kind of file"):
        load_actor_critic(tmp_path / "bad.pt")
    with pytest.raises(errors.ConfigError, match="no such file"):
        load_actor_critic(tmp_path / "absent.pt")
    with pytest.raises(errors.UnknownNameError, match="unknown shipped policy 'carpole'"):
        load_actor_critic("carpole")


def test_a_seed_decides_everything_and_leaves_torchs_own_random_numbers_alone() -> None:
    def run() -> list[torch.Tensor]:
        learner = PPO(headrace.make("cartpole", num_envs=4, seed=3, threads=1), PPOCfg(steps=8, epochs=2, seed=5))
        for _ in learner.learn(2):
            pass
        return list(learner.policy.parameters())

    torch.manual_seed(11)
    first = run()
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(11)))
    for one, other in zip(first, run(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("memory", ["none", "gru"])
def test_suspended_environments_are_not_learned_from(memory: str) -> None:
    env = headrace.make("cartpole", num_envs=4, threads=1)
    learner = PPO(env, PPOCfg(steps=8, epochs=1, minibatches=2, memory=memory))
    env.suspend([1, 2])
    (report,) = learner.learn(1)
    assert report.steps == 16
    assert all(p.isfinite().all() for p in learner.policy.parameters())
    env.suspend([0, 3])
    with pytest.raises(errors.LifecycleError, match="expected active environments"):
        list(learner.learn(1))


def test_memory_while_collecting_is_the_memory_while_learning() -> None:
    """Log-probabilities of the slice equal those of acting step by step, over ends and sleep, before any update."""
    env = headrace.make("cartpole", num_envs=6, seed=2, threads=1, overrides={"episode_length": 5})
    learner = PPO(env, PPOCfg(steps=16, memory="gru"))
    list(learner.learn(1))
    env.suspend([2])
    state, fresh = learner._state, learner._fresh
    learner.collect()
    rollout = learner.buffer.rollout()
    ended = rollout.terminated | rollout.truncated
    assert ended.any()
    resets = torch.cat((fresh[None], ended[:-1]))
    seen, _, after = learner.policy.features(rollout.obs, state, resets, rollout.active)
    log_prob = learner.policy.distribution(seen).log_prob(rollout.action).sum(-1)
    live = rollout.active
    # float32, the same products in other batches
    torch.testing.assert_close(log_prob[live], rollout.extras["log_prob"][live], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(after, learner._state, rtol=1e-4, atol=1e-5)


def test_normalizer_has_the_moments_of_all_it_has_seen() -> None:
    normalizer, parts = Normalizer(3), [torch.randn(n, 3) * 4 + 2 for n in (5, 1, 70)]
    for part in parts:
        normalizer.update(part)
    everything = torch.cat(parts)
    # it starts with the weight of 1e-4 rows of mean 0 and variance 1
    torch.testing.assert_close(normalizer.mean, everything.mean(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(normalizer.variance, everything.var(0, unbiased=False), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(normalizer.denormalize(normalizer(parts[0])), parts[0], rtol=1e-4, atol=1e-4)


def test_pictures_are_centered_and_their_channels_made_independent_and_equally_strong() -> None:
    torch.manual_seed(0)
    base, change = torch.rand(200, 6, 5, 1), 0.02 * torch.rand(200, 6, 5, 1)
    pictures = torch.cat((base, base + change), -1).movedim(-1, 1)  # two frames that hardly differ
    normalizer = ImageNormalizer(6, 5, 2)
    assert torch.equal(normalizer(pictures), pictures)
    normalizer.update(pictures)
    seen = normalizer(pictures)
    torch.testing.assert_close(seen.mean(0), torch.zeros(2, 6, 5), rtol=0, atol=1e-4)
    rows = seen.movedim(1, -1).flatten(0, -2)
    # the floor of one gray level takes a share of the variance of the difference, 1e-5 of 1.7e-5 + 1e-5
    covariance = rows.T @ rows / len(rows)
    assert covariance[0, 1].abs() < 1e-3
    assert covariance[1, 1] == pytest.approx(1, abs=1e-3)
    assert 0.5 < covariance[0, 0] < 0.8


def test_tasks_it_cannot_learn_are_refused() -> None:
    with pytest.raises(errors.ConfigError, match="expected a task with continuous actions"):
        PPO(headrace.make("cartpole-discrete", num_envs=4, threads=1))
    with pytest.raises(errors.ConfigError, match="num_envs >= 4 minibatches, got 2"):
        PPO(headrace.make("cartpole", num_envs=2, threads=1))
