"""DQN of stable-baselines3 over our replay: every frame once, time-outs exact.

Pictures of cartpole, stacked by SB3's own VecFrameStack. SB3's buffer would keep each frame eight times.
Needs: pip install 'headrace[sb3]'
"""

from __future__ import annotations

import argparse

import gymnasium
import numpy as np
from stable_baselines3 import DQN
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack

import headrace
from headrace.libraries.sb3 import FrameReplayBuffer
from headrace.types import StackSpec


class CartpolePixels(gymnasium.Env[np.ndarray, np.int64]):
    """One environment of a headrace task as a plain Gymnasium environment: gray pictures, two choices."""

    observation_space = gymnasium.spaces.Box(0, 255, (1, 36, 36), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self._env = headrace.make("cartpole-camera", 1, overrides={"pixels": 36, "frame_stack": 1})

    def reset(self, *, seed: int | None = None, options: dict[str, object] | None = None):
        super().reset(seed=seed, options=options)
        return self._gray(self._env.reset(seed=seed)[0]), {}

    def step(self, action: np.int64):
        import torch

        step = self._env.step(torch.tensor([[2.0 * float(action) - 1.0]]))
        ended = bool(step.terminated[0] | step.truncated[0])
        obs = step.info["final_obs"] if ended else step.obs
        return self._gray(obs), float(step.reward[0]), bool(step.terminated[0]), bool(step.truncated[0]), {}

    def _gray(self, obs: dict[str, object]) -> np.ndarray:
        return obs["policy"][0].float().mean(-1).byte().numpy()[None]


def main() -> None:
    """Train for a while and compare the bytes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-steps", type=int, default=20_000, help="environment steps (default: 20,000)")
    parser.add_argument("--buffer", type=int, default=10_000, help="transitions kept (default: 10,000)")
    arguments = parser.parse_args()

    env = VecFrameStack(DummyVecEnv([CartpolePixels] * 2), n_stack=4, channels_order="first")
    model = DQN(
        "CnnPolicy",
        env,
        buffer_size=arguments.buffer,
        learning_starts=min(1_000, arguments.num_steps // 2),
        train_freq=8,
        batch_size=32,
        replay_buffer_class=FrameReplayBuffer,
        replay_buffer_kwargs={"stack": StackSpec(frames=4, dim=0, reset="zero")},
        policy_kwargs={"normalize_images": True},
        verbose=0,
    )
    model.learn(arguments.num_steps, progress_bar=False)
    kept = model.replay_buffer.frames.bytes_per_transition
    print(f"bytes per transition: {kept:,.0f} here, {2 * 4 * 36 * 36:,} with obs and next_obs stored")


if __name__ == "__main__":
    main()
