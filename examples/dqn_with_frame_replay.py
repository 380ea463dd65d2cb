"""DQN of stable-baselines3 over our replay: every frame once, time-outs exact, n-step returns.

Cart-pole from four gray frames, stacked by SB3's own VecFrameStack; SB3's buffer would keep each frame eight times.
Ends with the mean return of 20 held-out episodes, acting greedily, 300 at most: 276.6, 221.9 and 272.2 for the seeds 0,
1 and 2, after 9 to 11 minutes on a core that other programs used, too. Needs: pip install 'headrace[sb3]'
"""

from __future__ import annotations

import argparse
import time

import gymnasium
import numpy as np
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecFrameStack
from torch import nn

import headrace
from headrace.libraries.sb3 import FrameReplayBuffer
from headrace.types import StackSpec

STACK = StackSpec(frames=4, dim=0, reset="zero")
GAMMA = 0.97


class CartpolePixels(gymnasium.Env[np.ndarray, np.int64]):
    """One environment of a headrace task as a plain Gymnasium environment: gray pictures, two choices."""

    observation_space = gymnasium.spaces.Box(0, 255, (1, 48, 48), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        picture = {"pixels": 48, "frame_stack": 1, "color": "gray", "layout": "channels_first"}
        self._env = headrace.make("cartpole-camera", 1, threads=1, overrides=picture, autoreset="disabled")

    def reset(self, *, seed: int | None = None, options: dict[str, object] | None = None):  # noqa: ARG002  # of Gymnasium
        super().reset(seed=seed)
        return self._env.reset(seed=seed)[0]["policy"][0].numpy(), {}

    def step(self, action: np.int64):
        step = self._env.step(torch.tensor([[2.0 * float(action) - 1.0]]))
        flags = bool(step.terminated[0]), bool(step.truncated[0])
        return step.obs["policy"][0].numpy(), float(step.reward[0]), *flags, {}


class Pictures(BaseFeaturesExtractor):
    """Convolutions over the newest frame and how it differs from earlier ones, each channel with unit variance."""

    def __init__(self, space: gymnasium.spaces.Box, examples: torch.Tensor) -> None:
        super().__init__(space, features_dim=128)
        seen = _channels(examples)
        self.register_buffer("mean", seen.mean(0))
        self.register_buffer("scale", 1 / (seen - seen.mean(0)).std((0, 2, 3))[:, None, None])
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 16, 8, 4), nn.ReLU(), nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(512, 128), nn.LayerNorm(128), nn.ReLU()),
        )

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return self.layers((_channels(observations) - self.mean) * self.scale)


def _channels(stacks: torch.Tensor) -> torch.Tensor:
    """Return the newest frame, and its small differences from the one before and the oldest, which show velocities."""
    newest = stacks[:, -1:]
    return torch.cat((newest, newest - stacks[:, -2:-1], newest - stacks[:, :1]), 1)


def make(num_envs: int, seed: int) -> VecEnv:
    """Return stacked pictures of several environments, whose first episodes are those of ``seed``."""
    env = VecFrameStack(DummyVecEnv([lambda: Monitor(CartpolePixels())] * num_envs), 4, channels_order="first")
    env.seed(seed)
    return env


def collect_examples(env: VecEnv, steps: int) -> torch.Tensor:
    """Return what random actions show, as the network will read it."""
    env.reset()
    seen = [env.step(np.array([env.action_space.sample() for _ in range(env.num_envs)]))[0] for _ in range(steps)]
    return torch.from_numpy(np.concatenate(seen[4:])).float() / 255


def main() -> None:
    """Train, judge, and compare the bytes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-steps", type=int, default=80_000, help="environment steps (default: 80,000)")
    parser.add_argument("--buffer", type=int, default=30_000, help="transitions kept (default: 30,000)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # physics and a small network: threads would fight for cores
    begun = time.perf_counter()

    env = make(8, arguments.seed)
    env.action_space.seed(arguments.seed)
    model = DQN(
        "CnnPolicy",
        env,
        learning_rate=lambda left: 1e-3 * left,  # falls to 0, so that the last policy is a settled one
        buffer_size=arguments.buffer,
        learning_starts=min(2_000, arguments.num_steps // 2),
        batch_size=32,
        gamma=GAMMA,
        train_freq=1,
        gradient_steps=4,
        target_update_interval=800,
        exploration_fraction=0.15,
        exploration_final_eps=0.05,
        replay_buffer_class=FrameReplayBuffer,
        replay_buffer_kwargs={"stack": STACK, "n_steps": 3, "gamma": GAMMA, "seed": arguments.seed},
        policy_kwargs={
            "features_extractor_class": Pictures,
            "features_extractor_kwargs": {"examples": collect_examples(env, 50)},
            "net_arch": [],
        },
        seed=arguments.seed,
        verbose=0,
    )
    model.learn(arguments.num_steps, log_interval=25)
    score, _ = evaluate_policy(model, make(4, seed=1_000_003), n_eval_episodes=20)
    print(f"return of 20 held-out episodes: {score:.1f} of 300, after {time.perf_counter() - begun:.0f} s")
    kept = model.replay_buffer.frames.bytes_per_transition
    print(f"bytes per transition: {kept:,.0f} here, {2 * 4 * 48 * 48:,} with obs and next_obs stored")


if __name__ == "__main__":
    main()
