"""Cart-pole: keep a frictionless pole upright by pushing its cart. Short episodes, dense reward.

``cartpole`` as terms: the same numbers as the class, bit for bit.

Inverted pendulum, equal to Gymnasium's ``InvertedPendulum-v5``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from importlib.resources import files

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from headrace._device import constant
from headrace.envs import terms
from headrace.envs.image_spec import ImageSpec, PictureCfg
from headrace.envs.task import Rows, Task, TaskCfg
from headrace.envs.term_task import TermTask, TermTaskCfg
from headrace.sim.camera.camera import CameraSpec
from headrace.sim.mujoco_api import gymnasium_model, load_model
from headrace.types import Obs

CARTPOLE_XML = files("headrace.envs.tasks").joinpath("assets/cartpole.xml")


@dataclass(frozen=True, kw_only=True)
class CartpoleCfg(TaskCfg):
    """Settings of ``cartpole``."""

    decimation: int = 2
    episode_length: int = 300
    start_position: float = 0.5
    """Largest initial distance of the cart from the middle, in m."""
    start_angle: float = 0.25
    """Largest initial angle of the pole, in rad."""
    start_velocity: float = 0.25
    """Largest initial velocity of cart (m/s) and pole (rad/s)."""
    max_position: float = 2.4
    """The episode ends when the cart is further from the middle than this, in m."""
    max_angle: float = 0.8
    """The episode ends when the pole leans more than this, in rad."""
    alive_weight: float = 1.0
    angle_weight: float = -1.0
    """Weight of the squared angle of the pole."""
    position_weight: float = -0.02
    """Weight of the squared position of the cart."""


class Cartpole(Task[CartpoleCfg]):
    """Balance from random starts. A perfect run scores about 300: one a step, less a little while the pole leans."""

    success_measure = "the pole is still up after the last step"

    def __init__(self, cfg: CartpoleCfg) -> None:
        super().__init__(cfg, load_model(CARTPOLE_XML.read_text()), {"policy": 4})

    def reset(self, rows: Rows) -> None:
        """Cart anywhere near the middle, pole near upright, both moving a little."""
        cfg = self.cfg
        start = rows.uniform("start", 4, low=-1.0, high=1.0)
        scale = constant((cfg.start_position, cfg.start_angle), torch.float64, rows.device)
        rows.set("qpos", start[:, :2] * scale)
        rows.set("qvel", start[:, 2:] * cfg.start_velocity)

    def observe(self, rows: Rows) -> Obs:
        """``policy``: position, angle, velocity, angular velocity."""
        return {"policy": torch.cat((rows.get("qpos"), rows.get("qvel")), dim=1)}

    def reward(self, rows: Rows, actions: Tensor) -> Tensor:
        """Return one for each step, less what the pole leans and the cart strays."""
        del actions
        cfg, qpos = self.cfg, rows.get("qpos")
        position, angle = qpos[:, 0], qpos[:, 1]
        lean, stray = cfg.angle_weight * (angle * angle), cfg.position_weight * (position * position)
        return (cfg.alive_weight + lean) + stray

    def terminated(self, rows: Rows) -> Tensor:
        """Return whether the pole has fallen or the cart has left the rail."""
        cfg, qpos = self.cfg, rows.get("qpos")
        return (qpos[:, 0].abs() > cfg.max_position) | (qpos[:, 1].abs() > cfg.max_angle)

    def success(self, rows: Rows) -> Tensor:
        """Still up."""
        return ~self.terminated(rows)


class CartpoleDiscrete(Cartpole):
    """``cartpole`` with two actions, full force left or right, for value-based learners."""

    def __init__(self, cfg: CartpoleCfg) -> None:
        super().__init__(cfg)
        self.action_space = spaces.Discrete(2, dtype=np.int64)

    def apply_action(self, rows: Rows, actions: Tensor) -> None:
        """0 pushes left, 1 pushes right."""
        rows.set("ctrl", (2.0 * actions.to(torch.float64) - 1.0)[:, None])


@dataclass(frozen=True, kw_only=True)
class CartpoleCameraCfg(PictureCfg, CartpoleCfg):
    """Settings of ``cartpole-camera``."""

    frame_stack: int = 2
    """Frames in an observation: one shows where the pole is, two also where it goes."""
    pixels: int = 48


class CartpoleCamera(Cartpole):
    """``cartpole`` seen by a camera: the policy gets pictures, the critic may have the state."""

    def __init__(self, cfg: CartpoleCameraCfg) -> None:
        Task.__init__(self, cfg, load_model(CARTPOLE_XML.read_text()), {"critic": 4}, {"policy": cfg.picture("side")})

    def observe(self, rows: Rows) -> Obs:
        """``critic``: position, angle, velocity, angular velocity. ``policy`` is the camera's."""
        return {"critic": super().observe(rows)["policy"]}


__all__ = ["TermTask", "cartpole_camera_terms", "cartpole_terms"]

_JOINTS = ("slider", "hinge")


def cartpole_terms() -> TermTaskCfg:
    """Return the settings of ``cartpole-terms``."""
    return TermTaskCfg(
        model=CARTPOLE_XML.read_text(),
        decimation=2,
        episode_length=300,
        actions={"push": terms.Effort()},
        observations={
            "policy": {
                "positions": terms.ObservationTerm(function=terms.JointPositions(joints=_JOINTS)),
                "velocities": terms.ObservationTerm(function=terms.JointVelocities(joints=_JOINTS)),
            }
        },
        rewards={
            "alive": terms.RewardTerm(function=terms.Alive()),
            "lean": terms.RewardTerm(function=terms.JointPositionL2(joints=("hinge",)), weight=-1.0),
            "stray": terms.RewardTerm(function=terms.JointPositionL2(joints=("slider",)), weight=-0.02),
        },
        terminations={
            "off_the_rail": terms.JointOutOfRange(joint="slider", low=-2.4, high=2.4),
            "fallen": terms.JointOutOfRange(joint="hinge", low=-0.8, high=0.8),
        },
        success=terms.SuccessTerm(measure="the pole is still up after the last step"),
        events={
            "start": terms.ResetEvent(
                function=terms.ResetJoints(joints=_JOINTS, positions=(0.5, 0.25), velocities=(0.25, 0.25))
            )
        },
    )


def cartpole_camera_terms() -> TermTaskCfg:
    """Return the settings of ``cartpole-camera-terms``: the same terms with a camera for the policy."""
    plain = cartpole_terms()
    picture = ImageSpec(camera=CameraSpec(name="side", width=48, height=48), frames=2)
    return dataclasses.replace(plain, observations={"critic": plain.observations["policy"]}, images={"policy": picture})


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
