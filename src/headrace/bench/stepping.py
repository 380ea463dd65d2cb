"""The loop of a run without learning: warm up until steady, then measure every step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from headrace.bench.schema import Warmup
from headrace.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    import torch
    from gymnasium import Space
    from torch import Tensor

    from headrace.bench.builders import RuntimeBuilder
    from headrace.envs.recipe import AnyEnv
    from headrace.types import Step

Progress = Callable[[int], None]
"""Called with how many steps are done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupRule:
    """Warm until the step time is steady: the medians of the last ``blocks`` blocks within ``tolerance`` of each other.

    At least ``steps`` steps, at most ``limit`` times as many.
    """

    steps: int = 50
    tolerance: float = 0.05
    blocks: int = 3
    limit: int = 20

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ConfigError(f"--warmup-steps: expected at least 0, got {self.steps}")

    @property
    def block(self) -> int:
        """Steps of a block."""
        return max(10, -(-self.steps // 5))

    def is_steady(self, medians: list[float]) -> bool:
        """Whether the blocks so far end steadily."""
        last = medians[-self.blocks :]
        return len(last) == self.blocks and max(last) <= (1 + self.tolerance) * min(last)

    def __str__(self) -> str:
        return (
            f"medians of the last {self.blocks} blocks of {self.block} steps within {self.tolerance:.0%}; "
            f"at least {self.steps} steps, at most {self.limit * self.steps}"
        )


def warm_up(
    steps: Callable[[int], list[float]], rule: WarmupRule, progress: Progress = lambda _: None
) -> Warmup | None:
    """Call ``steps``, which does so many and returns the seconds of each, until the rule is content or its limit is
    reached.

    None where the rule asks for no warm-up.
    """
    if not rule.steps:
        return None
    medians: list[float] = []
    done, spent = 0, 0.0
    while done < rule.steps or not rule.is_steady(medians):
        if done >= rule.limit * rule.steps:
            break
        seconds = steps(rule.block)
        medians.append(statistics.median(seconds))
        done += rule.block
        spent += sum(seconds)
        progress(done)
    return Warmup(steps=done, seconds=spent, steady=rule.is_steady(medians), rule=str(rule), block_medians_s=medians)


class Stepper:
    """Steps an environment with made-up actions and times each step as the timing mode says."""

    def __init__(self, env: AnyEnv, actions: Callable[[], Tensor], builder: RuntimeBuilder) -> None:
        self._env, self._actions, self._builder = env, actions, builder
        self._wait: Callable[[], None] | None = None
        if builder.steps.mode == "synchronized" and env.device.type == "cuda":  # a call on the CPU has done its work
            import torch

            self._wait = lambda: torch.cuda.synchronize(env.device)
        # on a GPU the stages' host times say nothing about where the device's time went
        self._has_split = env.device.type == "cpu"

    def step(self) -> tuple[Step, float]:
        """One step and its seconds, without those of choosing actions."""
        actions = self._actions()
        if self._wait is not None:
            self._wait()
        begin = time.perf_counter()
        result = self._env.step(actions)
        if self._wait is not None:
            self._wait()
        return result, time.perf_counter() - begin

    def warm_up(self, rule: WarmupRule, progress: Progress = lambda _: None) -> None:
        """Warm up, and write into the builder how it went."""
        self._builder.steps.warmup = warm_up(lambda count: [self.step()[1] for _ in range(count)], rule, progress)

    def run(self, num_steps: int, progress: Progress = lambda _: None) -> None:
        """Measure ``num_steps`` steps into the builder; episodes that end are counted."""
        env, builder = self._env, self._builder
        steps, episodes, count = builder.steps, builder.episodes, env.num_envs
        timer = env.timer if self._has_split else None
        calls = 0 if timer is None else timer.calls().get("physics", 0)
        steps.begin(None if timer is None else timer.seconds())
        try:
            for index in range(num_steps):
                result, seconds = self.step()
                steps.add(seconds, count, None if timer is None else timer.seconds())
                episodes.add_step(result)
                progress(index + 1)
        finally:
            episodes.unfinished = count
            if timer is not None and "physics" in timer.calls():
                steps.sim_calls = timer.calls()["physics"] - calls


def action_maker(
    kind: Literal["random", "zero"], space: Space[object], num_envs: int, device: torch.device, seed: int
) -> Callable[[], Tensor]:
    """Return a function that gives fresh actions for all environments, uniform in the space or all zero.

    Args:
        kind: which.
        space: of one environment's action: Box, Discrete, MultiDiscrete or MultiBinary. Unbounded sides of a Box
            count as ±1.
        num_envs: rows, N.
        device: of the tensor.
        seed: the same seed gives the same actions.
    """
    import numpy as np
    import torch
    from gymnasium import spaces

    generator = torch.Generator(device=device).manual_seed(seed)
    whole = not isinstance(space, spaces.Box)
    if isinstance(space, spaces.Box):
        low, high = (np.where(np.isfinite(a), a, b) for a, b in ((space.low, -1.0), (space.high, 1.0)))
        ranges = np.clip(0.0, space.low, space.high), low, high  # the nearest allowed to zero
    elif isinstance(space, spaces.Discrete):
        ranges = space.start, space.start, space.start + space.n
    elif isinstance(space, (spaces.MultiDiscrete, spaces.MultiBinary)):
        ranges = 0, 0, np.full(space.shape, 2) if isinstance(space, spaces.MultiBinary) else space.nvec
    else:
        raise UnsupportedError(f"actions: expected Box, Discrete, MultiDiscrete or MultiBinary, got {space}")
    kinds = (torch.float64, torch.int64) if whole else (torch.float32, torch.float32)
    rest, low, high = (torch.as_tensor(np.asarray(values), dtype=kinds[0], device=device) for values in ranges)
    shape = (num_envs, *(space.shape or ()))

    def draw() -> Tensor:
        if kind == "zero":
            return rest.expand(shape).to(kinds[1], copy=True)
        unit = torch.rand(shape, generator=generator, dtype=kinds[0], device=device)
        return unit.mul_(high - low).add_(low).to(kinds[1])

    return draw


def first_step(env: AnyEnv) -> None:
    """Reset and step an environment once, with zero actions: what is made on first use is there afterwards.

    The caller then begins with ``env.reset(seed=env.seed)``, as if nothing had been. An environment over which a
    seed has no say is left alone.
    """
    if getattr(env, "reseeds", True):
        env.reset()
        env.step(action_maker("zero", env.single_action_space, env.num_envs, env.device, seed=0)())
