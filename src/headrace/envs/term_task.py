"""Tasks made of named terms: observations, actions, rewards, terminations, events, randomization.

Every record is a frozen dataclass, so every weight and parameter has a path: ``rewards.alive.weight``,
``terminations.fallen.high``, ``events.push.interval``. See :mod:`headrace.envs.recipe`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from headrace.envs._action_terms import ActionTerm, Randomization
from headrace.envs._episode_state import EpisodeState
from headrace.envs.image_spec import ImageSpec, check_delay, lag_range
from headrace.envs.task import Rows, Task, TaskCfg
from headrace.errors import ConfigError, DtypeError, ShapeError, UnknownNameError
from headrace.sim.mujoco_api import Model, load_model
from headrace.sim.mujoco_sim import MujocoSim
from headrace.types import Obs

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
    """A few columns of an observation group: ``scale · function(rows) + noise``, some steps late."""

    function: RowFunction
    scale: float = 1.0
    noise_std: float = 0.0
    """Standard deviation of normal noise, new in each step, in the units of the scaled value."""

    delay: int | tuple[int, int] = 0
    """Steps by which it is late, or a range (fewest, most) of which every episode draws one."""

    def __post_init__(self) -> None:
        check_delay("ObservationTerm.delay", self.delay)
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
class AddedCamera:
    """A camera that a task adds to a body of its model, in the body's frame."""

    body: str = "world"
    position: tuple[float, float, float] = (0.0, 0.0, 0.0)
    quaternion: tuple[float, float, float, float] = (1.0, 0.0, 0.0, 0.0)
    """Of (1, 0, 0, 0) the camera looks along the body's -z, with its y up."""
    fovy: float = 45.0
    """Degrees from the top of a picture to its bottom."""


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
    delays: Mapping[str, int | tuple[int, int]] = field(default_factory=dict[str, "int | tuple[int, int]"])
    """Group of ``observations`` → steps by which all of it is late; see ``ObservationTerm.delay``."""
    cameras: Mapping[str, AddedCamera] = field(default_factory=dict[str, AddedCamera])
    """Cameras besides those of the model, by name, for ``images``, ``view`` and ``picture``."""
    images: Mapping[str, ImageSpec] = field(default_factory=dict[str, ImageSpec])
    """Observation groups that a camera fills."""
    rewards: Mapping[str, RewardTerm]
    terminations: Mapping[str, RowCondition] = field(default_factory=dict[str, RowCondition])
    """Any of them ends an episode."""
    success: SuccessTerm | None = None
    instruction: str | RowTexts | None = None
    """The instruction of a policy: one text, or a function that gives each episode its own."""
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
        for name, delay in self.delays.items():
            if name not in self.observations:
                raise UnknownNameError("group in delays:", name, self.observations)
            check_delay(f"delays.{name}", delay)
        for name, term in self.randomization.items():
            if term.curriculum is not None and term.curriculum not in self.curriculum:
                raise ConfigError(
                    f"randomization.{name}.curriculum: expected one of {sorted(self.curriculum)}, "
                    f"got {term.curriculum!r}"
                )


ACTION, PREVIOUS_ACTION = "action", "previous_action"
"""Memory of every term task, float64 (n, A): the action of this step, and of the one before."""


def level_memory(term: str) -> str:
    """Return the name under which ``rows.recall`` finds the level of a curriculum term, float64 (n,)."""
    return f"curriculum.{term}"


class TermTask(Task[TermTaskCfg]):
    """A task made of the terms of a :class:`~headrace.envs.term_task.TermTaskCfg`.

    Each term is tried once on one row when the task is made: sizes of observation groups come from that, and a term of
    the wrong shape or dtype is named at once.
    """

    def __init__(self, cfg: TermTaskCfg) -> None:
        model = load_model(cfg.model, cameras={name: vars(camera) for name, camera in cfg.cameras.items()})
        bounds = [term.prepare(model) for term in cfg.actions.values()]
        self._widths = [len(low) for low, _ in bounds]
        self.success_measure = None if cfg.success is None else cfg.success.measure
        self.memory = {ACTION: (sum(self._widths),), PREVIOUS_ACTION: (sum(self._widths),)}
        self.memory |= {level_memory(name): () for name in cfg.curriculum}
        self._intervals = {name: event for name, event in cfg.events.items() if isinstance(event, IntervalEvent)}
        self.memory |= {_due_memory(name): () for name in self._intervals}
        super().__init__(cfg, model, _try_terms(cfg, model, self.memory), cfg.images)
        low, high = (np.concatenate(ends).astype(np.float32) for ends in zip(*bounds, strict=True))
        self.action_space = spaces.Box(low, high, dtype=np.float32)

    @property
    def identity(self) -> str:
        """The names of the terms: two tasks with the same ones can load each other's snapshots."""
        cfg = self.cfg
        observed = [f"{group}.{name}" for group, terms in cfg.observations.items() for name in terms]
        parts = [*observed, *cfg.images, *cfg.actions, *cfg.rewards, *cfg.events, *cfg.randomization, *cfg.curriculum]
        return f"TermTask({', '.join(parts)})"

    def reset(self, rows: Rows) -> None:
        """Levels, model fields, reset events in their order, and when interval events will come first."""
        cfg = self.cfg
        for name, schedule in cfg.curriculum.items():
            rows.remember(level_memory(name), schedule(rows.episode_ids))
        for name, term in cfg.randomization.items():
            level = None if term.curriculum is None else rows.recall(level_memory(term.curriculum))
            term.apply(rows, f"randomization.{name}", level)
        for name, event in cfg.events.items():
            if isinstance(event, ResetEvent):
                event.function(rows, name)
            else:
                self._plan(rows, name, event)
                # a call with no rows makes known which derived fields the function will read
                event.function(rows.where(torch.zeros(len(rows), dtype=torch.bool, device=rows.device)), name)

    def apply_action(self, rows: Rows, actions: Tensor) -> None:
        """Interval events that are due, then the action terms, each with its columns."""
        rows.remember(PREVIOUS_ACTION, rows.recall(ACTION))
        rows.remember(ACTION, actions)
        for name, event in self._intervals.items():
            due = rows.recall(_due_memory(name)) == rows.steps
            if bool(due.any()):
                chosen = rows.where(due)
                event.function(chosen, name)
                self._plan(chosen, name, event)
        parts = actions.split(self._widths, dim=1)
        for term, part in zip(self.cfg.actions.values(), parts, strict=True):
            term.apply(rows, part)

    def observe(self, rows: Rows) -> Obs:
        """Return each group's terms side by side, in their order."""
        found: Obs = {}
        for group, terms in self.cfg.observations.items():
            parts = [
                _delay_values(rows, _observe_term(rows, term, f"noise.{group}.{name}"), f"{group}.{name}", term.delay)
                for name, term in terms.items()
            ]
            found[group] = _delay_values(rows, torch.cat(parts, dim=1), group, self.cfg.delays.get(group, 0))
        return found

    def reward(self, rows: Rows, actions: Tensor) -> Tensor:
        """Return the weighted sum, added up in the order of the terms."""
        del actions
        first, *others = self.cfg.rewards.values()
        total = _weigh(rows, first)
        for term in others:
            total = total + _weigh(rows, term)
        return total

    def terminated(self, rows: Rows) -> Tensor:
        """Return whether any of the conditions holds."""
        return rows.once("terminated", lambda: self._any_condition(rows))

    def success(self, rows: Rows) -> Tensor | None:
        """Return the success term's condition."""
        term = self.cfg.success
        if term is None:
            return None
        return ~self.terminated(rows) if term.condition == "not terminated" else term.condition(rows)

    def instructions(self, rows: Rows) -> Sequence[str] | None:
        """Return the instruction of the settings, or what its function gives for each row."""
        said = self.cfg.instruction
        return [said] * len(rows) if isinstance(said, str) else None if said is None else said(rows)

    def _any_condition(self, rows: Rows) -> Tensor:
        ended = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        for condition in self.cfg.terminations.values():
            ended = ended | condition(rows)
        return ended

    def _plan(self, rows: Rows, name: str, event: IntervalEvent) -> None:
        """Draw when the event comes next, from the numbers that belong to this step."""
        fewest, most = event.interval
        unit = rows.uniform(f"interval.{name}", 1, draw=rows.steps)[:, 0]
        rows.remember(_due_memory(name), rows.steps + fewest + torch.floor(unit * (most - fewest + 1)))


def _due_memory(event: str) -> str:
    return f"due.{event}"


def _weigh(rows: Rows, term: RewardTerm) -> Tensor:
    return term.weight * term.function(rows)


def _observe_term(rows: Rows, term: ObservationTerm, stream: str) -> Tensor:
    """Return a term's columns, float64 (n, k)."""
    values = term.function(rows)
    values = values[:, None] if values.dim() == 1 else values
    if term.scale != 1.0:
        values = values * term.scale
    if term.noise_std > 0.0:
        values = values + rows.noise(stream, values.shape[1], std=term.noise_std)
    return values


def _delay_memory(name: str) -> str:
    return f"delay.{name}"


def _ring(name: str, delay: int | tuple[int, int], width: int) -> dict[str, tuple[int, ...]]:
    """Return the memory that a delay needs: none for no delay."""
    most = lag_range(delay)[1]
    return {_delay_memory(name): (most + 1, width)} if most else {}


def _delay_values(rows: Rows, values: Tensor, name: str, delay: int | tuple[int, int]) -> Tensor:
    """Note the values (n, k) of this step, and return those of ``delay`` steps ago, or of the first step."""
    low, high = lag_range(delay)
    if high == 0:
        return values
    unit = rows.uniform(_delay_memory(name), 1)[:, 0]
    lag = torch.minimum(low + torch.floor(unit * (high - low + 1)).long(), rows.steps)
    ring, every = rows.recall(_delay_memory(name)), torch.arange(len(rows), device=rows.device)
    ring[every, rows.steps % (high + 1)] = values
    rows.remember(_delay_memory(name), ring)
    return ring[every, (rows.steps - lag) % (high + 1)]


def _try_terms(cfg: TermTaskCfg, model: Model, memory: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """Call every function once on the model's default state; return the number of features of each group.

    What delays need is added to ``memory``.
    """
    sim = MujocoSim(model, 1, threads=1)
    episodes = EpisodeState(1, sim.device, memory)
    episodes.episode_ids.zero_()
    rows = Rows(sim, episodes, None)
    sim.forward(None)
    sizes: dict[str, int] = {}
    for group, terms in cfg.observations.items():
        sizes[group] = 0
        for name, term in terms.items():
            path = f"observations.{group}.{name}"
            _check(path, term.function(rows), (1, 2), torch.float64)
            width = _observe_term(rows, term, path).shape[1]
            sizes[group] += width
            memory |= _ring(f"{group}.{name}", term.delay, width)
        memory |= _ring(group, cfg.delays.get(group, 0), sizes[group])
    for name, term in cfg.rewards.items():
        _check(f"rewards.{name}", term.function(rows), (1,), torch.float64)
    for name, condition in cfg.terminations.items():
        _check(f"terminations.{name}", condition(rows), (1,), torch.bool)
    if cfg.success is not None and cfg.success.condition != "not terminated":
        _check("success", cfg.success.condition(rows), (1,), torch.bool)
    for name, schedule in cfg.curriculum.items():
        _check(f"curriculum.{name}", schedule(episodes.episode_ids), (1,), torch.float64)
    sim.close()
    return sizes


def _check(path: str, value: Tensor, ranks: tuple[int, ...], dtype: torch.dtype) -> None:
    if value.dim() not in ranks or value.shape[0] != 1:
        shapes = " or ".join({1: "(n,)", 2: "(n, k)"}[rank] for rank in ranks)
        raise ShapeError(f"{path}: expected {shapes} with n = 1 in this trial, got {tuple(value.shape)}")
    if value.dtype != dtype:
        raise DtypeError(f"{path}: expected {dtype}, got {value.dtype}")
