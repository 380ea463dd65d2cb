"""``pusher-words``: ``pusher-solid`` with a goal that is named in words and shown to nobody who does not read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor

from headrace._device import constant
from headrace.envs._rows import Rows
from headrace.envs.tasks.pusher_solid import PusherSolid, PusherSolidCfg
from headrace.types import Obs

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
        """The goal that the words name, the object somewhere else on the table."""
        self._place(rows, goal_offsets(_chosen(rows), self.cfg.goal_range))

    def instructions(self, rows: Rows) -> Sequence[str]:
        """One of ``INSTRUCTIONS`` for each row."""
        return [INSTRUCTIONS[index] for index in _chosen(rows).tolist()]

    def observe(self, rows: Rows) -> Obs:
        """``policy``: as of ``pusher-solid`` without the goal; ``critic`` has it."""
        whole = super().observe(rows)["policy"]
        return {"policy": whole[:, :20].contiguous(), "critic": whole}


def goal_offsets(chosen: Tensor, reach: float) -> Tensor:
    """Where the goals of these instructions, int64 (n,), are from the middle, float64 (n, 2), y first, in m."""
    places = constant(tuple(chain(*_DIRECTIONS.values())), torch.float64, chosen.device).view(-1, 2)
    return places.index_select(0, chosen) * reach


def _chosen(rows: Rows) -> Tensor:
    """Which of ``INSTRUCTIONS`` each row's episode has, int64 (n,); a function of the episode alone."""
    return (rows.uniform("words", 1)[:, 0] * len(INSTRUCTIONS)).long()
