"""An expert for tasks of LIBERO that ask for one thing to be put into or onto another that stands freely.

A feedback law of the observation alone, without memory: over the thing, down, close, up, over the goal, down, open.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace.envs.tasks.libero.exported import load_exported
from headrace.types import Obs

_HAND, _FINGERS, _JOINTS = slice(0, 3), slice(7, 9), 9
"""Of the group ``critic``: place of the grip site, both fingers, where all joints begin."""
_STEP = 0.05
"""Way of the hand that an action of 1 means, m."""
_ABOVE, _CLEAR, _NEAR, _CATCH = 0.1, 0.25, 0.02, 0.03
"""How far above the thing the hand comes and above the goal it carries; how near is over the goal and in hand, m."""


class Grasp(NamedTuple):
    """How a thing is taken and let go."""

    offset: tuple[float, float, float]
    """Of the hand from the thing's center, m."""
    width: float
    """Below this opening, m, the fingers hold it."""
    drop: float
    """Height above the goal at which it is let go, m."""


_CAN, _BOWL = Grasp((0.0, 0.0, 0.0), 0.07, 0.15), Grasp((0.0, 0.042, 0.025), 0.02, 0.0)
GRASPS = {
    "libero_object/0": _CAN,
    "libero_spatial/0": _BOWL,
    "libero_spatial/2": _BOWL,
    "libero_goal/8": _BOWL,
    "libero_90/9": _BOWL,
}
"""Task → grasp, where this expert is known to succeed."""


@functools.cache
def libero_expert(task: str) -> Callable[[Obs], Tensor]:
    """Return the expert of a task: rows of ``critic`` → actions float32 (n, 7)."""
    exported, grasp = load_exported(task), GRASPS[task]
    model: Any = exported.compile(textures=False)
    (goal,) = exported.record["goal"]
    thing = _column(model, model.body(goal["body"]).id)
    if "site" in goal:
        site = model.site(goal["site"]).id
        target, shift = _column(model, int(model.site_bodyid[site])), torch.from_numpy(model.site_pos[site].copy())
    else:
        target, shift = _column(model, model.body(goal["other"]).id), torch.zeros(3, dtype=torch.float64)

    def act(obs: Obs) -> Tensor:
        rows = obs["critic"].to(torch.float64)
        hand, opening, joints = rows[:, _HAND], rows[:, 7] - rows[:, 8], rows[:, _JOINTS:]
        place = joints[:, thing : thing + 3]
        end = joints[:, target : target + 3] + shift  # what it is put into stands upright
        away = place + place.new_tensor(grasp.offset) - hand
        aside = away[:, :2].square().sum(dim=1).sqrt()
        inside = (aside < 0.015) & (away[:, 2].abs() < 0.012)
        held = (opening < grasp.width) & (away.square().sum(dim=1).sqrt() < _CATCH)
        short = (end - place)[:, :2].square().sum(dim=1).sqrt()
        there = short <= _NEAR
        # down beside the thing only once the fingers are over it
        rise = torch.where(inside, 0.0, (4.0 * (aside - 0.01)).clamp(0.0, _ABOVE))
        way = away + torch.stack((rise * 0.0, rise * 0.0, rise), dim=1)
        lift = torch.zeros_like(way)
        lift[:, 2] = _STEP
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
        return moves.clamp(-1.0, 1.0).to(torch.float32)

    return act


def _column(model: Any, body: int) -> int:
    """Return where the place of a free body is in qpos."""
    return int(model.jnt_qposadr[model.body_jntadr[body]])
