"""The compiled form of a task that steps often: row functions as kernels, and steps without Python per row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium.spaces import Discrete
from numpy.typing import NDArray
from torch import Tensor

from headrace._kernels.compiled import kernel
from headrace.envs._episode_state import F32, F64, I64, ActiveSet, EpisodeState, Flags, begin_rows
from headrace.sim import Simulation
from headrace.sim.mujoco_sim import MujocoSim, ResetArrays, restore_rows
from headrace.types import EpisodeEnds, Obs, Step, StepInfo

if TYPE_CHECKING:
    from headrace.envs.batch_env import BatchEnv
    from headrace.envs.task import Task

_NO_FLAGS = np.empty(0, np.bool_)
_FLOAT32_MAX = float(np.finfo(np.float32).max)
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
        """Return the task's own memory ``name``, (N, …)."""
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
    """Return the compiled form of a task; None where it has none, or where it is not that of all its functions.

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


@kernel()
def settle_rows(
    ids: I64,
    obs: F64,
    reward: F64,
    terminated: Flags,
    failed: Flags,
    bad: NDArray[np.int32],
    limit: int,
    steps: I64,
    returns: F64,
    held: F32,
    shown: F32,
    out_reward: F32,
    flags: Flags,
    ended: I64,
) -> int:
    """Return a step's bookkeeping in one pass: ``post_rows`` and ``finish_rows`` of one group, and a copy of what is
    held.

    Inputs: ``ids`` (n,), ``obs`` (n, F), ``reward`` (n,), ``terminated`` (n,), ``failed`` (n,) or (0,) for none,
    ``bad`` (N, k), not zero where a simulation failed, ``limit`` steps. Outputs: ``steps`` (N,) and ``returns`` (N,)
    are added to; rows of ``held`` (N, F); ``shown``
    (N, F), a copy of all of it; ``out_reward`` (N,) and ``flags`` (3, N) (terminated, truncated, diverged), zero for
    other environments; the first m of ``ended`` (n,), rows whose episode ended. Returns m.
    """
    count = 0
    any_failed = failed.shape[0] > 0
    if ids.shape[0] < held.shape[0]:
        for env in range(held.shape[0]):
            out_reward[env] = 0.0
            for kind in range(3):
                flags[kind, env] = False
    for row in range(ids.shape[0]):
        env = ids[row]
        steps[env] += 1
        # written so that NaN is not fine either
        fine = abs(reward[row]) <= _FLOAT32_MAX and not (any_failed and failed[row])
        for column in range(bad.shape[1]):
            fine &= bad[env, column] == 0
        for column in range(obs.shape[1]):
            fine &= abs(obs[row, column]) <= _FLOAT32_MAX
        if fine:
            for column in range(obs.shape[1]):
                held[env, column] = obs[row, column]
        gain = reward[row] if fine else 0.0
        over = terminated[row] and fine
        cut = not fine or steps[env] >= limit
        returns[env] += gain
        out_reward[env] = gain
        flags[0, env] = over
        flags[1, env] = cut
        flags[2, env] = not fine
        if over or cut:
            ended[count] = row
            count += 1
    for env in range(held.shape[0]):
        for column in range(held.shape[1]):
            shown[env, column] = held[env, column]
    return count


@kernel()
def end_rows(
    ended: I64,
    ids: I64,
    success: Flags,
    diverged: Flags,
    episode_ids: I64,
    returns: F64,
    steps: I64,
    whole: I64,
    sums: F64,
    small: Flags,
    all_sums: F64,
    all_lengths: I64,
    masks: Flags,
) -> int:
    """Return what is known of the episodes that end in rows ``ended`` (m,) of ``ids`` (n,), compact and scattered.

    Inputs: ``success`` (n,), ``diverged`` (N,). Outputs: ``whole`` (3, m): environments, episodes, lengths; ``sums``
    (m,); ``small`` (2, m): success, diverged; ``all_sums``, ``all_lengths`` (N,) and ``masks`` (2, N), zero for other
    environments. Returns how many diverged.
    """
    lost = 0
    for env in range(all_sums.shape[0]):
        all_sums[env] = 0.0
        all_lengths[env] = 0
        masks[0, env] = False
        masks[1, env] = False
    for i in range(ended.shape[0]):
        row = ended[i]
        env = ids[row]
        whole[0, i] = env
        whole[1, i] = episode_ids[env]
        whole[2, i] = steps[env]
        sums[i] = returns[env]
        small[0, i] = success[row] and not diverged[env]
        small[1, i] = diverged[env]
        if diverged[env]:
            lost += 1
        all_sums[env] = returns[env]
        all_lengths[env] = steps[env]
        masks[0, env] = True
        masks[1, env] = True
    return lost


@kernel()
def clear_rows(ids: I64, memory: tuple[F64, ...]) -> None:
    """Zero the rows ``ids`` (m,) of every array of ``memory``, (N, k)."""
    for part in range(len(memory)):
        for row in range(ids.shape[0]):
            for column in range(memory[part].shape[1]):
                memory[part][ids[row], column] = 0.0


@kernel()
def turn_rows(
    ended: I64,
    ids: I64,
    success: Flags,
    diverged: Flags,
    stride: int,
    episode_ids: I64,
    next_ids: I64,
    steps: I64,
    returns: F64,
    memory: tuple[F64, ...],
    default: F64,
    state: F64,
    warning: NDArray[np.int32],
    whole: I64,
    sums: F64,
    small: Flags,
    all_sums: F64,
    all_lengths: I64,
    masks: Flags,
) -> int:
    """From one episode to the next in one pass: ``end_rows``, ``begin_rows``, ``clear_rows`` and ``restore_rows``."""
    lost = end_rows(
        ended, ids, success, diverged, episode_ids, returns, steps, whole, sums, small, all_sums, all_lengths, masks
    )
    begin_rows(whole[0], ids[:0], stride, episode_ids, next_ids, steps, returns)
    clear_rows(whole[0], memory)
    restore_rows(whole[0], default, state, warning)
    return lost


@kernel()
def hold_rows(ids: I64, obs: F64, held: F32, shown: F32) -> None:
    """Write rows ``ids`` (m,) of ``held`` (N, F) from ``obs`` (m, F), and copy all of it to ``shown`` (N, F)."""
    for row in range(ids.shape[0]):
        for column in range(obs.shape[1]):
            held[ids[row], column] = obs[row, column]
    for env in range(held.shape[0]):
        for column in range(held.shape[1]):
            shown[env, column] = held[env, column]


class CompiledStep:
    """Does what ``BatchEnv.step`` does, bit for bit, where no cameras, substeps or masks take part.

    Owns the memory between the kernels; what it returns is fresh.
    """

    def __init__(
        self,
        env: BatchEnv,
        sim: MujocoSim,
        rows: CompiledRows,
        episodes: EpisodeState,
        active_set: ActiveSet,
        held: NDArray[np.float32],
    ) -> None:
        """Step ``env`` with the compiled form of its task; the rest is the environment's own, ``held`` (N, F)."""
        self._env = env
        self._rows = rows
        self._held = held
        self._episodes = state = episodes
        self._active_set = active_set
        self._all_ids = state.all_ids.numpy()
        self._episode_ids, self._next_ids = state.episode_ids.numpy(), state.next_ids.numpy()
        self._steps, self._returns = state.steps.numpy(), state.returns.numpy()
        memory = [values.numpy().reshape(env.num_envs, -1) for values in state.memory.values()]
        # numba has no empty tuple of arrays
        self._memory = tuple(memory or [np.empty((env.num_envs, 0))])
        self._sim = sim
        self._bad = sim.bad_counts
        self._ended = np.empty(env.num_envs, np.int64)
        self._obs = np.empty(held.shape)
        self._reward = np.empty(env.num_envs)
        self._terminated = np.empty(env.num_envs, np.bool_)
        self._success = np.zeros(env.num_envs, np.bool_)

    def step(
        self, actions: Tensor, active: Tensor | None, final_obs: bool, restart: bool
    ) -> tuple[Step, Tensor | None]:
        """Return one step of the ``active`` environments, int64 (n,), n > 0; None for all. ``actions``: float64 (n, A).

        Returns the step and the environments whose episodes ended, of which the next ones have begun with ``restart``;
        otherwise :meth:`begin` starts them.
        """
        env, chosen = self._env, actions.numpy()
        ids = self._all_ids if active is None else active.numpy()
        n, total = ids.shape[0], self._held.shape[0]
        timer, cfg = env.timer, env.task.cfg
        timer.start("task")
        self._rows.act(ids, chosen)
        timer.start("physics")
        failed = self._sim.advance(None if active is None else ids.astype(np.int32), cfg.decimation)
        timer.start("task")
        obs, reward, terminated, success = self._obs[:n], self._reward[:n], self._terminated[:n], self._success[:n]
        self._rows.judge(ids, chosen, obs, reward, terminated, success)
        # one way to allocate: what is not warm in the cache costs more than filling it in the kernel
        shown, gain, flags = (
            np.empty(self._held.shape, np.float32),
            np.empty(total, np.float32),
            np.empty((3, total), np.bool_),
        )
        unfit = _NO_FLAGS if failed is None else np.isin(ids, failed)
        count = settle_rows(
            *(ids, obs, reward, terminated, unfit, self._bad, cfg.episode_length, self._steps, self._returns),
            *(self._held, shown, gain, flags, self._ended),
        )
        seen: Obs = {"policy": torch.from_numpy(shown)}
        info: StepInfo = {}
        ended_ids: Tensor | None = None
        if count:
            arrays = self._sim.reset_arrays if restart else None
            ended_ids, info = self._end(self._ended[:count], ids, success, flags[2], seen, final_obs, arrays)
            if restart:
                timer.start("reset")
                seen = self.begin(ended_ids) if arrays is None else self._begin(ended_ids)
        step = Step(seen, torch.from_numpy(gain), torch.from_numpy(flags[0]), torch.from_numpy(flags[1]), info)
        return step, ended_ids

    def begin(self, env_ids: Tensor, episode_ids: Tensor | None = None) -> Obs:
        """Start episodes in ``env_ids`` (m,), their next ones or those given (m,); all rows, fresh."""
        self._episodes.begin(env_ids, episode_ids)
        self._sim.reset(env_ids)
        return self._begin(env_ids)

    def _begin(self, env_ids: Tensor) -> Obs:
        """Return the part of :meth:`begin` after bookkeeping and state were put back."""
        ids = env_ids.numpy()
        self._rows.reset(ids, self._episodes.seed)
        self._sim.forward(env_ids)
        first, shown = self._obs[: ids.shape[0]], np.empty(self._held.shape, np.float32)
        self._rows.observe(ids, first)
        hold_rows(ids, first, self._held, shown)
        self._active_set.unpark(env_ids)
        return {"policy": torch.from_numpy(shown)}

    def _end(
        self,
        ended: NDArray[np.int64],
        ids: NDArray[np.int64],
        success: NDArray[np.bool_],
        diverged: NDArray[np.bool_],
        last: Obs,
        final_obs: bool,
        arrays: ResetArrays | None,
    ) -> tuple[Tensor, StepInfo]:
        """Report the episodes that ended in rows ``ended`` (m,) of ``ids``; returns their environments, too.

        With the simulation's ``arrays``, bookkeeping and states are those of the next episodes afterwards.
        """
        env, m, total = self._env, ended.shape[0], self._held.shape[0]
        whole, sums, small = np.empty((3, m), np.int64), np.empty(m), np.empty((2, m), np.bool_)
        all_sums, all_lengths, masks = np.empty(total), np.empty(total, np.int64), np.empty((2, total), np.bool_)
        out = whole, sums, small, all_sums, all_lengths, masks
        if arrays is not None:
            lost = turn_rows(
                *(ended, ids, success, diverged, self._episodes.episode_stride, self._episode_ids, self._next_ids),
                *(self._steps, self._returns, self._memory, *arrays, *out),
            )
        else:
            lost = end_rows(ended, ids, success, diverged, self._episode_ids, self._returns, self._steps, *out)
        env.divergences += lost
        as_tensor = torch.from_numpy
        env_ids = as_tensor(whole[0])
        ends = EpisodeEnds(
            env_ids=env_ids,
            episode_ids=as_tensor(whole[1]),
            returns=as_tensor(sums),
            lengths=as_tensor(whole[2]),
            success=None if env.task.success_measure is None else as_tensor(small[0]),
            diverged=as_tensor(small[1]),
        )
        info: StepInfo = {
            "ends": ends,
            "episode": {"r": as_tensor(all_sums), "l": as_tensor(all_lengths)},
            "_episode": as_tensor(masks[0]),
        }
        if env.autoreset == "disabled":
            self._active_set.park(env_ids)
        elif final_obs:
            info["final_obs"] = last
            info["_final_obs"] = as_tensor(masks[1])
        return env_ids, info
