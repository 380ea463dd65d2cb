"""A curriculum where environments need different numbers of steps: who has done enough rests.

Every environment practices its level until it has balanced for a while three times in a row. Easy levels are done
early; their environments are suspended, and the time of a step shrinks with the number of those still at work.
"""

from __future__ import annotations

import argparse

import torch

import headrace


def main() -> None:
    """Practice until all environments are done, and count the steps that were not taken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--limit", type=int, default=2_000, help="ticks at most (default: 2,000)")
    arguments = parser.parse_args()

    count = arguments.num_envs
    env = headrace.make("cartpole", count, seed=0, overrides={"episode_length": 50})
    obs, _ = env.reset()
    noise = torch.linspace(0.0, 4.0, count)[:, None]  # the level: how much the action is disturbed
    streak = torch.zeros(count, dtype=torch.int64)
    ticks = acted = 0
    while env.active.any() and ticks < arguments.limit:
        acted += int(env.active.sum())
        state = obs["policy"]
        push = 2.0 * state[:, 1:2] + 0.5 * state[:, 3:4] + noise * torch.randn(count, 1)
        step = env.step(push.clamp(-1, 1))
        obs = step.obs
        streak[step.truncated] += 1  # balanced to the end
        streak[step.terminated] = 0  # fell over
        env.suspend(streak >= 3)
        ticks += 1
    done = int((streak >= 3).sum())
    print(f"{done} of {count} environments done after {ticks} ticks: {acted:,} env-steps instead of {ticks * count:,}")
    env.close()


if __name__ == "__main__":
    main()
