"""Environments whose reset is expensive wait for it, suspended, while the others go on.

A reset that settles a scene, loads a map or asks a service takes seconds. Done inside the step it stalls the whole
batch. Here an environment parks when its episode ends, a thread prepares its next scene, and it is reset when ready.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch

import headrace


def prepare_scene(seconds: float) -> float:
    """Stands for the expensive part."""
    time.sleep(seconds)
    return seconds


def main() -> None:
    """Step until enough episodes are done, and say how much physics ran meanwhile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=32)
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=0.2, help="what a reset takes (default: 0.2)")
    arguments = parser.parse_args()

    count = arguments.num_envs
    env = headrace.make("cartpole", count, seed=0, autoreset="disabled", final_obs=False)
    env.reset()
    pending: dict[int, Future[float]] = {}
    finished = acted = 0
    start = time.perf_counter()
    with ThreadPoolExecutor(4, thread_name_prefix="scenes") as workers:
        while finished < arguments.episodes:
            acting = int(env.active.sum())
            if acting:
                step = env.step(torch.rand(count, 1) * 2 - 1)
                acted += acting
                for number in torch.nonzero(step.terminated | step.truncated).flatten().tolist():
                    finished += 1
                    pending[number] = workers.submit(prepare_scene, arguments.seconds)
            ready = torch.tensor([number in pending and pending[number].done() for number in range(count)])
            if ready.any():
                env.reset(options={"reset_mask": ready})
                for number in torch.nonzero(ready).flatten().tolist():
                    del pending[number]
            elif not acting:
                time.sleep(0.001)
    spent = time.perf_counter() - start
    serial = finished * arguments.seconds
    print(f"{finished} episodes, {acted:,} env-steps in {spent:.1f} s")
    print(f"resets inside the step would have taken {serial:.1f} s by themselves")
    env.close()


if __name__ == "__main__":
    main()
