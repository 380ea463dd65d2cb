"""Ant, equal to Gymnasium's ``Ant-v5`` without contact forces."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace._device import constant
from headrace.envs._compiled_rows import CompiledRows, TaskArrays
from headrace.envs._rows import Rows
from headrace.envs._task import Task
from headrace.envs.tasks.gymnasium_models import gymnasium_model
from headrace.envs.tasks.walking import WalkCfg, outside, reset_keys, walk_reward, walk_weights
from headrace.types import Obs

_TORSO = 1


@dataclass(frozen=True, kw_only=True)
class AntCfg(WalkCfg):
    """Settings of ``ant``."""

    forward_reward_weight: float = 1.0
    ctrl_cost_weight: float = 0.5
    healthy_reward: float = 1.0
    healthy_z_min: float = 0.2
    healthy_z_max: float = 1.0
    reset_noise: float = 0.1


class Ant(Task[AntCfg]):
    """Run forward on four legs.

    Equal to ``Ant-v5`` with ``include_cfrc_ext_in_observation=False`` and ``contact_cost_weight=0``: contact forces are
    not computed by a batched step.
    """

    memory = {"torso_x": ()}  # noqa: RUF012  (a class constant, typed in the base)

    def __init__(self, cfg: AntCfg) -> None:
        super().__init__(cfg, gymnasium_model("ant.xml"), {"policy": 27})
        self._qpos0 = tuple(self.model.qpos0.tolist())

    def reset(self, rows: Rows) -> None:
        """Uniform noise on positions, normal noise on velocities."""
        noise = self.cfg.reset_noise
        qpos0 = constant(self._qpos0, torch.float64, rows.device)
        rows.set("qpos", qpos0 + rows.uniform("qpos", self.model.nq, low=-noise, high=noise))
        rows.set("qvel", rows.normal("qvel", self.model.nv, std=noise))

    def apply_action(self, rows: Rows, actions: Tensor) -> None:
        """Torques; where the torso is now tells its speed afterwards."""
        rows.remember("torso_x", rows.get("xpos", _TORSO)[:, 0])
        rows.set("ctrl", actions)

    def observe(self, rows: Rows) -> Obs:
        """``policy``: positions (without x and y) and velocities."""
        return {"policy": rows.join(("qpos", slice(2, None)), "qvel")}

    def reward(self, rows: Rows, actions: Tensor) -> Tensor:
        """Forward speed, a bonus for staying healthy, less the effort."""
        x = rows.get("xpos", _TORSO)[:, 0]
        return walk_reward(self.cfg, self.dt, rows.recall("torso_x"), x, self.terminated(rows), actions)

    def terminated(self, rows: Rows) -> Tensor:
        """The torso is too low or too high."""
        cfg = self.cfg
        return rows.once("fallen", lambda: outside(rows.get("qpos", 2), cfg.healthy_z_min, cfg.healthy_z_max))

    def compiled(self, arrays: TaskArrays) -> CompiledRows:
        """The functions above as kernels."""
        from headrace._kernels import locomotion  # brings numba: on use

        cfg, episode_ids, qpos0 = self.cfg, arrays.episode_ids, np.array(self._qpos0)
        qpos, qvel, ctrl = arrays.field("qpos"), arrays.field("qvel"), arrays.field("ctrl")
        xpos, before = arrays.field("xpos"), arrays.memory("torso_x")
        heights, weights = (cfg.healthy_z_min, cfg.healthy_z_max), walk_weights(cfg, self.dt)
        return CompiledRows(
            act=lambda ids, actions: locomotion.act_ant(ids, actions, xpos, _TORSO, before, ctrl),
            judge=lambda ids, actions, obs, reward, terminated, _: locomotion.judge_ant(
                ids, actions, qpos, qvel, xpos, _TORSO, before, heights, weights, obs, reward, terminated
            ),
            observe=lambda ids, obs: locomotion.observe_ant(ids, qpos, qvel, obs),
            reset=lambda ids, seed: locomotion.reset_walker(
                ids, episode_ids, reset_keys(seed), cfg.reset_noise, True, qpos0, qpos, qvel
            ),
        )
