"""Humanoid, equal to Gymnasium's ``Humanoid-v5`` without contact forces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from headrace.envs.rows import Rows
from headrace.envs.task import Task, TaskCfg
from headrace.envs.tasks.gymnasium_models import gymnasium_model
from headrace.types import Obs


@dataclass(frozen=True, kw_only=True)
class HumanoidCfg(TaskCfg):
    """Settings of ``humanoid``."""

    decimation: int = 5
    episode_length: int = 1000
    forward_reward_weight: float = 1.25
    ctrl_cost_weight: float = 0.1
    healthy_reward: float = 5.0
    healthy_z_min: float = 1.0
    healthy_z_max: float = 2.0
    reset_noise: float = 0.01


class Humanoid(Task):
    """Walk forward on two legs without falling.

    Equal to ``Humanoid-v5`` with ``include_cfrc_ext_in_observation=False`` and ``contact_cost_weight=0``.
    """

    memory = {"mass_center_x": ()}  # noqa: RUF012  (a class constant, typed in the base)

    def __init__(self, cfg: HumanoidCfg) -> None:
        model = gymnasium_model("humanoid.xml")
        bodies = model.nbody - 1
        super().__init__(cfg, model, {"policy": model.nq - 2 + model.nv + 16 * bodies + model.nv - 6})
        self._qpos0 = torch.from_numpy(model.qpos0.copy())
        self._mass = torch.from_numpy(model.body_mass.copy())
        self._total_mass = float(model.body_mass.sum())

    @property
    def _cfg(self) -> HumanoidCfg:
        return cast("HumanoidCfg", self.cfg)

    def reset(self, rows: Rows) -> None:
        """Uniform noise on positions and velocities."""
        noise = self._cfg.reset_noise
        qpos0 = self._qpos0.to(rows.device)
        rows.set("qpos", qpos0 + rows.uniform("qpos", self.model.nq, low=-noise, high=noise))
        rows.set("qvel", rows.uniform("qvel", self.model.nv, low=-noise, high=noise))

    def apply_action(self, rows: Rows, actions: Tensor) -> None:
        """Torques; where the centre of mass is now tells its speed afterwards."""
        rows.remember("mass_center_x", self._mass_center_x(rows))
        rows.set("ctrl", actions)

    def observe(self, rows: Rows) -> Obs:
        """``policy``: positions (without x and y), velocities, body inertias and velocities, actuator forces."""
        parts = (
            rows.get("qpos")[:, 2:],
            rows.get("qvel"),
            rows.get("cinert")[:, 1:].flatten(1),
            rows.get("cvel")[:, 1:].flatten(1),
            rows.get("qfrc_actuator")[:, 6:],
        )
        return {"policy": torch.cat(parts, dim=1)}

    def reward(self, rows: Rows, actions: Tensor) -> Tensor:
        """Forward speed of the centre of mass, a bonus for staying healthy, less the effort."""
        cfg = self._cfg
        speed = (self._mass_center_x(rows) - rows.recall("mass_center_x")) / self.dt
        healthy = (~self.terminated(rows)).to(torch.float64) * cfg.healthy_reward
        effort = cfg.ctrl_cost_weight * (actions * actions).sum(dim=1)
        return (cfg.forward_reward_weight * speed + healthy) - effort

    def terminated(self, rows: Rows) -> Tensor:
        """The torso is too low or too high."""
        cfg, height = self._cfg, rows.get("qpos")[:, 2]
        return ~((height > cfg.healthy_z_min) & (height < cfg.healthy_z_max))

    def _mass_center_x(self, rows: Rows) -> Tensor:
        weighted = self._mass.to(rows.device) * rows.get("xipos")[:, :, 0]
        return weighted.sum(dim=1) / self._total_mass
