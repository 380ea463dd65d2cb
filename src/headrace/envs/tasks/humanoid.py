"""Humanoid, equal to Gymnasium's ``Humanoid-v5`` without contact forces."""

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
from headrace.envs.tasks.walking import (
    WalkCfg,
    between,
    mass_center_x,
    outside,
    reset_keys,
    walk_reward,
    walk_weights,
)
from headrace.types import Obs


@dataclass(frozen=True, kw_only=True)
class HumanoidCfg(WalkCfg):
    """Settings of ``humanoid``."""

    forward_reward_weight: float = 1.25
    ctrl_cost_weight: float = 0.1
    healthy_reward: float = 5.0
    healthy_z_min: float = 1.0
    healthy_z_max: float = 2.0
    reset_noise: float = 0.01


class Humanoid(Task[HumanoidCfg]):
    """Walk forward on two legs without falling.

    Equal to ``Humanoid-v5`` with ``include_cfrc_ext_in_observation=False`` and ``contact_cost_weight=0``.
    """

    memory = {"mass_center_x": ()}  # noqa: RUF012  (a class constant, typed in the base)

    def __init__(self, cfg: HumanoidCfg) -> None:
        model = gymnasium_model("humanoid.xml")
        bodies = model.nbody - 1
        super().__init__(cfg, model, {"policy": model.nq - 2 + model.nv + 16 * bodies + model.nv - 6})
        self._qpos0 = tuple(model.qpos0.tolist())
        self._mass = tuple(model.body_mass.tolist())
        self._total_mass = float(model.body_mass.sum())

    def reset(self, rows: Rows) -> None:
        """Uniform noise on positions and velocities."""
        noise = self.cfg.reset_noise
        qpos0 = constant(self._qpos0, torch.float64, rows.device)
        rows.set("qpos", qpos0 + rows.uniform("qpos", self.model.nq, low=-noise, high=noise))
        rows.set("qvel", rows.uniform("qvel", self.model.nv, low=-noise, high=noise))

    def apply_action(self, rows: Rows, actions: Tensor) -> None:
        """Torques; where the center of mass is now tells its speed afterwards."""
        rows.remember("mass_center_x", self._mass_center_x(rows))
        rows.set("ctrl", actions)

    def observe(self, rows: Rows) -> Obs:
        """``policy``: positions (without x and y), velocities, body inertias and velocities, actuator forces."""
        bodies, joints = slice(1, None), slice(6, None)
        fields = (("qpos", slice(2, None)), "qvel", ("cinert", bodies), ("cvel", bodies), ("qfrc_actuator", joints))
        return {"policy": rows.join(*fields)}

    def reward(self, rows: Rows, actions: Tensor) -> Tensor:
        """Forward speed of the center of mass, a bonus for staying healthy, less the effort."""
        before, after = rows.recall("mass_center_x"), self._mass_center_x(rows)
        return walk_reward(self.cfg, self.dt, before, after, self.terminated(rows), actions)

    def terminated(self, rows: Rows) -> Tensor:
        """The torso is too low or too high."""
        lowest, highest = between(self.cfg.healthy_z_min, self.cfg.healthy_z_max)
        return rows.once("fallen", lambda: outside(rows.get("qpos", 2), lowest, highest))

    def _mass_center_x(self, rows: Rows) -> Tensor:
        mass = constant(self._mass, torch.float64, rows.device)
        return mass_center_x(rows.get("xipos"), mass, self._total_mass)

    def compiled(self, arrays: TaskArrays) -> CompiledRows:
        """The functions above as kernels."""
        from headrace._kernels import locomotion  # brings numba: on use

        cfg, episode_ids, qpos0 = self.cfg, arrays.episode_ids, np.array(self._qpos0)
        qpos, qvel, ctrl = arrays.field("qpos"), arrays.field("qvel"), arrays.field("ctrl")
        seen = qpos, qvel, arrays.field("cinert"), arrays.field("cvel"), arrays.field("qfrc_actuator")
        center = arrays.field("xipos"), np.array(self._mass), self._total_mass, arrays.memory("mass_center_x")
        heights, weights = between(cfg.healthy_z_min, cfg.healthy_z_max), walk_weights(cfg, self.dt)
        return CompiledRows(
            act=lambda ids, actions: locomotion.act_humanoid(ids, actions, *center, ctrl),
            judge=lambda ids, actions, obs, reward, terminated, _: locomotion.judge_humanoid(
                ids, actions, *seen, *center, heights, weights, obs, reward, terminated
            ),
            observe=lambda ids, obs: locomotion.observe_humanoid(ids, *seen, obs),
            reset=lambda ids, seed: locomotion.reset_walker(
                ids, episode_ids, reset_keys(seed), cfg.reset_noise, False, qpos0, qpos, qvel
            ),
        )
