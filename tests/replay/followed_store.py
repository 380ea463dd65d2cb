"""Write identifiable steps to a store on disk until killed, as fast as possible: run by the tests of readers.
A store that is there already is gone on with.

Frame t of environment e is filled with 1000 · e + t; so are the action and the extra. Episodes end, are cut off and
begin anew at t = 0 (mod 50) of their own clock, so that every kind of end comes often.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from headrace.replay import ArraySpec, ReplayBuffer
from headrace.types import StackSpec, Step

NUM_ENVS, LENGTH, SIZE = 2, 400, 600
STACK = StackSpec(frames=2, dim=0)
OBSERVATION = ArraySpec((2, SIZE), torch.int64)
ACTION = ArraySpec((), torch.int64)


def frame(clock: torch.Tensor) -> torch.Tensor:
    return (torch.arange(NUM_ENVS) * 10_000_000 + clock)[:, None, None].expand(-1, 1, SIZE)


def write(directory: str) -> None:
    """Every seventh step ends, every eleventh is cut off."""
    if Path(directory, "manifest.json").exists():
        store = ReplayBuffer.open(directory)
    else:
        store = ReplayBuffer(NUM_ENVS * LENGTH, NUM_ENVS, OBSERVATION, ACTION, stack=STACK, directory=directory)
    clock = torch.zeros(NUM_ENVS, dtype=torch.int64)
    first = frame(clock).repeat(1, 2, 1)
    obs, no = first, torch.zeros(NUM_ENVS, dtype=torch.bool)
    for count in range(10_000_000):
        after = torch.cat([obs[:, 1:], frame(clock + 1)], 1).contiguous()
        ended = torch.full((NUM_ENVS,), count % 7 == 6)
        clock = clock + 1
        fresh = frame(clock + 1).repeat(1, 2, 1)
        following = fresh if count % 7 == 6 else after
        info = {"final_obs": after, "_final_obs": ended} if count % 7 == 6 else {}
        action = obs[:, -1, 0].clone()
        store.extend(obs, action, Step(following, action.float(), ended, no, info))
        if count % 7 == 6 or count % 11 == 10:
            clock = clock + 1
            following = fresh
        obs = following
        if count == 100:
            print("ready", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    write(sys.argv[1])
