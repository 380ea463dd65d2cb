"""``TermTask``: a task made of named terms."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from headrace.envs._episode_state import EpisodeState
from headrace.envs._rows import Rows
from headrace.envs._task import Task
from headrace.envs._terms import IntervalEvent, ObservationTerm, ResetEvent, RewardTerm, TermTaskCfg
from headrace.errors import DtypeError, ShapeError
from headrace.sim import MujocoSim
from headrace.sim._mujoco_api import Model, load_model
from headrace.types import Obs

ACTION, PREVIOUS_ACTION = "action", "previous_action"
"""Memory of every term task, float64 (n, A): the action of this step, and of the one before."""


def level_memory(term: str) -> str:
    """The name under which ``rows.recall`` finds the level of a curriculum term, float64 (n,)."""
    return f"curriculum.{term}"


class TermTask(Task[TermTaskCfg]):
    """A task made of the terms of a :class:`~headrace.envs._terms.TermTaskCfg`.

    Each term is tried once on one row when the task is made: sizes of observation groups come from that, and a term of
    the wrong shape or dtype is named at once.
    """

    def __init__(self, cfg: TermTaskCfg) -> None:
        model = load_model(cfg.model)
        bounds = [term.prepare(model) for term in cfg.actions.values()]
        self._widths = [len(low) for low, _ in bounds]
        self.success_measure = None if cfg.success is None else cfg.success.measure
        self.memory = {ACTION: (sum(self._widths),), PREVIOUS_ACTION: (sum(self._widths),)}
        self.memory |= {level_memory(name): () for name in cfg.curriculum}
        self._intervals = {name: event for name, event in cfg.events.items() if isinstance(event, IntervalEvent)}
        self.memory |= {_due_memory(name): () for name in self._intervals}
        super().__init__(cfg, model, _tried(cfg, model, self.memory), cfg.images)
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
        """Each group's terms side by side, in their order."""
        return {
            group: torch.cat([_observed(rows, term, f"noise.{group}.{name}") for name, term in terms.items()], dim=1)
            for group, terms in self.cfg.observations.items()
        }

    def reward(self, rows: Rows, actions: Tensor) -> Tensor:
        """The weighted sum, added up in the order of the terms."""
        del actions
        first, *others = self.cfg.rewards.values()
        total = _weighted(rows, first)
        for term in others:
            total = total + _weighted(rows, term)
        return total

    def terminated(self, rows: Rows) -> Tensor:
        """Any of the conditions holds."""
        return rows.once("terminated", lambda: self._any_condition(rows))

    def success(self, rows: Rows) -> Tensor | None:
        """The success term's condition."""
        term = self.cfg.success
        if term is None:
            return None
        return ~self.terminated(rows) if term.condition == "not terminated" else term.condition(rows)

    def instructions(self, rows: Rows) -> Sequence[str] | None:
        """The instruction of the settings, or what its function gives for each row."""
        told = self.cfg.instruction
        return [told] * len(rows) if isinstance(told, str) else None if told is None else told(rows)

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


def _weighted(rows: Rows, term: RewardTerm) -> Tensor:
    return term.weight * term.function(rows)


def _observed(rows: Rows, term: ObservationTerm, stream: str) -> Tensor:
    """A term's columns, float64 (n, k)."""
    values = term.function(rows)
    values = values[:, None] if values.dim() == 1 else values
    if term.scale != 1.0:
        values = values * term.scale
    if term.noise_std > 0.0:
        values = values + rows.noise(stream, values.shape[1], std=term.noise_std)
    return values


def _tried(cfg: TermTaskCfg, model: Model, memory: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """Call every function once on the model's default state; give the number of features of each group."""
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
            sizes[group] += _observed(rows, term, path).shape[1]
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
