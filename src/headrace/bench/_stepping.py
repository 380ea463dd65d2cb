"""The loop of a run without learning: warm up until steady, then measure every step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.bench._schema import Warmup
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.bench._builders import RuntimeBuilder
    from headrace.bench._targets import AnyEnv
    from headrace.types import Step

Progress = Callable[[int], None]
"""Told how many steps are done."""


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


def warm_up(step: Callable[[], float], rule: WarmupRule, progress: Progress = lambda _: None) -> Warmup | None:
    """Call ``step``, which returns its seconds, until the rule is content or its limit is reached.

    None where the rule asks for no warm-up.
    """
    if not rule.steps:
        return None
    medians: list[float] = []
    done, spent = 0, 0.0
    while done < rule.steps or not rule.is_steady(medians):
        if done >= rule.limit * rule.steps:
            break
        seconds = [step() for _ in range(rule.block)]
        medians.append(statistics.median(seconds))
        done += rule.block
        spent += sum(seconds)
        progress(done)
    return Warmup(steps=done, seconds=spent, steady=rule.is_steady(medians), rule=str(rule), block_medians_s=medians)


class Stepper:
    """Steps an environment with made-up actions and times each step as the timing mode says."""

    def __init__(self, env: AnyEnv, actions: Callable[[], Tensor], builder: RuntimeBuilder) -> None:
        self._env, self._actions, self._builder = env, actions, builder
        self._wait = _synchronizer(env) if builder.steps.mode == "synchronized" else None
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
        self._builder.steps.warmup = warm_up(lambda: self.step()[1], rule, progress)

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


def _synchronizer(env: AnyEnv) -> Callable[[], None] | None:
    """Waits for the device; None on the CPU, where a call that returned has done its work."""
    if env.device.type != "cuda":
        return None
    import torch

    device = env.device
    return lambda: torch.cuda.synchronize(device)
