"""ALOHA in simulation, equal to ``gym-aloha``: two ViperX arms with grippers, and a camera over their table.

``aloha-transfer-cube`` and ``aloha-insertion`` have the observations that LeRobot's policies read. ``…-state`` have the
poses of the objects instead of a picture.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from headrace.envs.image_spec import ImageSpec
from headrace.envs.task import Rows, Task, TaskCfg
from headrace.errors import DataError, MissingExtraError
from headrace.sim.camera.camera import CameraSpec
from headrace.sim.mujoco_api import Model, load_model_with_contacts
from headrace.types import Obs

ARM = 6
"""Joints of an arm without its gripper."""
ACTIONS = 2 * (ARM + 1)
POSE = 7
"""Numbers in the pose of an object: place, quaternion."""
CLOSED, OPEN = 0.01844, 0.05800
"""Positions of a finger, m, at which a gripper counts as 0 and as 1."""
START = (0.0, -0.96, 1.16, 0.0, -0.3, 0.0, 0.02239, -0.02239)
"""Joints of an arm at the start of an episode, both fingers last."""
_JOINTS = 2 * len(START)
_HEIGHT = 0.05
"""Of objects at the start, m: they fall a little."""
_LEFT_FINGER, _RIGHT_FINGER = "vx300s_left/10_left_gripper_finger", "vx300s_right/10_right_gripper_finger"
_SOCKET = tuple(f"socket-{side}" for side in range(1, 5))


@dataclass(frozen=True, kw_only=True)
class AlohaStateCfg(TaskCfg):
    """Settings of the tasks without a camera."""

    decimation: int = 10
    episode_length: int = 300
    """As gym-aloha registers it; LeRobot evaluates with 400."""


@dataclass(frozen=True, kw_only=True)
class AlohaCfg(AlohaStateCfg):
    """Settings of the tasks with cameras."""

    cameras: tuple[str, ...] = ("top",)
    """Cameras of the model, an observation group each: ``top``, ``angle``, ``front_close``, ``left_pillar``,
    ``right_pillar``, ``left_wrist``, ``right_wrist``."""
    width: int = 640
    height: int = 480
    renderer: str = "native"
    """``native``, or ``gl`` for MuJoCo's own picture, which is that of gym-aloha."""
    shadows: bool = False
    """Native renderer: shadows."""
    specular: bool = False
    """Native renderer: highlights."""


class Aloha(Task[AlohaStateCfg]):
    """Two arms and objects that move freely. An action is a position for each of 12 joints and 2 grippers."""

    success_measure = "the last stage of the reward, 4"
    current_positions = True
    file: ClassVar[str]
    """Of the model."""
    pairs: ClassVar[tuple[tuple[str, str], ...]]
    """Geoms that may touch, two by two: what the stages of the reward follow from."""
    places: ClassVar[tuple[tuple[tuple[float, float], tuple[float, float]], ...]]
    """Of each object: the range of its x and of its y at the start, m."""
    words: ClassVar[str]
    """The instruction of every episode."""

    def __init__(self, cfg: AlohaStateCfg) -> None:
        model, whole = aloha_model(self.file, self.pairs), ACTIONS + POSE * len(self.places)
        if not isinstance(cfg, AlohaCfg):
            super().__init__(cfg, model, {"policy": whole})
        else:
            pictures = {
                name: ImageSpec(
                    camera=CameraSpec(
                        name=name, width=cfg.width, height=cfg.height, shadows=cfg.shadows, specular=cfg.specular
                    ),
                    renderer=cfg.renderer,
                )
                for name in cfg.cameras
            }
            super().__init__(cfg, model, {"policy": ACTIONS, "critic": whole}, pictures)
        # as gym-aloha declares it, and as random actions are drawn; joints turn farther, and actions beyond are taken
        self.action_space = spaces.Box(-1.0, 1.0, (ACTIONS,), np.float32)
        self._start = torch.tensor((*START, *START), dtype=torch.float64)

    def reset(self, rows: Rows) -> None:
        """Put both arms at rest before the table, the objects somewhere on it, upright."""
        start = self._start.to(rows.device)
        poses: list[Tensor] = []
        upright = start.new_tensor((_HEIGHT, 1.0, 0.0, 0.0, 0.0)).expand(len(rows), -1)
        for index, ranges in enumerate(self.places):
            low, high = start.new_tensor(ranges).unbind(dim=1)
            poses += [low + (high - low) * rows.uniform("objects", 2, draw=2 * index), upright]
        rows.set("qpos", torch.cat((start.expand(len(rows), -1), *poses), dim=1))
        rows.set("ctrl", start.expand(len(rows), -1))

    def apply_action(self, rows: Rows, actions: Tensor) -> None:
        """Set positions of joints in rad, of grippers from 0 (closed) to 1 (open): both fingers move alike."""
        parts: list[Tensor] = []
        for arm in actions.split(ARM + 1, dim=1):
            finger = arm[:, ARM:] * (OPEN - CLOSED) + CLOSED
            parts += [arm[:, :ARM], finger, -finger]
        rows.set("ctrl", torch.cat(parts, dim=1))

    def observe(self, rows: Rows) -> Obs:
        """``policy``: joints and grippers as in an action; ``critic``, or ``policy`` without cameras: and the poses."""
        joints = rows.get("qpos")
        parts: list[Tensor] = []
        for arm in joints[:, :_JOINTS].split(len(START), dim=1):
            parts += [arm[:, :ARM], (arm[:, ARM : ARM + 1] - CLOSED) / (OPEN - CLOSED)]
        whole = torch.cat((*parts, joints[:, _JOINTS:]), dim=1)
        if not isinstance(self.cfg, AlohaCfg):
            return {"policy": whole}
        return {"policy": whole[:, :ACTIONS].contiguous(), "critic": whole}

    @abstractmethod
    def stage(self, touch: Tensor) -> Tensor:
        """Return how far the rows have come, 0 to 4, int64 (n,), from who touches whom, bool (n, pairs)."""

    def reward(self, rows: Rows, actions: Tensor) -> Tensor:
        """Return the stage."""
        del actions
        return self._stage(rows).to(torch.float64)

    def terminated(self, rows: Rows) -> Tensor:
        """Return whether the last stage is reached."""
        return self._stage(rows) == 4

    def success(self, rows: Rows) -> Tensor:
        """Return whether the last stage is reached."""
        return self.terminated(rows)

    def instructions(self, rows: Rows) -> Sequence[str]:
        """Return the same for all."""
        return [self.words] * len(rows)

    def _stage(self, rows: Rows) -> Tensor:
        return rows.once("stage", lambda: self.stage(rows.get("sensordata") > 0))


class AlohaTransferCube(Aloha):
    """Take the cube with the right arm and pass it on to the left one.

    Stages: the right gripper touches the cube (1) and lifts it (2); the left one touches it (3) in the air (4).
    """

    file = "bimanual_viperx_transfer_cube.xml"
    pairs = (("red_box", _RIGHT_FINGER), ("red_box", _LEFT_FINGER), ("red_box", "table"))
    places = (((0.0, 0.2), (0.4, 0.6)),)
    words = "Pick up the cube with the right arm and transfer it to the left arm."

    def stage(self, touch: Tensor) -> Tensor:
        """See :class:`AlohaTransferCube`."""
        right, left, table = touch.unbind(dim=1)
        return torch.where(left, torch.where(table, 3, 4), torch.where(right, torch.where(table, 1, 2), 0))


class AlohaInsertion(Aloha):
    """Take a peg with the right arm and a socket with the left one, and put the peg into the socket.

    Stages: both are touched (1) and lifted (2), they touch each other in the air (3), the peg reaches the pin (4).
    """

    file = "bimanual_viperx_insertion.xml"
    pairs = (
        ("red_peg", _RIGHT_FINGER),
        ("red_peg", "table"),
        ("red_peg", "pin"),
        *((side, _LEFT_FINGER) for side in _SOCKET),
        *((side, "table") for side in _SOCKET),
        *(("red_peg", side) for side in _SOCKET),
    )
    places = (((0.1, 0.2), (0.4, 0.6)), ((-0.2, -0.1), (0.4, 0.6)))
    words = "Insert the peg into the socket."

    def stage(self, touch: Tensor) -> Tensor:
        """See :class:`AlohaInsertion`."""
        peg, peg_down, pin = touch[:, :3].unbind(dim=1)
        socket, socket_down, meet = touch[:, 3:].reshape(len(touch), 3, len(_SOCKET)).any(dim=2).unbind(dim=1)
        lifted, both = ~(peg_down | socket_down), peg & socket
        held = torch.where(both, torch.where(lifted, 2, 1), 0)
        return torch.where(pin, 4, torch.where(meet & lifted, 3, held))


def aloha_assets() -> Path:
    """Return the directory of gym-aloha's model files."""
    # importing it would import dm-control, which does not work with our version of MuJoCo
    found = find_spec("gym_aloha")
    if found is None or found.origin is None:
        raise MissingExtraError(
            "the ALOHA tasks need the model files of 'gym-aloha', which is not installed; run: "
            "pip install --no-deps gym-aloha (its dependencies ask for an older MuJoCo and are not needed)"
        )
    return Path(found.origin).parent / "assets"


def aloha_model(file: str, pairs: Sequence[tuple[str, str]]) -> Model:
    """Compile one of gym-aloha's models.

    Args:
        file: for example ``bimanual_viperx_transfer_cube.xml``.
        pairs: names of two geoms; sensor i, one number, counts the contacts between those of pair i.
    """
    path = aloha_assets() / file
    if not path.is_file():
        raise DataError(
            f"gym-aloha: expected the model {path}, got no such file; reinstall: pip install --no-deps gym-aloha"
        )
    return load_model_with_contacts(path, pairs)
