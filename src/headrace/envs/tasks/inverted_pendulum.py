"""Inverted pendulum, equal to Gymnasium's ``InvertedPendulum-v5``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.envs.task import Rows, Task, TaskCfg
from headrace.sim.mujoco_api import gymnasium_model
from headrace.types import Obs

_CAMERA = '<camera name="side" pos="0 -2.2 0.3" xyaxes="1 0 0 0 0 1"/>'


@dataclass(frozen=True, kw_only=True)
class InvertedPendulumCfg(TaskCfg):
    """Settings of ``inverted-pendulum``."""

    decimation: int = 2
    episode_length: int = 1000
    reset_noise: float = 0.01
    max_angle: float = 0.2
    """The episode ends when the pole leans more than this, in rad."""


class InvertedPendulum(Task[InvertedPendulumCfg]):
    """Balance a pole on a cart; one point for each step it stays up."""

    success_measure = "the pole is still up after the last step"

    def __init__(self, cfg: InvertedPendulumCfg) -> None:
        super().__init__(cfg, gymnasium_model("inverted_pendulum.xml", camera=_CAMERA), {"policy": 4})

    def reset(self, rows: Rows) -> None:
        """Set uniform noise on positions and velocities."""
        noise = self.cfg.reset_noise
        start = rows.uniform("start", 4, low=-noise, high=noise)
        rows.set("qpos", start[:, :2])
        rows.set("qvel", start[:, 2:])

    def observe(self, rows: Rows) -> Obs:
        """``policy``: positions and velocities of cart and pole."""
        return {"policy": rows.join("qpos", "qvel")}

    def reward(self, rows: Rows, actions: Tensor) -> Tensor:
        """1 while the pole is up."""
        del actions
        return (~self.terminated(rows)).to(torch.float64)

    def terminated(self, rows: Rows) -> Tensor:
        """Return whether the pole leans too far."""
        return rows.once("down", lambda: rows.get("qpos", 1).abs() > self.cfg.max_angle)

    def success(self, rows: Rows) -> Tensor:
        """Still up."""
        return ~self.terminated(rows)
