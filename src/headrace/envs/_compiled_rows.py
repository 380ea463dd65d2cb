"""The compiled form of a task: the same row functions as kernels over plain arrays, for tasks that step often."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from gymnasium.spaces import Discrete
from numpy.typing import NDArray

from headrace.envs._episode_state import EpisodeState
from headrace.sim import Simulation

if TYPE_CHECKING:
    from headrace.envs._task import Task

F64: TypeAlias = NDArray[np.float64]
I64: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]

ROW_FUNCTIONS = frozenset(("reset", "apply_action", "observe", "reward", "terminated", "success", "instructions"))


class TaskArrays:
    """The memory that compiled row functions work on: arrays of all N environments, views of what the tensors hold."""

    def __init__(self, sim: Simulation, episodes: EpisodeState) -> None:
        self._sim = sim
        self._episodes = episodes

    def field(self, name: str) -> F64:
        """MjData ``field``, (N, …); one that the task's own functions read, too."""
        return self._sim.field(name).numpy()

    def memory(self, name: str) -> F64:
        """The task's own memory ``name``, (N, …)."""
        return self._episodes.memory[name].numpy()

    @property
    def episode_ids(self) -> I64:
        """(N,): the episode that each environment is in."""
        return self._episodes.episode_ids.numpy()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledRows:
    """A task's row functions over arrays. Each writes what the task's own function gives, bit for bit.

    ``ids`` (n,) are the environments of the rows; all other arguments are compact, one row per id.
    """

    act: Callable[[I64, F64], None]
    """``act(ids, actions)``: what ``apply_action`` does."""
    judge: Callable[[I64, F64, F64, F64, Flags, Flags], None]
    """``judge(ids, actions, obs, reward, terminated, success)`` writes the last four, (n, F) and (n,); the group
    ``policy`` is the only one. Without a success measure ``success`` is left alone."""
    observe: Callable[[I64, F64], None]
    """``observe(ids, obs)``: the observation alone, (n, F)."""
    reset: Callable[[I64, int], None]
    """``reset(ids, seed)``: what ``reset`` does, in the episodes that the environments are in."""


def compiled_rows(task: Task[Any], sim: Simulation, episodes: EpisodeState) -> CompiledRows | None:
    """The compiled form of a task; None where it has none, or where it is not that of all its functions.

    A subclass that overrides a row function without ``compiled`` is stepped by its own functions, and so is a task
    that gives instructions: there is no compiled form of texts.
    """
    if task.images or set(task.observation_space.spaces) != {"policy"} or isinstance(task.action_space, Discrete):
        return None
    order = type(task).__mro__
    if sum("instructions" in vars(cls) for cls in order) > 1:  # overridden
        return None
    home = next(place for place, cls in enumerate(order) if "compiled" in vars(cls))
    if any(not ROW_FUNCTIONS.isdisjoint(vars(holder)) for holder in (task, *order[:home])):
        return None
    return task.compiled(TaskArrays(sim, episodes))
