"""A rehearsal of a task's row functions when an environment is made.

It binds every derived field that the functions read, since a batch computes only the fields that are bound, and it
finds wrong shapes and dtypes before anything is stepped.
"""

from __future__ import annotations

import torch
from gymnasium import spaces
from torch import Tensor

from headrace.envs._episode_state import EpisodeState
from headrace.envs._rows import Rows
from headrace.envs._task import Task
from headrace.errors import DtypeError, ShapeError
from headrace.sim import Simulation


def rehearse(task: Task, sim: Simulation) -> None:
    """Call each row function once on environment 0, check what it returns, and put the simulation back."""
    episodes = EpisodeState(sim.num_envs, sim.device, task.memory)
    episodes.episode_ids.zero_()
    ids = torch.zeros(1, dtype=torch.int64, device=sim.device)
    rows = Rows(sim, episodes, ids)
    sim.reset(ids)
    task.reset(rows)
    sim.forward(ids)
    actions = _zero_actions(task, sim.device)
    task.apply_action(rows, actions)
    obs = task.observe(rows)
    expected = set(task.observation_space.spaces) - set(task.images)
    if set(obs) != expected:
        raise ShapeError(f"{_name(task)}.observe: expected the groups {sorted(expected)}, got {sorted(obs)}")
    for group in expected:
        space = task.observation_space.spaces[group]
        _check(task, f"observe[{group!r}]", obs[group], (1, *(space.shape or ())), torch.float64)
    _check(task, "reward", task.reward(rows, actions), (1,), torch.float64)
    _check(task, "terminated", task.terminated(rows), (1,), torch.bool)
    success = task.success(rows)
    if (success is None) != (task.success_measure is None):
        raise ShapeError(
            f"{_name(task)}: expected success_measure (in words) and success(rows) to be given both or not at all"
        )
    if success is not None:
        _check(task, "success", success, (1,), torch.bool)
    told = task.instructions(rows)
    if told is not None and [type(text) for text in told] != [str]:
        raise ShapeError(f"{_name(task)}.instructions: expected one text for one row, got {told!r}")
    sim.reset(ids)
    sim.seal()


def _zero_actions(task: Task, device: torch.device) -> Tensor:
    if isinstance(task.action_space, spaces.Discrete):
        return torch.full((1,), int(task.action_space.start), dtype=torch.int64, device=device)
    return torch.zeros((1, *task.action_space.shape), dtype=torch.float64, device=device)


def _check(task: Task, what: str, value: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(value.shape) != shape:
        raise ShapeError(f"{_name(task)}.{what}: expected shape {shape} for one row, got {tuple(value.shape)}")
    if value.dtype != dtype:
        raise DtypeError(f"{_name(task)}.{what}: expected {dtype}, got {value.dtype}")


def _name(task: Task) -> str:
    return type(task).__name__
