"""An expert for ``pusher-solid``: lower the open gripper over the object, then carry the object to the goal in it.

A feedback law of the observation alone, without memory. The gripper is a U that lies flat; its pocket is wider than the
object, so that moving the pocket takes the object along in every direction but backwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.imitation.experts._arm import HIGHEST, JOINTS, LOWEST, ArmPose, arm_pose
from headrace.types import Obs

_POCKET = (0.105, 0.0, 0.0)
_ABOVE, _LOWERED, _DOWN = -0.16, -0.215, -0.275
"""Heights of the pocket, m: clear of the object, with the object between the fingers, half way down the object."""
_SPEED, _PUSH = 0.7, 0.6
"""Fastest motion and that of a push, m/s."""
_REST = (0.0, 0.5, -1.45, -1.2, 0.0, -0.4, 1.45)
"""A posture to lean to, rad: elbow turned aside, so that the forearm swings over the table."""
_LEAN = 0.03
_WEIGHTS = (1.0, 1.0, 1.0, 0.08, 0.08, 0.04)
"""What matters: place (x, y, z), lying flat (about x, y), heading (about z)."""
_FASTEST = 3.0
"""Of a joint, rad/s."""
_PASSES = 3
_TORQUE = 2.0
_GAIN = (3.0, 3.0, 0.8, 1.2, 0.5, 0.5, 0.5)
"""Torque per missing joint speed, N·m·s: about five times what a joint has to move, per second."""
_DAMPING = (1.0, 1.0, 0.1, 0.1, 0.1, 0.1, 0.1)
"""Of the model's joints: what it takes to keep a speed."""


def pusher_expert(obs: Obs) -> Tensor:
    """Torques for n rows of the observation group ``policy`` (n, 23): float32 (n, 7)."""
    state = obs["policy"].to(torch.float64)
    angles, speeds = state[:, :JOINTS], state[:, JOINTS : 2 * JOINTS]
    thing, goal = state[:, 17:20], state[:, 20:23]
    pose = arm_pose(angles)
    motion = torch.cat((_pocket_speed(pose, thing, goal), _turn(pose, thing, goal)), dim=1)
    wanted = _joint_speeds(pose, motion, angles)
    torque = angles.new_tensor(_GAIN) * (wanted - speeds) + angles.new_tensor(_DAMPING) * wanted
    return torque.clamp(-_TORQUE, _TORQUE).to(torch.float32)


def _pocket_speed(pose: ArmPose, thing: Tensor, goal: Tensor) -> Tensor:
    """Return where the pocket should go, (n, 3), m/s."""
    pocket = pose.point(_POCKET)
    depth = pocket[:, 2:]
    ahead = pose.frame[:, :2, 0]
    ahead = ahead / torch.linalg.vector_norm(ahead, dim=1, keepdim=True)
    from_bar = (thing - pose.wrist)[:, :2]
    along = (from_bar * ahead).sum(dim=1, keepdim=True)
    across = (from_bar[:, 1] * ahead[:, 0] - from_bar[:, 0] * ahead[:, 1])[:, None]
    to_thing, to_goal = (thing - pocket)[:, :2], (goal - thing)[:, :2]
    # on its way down the gripper must not land on the object; once down, the object may lie against its insides
    fits = (along > 0.075) & (along < 0.135) & (across.abs() < 0.028)
    held = (along > 0.03) & (along < 0.15) & (across.abs() < 0.07) & (depth < _LOWERED)
    push = _PUSH * to_goal / torch.linalg.vector_norm(to_goal, dim=1, keepdim=True)
    lowered = ((_LOWERED - depth) / 0.03).clamp(0.0, 1.0)
    # beside the object and low: rise before moving on
    free = torch.where(fits, 1.0, 1.0 - ((-0.17 - depth) / 0.03).clamp(0.0, 0.9))
    flat = torch.where(held, lowered * push + 2.0 * to_thing, 4.0 * free * to_thing)
    rise = 5.0 * (torch.where(held | fits, _DOWN, _ABOVE) - depth)
    speed = torch.cat((flat, rise), dim=1)
    size = torch.linalg.vector_norm(speed, dim=1, keepdim=True)
    return speed * (_SPEED / size.clamp(min=_SPEED))


def _turn(pose: ArmPose, thing: Tensor, goal: Tensor) -> Tensor:
    """Angular velocity (n, 3), rad/s, that lays the gripper flat and turns its fingers to the goal."""
    up, ahead = pose.frame[:, :, 2], pose.frame[:, :, 0]
    vertical = torch.zeros_like(up)
    vertical[:, 2] = torch.where(up[:, 2] < 0, -1.0, 1.0)
    level = torch.linalg.cross(up, vertical)
    way = goal - thing
    yaw = torch.atan2(way[:, 1], way[:, 0]) - torch.atan2(ahead[:, 1], ahead[:, 0])
    yaw = torch.atan2(yaw.sin(), yaw.cos()).clamp(-1.0, 1.0)
    return torch.cat((4.0 * level[:, :2], 2.0 * yaw[:, None]), dim=1)


def _joint_speeds(pose: ArmPose, motion: Tensor, angles: Tensor) -> Tensor:
    """Joint speeds (n, 7) for a motion (n, 6) of the pocket: weighted least squares that leans to a posture.

    A joint that would run into its limit is given the speed it may have, and the others make up for it.
    """
    weights = angles.new_tensor(_WEIGHTS)
    rows = torch.cat((pose.jacobian(pose.point(_POCKET)), pose.axes.transpose(1, 2)), dim=1) * weights[:, None]
    motion = motion * weights
    least = (4.0 * (angles.new_tensor(LOWEST) - angles)).clamp(-_FASTEST, 0.0)
    most = (4.0 * (angles.new_tensor(HIGHEST) - angles)).clamp(0.0, _FASTEST)
    rest = angles.new_tensor(_REST) - angles
    eye = torch.eye(JOINTS, dtype=angles.dtype, device=angles.device)
    fixed = torch.zeros_like(angles, dtype=torch.bool)
    speeds = torch.zeros_like(angles)
    for _ in range(_PASSES):
        free = rows * (~fixed)[:, None, :]
        missing = motion - (rows * (speeds * fixed)[:, None, :]).sum(dim=2)
        normal = free.transpose(1, 2) @ free + _LEAN * _LEAN * eye
        right = (free * missing[:, :, None]).sum(dim=1) + _LEAN * _LEAN * rest
        speeds = torch.where(fixed, speeds, torch.linalg.solve(normal, right))
        fixed = fixed | (speeds < least) | (speeds > most)
        speeds = speeds.maximum(least).minimum(most)
    return speeds
