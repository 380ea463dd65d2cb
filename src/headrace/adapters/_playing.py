"""The loops that play a policy: a plan of episodes, each counted once, or a number of steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from headrace.adapters._learner import InferencePolicy
from headrace.envs import BatchEnv
from headrace.types import Obs, Step


class StepLog(Protocol):
    """Is told the time of every step; :class:`headrace.bench.StepTimes` is one."""

    def begin(self, stage_totals: Mapping[str, float] | None = None) -> None:
        """The first step comes now."""
        ...

    def add(self, seconds: float, frames: int, stage_totals: Mapping[str, float] | None = None) -> None:
        """A step of the batch is done."""
        ...


class EpisodeLog(Protocol):
    """Is told of ended episodes; :class:`headrace.bench.EpisodeTally` is one."""

    unfinished: int | None

    def add_step(self, step: Step) -> int:
        """Count the episodes that ended in a step; returns how many."""
        ...


def play_episodes(
    env: BatchEnv,
    policy: InferencePolicy,
    steps: StepLog,
    tally: EpisodeLog,
    episodes: int,
    update: Callable[[int], None],
) -> None:
    """Play the episodes 0 to ``episodes`` - 1, each to its end and once; slot i plays i, i + N, i + 2N, …

    A slot that has no episode left is suspended and costs nothing, so that long episodes count as much as short ones.
    """
    obs, _ = env.reset(seed=env.seed)
    env.suspend(env.episode_ids >= episodes)
    done = 0
    tally.unfinished = 0
    steps.begin(env.timer.seconds())
    try:
        while done < episodes:
            obs, ended = _stepped(env, policy, obs, steps, tally)
            done += ended
            if ended:
                env.suspend(env.episode_ids >= episodes)
                update(done)
    finally:
        # an episode that waits, or belongs to nobody's plan, has not begun
        tally.unfinished = _running(env)
        env.resume(torch.ones(env.num_envs, dtype=torch.bool))


def play_steps(
    env: BatchEnv,
    policy: InferencePolicy,
    steps: StepLog,
    tally: EpisodeLog,
    count: int,
    update: Callable[[int], None],
) -> None:
    """Play ``count`` steps of the batch; what is still running then is unfinished and counted nowhere else."""
    obs, _ = env.reset(seed=env.seed)
    steps.begin(env.timer.seconds())
    try:
        for number in range(count):
            obs, _ = _stepped(env, policy, obs, steps, tally)
            update(number + 1)
    finally:
        tally.unfinished = _running(env)


def _stepped(env: BatchEnv, policy: InferencePolicy, obs: Obs, steps: StepLog, tally: EpisodeLog) -> tuple[Obs, int]:
    actions = policy(obs)
    frames = int(env.active.sum())
    begin = time.perf_counter()
    step = env.step(actions)
    steps.add(time.perf_counter() - begin, frames, env.timer.seconds())
    ended = tally.add_step(step)
    if ended:
        policy.reset(step.terminated | step.truncated)
    return step.obs, ended


def _running(env: BatchEnv) -> int:
    return int(((env.episode_steps > 0) & env.active).sum())
