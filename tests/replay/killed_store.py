"""Write an identifiable stream to a store on disk until killed: run by the kill tests. Arguments: directory, seed.

Prints the number of completed ``extend`` calls after each one.
"""

from __future__ import annotations

import sys

import torch
from replay_reference import Stream

from headrace.replay import ArraySpec, PrioritizedSampler, ReplayBuffer
from headrace.types import StackSpec

NUM_ENVS, LENGTH = 3, 24
ACTION = ArraySpec((2,), torch.float32)
STACK = StackSpec(frames=3, dim=0)
SPACES = {"": ArraySpec((3, 40, 40), torch.uint8)}


def make_stream(seed: int) -> Stream:
    return Stream(seed, NUM_ENVS, SPACES, {"": STACK}, "same_step")


def bare(step):
    """The step with the one array itself as observation."""
    info = dict(step.info)
    if "final_obs" in info:
        info["final_obs"] = info["final_obs"][""]
    return step._replace(obs=step.obs[""], info=info)


def make_buffer(directory) -> ReplayBuffer:
    return ReplayBuffer(
        NUM_ENVS * LENGTH, NUM_ENVS, SPACES[""], ACTION, stack=STACK, sampler=PrioritizedSampler(), directory=directory
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    store, stream = make_buffer(sys.argv[1]), make_stream(int(sys.argv[2]))
    for count in range(1_000_000):
        observed, action, result, active = stream.step(ACTION)
        store.extend(observed[""], action, bare(result), active)
        print(count + 1, flush=True)
