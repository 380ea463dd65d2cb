"""Write an identifiable stream to a store on disk until killed: run by the kill tests. Arguments: directory, seed.

Prints the number of completed ``extend`` calls after each one.
"""

from __future__ import annotations

import sys

import torch
from replay_reference import Stream
from tensordict import TensorDict

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


def as_batch(steps) -> TensorDict:
    """Steps as one batch (N, T)."""
    columns = []
    for observed, action, step, active in steps:
        done = step.terminated | step.truncated
        final = step.info.get("final_obs", step.obs)[""]
        after = {
            "observation": torch.where(done.view(-1, 1, 1, 1), final, step.obs[""]),
            "reward": step.reward,
            "done": done,
            "terminated": step.terminated,
            "truncated": step.truncated,
        }
        acted = torch.ones(NUM_ENVS, dtype=torch.bool) if active is None else active
        content = {"observation": observed[""], "action": action, "active": acted, "next": after}
        columns.append(TensorDict(content, [NUM_ENVS]))
    return torch.stack(columns, 1)


def make_buffer(directory) -> ReplayBuffer:
    return ReplayBuffer(
        NUM_ENVS * LENGTH, NUM_ENVS, SPACES[""], ACTION, stack=STACK, sampler=PrioritizedSampler(), directory=directory
    )


def size_of(count: int) -> int:
    """Return the steps of the write after ``count`` steps: single steps and batches of several by turns."""
    return 1 if count % 3 else 5


def steps_of(writes: int) -> int:
    """Return the steps in the first ``writes`` writes."""
    count = 0
    for _ in range(writes):
        count += size_of(count)
    return count


if __name__ == "__main__":
    torch.set_num_threads(1)
    store, stream = make_buffer(sys.argv[1]), make_stream(int(sys.argv[2]))
    count = 0
    while True:
        steps = [stream.step(ACTION) for _ in range(size_of(count))]
        if len(steps) == 1:
            observed, action, result, active = steps[0]
            store.extend(observed[""], action, bare(result), active)
        else:
            store.extend(as_batch(steps))
        count += len(steps)
        print(count, flush=True)
