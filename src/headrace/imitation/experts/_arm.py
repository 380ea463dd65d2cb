"""Kinematics of Pusher's arm, from joint angles alone: where the gripper is, how it is turned, how it would move."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

JOINTS = 7
_ORIGIN = (0.0, -0.6, 0.0)
# of each joint: which axis of its own frame it turns about, and the way from its frame to the next joint's
_CHAIN: tuple[tuple[int, tuple[float, float, float]], ...] = (
    (2, (0.1, 0.0, 0.0)),  # shoulder pan
    (1, (0.0, 0.0, 0.0)),  # shoulder lift
    (0, (0.4, 0.0, 0.0)),  # upper arm roll
    (1, (0.0, 0.0, 0.0)),  # elbow flex
    (0, (0.321, 0.0, 0.0)),  # forearm roll
    (1, (0.0, 0.0, 0.0)),  # wrist flex
    (0, (0.0, 0.0, 0.0)),  # wrist roll
)
LOWEST = (-2.2854, -0.5236, -1.5, -2.3213, -1.5, -1.094, -1.5)
HIGHEST = (1.714602, 1.3963, 1.7, 0.0, 1.5, 0.0, 1.5)
"""Limits of the joints, rad."""


class ArmPose(NamedTuple):
    """The arm at n joint configurations, float64, in world coordinates."""

    anchors: Tensor
    """(n, 7, 3): a point on each joint's axis."""
    axes: Tensor
    """(n, 7, 3): the unit axes."""
    wrist: Tensor
    """(n, 3): origin of the gripper's frame, the middle of its crossbar."""
    frame: Tensor
    """(n, 3, 3): columns are the gripper's axes: along its fingers, along its crossbar, across both."""

    def point(self, local: tuple[float, float, float]) -> Tensor:
        """Return where a point of the gripper's frame is, (n, 3)."""
        return self.wrist + (self.frame * self.frame.new_tensor(local)).sum(dim=2)

    def jacobian(self, point: Tensor) -> Tensor:
        """Return how a point fixed to the gripper moves with the joints, (n, 3, 7)."""
        return torch.linalg.cross(self.axes, point[:, None, :] - self.anchors).transpose(1, 2)


def arm_pose(angles: Tensor) -> ArmPose:
    """Forward kinematics of joint angles (n, 7)."""
    angles = angles.to(torch.float64)
    count = len(angles)
    place = angles.new_tensor(_ORIGIN).expand(count, 3)
    frame = torch.eye(3, dtype=angles.dtype, device=angles.device).expand(count, 3, 3)
    anchors: list[Tensor] = []
    axes: list[Tensor] = []
    for joint, (axis, way) in enumerate(_CHAIN):
        anchors.append(place)
        axes.append(frame[:, :, axis])
        frame = _turned(frame, axis, angles[:, joint])
        place = place + (frame * frame.new_tensor(way)).sum(dim=2)
    return ArmPose(anchors=torch.stack(anchors, 1), axes=torch.stack(axes, 1), wrist=place, frame=frame)


def _turned(frame: Tensor, axis: int, angle: Tensor) -> Tensor:
    """Return the frame (n, 3, 3) after a turn about one of its own axes."""
    first, second = frame[:, :, (axis + 1) % 3], frame[:, :, (axis + 2) % 3]
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    columns = [frame[:, :, axis]] * 3
    columns[(axis + 1) % 3] = first * cos + second * sin
    columns[(axis + 2) % 3] = second * cos - first * sin
    return torch.stack(columns, dim=2)
