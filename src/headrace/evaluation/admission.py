"""Admission: when to run the model, and for whom. Small rules behind one protocol.

An environment *waits* when its next chunk is due and has not been asked for. Who waits is suspended, or, in the hold
forms that others use and that are here for comparison, is stepped on with a hold action.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from headrace._named import load_made
from headrace.errors import ConfigError, UnknownNameError


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueState:
    """What a rule decides by. Masks are bool (N,) on the host, borrowed. At least one environment waits."""

    running: NDArray[np.bool_]
    """Environments that play an episode."""
    waiting: NDArray[np.bool_]
    """Environments that want a chunk and are not being inferred already."""
    can_act: NDArray[np.bool_]
    """Environments that have an action to play and may play it before the model answers."""
    due_next: NDArray[np.bool_]
    """Of these, environments that will wait after one more step."""
    engine_overlaps: bool
    """Whether the model runs beside the physics. If so, it is free: a rule is not asked while it is busy."""
    steps: int
    """Steps of the batch so far."""

    @property
    def nobody_can_act(self) -> bool:
        """Nothing moves before the model answers."""
        return not self.can_act.any()

    @property
    def nobody(self) -> NDArray[np.bool_]:
        """bool (N,), all False."""
        return np.zeros_like(self.waiting)


class Admission(Protocol):
    """A rule: whom to infer now. It must name somebody when no environment can act."""

    @property
    def holds(self) -> bool:
        """Whether an environment that waits is stepped with a hold action instead of being suspended."""
        ...

    def infer(self, queue: QueueState) -> NDArray[np.bool_]:
        """bool (N,): rows to give to the model now; rows that do not wait are inferred for nothing."""
        ...


@dataclass(frozen=True, slots=True)
class WholeBatchOnAny:
    """One waits → the whole batch is inferred. The baseline that escalates once environments are out of phase."""

    holds = False

    def infer(self, queue: QueueState) -> NDArray[np.bool_]:
        """Everyone who runs, as soon as one waits."""
        return queue.running


@dataclass(frozen=True, slots=True)
class Immediate:
    """Whoever waits is inferred at once, and nobody else."""

    holds = False

    def infer(self, queue: QueueState) -> NDArray[np.bool_]:
        """Who waits."""
        return queue.waiting


@dataclass(frozen=True, slots=True)
class Periodic:
    """Whoever waits is inferred at every ``period``-th step of the batch."""

    period: int
    holds: bool = False

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ConfigError(f"Periodic.period: expected at least 1 step, got {self.period}")

    def infer(self, queue: QueueState) -> NDArray[np.bool_]:
        """Who waits, on the tick; or, suspended, when nobody could ever reach the next tick."""
        on_tick = queue.steps % self.period == 0
        stuck = queue.nobody_can_act and not self.holds
        return queue.waiting if on_tick or stuck else queue.nobody


@dataclass(frozen=True, slots=True)
class Synchronized:
    """Everyone is inferred together, when all wait: the synchronized form."""

    holds: bool = False

    def infer(self, queue: QueueState) -> NDArray[np.bool_]:
        """Everyone who runs, once all of them wait."""
        return queue.waiting if queue.waiting[queue.running].all() else queue.nobody


@dataclass(frozen=True, slots=True)
class Threshold:
    """Whoever waits is inferred once ``count`` of them do, or when nobody can act."""

    count: int
    holds = False

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"Threshold.count: expected at least 1 environment, got {self.count}")

    def infer(self, queue: QueueState) -> NDArray[np.bool_]:
        """Who waits, if they are enough."""
        enough = int(queue.waiting.sum()) >= self.count or queue.nobody_can_act
        return queue.waiting if enough else queue.nobody


@dataclass(frozen=True, slots=True)
class Greedy:
    """The default. Beside a busy engine: everyone who waits, as soon as it is free. Inline: when no one can act.

    Inline, inferring earlier would only make more and smaller batches. Beside an engine there are two exceptions:

    - A batch in which all wait at once, as at the start, would stay a convoy: model and physics would take turns for
      ever, since environments that get their chunks together wait together again. So half of it is inferred first,
      and plays while the other half is.
    - If one more step would more than double those who wait, that step comes first: a call for the few who are early
      would keep the many waiting for the whole of its fixed part.
    """

    holds = False

    def infer(self, queue: QueueState) -> NDArray[np.bool_]:
        """Who waits, the first half of a convoy, or nobody yet."""
        stuck = not queue.can_act.any()
        if not queue.engine_overlaps:
            return queue.waiting if stuck else queue.nobody
        if not stuck:
            many_come = np.count_nonzero(queue.due_next) > np.count_nonzero(queue.waiting)
            return queue.nobody if many_come else queue.waiting
        slots = np.flatnonzero(queue.waiting)
        half = queue.nobody
        half[slots[: (len(slots) + 1) // 2]] = True
        return half


_RULES: dict[str, Callable[..., Admission]] = {
    "greedy": Greedy,
    "immediate": Immediate,
    "periodic": Periodic,
    "synchronized": Synchronized,
    "threshold": Threshold,
    "whole-batch-on-any": WholeBatchOnAny,
}


def register_admission(name: str, build: Callable[..., Admission]) -> None:
    """Give a rule of your own a name, for ``evaluate(admission=name)`` and ``--admission name``.

    Args:
        name: lower-case words joined with ``-``; what follows a ``:`` is for ``build``.
        build: makes the rule from the whole numbers that follow the name (``name:3``), and from ``holds=True`` where
            ``hold`` does (``name:3:hold``): the class of the rule, mostly.
    """
    if not name or ":" in name:
        raise ConfigError(f"admission rule: expected a name without ':', got {name!r}")
    if name in _RULES:
        raise ConfigError(f"admission rule {name!r}: there is one already, {_RULES[name]}; choose another name")
    _RULES[name] = build


def make_admission(rule: Admission | str) -> Admission:
    """Return the rule of a name: ``greedy``, ``periodic:16``, ``synchronized:hold``, …, or ``module:name``.

    A class of a module is made without arguments; a rule is returned as it is.
    """
    if not isinstance(rule, str):
        return rule
    name, *rest = rule.split(":")
    if name not in _RULES:
        if len(rest) == 1 and rest[0].isidentifier():
            return cast("Admission", load_made(rule, "--admission"))
        raise UnknownNameError("admission rule", name, sorted(_RULES))
    holds = rest[-1:] == ["hold"]
    numbers = rest[:-1] if holds else rest
    if not all(map(str.isdecimal, numbers)):
        raise ConfigError(f"admission rule: expected NAME, NAME:NUMBER or NAME:NUMBER:hold, got {rule!r}")
    build, given, named = _RULES[name], list(map(int, numbers)), {"holds": True} if holds else {}
    signature = inspect.signature(build)
    try:
        signature.bind(*given, **named)
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "nothing"
        raise ConfigError(f"admission rule {rule!r}: {name} takes {takes}: {error}") from error
    return build(*given, **named)
