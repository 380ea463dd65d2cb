"""Pusher, equal to Gymnasium's ``Pusher-v5``, and variants: random goals, an object with weight, goals in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import TypeVar

from headrace._device import constant
from headrace.envs.image_spec import ImageSpec, PictureCfg
from headrace.envs.task import Rows, Task, TaskCfg
from headrace.errors import DataError
from headrace.sim.camera.camera import CameraSpec
from headrace.sim.mujoco_api import Model, gymnasium_model, load_model
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
        """Put the object somewhere on the table, not at the goal; give the arm a little velocity."""
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
        """Draw positions over the table, (n, 2), y first: the first try that is not too near the goal."""
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
        """Put the goal near Pusher's own and the object somewhere else on the table."""
        reach = self.cfg.goal_range
        self._place(rows, rows.uniform("goal", 2, low=-reach, high=reach))

    def terminated(self, rows: Rows) -> Tensor:
        """Return whether the object is at the goal."""
        offset = rows.get("xpos", self._object)[:, :2] - rows.get("xpos", self._goal)[:, :2]
        return torch.linalg.vector_norm(offset, dim=1) < self.cfg.success_radius

    def success(self, rows: Rows) -> Tensor:
        """Return whether the object is at the goal."""
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


_AS_SHIPPED, _SOLID = 'density="0.01"', 'density="50"'


@dataclass(frozen=True, kw_only=True)
class PusherSolidCfg(PusherGoalCfg):
    """Settings of ``pusher-solid``."""

    camera: bool = False
    """Add the group ``image``: what a camera over the table sees, uint8 (64, 64, 3)."""


class PusherSolid(PusherGoal):
    """Push a cylinder that has weight to a random goal; the episode ends when it is there."""

    groups: ClassVar[dict[str, int]] = {"policy": 23}
    """Sizes of the observation groups."""

    def __init__(self, cfg: PusherSolidCfg) -> None:
        images = {"image": ImageSpec(camera=CameraSpec(name="table", width=64, height=64))} if cfg.camera else {}
        super().__init__(cfg, _model(), self.groups, images)


def _model() -> Model:
    mjcf = files("gymnasium.envs.mujoco").joinpath("assets", "pusher_v5.xml").read_text()
    if mjcf.count(_AS_SHIPPED) != 1:
        raise DataError(
            f"pusher_v5.xml: expected one geom with {_AS_SHIPPED}, got another version of Gymnasium's model"
        )
    mjcf = mjcf.replace(_AS_SHIPPED, _SOLID).replace("<worldbody>", f"<worldbody>{TABLE_CAMERA}", 1)
    return load_model(mjcf)


_DIRECTIONS = {
    "middle": (0.0, 0.0),
    "left": (0.0, -1.0),
    "right": (0.0, 1.0),
    "near side": (-1.0, 0.0),
    "far side": (1.0, 0.0),
}
"""Name of a place, as seen by the camera → where it is from the middle, y first."""
INSTRUCTIONS = tuple(f"push the object to the {name} of the table" for name in _DIRECTIONS)


@dataclass(frozen=True, kw_only=True)
class PusherWordsCfg(PusherSolidCfg):
    """Settings of ``pusher-words``."""

    goal_range: float = 0.12
    """How far the named places are from the middle, in m."""


class PusherWords(PusherSolid):
    """Push a cylinder to the place that the instruction of the episode names; the episode ends when it is there.

    The group ``policy`` has no goal in it; ``critic`` does.
    """

    groups: ClassVar[dict[str, int]] = {"policy": 20, "critic": 23}

    def reset(self, rows: Rows) -> None:
        """Put the goal where the words name it and the object somewhere else on the table."""
        self._place(rows, goal_offsets(_choose_instruction(rows), self.cfg.goal_range))

    def instructions(self, rows: Rows) -> Sequence[str]:
        """Return one of ``INSTRUCTIONS`` for each row."""
        return [INSTRUCTIONS[index] for index in _choose_instruction(rows).tolist()]

    def observe(self, rows: Rows) -> Obs:
        """``policy``: as of ``pusher-solid`` without the goal; ``critic`` has it."""
        whole = super().observe(rows)["policy"]
        return {"policy": whole[:, :20].contiguous(), "critic": whole}


def goal_offsets(chosen: Tensor, reach: float) -> Tensor:
    """Return where the goals of these instructions, int64 (n,), are from the middle, float64 (n, 2), y first, in m."""
    places = constant(tuple(chain(*_DIRECTIONS.values())), torch.float64, chosen.device).view(-1, 2)
    return places.index_select(0, chosen) * reach


def _choose_instruction(rows: Rows) -> Tensor:
    """Return which of ``INSTRUCTIONS`` each row's episode has, int64 (n,); a function of the episode alone."""
    return (rows.uniform("words", 1)[:, 0] * len(INSTRUCTIONS)).long()
