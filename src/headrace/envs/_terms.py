"""A task as named terms: observations, actions, rewards, terminations, events, randomization.

Everything is a frozen dataclass, so every weight and parameter has a path: ``rewards.alive.weight``,
``terminations.fallen.high``, ``events.push.interval``. See :mod:`headrace.envs._overrides`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from torch import Tensor

from headrace.envs._action_terms import ActionTerm
from headrace.envs._image_spec import ImageSpec
from headrace.envs._randomization import Randomization
from headrace.envs._rows import Rows
from headrace.envs._task import TaskCfg
from headrace.errors import ConfigError

RowFunction: TypeAlias = Callable[[Rows], Tensor]
"""Numbers of each row, float64 (n,) or (n, k). Pure: see :class:`headrace.Task`."""
RowCondition: TypeAlias = Callable[[Rows], Tensor]
"""Something that is so or not, bool (n,)."""
RowTexts: TypeAlias = Callable[[Rows], Sequence[str]]
"""A text for each row, n of them; called once per episode, after its reset events."""
RowChange: TypeAlias = Callable[[Rows, str], None]
"""Writes to the rows' states. Draws its random numbers from the stream it is given, which is its own."""
Schedule: TypeAlias = Callable[[Tensor], Tensor]
"""Episode ids, int64 (n,), as levels of difficulty, float64 (n,) in [0, 1]."""


@dataclass(frozen=True, kw_only=True)
class ObservationTerm:
    """A few columns of an observation group: ``scale · function(rows) + noise``."""

    function: RowFunction
    scale: float = 1.0
    noise_std: float = 0.0
    """Standard deviation of normal noise, new in each step, in the units of the scaled value."""

    def __post_init__(self) -> None:
        if self.noise_std < 0.0:
            raise ConfigError(f"ObservationTerm.noise_std: expected at least 0, got {self.noise_std}")


@dataclass(frozen=True, kw_only=True)
class RewardTerm:
    """``weight · function(rows)``, per environment step (not per second)."""

    function: RowFunction
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class SuccessTerm:
    """When an ended episode counts as a success."""

    measure: str
    """In words."""
    condition: RowCondition | Literal["not terminated"] = "not terminated"
    """At the last step; ``not terminated`` where lasting to the end is the success."""


@dataclass(frozen=True, kw_only=True)
class ResetEvent:
    """Something that is done to each new episode, in the order of ``events``."""

    function: RowChange


@dataclass(frozen=True, kw_only=True)
class IntervalEvent:
    """Something that happens now and then, before the physics of a step."""

    function: RowChange
    interval: tuple[int, int]
    """Fewest and most steps from one time to the next, and from the start to the first."""

    def __post_init__(self) -> None:
        if len(self.interval) != 2 or not 1 <= self.interval[0] <= self.interval[1]:
            raise ConfigError(
                f"IntervalEvent.interval: expected (fewest, most) with 1 ≤ fewest ≤ most, got {self.interval}"
            )


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """A curriculum: level 0 up to episode ``first``, then evenly up to level 1 at episode ``last``."""

    first: int = 0
    last: int

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.last:
            raise ConfigError(f"Ramp: expected 0 ≤ first < last, got {self.first} and {self.last}")

    def __call__(self, episode_ids: Tensor) -> Tensor:
        """See :data:`Schedule`."""
        return ((episode_ids - self.first).double() / (self.last - self.first)).clamp(0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class TermTaskCfg(TaskCfg):
    """A task as named terms. The terms of each part are evaluated in their order."""

    model: str | Path = field(repr=False)
    """MJCF as text, or the path of a file."""
    actions: Mapping[str, ActionTerm]
    """Their columns make the action, one after another."""
    observations: Mapping[str, Mapping[str, ObservationTerm]] = field(
        default_factory=dict[str, Mapping[str, ObservationTerm]]
    )
    """Group → term name → term; ``policy`` is what policies look at."""
    images: Mapping[str, ImageSpec] = field(default_factory=dict[str, ImageSpec])
    """Observation groups that a camera fills."""
    rewards: Mapping[str, RewardTerm]
    terminations: Mapping[str, RowCondition] = field(default_factory=dict[str, RowCondition])
    """Any of them ends an episode."""
    success: SuccessTerm | None = None
    instruction: str | RowTexts | None = None
    """What a policy is told to do: one text, or a function that gives each episode its own."""
    events: Mapping[str, ResetEvent | IntervalEvent] = field(default_factory=dict[str, ResetEvent | IntervalEvent])
    """An event draws from the random stream of its name."""
    randomization: Mapping[str, Randomization] = field(default_factory=dict[str, Randomization])
    """Model fields that differ between episodes."""
    curriculum: Mapping[str, Schedule] = field(default_factory=dict[str, Schedule])
    """Levels by episode id, for events and randomization. An episode is a function of its seed and id, so its level
    is, too: it does not depend on how well earlier episodes went."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for part in ("actions", "rewards"):
            if not getattr(self, part):
                raise ConfigError(f"TermTaskCfg.{part}: expected at least one term, got none")
        if not self.observations and not self.images:
            raise ConfigError(
                "TermTaskCfg.observations: expected at least one group of terms, or one of pictures, got none"
            )
        for name, term in self.randomization.items():
            if term.curriculum is not None and term.curriculum not in self.curriculum:
                raise ConfigError(
                    f"randomization.{name}.curriculum: expected one of {sorted(self.curriculum)}, "
                    f"got {term.curriculum!r}"
                )
