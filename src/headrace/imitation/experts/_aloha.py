"""An expert for ALOHA's transfer of a cube: the right arm picks it up and holds it out, the left one takes it.

A feedback law of the observation alone, without memory: which part of the work is due is told from where the cube and
the hands are, and how far the right gripper is open.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headrace.imitation.experts._arm import in_gripper, joints_for, pinch_place
from headrace.types import Obs

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
_STEP = 0.06
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
    return hand + way * (_STEP / length.clamp(min=_STEP))


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
