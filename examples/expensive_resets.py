"""Environments whose reset is expensive wait for it, suspended, while the others go on.

A reset that settles a scene, loads a map or asks a service takes seconds. Done between two steps it stalls the whole
batch. Bridged with threads (or processes, or in another interpreter), environments are reset in the background, and
``evaluate`` plays on with those that are ready. Every episode is the same to the last bit.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import gymnasium
import torch
from torch import Tensor

import headrace
from headrace.evaluation import Evaluation
from headrace.types import Obs


class Scene(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A pendulum whose scene takes a while to set up, and that falls off its hook at random."""

    def __init__(self, seconds: float) -> None:
        super().__init__(gymnasium.make("Pendulum-v1"))
        self._seconds = seconds

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        time.sleep(self._seconds)
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, reward, terminated or self.np_random.random() < 1 / 40, truncated, info


def swing(obs: Obs) -> Tensor:
    """Four actions per observation: push along the way it turns."""
    return obs["policy"][:, None, 2:].sign().expand(-1, 4, -1) * 2


def play(executor: Any, num_envs: int, episodes: int, seconds: float) -> tuple[Evaluation, float]:
    """The table, and the seconds that it took."""
    scenes = [partial(Scene, seconds)] * num_envs
    env = headrace.bridge(scenes, autoreset="disabled", final_obs=False, executor=executor)
    policy = headrace.policies.as_chunk_policy(swing, horizon=4, action_dim=1)
    begin = time.perf_counter()
    found = headrace.evaluate(env, policy, episodes=episodes, progress=False)
    env.close()
    return found, time.perf_counter() - begin


def main() -> None:
    """Evaluate with resets between steps, and with resets in the background."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=0.2, help="what a reset takes (default: 0.2)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    size = (arguments.num_envs, arguments.episodes, arguments.seconds)
    waited, long = play("inline", *size)
    background, short = play("threads", *size)
    assert background.episodes == waited.episodes
    print(f"{arguments.episodes} episodes, resets between steps: {long:.1f} s")
    print(f"the same table, threads, resets in the background: {short:.1f} s")


if __name__ == "__main__":
    main()
