"""Goals and rewards decided when a transition is drawn, compared with SB3's ``HerReplayBuffer``."""

from __future__ import annotations

from collections import Counter

import gymnasium
import numpy as np
import pytest
import torch
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.vec_env import DummyVecEnv

from headrace.errors import ConfigError, ShapeError
from headrace.replay import ArraySpec, Mixture, PrioritizedSampler, Relabeled, ReplayBuffer, SliceSampler
from headrace.types import Step

ENVS, LENGTH, STEPS = 3, 40, 100
GOAL = ArraySpec((2,), torch.float32)
SPACES = {"achieved_goal": GOAL, "desired_goal": GOAL, "observation": ArraySpec((5,), torch.float32)}


class GoalEnv(gymnasium.Env):
    """Only the spaces and the reward: what ``HerReplayBuffer`` asks of an environment."""

    observation_space = gymnasium.spaces.Dict(
        {name: gymnasium.spaces.Box(-9, 9, spec.shape, np.float32) for name, spec in SPACES.items()}
    )
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def compute_reward(self, achieved, desired, _info):
        return reward_of(torch.from_numpy(achieved), torch.from_numpy(desired)).numpy()


def reward_of(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
    return -(achieved - desired).abs().sum(-1)


def reward(batch) -> torch.Tensor:
    return reward_of(batch["next", "observation", "achieved_goal"], batch["observation", "desired_goal"])


def stream(seed: int = 0):
    """Steps of episodes of different lengths, as both stores take them; the last episodes are whole."""
    rng = np.random.default_rng(seed)

    def draw(goal=None):
        obs = {name: rng.standard_normal((ENVS, *spec.shape)).astype(np.float32) for name, spec in SPACES.items()}
        if goal is not None:
            obs["desired_goal"] = goal.copy()
        return obs

    obs = draw()
    for t in range(STEPS):
        following = draw(obs["desired_goal"])
        done = rng.random(ENVS) < 0.15 if t < STEPS - 1 else np.ones(ENVS, bool)
        timeout = done & (rng.random(ENVS) < 0.5)
        action = rng.standard_normal((ENVS, 1)).astype(np.float32)
        yield obs, following, action, rng.standard_normal(ENVS).astype(np.float32), done, timeout
        first = draw()
        # SB3 goes on with the first observation of the next episode where one ended
        obs = {name: np.where(done[:, None], first[name], following[name]) for name in following}


def stores(**settings) -> tuple[ReplayBuffer, HerReplayBuffer]:
    ours = ReplayBuffer(LENGTH * ENVS, ENVS, SPACES, ArraySpec((1,), torch.float32), autoreset="disabled", **settings)
    env = DummyVecEnv([GoalEnv for _ in range(ENVS)])
    theirs = HerReplayBuffer(
        LENGTH * ENVS, GoalEnv.observation_space, GoalEnv.action_space, env, device="cpu", n_envs=ENVS
    )
    for obs, following, action, rewards, done, timeout in stream():
        infos = [{"TimeLimit.truncated": bool(late)} for late in timeout]
        theirs.add(obs, following, action, rewards, done, infos)
        tensors = [{name: torch.from_numpy(v.copy()) for name, v in part.items()} for part in (obs, following)]
        flags = torch.from_numpy(done & ~timeout), torch.from_numpy(timeout)
        ours.extend(tensors[0], torch.from_numpy(action), Step(tensors[1], torch.from_numpy(rewards), *flags, {}))
    return ours, theirs


def places(index: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Where SB3 has these transitions: slots of its ring, and environments."""
    positions, envs = np.divmod(index.numpy(), ENVS)
    return positions % LENGTH, envs


def test_final_goals_and_rewards_are_those_of_sb3() -> None:
    ours, theirs = stores()
    theirs.goal_selection_strategy = theirs.goal_selection_strategy.__class__.FINAL
    batch = Relabeled(ours, reward, goals="final", share=1.0).sample(256)
    slots, envs = places(batch["index"])
    whole = theirs.ep_length[slots, envs] > 0  # SB3 leaves out episodes that were overwritten in part
    assert whole.sum() > 200
    expected = theirs._get_virtual_samples(slots[whole], envs[whole])
    rows = batch[torch.from_numpy(whole)]
    for name in SPACES:
        assert torch.equal(rows["observation", name], expected.observations[name]), name
        assert torch.equal(rows["next", "observation", name], expected.next_observations[name]), name
    assert torch.equal(rows["next", "reward"], expected.rewards)
    assert torch.equal(rows["next", "terminated"].float(), expected.dones)
    assert torch.equal(rows["action"], expected.actions)


@pytest.mark.parametrize("goals", ["future", "episode"])
def test_goals_are_drawn_from_the_ones_sb3_draws_from_and_equally_often(goals: str, monkeypatch) -> None:
    ours, theirs = stores()
    theirs.goal_selection_strategy = getattr(type(theirs.goal_selection_strategy), goals.upper())
    view = Relabeled(ours, reward, goals=goals, share=1.0)
    possible: dict[int, set[bytes]] = {}
    bounds: list[tuple[np.ndarray, np.ndarray]] = []

    def randint(low, high):
        low, high = np.broadcast_arrays(low, high)
        bounds.append((low, high))
        return low

    monkeypatch.setattr(np.random, "randint", randint)
    seen: Counter[tuple[int, bytes]] = Counter()
    for _ in range(60):
        batch = view.sample(128)
        for index, goal in zip(batch["index"].tolist(), batch["observation", "desired_goal"], strict=True):
            seen[index, goal.numpy().tobytes()] += 1
        assert torch.equal(batch["observation", "desired_goal"], batch["next", "observation", "desired_goal"])
        assert torch.equal(batch["next", "reward"][:, 0], reward(batch))
    found: dict[int, Counter[bytes]] = {}
    for (index, goal), count in seen.items():
        found.setdefault(index, Counter())[goal] = count
    for index, goals_seen in found.items():
        slots, envs = places(torch.tensor([index]))
        length = int(theirs.ep_length[slots, envs][0])
        if length == 0:
            continue
        theirs._sample_goals(slots, envs)
        low, high = (int(part[0]) for part in bounds[-1])
        start = int(theirs.ep_start[slots, envs][0])
        ring = [(start + k) % LENGTH for k in range(low, high)]
        possible[index] = {theirs.next_observations["achieved_goal"][slot, envs[0]].tobytes() for slot in ring}
        assert goals_seen.keys() <= possible[index]
    # about 80 draws of each transition: each goal of a transition expects its share, by a chi-squared over all of them
    total = [
        (found[index].get(goal, 0), found[index].total() / len(ones))
        for index, ones in possible.items()
        for goal in ones
        if len(ones) > 1
    ]
    freedom = sum(len(ones) - 1 for ones in possible.values() if len(ones) > 1)
    statistic = sum((count - mean) ** 2 / mean for count, mean in total)
    assert freedom > 100
    assert abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5  # five standard deviations


def test_the_first_share_of_rows_is_relabeled_and_the_rest_is_as_stored() -> None:
    ours, _ = stores()
    view = Relabeled(ours, reward, goals="future", share=0.8)
    batch = view.sample(50)
    stored = ours.get(batch["index"])
    for key in stored.keys(include_nested=True, leaves_only=True):
        assert torch.equal(batch[key][40:], stored[key][40:]), key
        if key[-1] not in ("desired_goal", "reward"):
            assert torch.equal(batch[key], stored[key]), key
    assert (batch["observation", "desired_goal"] != stored["observation", "desired_goal"])[:40].any(1).all()


@pytest.mark.parametrize("goals", [None, "final"])
def test_n_step_rewards_are_sums_of_single_ones(goals: str | None) -> None:
    ours, _ = stores(n_step=3, gamma=0.9)
    view = Relabeled(ours, reward, goals=goals, share=1.0)
    batch = view.sample(64)
    assert len(batch["steps_to_next_obs"].unique()) == 3
    single = ours.with_sampler(PrioritizedSampler(), "single")
    for row in range(64):
        total, goal = 0.0, batch["observation", "desired_goal"][row]
        for k in range(int(batch["steps_to_next_obs"][row])):
            step = single.get(batch["index"][row : row + 1] + k * ENVS)
            total += 0.9**k * float(reward_of(step["next", "observation", "achieved_goal"][0], goal))
        assert float(batch["next", "reward"][row]) == pytest.approx(total, rel=1e-6)  # float32 of a float64 sum


def test_a_running_trajectory_reaches_to_its_newest_transition() -> None:
    buffer = ReplayBuffer(30, 1, SPACES, ArraySpec((1,), torch.float32))
    flag = torch.zeros(1, dtype=torch.bool)
    for t in range(20):
        obs, following = (
            {name: torch.full((1, *spec.shape), float(t + k)) for name, spec in SPACES.items()} for k in (0, 1)
        )
        buffer.extend(obs, torch.zeros(1, 1), Step(following, torch.zeros(1), flag, flag, {}))
    batch = Relabeled(buffer, reward, goals="final", share=1.0).sample(8)
    assert batch["observation", "desired_goal"].unique().tolist() == [20.0]
    batch = Relabeled(buffer, reward, goals="future", share=1.0).sample(64)
    assert (batch["observation", "desired_goal"][:, 0] > batch["index"]).all()


def test_draws_are_functions_of_seed_and_number_and_mix_with_other_parts() -> None:
    first, second = (Relabeled(stores(seed=5)[0], reward, goals="future") for _ in range(2))
    for _ in range(3):
        one, other = first.sample(32), second.sample(32)
        assert torch.equal(one["observation", "desired_goal"], other["observation", "desired_goal"])
    assert Mixture([first, second]).sample(10).batch_size == (10,)


def test_what_cannot_be_relabeled_is_refused() -> None:
    ours, _ = stores()
    with pytest.raises(ConfigError, match="without a stack, got"):
        Relabeled(ours, reward, goals="final", achieved="position")
    with pytest.raises(ConfigError, match="one shape and dtype"):
        Relabeled(ours, reward, goals="final", achieved="observation")
    with pytest.raises(ConfigError, match="goals: expected one of"):
        Relabeled(ours, reward, goals="last")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="share"):
        Relabeled(ours, reward, goals="final", share=1.5)
    with pytest.raises(ShapeError, match=r"reward: expected \(25,\)"):
        Relabeled(ours, lambda batch: torch.zeros(3)).sample(25)
    slices = ours.with_sampler(SliceSampler(2), "slices")
    with pytest.raises(ConfigError, match="single transitions"):
        Relabeled(slices, reward).sample(4)
