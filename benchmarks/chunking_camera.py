"""Part (c) of benchmarks/chunking.py: pictures drawn for the observations that a model reads, or in every step."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor

import headrace
from chunking_cases import ENDLESS, EXECUTE, Effort, RandomEnds, Row, Window
from headrace import evaluate
from headrace.envs.tasks.cartpole import CartpoleCamera, CartpoleCameraCfg
from headrace.evaluation import PlayCfg
from headrace.policies.protocol import ChunkContext
from headrace.types import Obs


class EndingCartpoleCamera(RandomEnds, CartpoleCamera):
    """``cartpole-camera`` that ends at random only."""


class NoThought:
    """Plans a fixed chunk and counts the time it takes, which is excluded."""

    horizon, action_dim, obs_steps = EXECUTE, 1, 1

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, obs: Obs, context: ChunkContext) -> Tensor:
        del obs
        begin = time.perf_counter()
        plan = torch.full((len(context.env_ids), EXECUTE, 1), 0.1)
        self.seconds += time.perf_counter() - begin
        return plan


def camera_rows(frames: int, effort: Effort) -> list[Row]:
    rows: list[Row] = []
    for num_envs in effort.sizes:
        free, parking = (_cartpoles(num_envs, frames, mode) for mode in ("same_step", "disabled"))
        every, demand, shares, physics, drawing = [], [], [], 0.0, 0.0
        for _ in range(effort.rounds + 2):
            physics = _camera_seconds(free, effort, draws=False)
            step = _camera_seconds(free, effort, draws=True)
            drawing = step - physics
            policy = NoThought()
            window = Window(parking, effort)
            window.on_begin = lambda policy=policy: setattr(policy, "seconds", 0.0)
            evaluate(
                window, policy, episodes=range(ENDLESS), play=PlayCfg(execute=EXECUTE, batching="fast"), progress=False
            )
            every.append(num_envs / step)
            demand.append(window.useful / (window.seconds - policy.seconds))
            allowed = (physics + drawing) / (physics + frames * drawing / EXECUTE)
            shares.append(demand[-1] / every[-1] / allowed)
        setting = f"(c) camera 64², K = {frames}"
        note = (
            f"{setting}, N = {num_envs}: p = {physics * 1e3:.2f} ms, r = {drawing * 1e3:.2f} ms; "
            f"on demand is {statistics.median(a / b for a, b in zip(demand, every, strict=True)):.1f} × every step"
        )
        rows += [
            Row(setting, num_envs, "a picture every step", statistics.median(every)),
            Row(
                *(setting, num_envs, "on demand (Greedy, inline)", statistics.median(demand)),
                of_bound=statistics.median(shares),
                note=note,
            ),
        ]
        free.close()
        parking.close()
    return rows


def _cartpoles(num_envs: int, frames: int, autoreset: str) -> Any:
    task = EndingCartpoleCamera(CartpoleCameraCfg(pixels=64, frame_stack=frames, episode_length=10_000))
    task.q = 1 / 150
    return headrace.make(task, num_envs, threads=2, autoreset=autoreset, final_obs=False)  # type: ignore[arg-type]  # a literal


def _camera_seconds(env: Any, effort: Effort, *, draws: bool) -> float:
    """Seconds of a step of the batch, with or without pictures."""
    env.reset(seed=0)
    observe = None if draws else torch.zeros(env.num_envs, dtype=torch.bool)
    action = torch.full((env.num_envs, 1), 0.1)
    for _ in range(5):
        env.step(action, observe=observe)
    steps, begin = 0, time.perf_counter()
    while (spent := time.perf_counter() - begin) < effort.seconds / 2:
        env.step(action, observe=observe)
        steps += 1
    return spent / steps
