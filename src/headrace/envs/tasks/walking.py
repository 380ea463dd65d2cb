"""Ant and Humanoid, equal to Gymnasium's ``Ant-v5`` and ``Humanoid-v5``, and what they share: speed, health, effort."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace._device import constant
from headrace.envs.task import Rows, Task, TaskCfg
from headrace.sim.mujoco_api import gymnasium_model
from headrace.types import Obs


@dataclass(frozen=True, kw_only=True)
class WalkCfg(TaskCfg):
    """Settings of the walking tasks."""

    decimation: int = 5
    episode_length: int = 1000
    forward_reward_weight: float
    ctrl_cost_weight: float
    healthy_reward: float
    healthy_z_min: float
    healthy_z_max: float
    reset_noise: float


def walk_reward(cfg: WalkCfg, dt: float, before: Tensor, after: Tensor, fallen: Tensor, actions: Tensor) -> Tensor:
    """Forward speed, a bonus for staying healthy, less the effort: float64 (n,).

    Args:
        cfg: the weights.
        dt: seconds between the two positions.
        before: x before the step, float64 (n,).
        after: x after it, float64 (n,).
        fallen: bool (n,).
        actions: float64 (n, A).
    """
    speed = (after - before) / dt
    healthy = (~fallen).to(torch.float64) * cfg.healthy_reward
    # on the CPU numpy's sum, whose order is Gymnasium's
    squares = actions * actions
    effort = torch.from_numpy(squares.numpy().sum(axis=1)) if squares.is_cpu else squares.sum(dim=1)
    return (cfg.forward_reward_weight * speed + healthy) - cfg.ctrl_cost_weight * effort


def mass_center_x(positions: Tensor, mass: Tensor, total: float) -> Tensor:
    """x of the center of mass, float64 (n,), from the bodies' positions (n, bodies, 3) and masses (bodies,)."""
    # added up body by body, as Gymnasium does
    return (mass * positions[:, :, 0]).cumsum(dim=1)[:, -1] / total


def outside(height: Tensor, lowest: float, highest: float) -> Tensor:
    """Return whether a height (n,) is not in [lowest, highest], bool (n,); a NaN is not."""
    return height != height.clamp(lowest, highest)


def between(lowest: float, highest: float) -> tuple[float, float]:
    """Return the closed interval of the numbers that lie in the open one."""
    return math.nextafter(lowest, math.inf), math.nextafter(highest, -math.inf)


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
        """Set uniform noise on positions, normal noise on velocities."""
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
        """Return whether the torso is too low or too high."""
        cfg = self.cfg
        return rows.once("fallen", lambda: outside(rows.get("qpos", 2), cfg.healthy_z_min, cfg.healthy_z_max))


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
        """Set uniform noise on positions and velocities."""
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
        """Return whether the torso is too low or too high."""
        lowest, highest = between(self.cfg.healthy_z_min, self.cfg.healthy_z_max)
        return rows.once("fallen", lambda: outside(rows.get("qpos", 2), lowest, highest))

    def _mass_center_x(self, rows: Rows) -> Tensor:
        mass = constant(self._mass, torch.float64, rows.device)
        return mass_center_x(rows.get("xipos"), mass, self._total_mass)
