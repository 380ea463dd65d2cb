"""Experts for tasks of LIBERO: things put one after the other into or onto what stands freely, and drawers and knobs
pushed with a closed hand.

Feedback laws of the observation alone, without memory. A thing: over it, down, close, up, over the goal, down, open. A
push: up, over its start, down, along its way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace.envs.tasks.libero.exported import ExportedTask, load_exported
from headrace.sim.mujoco_api import mujoco
from headrace.types import Obs

_HAND, _JOINTS = slice(0, 3), 9
"""Of the group ``critic``: place of the grip site, where all joints begin."""
_STEP = 0.05
"""Way of the hand that an action of 1 means, m."""
_ABOVE, _OVER, _CLEAR, _NEAR, _CATCH = 0.1, 0.22, 0.25, 0.02, 0.03
"""How far above the thing the hand comes, near it and far, and above the goal it carries; how near is over the goal and
in hand, m."""


class Grasp(NamedTuple):
    """How a thing is taken and let go."""

    offset: tuple[float, float, float]
    """Of the hand from the thing's center, m."""
    width: float
    """Below this opening, m, the fingers hold it."""
    drop: float
    """Height above the goal at which it is let go, m."""


class Push(NamedTuple):
    """How a drawer or a knob is moved by the closed hand; in world coordinates, from the middle of a geom."""

    geom: str
    start: tuple[float, float, float]
    """Where the hand begins, m."""
    way: tuple[float, float, float]
    """Where it goes from there, m per step."""


_CAN, _BOWL = Grasp((0.0, 0.0, 0.0), 0.07, 0.15), Grasp((0.0, 0.042, 0.025), 0.02, 0.0)
SKILLS: dict[str, Grasp | Push] = {
    "libero_object/0": _CAN,
    "libero_spatial/0": _BOWL,
    "libero_spatial/2": _BOWL,
    "libero_goal/8": _BOWL,
    "libero_90/9": _BOWL,
    "libero_10/0": _CAN,
    "libero_90/0": Push("wooden_cabinet_1_g18", (0.0, 0.05, 0.025), (0.0, -0.03, 0.0)),
    "libero_90/7": Push("wooden_cabinet_1_g18", (0.0, 0.004, 0.012), (0.0, 0.03, -0.03)),
    "libero_goal/7": Push("flat_stove_1_g20", (0.02, -0.055, 0.001), (0.0, 0.05, 0.0)),
    "libero_90/39": Push("flat_stove_1_g20", (-0.055, -0.055, 0.01), (0.0, 0.05, 0.0)),
}
"""Task → what is done in it, where this expert is known to succeed."""


@functools.cache
def libero_expert(task: str) -> Callable[[Obs], Tensor]:
    """Return the expert of a task: rows of ``critic`` → actions float32 (n, 7)."""
    exported, skill = load_exported(task), SKILLS[task]
    model: Any = exported.compile(textures=False)
    if isinstance(skill, Push):
        return _push(model, exported, skill)
    goals = [_Goal(model, goal) for goal in exported.record["goal"]]

    def act(obs: Obs) -> Tensor:
        rows = obs["critic"].to(torch.float64)
        moves, done = _place(rows, goals[0], skill)
        for goal in goals[1:]:
            further, also = _place(rows, goal, skill)
            moves, done = torch.where(done[:, None], further, moves), done & also
        return moves.clamp(-1.0, 1.0).to(torch.float32)

    return act


class _Goal:
    """Where a thing and its goal are in qpos; ``size`` is that of the place it belongs into."""

    def __init__(self, model: Any, goal: Any) -> None:
        self.thing = _column(model, model.body(goal["body"]).id)
        self.size, self.shift = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
        body = model.body(goal["other"]).id if "other" in goal else 0
        if "site" in goal:
            site = model.site(goal["site"]).id
            body, self.shift = int(model.site_bodyid[site]), torch.from_numpy(model.site_pos[site].copy())
            self.size = torch.tensor(goal["size"], dtype=torch.float64)
        self.target = _column(model, body)


def _place(rows: Tensor, goal: _Goal, grasp: Grasp) -> tuple[Tensor, Tensor]:
    """Return moves (n, 7) that put a thing to its goal, and whether it is there."""
    hand, opening, joints = rows[:, _HAND], rows[:, 7] - rows[:, 8], rows[:, _JOINTS:]
    place = joints[:, goal.thing : goal.thing + 3]
    end = joints[:, goal.target : goal.target + 3] + goal.shift  # what it is put into stands upright
    away = place + place.new_tensor(grasp.offset) - hand
    aside = away[:, :2].square().sum(dim=1).sqrt()
    inside = (aside < 0.015) & (away[:, 2].abs() < 0.012)
    held = (opening < grasp.width) & (away.square().sum(dim=1).sqrt() < _CATCH)
    short = (end - place)[:, :2].square().sum(dim=1).sqrt()
    there = short <= _NEAR
    # down beside the thing only once the fingers are over it
    rise = (4.0 * (aside - 0.01)).clamp(0.0, _ABOVE) + (4.0 * (aside - _ABOVE)).clamp(0.0, _OVER - _ABOVE)
    rise = torch.where(inside, 0.0, rise)
    way = away + torch.stack((rise * 0.0, rise * 0.0, rise), dim=1)
    lift = torch.zeros_like(way)
    lift[:, 2] = _STEP
    # out of what the last thing was put into, before it goes to the next
    way = torch.where(((aside > 0.13) & (away[:, 2] > 0.05 - _OVER))[:, None], lift, way)
    carry = end - place
    # beside the goal it stays at its height: the way down is left at times, and found again
    far = short > 3.0 * _NEAR
    carry[:, 2] = torch.where(far, end[:, 2] + _CLEAR - hand[:, 2], 0.0)
    low = far & (hand[:, 2] < end[:, 2] + _CLEAR - 0.03)
    lower = (end - place) * 0.5
    lower[:, 2] = (end[:, 2] + grasp.drop - place[:, 2]).clamp(-0.03, 0.0)
    way = torch.where((held & ~there)[:, None], torch.where(low[:, None], lift, carry), way)
    way = torch.where((held & there)[:, None], lower, way)
    close = torch.where(held, ~there | (place[:, 2] > end[:, 2] + grasp.drop + 0.01), inside)
    moves = torch.cat((way / _STEP, torch.zeros_like(way), torch.where(close, 1.0, -1.0)[:, None]), dim=1)
    return moves, ((place - end).abs() < goal.size).all(dim=1)


def _push(model: Any, exported: ExportedTask, push: Push) -> Callable[[Obs], Tensor]:
    data: Any = mujoco.MjData(model)
    for body, poses in zip(exported.record["fixtures"], exported.fixtures, strict=True):
        middle = poses.mean(axis=0)
        model.body(body).pos[:], model.body(body).quat[:] = middle[:3], middle[3:]
    mujoco.mj_forward(model, data)
    (name,) = exported.record["goal"][0]["joints"]
    joint = model.joint(name)
    slides, column = int(joint.type[0]) == int(mujoco.mjtJoint.mjJNT_SLIDE), _JOINTS + int(joint.qposadr[0])
    axis, anchor = (torch.from_numpy(part[joint.id].copy()) for part in (data.xaxis, data.xanchor))
    begin = torch.from_numpy(data.geom(push.geom).xpos.copy()) + torch.tensor(push.start, dtype=torch.float64) - anchor
    way = torch.tensor(push.way, dtype=torch.float64)
    line = way[:2] / way[:2].square().sum().sqrt()

    def act(obs: Obs) -> Tensor:
        rows = obs["critic"].to(torch.float64)
        moved = rows[:, column]
        # seen from what is pushed: a drawer takes its frame along, a knob turns it
        turn = moved * 0.0 if slides else moved * axis[2]
        rest = _turned(rows[:, _HAND] - anchor - (axis * moved[:, None] if slides else 0.0), -turn) - begin
        along = (rest[:, :2] * line).sum(dim=1)
        across = rest.clone()
        across[:, :2] -= along[:, None] * line
        pushing = (
            (across[:, :2].square().sum(dim=1).sqrt() < 0.03)
            & (along > -0.03)
            & (along < 0.1)
            & (across[:, 2].abs() < (0.015 if push.way[2] else 0.03))
        )
        # over the start before down, and up before over it
        over = rest[:, :2].square().sum(dim=1).sqrt() < 0.012
        up = ~over & (rest[:, 2] < _ABOVE / 2)
        height = torch.where(over, 0.0, _ABOVE) - rest[:, 2]
        goto = torch.cat((torch.where(up[:, None], 0.0, -rest[:, :2]), height[:, None]), dim=1)
        moves = _turned(torch.where(pushing[:, None], way - across, goto), turn) / _STEP
        closed = torch.ones(len(rows), 1, dtype=torch.float64)
        return torch.cat((moves, torch.zeros_like(moves), closed), dim=1).clamp(-1.0, 1.0).to(torch.float32)

    return act


def _turned(place: Tensor, angle: Tensor) -> Tensor:
    """Return places (n, 3) turned about the vertical by angles (n,)."""
    x, y, z = place.unbind(dim=1)
    return torch.stack((x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos(), z), dim=1)


def _column(model: Any, body: int) -> int:
    """Return where the place of a free body is in qpos."""
    return int(model.jnt_qposadr[model.body_jntadr[body]])
