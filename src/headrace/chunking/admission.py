"""Admission: when to run the model, and for whom. Small rules behind one protocol.

An environment *waits* when its chunk has run dry (or, with latency, is about to). Who waits is suspended, or, in the
hold forms that others use and that are here for comparison, is stepped on with a hold action.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headrace.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """What a rule decides by. Masks are bool (N,), borrowed."""

    running: Tensor
    """Slots that play an episode."""
    waiting: Tensor
    """Slots that want a chunk and are not being inferred already."""
    can_act: Tensor
    """Slots that have an action to play."""
    engine_overlaps: bool
    """Whether the model runs beside the physics."""
    steps: int
    """Steps of the batch so far."""

    @property
    def nobody_can_act(self) -> bool:
        """Nothing moves before the model answers."""
        return not bool((self.can_act & self.running).any())


class Admission(Protocol):
    """A rule: whom to infer now."""

    @property
    def holds(self) -> bool:
        """Whether an environment that waits is stepped with a hold action instead of being suspended."""
        ...

    def infer(self, queue: Queue) -> Tensor:
        """bool (N,): rows to give to the model now; rows that do not wait are inferred for nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Any:
    """One waits → the whole batch is inferred. The baseline that escalates once environments are out of phase."""

    @property
    def holds(self) -> bool:
        """Waiting environments are suspended."""
        return False

    def infer(self, queue: Queue) -> Tensor:
        """Everyone who runs, as soon as one waits."""
        return queue.running if bool(queue.waiting.any()) else torch.zeros_like(queue.waiting)


@dataclass(frozen=True, slots=True)
class Subset:
    """Whoever waits is inferred at once, and nobody else."""

    @property
    def holds(self) -> bool:
        """Waiting environments are suspended."""
        return False

    def infer(self, queue: Queue) -> Tensor:
        """Who waits."""
        return queue.waiting


@dataclass(frozen=True, slots=True)
class Clock:
    """Whoever waits is inferred at every ``period``-th step of the batch."""

    period: int
    holds: bool = False

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ConfigError(f"Clock.period: expected at least 1 step, got {self.period}")

    def infer(self, queue: Queue) -> Tensor:
        """Who waits, on the tick; or when nobody could ever reach the next tick."""
        on_tick = queue.steps % self.period == 0
        stuck = queue.nobody_can_act and not self.holds
        return queue.waiting if on_tick or stuck else torch.zeros_like(queue.waiting)


@dataclass(frozen=True, slots=True)
class All:
    """Everyone is inferred together, when all wait: the synchronised form."""

    holds: bool = False

    def infer(self, queue: Queue) -> Tensor:
        """Everyone who runs, once all of them wait."""
        return queue.waiting if bool(queue.waiting[queue.running].all()) else torch.zeros_like(queue.waiting)


@dataclass(frozen=True, slots=True)
class Threshold:
    """Whoever waits is inferred once ``count`` of them do, or when nobody can act."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"Threshold.count: expected at least 1 environment, got {self.count}")

    @property
    def holds(self) -> bool:
        """Waiting environments are suspended."""
        return False

    def infer(self, queue: Queue) -> Tensor:
        """Who waits, if they are enough."""
        enough = int(queue.waiting.sum()) >= self.count or queue.nobody_can_act
        return queue.waiting if enough else torch.zeros_like(queue.waiting)


@dataclass(frozen=True, slots=True)
class Greedy:
    """The default. Beside a busy engine: everyone who waits, as soon as it is free. Inline: when no one can act.

    Inline, inferring earlier would only make more and smaller batches.
    """

    @property
    def holds(self) -> bool:
        """Waiting environments are suspended."""
        return False

    def infer(self, queue: Queue) -> Tensor:
        """Who waits."""
        return queue.waiting if queue.engine_overlaps or queue.nobody_can_act else torch.zeros_like(queue.waiting)
