"""SB3's own algorithms on our replay buffer: a few updates here, whole trainings in the slow tier."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import DQN, SAC
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack

from headrace.envs.registry import make
from headrace.errors import ConfigError
from headrace.libraries.learner import LearnerEnv
from headrace.libraries.sb3._learner import Sb3Env
from headrace.libraries.sb3._replay import FrameReplayBuffer
from headrace.types import StackSpec

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Corridor(gymnasium.Env):
    """A dot to push to the right end of a 10-pixel corridor; every picture differs, time runs out after 12 steps."""

    observation_space = spaces.Box(0, 255, (1, 36, 36), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.clock = int(self.np_random.integers(2, 5)), 0
        return self._picture(), {}

    def step(self, action):
        self.at = max(self.at + (1 if action == 1 else -1), 0)
        self.clock += 1
        terminated = self.at >= 8
        return self._picture(), 1.0 if terminated else -0.05, terminated, not terminated and self.clock >= 12, {}

    def _picture(self):
        picture = np.zeros((1, 36, 36), np.uint8)
        picture[0, 4:8, 4 * self.at : 4 * self.at + 4] = 255
        picture[0, 0, self.clock] = 99
        return picture


class Seek(gymnasium.Env):
    """A point that should go to 0; never terminates, time runs out after 20 steps."""

    observation_space = spaces.Box(-2, 2, (1,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.clock = float(self.np_random.uniform(-1, 1)), 0
        return np.array([self.at], np.float32), {}

    def step(self, action):
        self.at = float(np.clip(self.at + 0.5 * action[0], -2, 2))
        self.clock += 1
        return np.array([self.at], np.float32), -abs(self.at), False, self.clock >= 20, {}


def both_buffers(envs, steps, make_ours):
    """Feed SB3's buffer and ours with the same steps, as SB3's algorithms do."""
    theirs = ReplayBuffer(steps * envs.num_envs, envs.observation_space, envs.action_space, "cpu", n_envs=envs.num_envs)
    ours = make_ours(steps * envs.num_envs)
    rng = np.random.default_rng(0)
    obs = envs.reset()
    for _ in range(steps):
        action = np.array([envs.action_space.sample() for _ in range(envs.num_envs)])
        action = rng.integers(0, 2, envs.num_envs) if isinstance(envs.action_space, spaces.Discrete) else action
        following, reward, done, infos = envs.step(action)
        true = following.copy()
        for e, info in enumerate(infos):
            if done[e]:
                true[e] = info["terminal_observation"]
        for buffer in (theirs, ours):
            buffer.add(obs, true, action, reward, done, infos)
        obs = following
    return theirs, ours


def test_every_transition_equals_the_one_in_sb3s_own_buffer():
    envs = VecFrameStack(DummyVecEnv([Corridor] * 3), 4, channels_order="first")
    stack = StackSpec(frames=4, dim=0, reset="zero")

    def make(size):
        return FrameReplayBuffer(size, envs.observation_space, envs.action_space, "cpu", n_envs=3, stack=stack)

    theirs, ours = both_buffers(envs, 100, make)
    batch = ours.frames.at(torch.arange(300))

    def order(name):
        return torch.from_numpy(getattr(theirs, name)).transpose(0, 1).flatten(0, 1)

    assert torch.equal(batch["observation"], order("observations"))
    assert torch.equal(batch["next", "observation"], order("next_observations"))
    assert torch.equal(batch["action"], order("actions"))
    assert torch.equal(batch["next", "reward"][:, 0], order("rewards"))
    dones, timeouts = order("dones"), order("timeouts")
    assert timeouts.any()
    assert (dones * (1 - timeouts)).any()
    assert torch.equal(batch["next", "terminated"][:, 0].float(), dones * (1 - timeouts))
    assert ours.frames.nbytes < theirs.observations.nbytes * 0.7


def test_samples_have_sb3s_shapes_and_timeouts_are_not_terminal():
    envs = DummyVecEnv([Seek] * 2)
    _, ours = both_buffers(
        envs, 50, lambda size: FrameReplayBuffer(size, envs.observation_space, envs.action_space, "cpu", 2)
    )
    sample = ours.sample(64)
    assert sample.observations.shape == (64, 1)
    assert sample.actions.shape == (64, 1)
    assert sample.dones.shape == sample.rewards.shape == (64, 1)
    assert sample.dones.sum() == 0
    assert sample.discounts is None
    assert ours.size() == 50
    ours.reset()
    assert ours.size() == 0
    assert len(ours.frames) == 0


def test_dict_observations_come_as_dicts():
    space = spaces.Dict({"a": spaces.Box(-1, 1, (2,), np.float32), "b": spaces.Box(0, 255, (1, 4, 4), np.uint8)})
    buffer = FrameReplayBuffer(20, space, spaces.Discrete(3), "cpu", n_envs=2, n_steps=2, gamma=0.5)
    obs = {"a": np.zeros((2, 2), np.float32), "b": np.zeros((2, 1, 4, 4), np.uint8)}
    for _ in range(5):
        buffer.add(obs, obs, np.zeros((2, 1), np.int64), np.ones(2), np.zeros(2, bool), [{}, {}])
    sample = buffer.sample(8)
    assert isinstance(sample.observations, dict)
    assert sample.next_observations["b"].shape == (8, 1, 4, 4)
    assert set(sample.discounts.flatten().tolist()) <= {0.25, 0.5}


def test_an_environment_takes_the_seed_it_is_given_at_the_next_reset():
    core = LearnerEnv(make("cartpole", num_envs=3, seed=5))
    env = Sb3Env(core)
    first, again = env.reset(), None
    env.seed(11)
    other = env.reset()
    assert not np.array_equal(first, other)
    assert not np.array_equal(env.reset(), other), "the seed counts once: the next episodes follow"
    env.seed(11)
    again = env.reset()
    assert np.array_equal(again, other)
    core.env.close()


def test_the_memory_saving_switches_of_sb3_are_refused():
    with pytest.raises(ConfigError, match="optimize_memory_usage"):
        FrameReplayBuffer(10, Seek.observation_space, Seek.action_space, optimize_memory_usage=True)


def test_the_settings_of_hindsight_are_refused_with_the_reason():
    with pytest.raises(ConfigError, match="n_sampled_goal; new goals for stored episodes need SB3's HerReplayBuffer"):
        FrameReplayBuffer(10, Seek.observation_space, Seek.action_space, n_sampled_goal=4)


@pytest.mark.parametrize("n_steps", [1, 3])
def test_a_model_saves_its_replay_buffer_and_goes_on_with_it(tmp_path, n_steps):
    envs = DummyVecEnv([Seek] * 2)
    settings = {"replay_buffer_class": FrameReplayBuffer, "buffer_size": 200, "device": "cpu", "seed": 0}
    settings["replay_buffer_kwargs"] = {"n_steps": n_steps, "gamma": 0.9}
    model = SAC("MlpPolicy", envs, learning_starts=40, batch_size=8, policy_kwargs={"net_arch": [8]}, **settings)
    model.learn(80)
    model.save_replay_buffer(tmp_path / "buffer.pkl")
    other = SAC("MlpPolicy", envs, learning_starts=0, batch_size=8, policy_kwargs={"net_arch": [8]}, **settings)
    other.load_replay_buffer(tmp_path / "buffer.pkl")
    before, after = model.replay_buffer, other.replay_buffer
    assert isinstance(after, FrameReplayBuffer)
    assert after.size() == before.size() == 40
    assert (after.frames.get(after.frames.indices()) == before.frames.get(before.frames.indices())).all()
    ours, theirs = after.sample(16), before.sample(16)
    assert torch.equal(ours.observations, theirs.observations)
    assert (ours.discounts is None) == (n_steps == 1)
    other.learn(20, reset_num_timesteps=False)
    assert after.size() == 50


@pytest.mark.parametrize(("steps", "bar"), [(280, -1.0), pytest.param(3000, 0.7, marks=pytest.mark.slow)])
def test_dqn_learns_from_stacked_pictures(steps, bar):
    envs = VecFrameStack(DummyVecEnv([Corridor] * 4), 2, channels_order="first")
    model = DQN(
        "CnnPolicy", envs, replay_buffer_class=FrameReplayBuffer, buffer_size=4000, learning_starts=200, batch_size=32,
        replay_buffer_kwargs={"stack": StackSpec(frames=2, dim=0, reset="zero")}, train_freq=4, gradient_steps=2,
        target_update_interval=200, exploration_fraction=0.5, learning_rate=5e-4, seed=0, device="cpu",
        policy_kwargs={"normalize_images": True},
    )  # fmt: skip
    model.learn(steps)
    mean, _ = evaluate_policy(model, envs, n_eval_episodes=10)
    # right all the way is 1 minus at most 5 steps of 0.05; a random walk runs out of time at −0.6 more often than not
    assert mean > bar


@pytest.mark.parametrize(("steps", "bar"), [(240, -60.0), pytest.param(2500, -3.0, marks=pytest.mark.slow)])
def test_sac_learns_with_time_outs(steps, bar):
    envs = DummyVecEnv([Seek] * 2)
    model = SAC(
        "MlpPolicy", envs, replay_buffer_class=FrameReplayBuffer, buffer_size=4000, learning_starts=200, batch_size=64,
        learning_rate=3e-3, seed=0, device="cpu", policy_kwargs={"net_arch": [32, 32]}, train_freq=2,
    )  # fmt: skip
    model.learn(steps)
    mean, _ = evaluate_policy(model, envs, n_eval_episodes=20)
    # staying put costs about 10, walking at random more; going straight to 0 costs less than 1.5
    assert mean > bar
