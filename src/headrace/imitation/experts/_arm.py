"""Kinematics of Pusher's arm, from joint angles alone: where the gripper is, how it is turned, how it would move.

Kinematics of one ViperX arm of ALOHA without a rolled forearm: a plane that the waist turns, and three joints in it.

Places are in the arm's own frame: x ahead of its base, z up. Closed forms, one row at a time.

An expert for ALOHA's transfer of a cube: the right arm picks it up and holds it out, the left one takes it.

A feedback law of the observation alone, without memory: which part of the work is due follows from where the cube and
the hands are, and how far the right gripper is open.

An expert for ``pusher-solid``: lower the open gripper over the object, then carry the object to the goal in it.

A feedback law of the observation alone, without memory. The gripper is a U that lies flat; its pocket is wider than the
object, so that moving the pocket takes the object along in every direction but backwards.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.types import Obs

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
        frame = _turn(frame, axis, angles[:, joint])
        place = place + (frame * frame.new_tensor(way)).sum(dim=2)
    return ArmPose(anchors=torch.stack(anchors, 1), axes=torch.stack(axes, 1), wrist=place, frame=frame)


def _turn(frame: Tensor, axis: int, angle: Tensor) -> Tensor:
    """Return the frame (n, 3, 3) after a turn about one of its own axes."""
    first, second = frame[:, :, (axis + 1) % 3], frame[:, :, (axis + 2) % 3]
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    columns = [frame[:, :, axis]] * 3
    columns[(axis + 1) % 3] = first * cos + second * sin
    columns[(axis + 2) % 3] = second * cos - first * sin
    return torch.stack(columns, dim=2)


_SHOULDER = 0.12705
"""Height of the shoulder, m."""
_RISE, _STEP = 0.3, 0.05955
"""From shoulder to elbow at rest: up and ahead, m."""
_UPPER, _FOREARM = math.hypot(_RISE, _STEP), 0.3
_BEND = math.atan2(_STEP, _RISE)
PINCH = 0.135
"""From the gripper's origin to the middle between its finger tips, m."""
_HAND = 0.069744 + PINCH


def pinch_place(joints: Tensor) -> Tensor:
    """Return the point between the finger tips, float64 (n, 3), of joints (n, 6)."""
    waist, shoulder, elbow, _, wrist, _ = joints.unbind(dim=1)
    forearm = shoulder + elbow
    pitch = forearm + wrist
    reach = _STEP * shoulder.cos() + _RISE * shoulder.sin() + _FOREARM * forearm.cos() + _HAND * pitch.cos()
    height = (
        _SHOULDER - _STEP * shoulder.sin() + _RISE * shoulder.cos() - _FOREARM * forearm.sin() - _HAND * pitch.sin()
    )
    return torch.stack((reach * waist.cos(), reach * waist.sin(), height), dim=1)


def in_gripper(place: Tensor, joints: Tensor) -> Tensor:
    """Return a place (n, 3) seen from between the finger tips: ahead, to the left, up, (n, 3).

    The wrist is not rolled.
    """
    waist = joints[:, 0]
    pitch = joints[:, 1] + joints[:, 2] + joints[:, 4]
    offset = place - pinch_place(joints)
    out = offset[:, 0] * waist.cos() + offset[:, 1] * waist.sin()
    left = offset[:, 1] * waist.cos() - offset[:, 0] * waist.sin()
    ahead = out * pitch.cos() - offset[:, 2] * pitch.sin()
    up = out * pitch.sin() + offset[:, 2] * pitch.cos()
    return torch.stack((ahead, left, up), dim=1)


def joints_for(place: Tensor, pitch: float, roll: float) -> Tensor:
    """Joints (n, 6), elbow up, that bring the point between the finger tips to ``place`` (n, 3).

    Args:
        place: a place out of reach is replaced by one within.
        pitch: how far the hand points down, rad.
        roll: of the wrist, rad.
    """
    waist = torch.atan2(place[:, 1], place[:, 0])
    reach = torch.linalg.vector_norm(place[:, :2], dim=1) - _HAND * math.cos(pitch)
    height = place[:, 2] + _HAND * math.sin(pitch) - _SHOULDER
    distance = torch.sqrt(reach * reach + height * height).clamp(0.08, _UPPER + _FOREARM - 1e-3)
    inner = _corner(_UPPER, _FOREARM, distance)
    shoulder = torch.atan2(reach, height) - _corner(_UPPER, distance, _FOREARM) - _BEND
    elbow = math.pi / 2 + _BEND - inner
    still = torch.zeros_like(waist)
    return torch.stack((waist, shoulder, elbow, still, pitch - shoulder - elbow, still + roll), dim=1)


def _corner(first: float, second: Tensor | float, opposite: Tensor | float) -> Tensor:
    """Return the angle between two sides of a triangle."""
    cosine = (first * first + second * second - opposite * opposite) / (2 * first * second)
    return torch.acos(torch.as_tensor(cosine).clamp(-1.0, 1.0))


_ARM = 7
"""Numbers of an arm in observations and actions: six joints and a gripper."""
_BASE = 0.469, 0.5
"""Of the right arm, m; the left one stands opposite."""
_MEETING = (0.0, 0.5, 0.28)
"""Where the cube is passed on, m."""
_PICK, _PASS = 0.6, -0.35
"""How far the right and the left hand point down, rad."""
_ROLL = math.pi / 2
"""Of the left wrist: its fingers close on other sides of the cube than the right ones."""
_GAP = 0.11
"""Between the left hand and the cube while it waits, m."""
_ABOVE = 0.08
"""How far above the cube the hand comes, m."""
_ADVANCE = 0.06
"""Farthest way of a hand that is looked ahead, m."""
_HURRY, _FASTEST = 0.25, 0.02
"""Share of a joint's missing way that it should go in a step, and the most it should, rad."""
_YIELD = (0.123, 0.2, 0.5, 1.0, 0.4, 1.1)
"""How far a joint creeps in a step per rad of command ahead of it, while the friction of its gear holds."""
_GRIP = (0.06, 0.04, 0.07, 1.0, 1.0, 1.0)
"""Command ahead of a joint, rad, at which its friction gives way."""
_SLIDE = 0.5
"""Command ahead of a joint beyond that, per rad that it should go in a step."""
_OPEN, _CLOSED = 1.0, 0.0
_WIDE, _HELD = 0.85, 0.68
"""A gripper that is wider than this is open; one on a cube is narrower than that."""


def aloha_expert(obs: Obs) -> Tensor:
    """Return actions for n rows of ``critic`` or ``policy`` (n, 21): joints, grippers, pose of the cube.

    Float32 (n, 14).
    """
    state = obs.get("critic", obs["policy"]).to(torch.float64)
    left, right, cube = state[:, :_ARM], state[:, _ARM : 2 * _ARM], state[:, 2 * _ARM : 2 * _ARM + 3]
    return torch.cat((_receive(left, right, cube), _pick(right, cube)), dim=1).to(torch.float32)


def _pick(arm: Tensor, cube: Tensor) -> Tensor:
    """Return the right arm: over the cube, down, close, and to the meeting place."""
    joints, opening = arm[:, :6], arm[:, 6]
    thing, hand = _from_right(cube), pinch_place(joints)
    farthest = in_gripper(thing, joints).abs().amax(dim=1)
    # once closed, a cube that has slipped a little is not let go
    inside = farthest < torch.where(opening < _HELD, 0.035, 0.018)
    held = inside & (opening < _HELD)
    aside = torch.linalg.vector_norm((thing - hand)[:, :2], dim=1)
    # down beside the cube only once the fingers are over it and open
    rise = torch.where(opening > _WIDE, (4.0 * (aside - 0.012)).clamp(0.0, _ABOVE), _ABOVE)
    over = torch.stack((thing[:, 0], thing[:, 1], thing[:, 2] + torch.where(inside, 0.0, rise)), dim=1)
    meeting = _from_right(cube.new_tensor(_MEETING).expand_as(cube))
    wanted = torch.where(held[:, None], hand + (meeting - thing), over)
    gripper = torch.where(inside, _CLOSED, _OPEN)
    return torch.cat((_towards(joints, joints_for(_ahead(hand, wanted), _PICK, 0.0)), gripper[:, None]), dim=1)


def _receive(arm: Tensor, other: Tensor, cube: Tensor) -> Tensor:
    """Return the left arm: wait beside the meeting place, come when the cube is there, close."""
    joints = arm[:, :6]
    thing, hand = _from_left(cube), pinch_place(joints)
    meeting = cube.new_tensor(_MEETING).expand_as(cube)
    there = (torch.linalg.vector_norm(cube - meeting, dim=1) < 0.03) & (other[:, 6] < _HELD)
    waiting = _from_left(meeting) - cube.new_tensor((_GAP, 0.0, 0.0))
    wanted = torch.where(there[:, None], thing, waiting)
    reached = there & (torch.linalg.vector_norm(thing - hand, dim=1) < 0.02)
    gripper = torch.where(reached, _CLOSED, _OPEN)
    return torch.cat((_towards(joints, joints_for(wanted, _PASS, _ROLL)), gripper[:, None]), dim=1)


def _ahead(hand: Tensor, wanted: Tensor) -> Tensor:
    """Return the next place on the straight way of a hand."""
    way = wanted - hand
    length = torch.linalg.vector_norm(way, dim=1, keepdim=True)
    return hand + way * (_ADVANCE / length.clamp(min=_ADVANCE))


def _towards(joints: Tensor, target: Tensor) -> Tensor:
    """Commands (n, 6) that bring the joints nearer to where they should be."""
    speed = (_HURRY * (target - joints)).clamp(-_FASTEST, _FASTEST)
    grip = speed.new_tensor(_GRIP)
    return joints + (speed / speed.new_tensor(_YIELD)).maximum(-grip).minimum(grip) + _SLIDE * speed


def _from_left(place: Tensor) -> Tensor:
    """Return a place of the world in the frame of the left arm."""
    return torch.stack((place[:, 0] + _BASE[0], place[:, 1] - _BASE[1], place[:, 2]), dim=1)


def _from_right(place: Tensor) -> Tensor:
    """Return a place of the world in the frame of the right arm."""
    return torch.stack((_BASE[0] - place[:, 0], _BASE[1] - place[:, 1], place[:, 2]), dim=1)


_POCKET = (0.105, 0.0, 0.0)
_POCKET_ABOVE, _LOWERED, _DOWN = -0.16, -0.215, -0.275
"""Heights of the pocket, m: clear of the object, with the object between the fingers, half way down the object."""
_SPEED, _PUSH = 0.7, 0.6
"""Fastest motion and that of a push, m/s."""
_REST = (0.0, 0.5, -1.45, -1.2, 0.0, -0.4, 1.45)
"""A posture to lean to, rad: elbow turned aside, so that the forearm swings over the table."""
_LEAN = 0.03
_WEIGHTS = (1.0, 1.0, 1.0, 0.08, 0.08, 0.04)
"""What matters: place (x, y, z), lying flat (about x, y), heading (about z)."""
_POCKET_FASTEST = 3.0
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
    motion = torch.cat((_pocket_speed(pose, thing, goal), _turn_gripper(pose, thing, goal)), dim=1)
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
    rise = 5.0 * (torch.where(held | fits, _DOWN, _POCKET_ABOVE) - depth)
    speed = torch.cat((flat, rise), dim=1)
    size = torch.linalg.vector_norm(speed, dim=1, keepdim=True)
    return speed * (_SPEED / size.clamp(min=_SPEED))


def _turn_gripper(pose: ArmPose, thing: Tensor, goal: Tensor) -> Tensor:
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
    least = (4.0 * (angles.new_tensor(LOWEST) - angles)).clamp(-_POCKET_FASTEST, 0.0)
    most = (4.0 * (angles.new_tensor(HIGHEST) - angles)).clamp(0.0, _POCKET_FASTEST)
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
