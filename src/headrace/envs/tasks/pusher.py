"""Pusher, equal to Gymnasium's ``Pusher-v5``, and ``pusher-goal``: random goals, and an end on success."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import TypeVar

from headrace.envs._image_spec import ImageSpec
from headrace.envs._rows import Rows
from headrace.envs._task import Task, TaskCfg
from headrace.envs.tasks.gymnasium_models import gymnasium_model
from headrace.envs.tasks.pictures import PictureCfg
from headrace.sim._mujoco_api import Model
from headrace.types import Obs

_JOINTS = 7
_SMALLEST_PUSH = 0.17
_TRIES = 64
TABLE_CAMERA = '<camera name="table" pos="0.35 -1.35 1.25" xyaxes="1 0 0 0 0.75 0.66"/>'


@dataclass(frozen=True, kw_only=True)
class PusherCfg(TaskCfg):
    """Settings of ``pusher``."""

    decimation: int = 5
    episode_length: int = 100
    near_weight: float = 0.5
    """Weight of the distance between the finger tips and the object."""
    dist_weight: float = 1.0
    """Weight of the distance between the object and the goal."""
    ctrl_weight: float = 0.1


@dataclass(frozen=True, kw_only=True)
class PusherGoalCfg(PusherCfg):
    """Settings of ``pusher-goal``."""

    goal_range: float = 0.15
    """Goals are drawn from a square of twice this side around Pusher's own goal, in m."""
    success_radius: float = 0.08
    """The object is at the goal when it is nearer than this on the table, in m."""


PusherT = TypeVar("PusherT", bound=PusherCfg, covariant=True, default=PusherCfg)


class Pusher(Task[PusherT]):
    """Push a cylinder to a fixed goal with a seven-jointed arm. Never terminates."""

    def __init__(
        self,
        cfg: PusherT,
        model: Model | None = None,
        groups: Mapping[str, int] | None = None,
        images: Mapping[str, ImageSpec] | None = None,
    ) -> None:
        model = model or gymnasium_model("pusher_v5.xml", camera=TABLE_CAMERA)
        super().__init__(cfg, model, groups or {"policy": 23}, images)
        self._tips, self._object, self._goal = (self.model.body(n).id for n in ("tips_arm", "object", "goal"))

    def reset(self, rows: Rows) -> None:
        """The object somewhere on the table, not at the goal; the arm with a little velocity."""
        self._place(rows, torch.zeros((len(rows), 2), dtype=torch.float64, device=rows.device))

    def observe(self, rows: Rows) -> Obs:
        """``policy``: arm positions and velocities; places of finger tips, object and goal."""
        places = (rows.get("xpos", body) for body in (self._tips, self._object, self._goal))
        return {"policy": torch.cat((rows.get("qpos")[:, :_JOINTS], rows.get("qvel")[:, :_JOINTS], *places), dim=1)}

    def reward(self, rows: Rows, actions: Tensor) -> Tensor:
        """Less the distances tips–object and object–goal, less the effort."""
        cfg, place = self.cfg, rows.get("xpos", self._object)
        near = -torch.linalg.vector_norm(place - rows.get("xpos", self._tips), dim=1) * cfg.near_weight
        dist = -torch.linalg.vector_norm(place - rows.get("xpos", self._goal), dim=1) * cfg.dist_weight
        effort = -(actions * actions).sum(dim=1) * cfg.ctrl_weight
        return (dist + effort) + near

    def _place(self, rows: Rows, goal: Tensor) -> None:
        """Write the initial state: ``goal`` (n, 2) in the coordinates of the goal's joints, y first."""
        rows.set("qpos", torch.cat((self._object_start(rows, goal), goal), dim=1), index=slice(-4, None))
        rows.set("qvel", rows.uniform("qvel", _JOINTS, low=-0.005, high=0.005), index=slice(0, _JOINTS))

    def _object_start(self, rows: Rows, goal: Tensor) -> Tensor:
        """Uniform over the table by rejection of what is too near the goal, (n, 2), y first."""
        if rows.device.type != "cpu":
            return self._object_start_at_once(rows, goal)
        place = torch.zeros_like(goal)
        open_ = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        for attempt in range(_TRIES):
            tried = rows.uniform("object", 2, draw=2 * attempt)
            tried = torch.stack((tried[:, 0] * 0.3 - 0.3, tried[:, 1] * 0.4 - 0.2), dim=1)
            place = torch.where(open_[:, None], tried, place)
            open_ = open_ & (torch.linalg.vector_norm(place - goal, dim=1) <= _SMALLEST_PUSH)
            if not bool(open_.any()):
                break
        return place

    def _object_start_at_once(self, rows: Rows, goal: Tensor) -> Tensor:
        """The same without asking a GPU after each try whether another is needed: all are drawn, the first is taken."""
        drawn = rows.uniform("object", 2 * _TRIES)
        tried = torch.stack((drawn[:, 0::2] * 0.3 - 0.3, drawn[:, 1::2] * 0.4 - 0.2), dim=2)
        fine = torch.linalg.vector_norm(tried - goal[:, None], dim=2) > _SMALLEST_PUSH
        fine[:, -1] = True
        first = fine.to(torch.uint8).argmax(dim=1)
        return tried.gather(1, first[:, None, None].expand(-1, 1, 2)).squeeze(1)


class PusherGoal(Pusher[PusherGoalCfg]):
    """Push a cylinder to a random goal; the episode ends when it is there."""

    success_measure = "the object is within 0.08 m of the goal, on the table"

    def reset(self, rows: Rows) -> None:
        """A goal near Pusher's own, the object somewhere else on the table."""
        reach = self.cfg.goal_range
        self._place(rows, rows.uniform("goal", 2, low=-reach, high=reach))

    def terminated(self, rows: Rows) -> Tensor:
        """The object is at the goal."""
        offset = rows.get("xpos", self._object)[:, :2] - rows.get("xpos", self._goal)[:, :2]
        return torch.linalg.vector_norm(offset, dim=1) < self.cfg.success_radius

    def success(self, rows: Rows) -> Tensor:
        """The object is at the goal."""
        return self.terminated(rows)


@dataclass(frozen=True, kw_only=True)
class PusherCameraCfg(PictureCfg, PusherGoalCfg):
    """Settings of ``pusher-camera``."""


class PusherCamera(PusherGoal):
    """``pusher-goal`` with a camera over the table instead of the places of object and goal."""

    def __init__(self, cfg: PusherCameraCfg) -> None:
        super().__init__(cfg, groups={"policy": 2 * _JOINTS + 3, "critic": 23}, images={"image": cfg.picture("table")})

    def observe(self, rows: Rows) -> Obs:
        """``policy``: arm positions, velocities and finger tips; ``image`` is the camera's; ``critic`` has it all."""
        whole = super().observe(rows)["policy"]
        return {"policy": whole[:, : 2 * _JOINTS + 3].contiguous(), "critic": whole}
