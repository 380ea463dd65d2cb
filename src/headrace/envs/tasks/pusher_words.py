"""``pusher-words``: ``pusher-solid`` with a goal that is named in words and shown to nobody who does not read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

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
        self._place(rows, goal_offsets(_chosen(rows), self.cfg.goal_range).to(rows.device))

    def instructions(self, rows: Rows) -> Sequence[str]:
        """One of ``INSTRUCTIONS`` for each row."""
        return [INSTRUCTIONS[index] for index in _chosen(rows)]

    def observe(self, rows: Rows) -> Obs:
        """``policy``: as of ``pusher-solid`` without the goal; ``critic`` has it."""
        whole = super().observe(rows)["policy"]
        return {"policy": whole[:, :20].contiguous(), "critic": whole}


def goal_offsets(chosen: Sequence[int], reach: float) -> Tensor:
    """Where the goals of these instructions are from the middle, float64 (n, 2), y first, in m."""
    places = torch.tensor([*_DIRECTIONS.values()], dtype=torch.float64) * reach
    return places[torch.tensor([*chosen], dtype=torch.int64)]


def _chosen(rows: Rows) -> list[int]:
    """Which of ``INSTRUCTIONS`` each row's episode has; a function of the episode alone."""
    return (rows.uniform("words", 1)[:, 0] * len(INSTRUCTIONS)).long().tolist()
