"""Snapshots through disk, into another process, and damaged ones."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import headrace
from headrace import errors
from headrace._gymnasium_ids import IDS
from headrace.testing._contract import next_actions, require_same_tensors

# what a new process does with a snapshot: load, go on, and save all that it saw
PROGRAM = """
import sys
import torch
import headrace
from headrace.testing._contract import next_actions

folder = sys.argv[1]
for task in sys.argv[2:]:
    env = headrace.make(task, 3, seed=999, threads=1, overrides={"episode_length": 14})
    env.load_state_dict(torch.load(f"{folder}/{task}.pt", weights_only=True))
    seen = []
    for call in range(12):
        if call == 5:
            env.resume([1])
        step = env.step(next_actions(env))
        final = step.info.get("final_obs", {})
        seen.append([step.obs, step.reward, step.terminated, step.truncated, final, env.episode_ids, env.episode_steps])
    torch.save([seen, env.state_dict()], f"{folder}/{task}.seen.pt")
"""


def test_every_task_continues_bit_identically_in_a_new_process(tmp_path: Path) -> None:
    # the tasks that ship: other tests register their own
    tasks, expected = sorted(IDS.values()), {}
    for task in tasks:
        env = headrace.make(task, 3, seed=2, threads=2, overrides={"episode_length": 14})
        env.reset()
        for _ in range(6):
            env.step(next_actions(env))
        env.suspend([1])
        env.step(next_actions(env))
        torch.save(env.state_dict(), tmp_path / f"{task}.pt")
        seen = []
        for call in range(12):
            if call == 5:
                env.resume([1])
            step = env.step(next_actions(env))
            final = step.info.get("final_obs", {})
            flags = (step.terminated, step.truncated)
            seen.append([step.obs, step.reward, *flags, final, env.episode_ids, env.episode_steps])
        expected[task] = [seen, env.state_dict()]
    command = [sys.executable, "-W", "error", "-c", PROGRAM, str(tmp_path), *tasks]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for task in tasks:
        got = torch.load(tmp_path / f"{task}.seen.pt", weights_only=True)
        require_same_tensors(got, expected[task], f"{task} in a new process")
        # an episode ended on the way, so that autoreset is part of what was compared
        assert any(bool((row[2] | row[3]).any()) for row in expected[task][0])


def test_a_snapshot_can_be_loaded_again_and_again() -> None:
    env = headrace.make("ant", 3, threads=1)
    env.reset()
    env.step(next_actions(env))
    state = env.state_dict()
    walks = []
    for _ in range(3):
        env.load_state_dict(state)
        walks.append([env.step(next_actions(env)) for _ in range(4)])
    require_same_tensors(walks[1], walks[0], "second walk")
    require_same_tensors(walks[2], walks[0], "third walk")


def test_a_snapshot_carries_seed_ids_suspension_and_parking() -> None:
    make = {
        "task": "cartpole",
        "num_envs": 3,
        "threads": 1,
        "autoreset": "disabled",
        "overrides": {"episode_length": 2},
    }
    env, other = headrace.make(**make, seed=5), headrace.make(**make, seed=6)
    env.reset(options={"episode_ids": [10, 20, 30]})
    env.suspend([1])
    for _ in range(2):
        env.step(next_actions(env))
    other.load_state_dict(env.state_dict())
    assert other.seed == 5
    assert other.episode_ids.tolist() == [10, 20, 30]
    assert other.suspended.tolist() == [False, True, False]
    assert other.active.tolist() == [False, False, False]
    other.resume([1])
    assert other.active.tolist() == [False, True, False]
    # the next ids: the last ones + num_envs
    other.reset(options={"reset_mask": torch.tensor([True, False, True])})
    assert other.episode_ids.tolist() == [13, 20, 33]


def test_a_snapshot_may_be_loaded_where_threads_differ() -> None:
    env, other = headrace.make("humanoid", 3, threads=1), headrace.make("humanoid", 3, threads=3)
    env.reset()
    env.step(next_actions(env))
    other.load_state_dict(env.state_dict())
    for _ in range(3):
        require_same_tensors(other.step(next_actions(other)), env.step(next_actions(env)), "another thread count")


def without(state, *path):
    state = copy.deepcopy(state)
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return state


def with_(state, value, *path):
    state = copy.deepcopy(state)
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return state


DAMAGED = {
    "empty": lambda s: {},
    "without sim": lambda s: without(s, "sim"),
    "of another task": lambda s: with_(s, "Humanoid", "task"),
    "of another size": lambda s: with_(s, 4, "num_envs"),
    "without physics state": lambda s: without(s, "sim", "state"),
    "with short physics state": lambda s: with_(s, s["sim"]["state"][:, :5], "sim", "state"),
    "without step counts": lambda s: without(s, "episodes", "steps"),
    "without memory": lambda s: without(s, "episodes", "memory.torso_x"),
    "with short step counts": lambda s: with_(s, s["episodes"]["steps"][:2], "episodes", "steps"),
    "with short flags": lambda s: with_(s, s["suspended"][:1], "suspended"),
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_snapshot_is_refused_and_changes_nothing(damage) -> None:
    env, other = headrace.make("ant", 3, seed=1, threads=1), headrace.make("ant", 3, seed=2, threads=1)
    for each in (env, other):
        each.reset()
        each.step(next_actions(each))
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(errors.DataError, match="snapshot"):
        other.load_state_dict(damage(env.state_dict()))
    require_same_tensors(other.state_dict(), before, "state after a damaged snapshot")
    assert other.seed == 2
