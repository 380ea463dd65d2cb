"""``pusher-solid``: ``pusher-goal`` with an object that the arm can push.

Pusher-v5's object weighs 8 mg. Since MuJoCo 3 the contact forces on so light a body are so soft that the gripper passes
through it at anything above a few centimeters per second (Gymnasium's issues 950 and 1576): hardly any goal is within
reach in the five seconds of an episode. ``pusher`` and ``pusher-goal`` keep the model as Gymnasium ships it; here the
object has the density of cork bark, 39 g, and is pushed as it looks.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import ClassVar

from headrace.envs._image_spec import ImageSpec
from headrace.envs.tasks.pusher import TABLE_CAMERA, PusherGoal, PusherGoalCfg
from headrace.errors import DataError
from headrace.sim._camera import CameraSpec
from headrace.sim._mujoco_api import Model, load_model

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
