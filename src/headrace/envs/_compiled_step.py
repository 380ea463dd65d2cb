"""A step of a task in its compiled form: a handful of kernels over plain arrays, and no Python per environment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.envs._active_set import ActiveSet
from headrace.envs._compiled_rows import CompiledRows
from headrace.envs._episode_state import EpisodeState
from headrace.sim import MujocoSim
from headrace.sim._mujoco_sim import ResetArrays
from headrace.types import EpisodeEnds, Obs, Step, StepInfo

if TYPE_CHECKING:
    from headrace.envs._batch_env import BatchEnv

_NO_FLAGS = np.empty(0, np.bool_)


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
        from headrace._kernels import episodes as kernels  # brings numba: on use

        self._kernels = kernels
        self._env = env
        self._rows = rows
        self._held = held
        self._episodes = state = episodes
        self._active_set = active_set
        self._everyone = state.everyone.numpy()
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
        """One step of the ``active`` environments, int64 (n,), n > 0; None for all. ``actions``: float64 (n, A).

        Returns the step and the environments whose episodes ended, of which the next ones have begun with ``restart``;
        otherwise :meth:`begin` starts them.
        """
        env, chosen = self._env, actions.numpy()
        ids = self._everyone if active is None else active.numpy()
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
        count = self._kernels.settle_rows(
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
        """The part of :meth:`begin` after bookkeeping and state were put back."""
        ids = env_ids.numpy()
        self._rows.reset(ids, self._episodes.seed)
        self._sim.forward(env_ids)
        first, shown = self._obs[: ids.shape[0]], np.empty(self._held.shape, np.float32)
        self._rows.observe(ids, first)
        self._kernels.hold_rows(ids, first, self._held, shown)
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
            lost = self._kernels.turn_rows(
                *(ended, ids, success, diverged, self._episodes.episode_stride, self._episode_ids, self._next_ids),
                *(self._steps, self._returns, self._memory, *arrays, *out),
            )
        else:
            lost = self._kernels.end_rows(
                ended, ids, success, diverged, self._episode_ids, self._returns, self._steps, *out
            )
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
