"""A fast and a slow agent in one batch: the slow one acts every k-th tick and costs nothing in between."""

from __future__ import annotations

import argparse
import time

import torch

import headrace


def seconds_of(env: headrace.BatchEnv, slow: torch.Tensor, every: int, ticks: int, rest: bool) -> float:
    """Run the ticks; with ``rest`` the slow half is suspended between its own."""
    env.reset(seed=0)
    actions = torch.zeros(env.num_envs, 8)
    start = time.perf_counter()
    for tick in range(ticks):
        if rest:
            (env.resume if tick % every == 0 else env.suspend)(slow)
        fast_action, slow_action = torch.rand(2) * 2 - 1
        actions[~slow] = fast_action
        actions[slow] = slow_action
        env.step(actions)
    env.resume(slow)
    return time.perf_counter() - start


def main() -> None:
    """Compare stepping all environments every tick with stepping the slow half only when it is due."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=128)
    parser.add_argument("--every", type=int, default=10, help="ticks between two actions of the slow agent")
    parser.add_argument("--ticks", type=int, default=100)
    arguments = parser.parse_args()

    env = headrace.make("ant", arguments.num_envs, seed=0)
    slow = torch.arange(arguments.num_envs) % 2 == 0
    seconds_of(env, slow, arguments.every, 5, rest=False)
    together = seconds_of(env, slow, arguments.every, arguments.ticks, rest=False)
    when_due = seconds_of(env, slow, arguments.every, arguments.ticks, rest=True)
    print(f"all every tick: {together:.2f} s; the slow half when due: {when_due:.2f} s")
    env.close()


if __name__ == "__main__":
    main()
