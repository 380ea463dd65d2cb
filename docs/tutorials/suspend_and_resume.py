"""Lesson: suspend and resume.

Run it with ``python docs/tutorials/suspend_and_resume.py``. Everything it says is asserted.

In a batch some environments always wait: for a slow policy, for an expensive reset, for an agent that acts
every tenth step. Other batched simulators step all environments or none, so a waiting robot falls over under zero
actions, fills the recording with junk and ends by itself. Here an environment can rest.
"""

from __future__ import annotations

import time

import torch

import headrace

# Eight ants. Three of them wait. What a resting environment would do with an action does not matter: its row is
# ignored, and may even be NaN.

env = headrace.make("ant", num_envs=8, seed=0)
env.reset()
env.suspend([0, 1, 2])
before = env.observe([0, 1, 2])["policy"].clone()
for _ in range(50):
    actions = torch.rand(8, 8) * 2 - 1
    actions[:3] = float("nan")
    step = env.step(actions)

# Nothing of them has changed by one bit, and they have earned nothing and ended nothing.

assert torch.equal(env.observe([0, 1, 2])["policy"], before)
assert env.episode_steps[:3].tolist() == [0, 0, 0]
assert step.reward[:3].tolist() == [0, 0, 0]
assert not step.terminated[:3].any()

# Resumed, they go on as if it had never been paused. A second batch that never paused is the proof: an episode is a
# function of task, seed, episode id and actions, and of nothing else.

env.resume([0, 1, 2])
fresh = headrace.make("ant", num_envs=8, seed=0)
fresh.reset()
for _ in range(50):
    actions = torch.rand(8, 8) * 2 - 1
    paused, never_paused = env.step(actions), fresh.step(actions)
assert torch.equal(paused.obs["policy"][:3], never_paused.obs["policy"][:3])

# A resting environment costs nothing. Half of 256 ants take about half of the time. (The exact share depends on your
# machine; `benchmarks/stepping.py` compares it with other libraries.)

many = headrace.make("ant", num_envs=256, seed=0)
many.reset()
actions = torch.zeros(256, 8)


def seconds(steps: int) -> float:
    """What so many steps take."""
    start = time.perf_counter()
    for _ in range(steps):
        many.step(actions)
    return time.perf_counter() - start


seconds(5)
all_of_them = seconds(20)
many.suspend(torch.arange(256) % 2 == 0)
half = seconds(20)
print(f"256 ants: {1000 * all_of_them / 20:.1f} ms per step; half of them suspended: {1000 * half / 20:.1f} ms")

# Two agents on different timescales: the slow one acts every fourth step, and no physics runs for it in between.

slow = torch.arange(8) < 4
for tick in range(8):
    if tick % 4 == 0:
        env.resume(slow)
    else:
        env.suspend(slow)
    env.step(torch.zeros(8, 8))
env.resume(slow)

# An expensive reset, such as a scene that is settled or a map that is fetched: the environment parks at the end of
# its episode, the others go on, and it is reset when its new scene is ready.

env = headrace.make("cartpole", num_envs=4, seed=0, autoreset="disabled", overrides={"episode_length": 20})
env.reset()
ready_at: dict[int, int] = {}
for tick in range(60):
    step = env.step(torch.zeros(4, 1))
    for ended in torch.nonzero(step.terminated | step.truncated).flatten().tolist():
        ready_at[ended] = tick + 3 + ended  # scenes take three to six ticks to prepare
    ready = torch.tensor([ready_at.get(i) == tick for i in range(4)])
    if ready.any():
        env.reset(options={"reset_mask": ready})
assert env.episode_ids.tolist() != [0, 1, 2, 3]

# Any Gymnasium environment gets the same contract from a bridge, which says in `fidelity` how it keeps a suspended
# environment: `native` means that it is not stepped at all.

bridged = headrace.bridge("CartPole-v1", num_envs=3)
bridged.reset(seed=0)
bridged.suspend([1])
step = bridged.step(torch.tensor([0, 1, 0]))
assert step.reward.tolist() == [1, 0, 1]
print("bridged environments are kept:", bridged.fidelity)
bridged.close()
