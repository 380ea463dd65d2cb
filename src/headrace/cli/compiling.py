"""``doctor --compile``: use every kernel once, so that no later command waits for the compiler."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from rich.progress import MofNCompleteColumn, TimeElapsedColumn

from headrace.cli.printing import listening, progress

if TYPE_CHECKING:
    from headrace.types import Need, ResetRecord, StepRecord


def compile_everything() -> str:
    """Use every kernel once, in each form that headrace uses it in, under a bar; what was done, in a sentence."""
    import headrace
    from headrace._kernels.compiled import cache_directory

    jobs: dict[str, Callable[[], None]] = {
        **{f"task {name}": partial(_play, name) for name in headrace.task_names()},
        "cameras": _draw,
        "images": _normalize,
        "estimators": _estimate,
        "recurrence": _recur,
        "replay": _replay,
        "recording": _record,
    }
    start = time.monotonic()
    heard: list[logging.LogRecord] = []
    with progress("compiling", len(jobs), MofNCompleteColumn(), TimeElapsedColumn()) as show, listening(heard.append):
        for done, (name, job) in enumerate(jobs.items()):
            show(description=f"compiling: {name}", completed=done)
            job()
    compiled = sum(record.levelno == logging.INFO for record in heard)
    return f"{compiled} kernels compiled in {time.monotonic() - start:.0f} s; they are kept in {cache_directory()}"


def _play(name: str) -> None:
    """Step with actions of both widths, suspended environments, ends, partial resets, and an observer."""
    import torch

    import headrace

    env = headrace.make(name, num_envs=3, overrides={"episode_length": 3})
    try:
        env.reset(seed=0)
        given = torch.from_numpy(env.action_space.sample())
        actions = (given.float(), given.double()) if given.is_floating_point() else (given,)
        for suspended in ((), (1,), ()):
            env.suspend(torch.tensor(suspended, dtype=torch.int64))
            for action in actions:
                env.step(action)
            env.resume(torch.arange(3))
        env.reset(options={"reset_mask": torch.tensor([True, False, False])})
        env.observe([1])
        env.attach(_Nobody())
        for _ in range(3):
            env.step(actions[0])
    finally:
        env.close()


class _Nobody:
    """An observer that needs nothing: steps and resets go the way of those that are watched."""

    needs: frozenset[Need] = frozenset()

    def after_step(self, record: StepRecord) -> None:
        """Look away."""

    def after_reset(self, record: ResetRecord) -> None:
        """Look away."""


def _draw() -> None:
    """Draw a picture of every kind."""
    import headrace
    from headrace.sim.camera.camera import FRAME_KINDS, CameraSpec, PoseReader
    from headrace.sim.camera.native_camera import NativeCamera

    env = headrace.make("cartpole", num_envs=1)
    try:
        env.reset(seed=0)
        model = env.sim.model
        spec = CameraSpec(name="side", width=16, height=16, data_types=tuple(FRAME_KINDS))  # pyright: ignore[reportArgumentType]  # the keys are its kinds
        NativeCamera(model, spec).render(PoseReader(model).read(env.sim.field("qpos").numpy()))
    finally:
        env.close()


def _normalize() -> None:
    import torch

    from headrace.history import CircularBuffer, FrameStack, normalize_image
    from headrace.types import StackSpec

    images = torch.zeros((2, 8, 8, 3), dtype=torch.uint8)
    large = torch.zeros((1, 400, 400, 1), dtype=torch.uint8)
    for given in (images, images.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1), images[:, ::2], large):
        normalize_image(given)
    ring = CircularBuffer(3, 2)
    for _ in range(2):
        ring.append(images)
    ring.append(images[:1], torch.tensor([1]))
    for normalize in (False, True):
        stack = FrameStack(StackSpec(frames=2, dim=-1), num_envs=2, frame_shape=(8, 8, 3), normalize=normalize)
        stack.append(images)
        stack.skip([1])
        stack.fill(stack.missing(), images[:1])
        stack.observe()


def _estimate() -> None:
    import torch

    from headrace.learning import gae, n_step, td_lambda, vtrace

    for dtype in (torch.float32, torch.float64):
        numbers, flags = torch.ones((4, 2), dtype=dtype), torch.zeros((4, 2), dtype=torch.bool)
        rollout = (numbers, numbers, numbers, flags, flags)
        for active in (None, ~flags):
            gae(*rollout, gamma=0.99, lam=0.95, active=active)
            td_lambda(*rollout, gamma=0.99, lam=0.95, active=active)
            n_step(*rollout, gamma=0.99, n=2, active=active)
            vtrace(*rollout, numbers, gamma=0.99, active=active)


def _recur() -> None:
    import torch

    from headrace.learning.linear_scan import linear_scan

    for dtype in (torch.float32, torch.float64):
        steps = torch.ones((3, 4), dtype=dtype)
        linear_scan(steps, steps, steps[0])


def _replay() -> None:
    import numpy as np
    import torch
    from gymnasium import spaces

    from headrace.replay import PrioritizedSampler, ReplayBuffer, SliceSampler, TrajectorySampler, UniformSampler
    from headrace.types import StackSpec, Step

    observation, action = spaces.Box(0, 255, (2, 8, 8), np.uint8), spaces.Box(-1, 1, (1,))
    obs = torch.zeros((2, 2, 8, 8), dtype=torch.uint8)
    no, yes = torch.zeros(2, dtype=torch.bool), torch.ones(2, dtype=torch.bool)
    for sampler in (UniformSampler(), PrioritizedSampler(), SliceSampler(2), TrajectorySampler()):
        for n in (1, 2):
            buffer = ReplayBuffer(
                16, 2, observation, action, stack=StackSpec(frames=2, dim=0), sampler=sampler, n_step=n,
                autoreset="disabled",
            )  # fmt: skip
            for end in (no, no, yes, no, no, yes):
                buffer.extend(obs, torch.zeros(2, 1), Step({"obs": obs}["obs"], torch.zeros(2), end, no, {}))  # pyright: ignore[reportArgumentType]  # one tensor, as extend takes it
            buffer.sample(2)
            sampler = type(sampler)(2) if isinstance(sampler, SliceSampler) else type(sampler)()


def _record() -> None:
    import numpy as np

    from headrace.recording.running import RunningRows

    moments = {"obs/policy": np.zeros((2, 1))}
    RunningRows(2, moments).write_first(moments, np.arange(2), np.arange(2))
