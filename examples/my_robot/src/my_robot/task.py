"""``my-robot-reach``: bring the gripper to the pad that the instruction names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headrace import Rows, Task, TaskCfg, TaskEntry
from headrace.envs import ImageSpec
from headrace.sim import CameraSpec, load_model
from headrace.types import Obs

MODEL = Path(__file__).parent / "assets" / "arm.xml"
PADS = ("red pad", "blue pad")
INSTRUCTIONS = tuple(f"touch the {pad}" for pad in PADS)


@dataclass(frozen=True, kw_only=True)
class ReachCfg(TaskCfg):
    """Settings of ``my-robot-reach``: ``headrace run my-robot-reach --set camera=true``."""

    decimation: int = 4
    episode_length: int = 100
    camera: bool = False
    """Let the policy see the table from above (the group ``top``)."""
    pixels: int = 64
    """Height and width of an image."""
    near: float = 0.05
    """How close counts as a success, in m."""
    effort_weight: float = -0.01


class Reach(Task[ReachCfg]):
    """Reach for a pad. The group ``policy`` has joints and a one at the place of the pad that was named."""

    success_measure = "the gripper is over the pad"

    def __init__(self, cfg: ReachCfg) -> None:
        images = {"top": ImageSpec(camera=CameraSpec(name="top", width=cfg.pixels, height=cfg.pixels))}
        super().__init__(cfg, load_model(MODEL), {"policy": 6}, images if cfg.camera else {})
        self._tip = self.model.site("tip").id
        self._pads = [self.model.site(pad).id for pad in PADS]

    def reset(self, rows: Rows) -> None:
        """The arm anywhere, at rest."""
        rows.set("qpos", rows.uniform("start", 2, low=-1.5, high=1.5))
        rows.set("qvel", torch.zeros_like(rows.get("qvel")))

    def instructions(self, rows: Rows) -> Sequence[str]:
        """One text for each row; a function of the episode alone."""
        return [INSTRUCTIONS[pad] for pad in _chosen(rows).tolist()]

    def observe(self, rows: Rows) -> Obs:
        """``policy``: joint angles, joint speeds, which pad."""
        named = torch.nn.functional.one_hot(_chosen(rows), len(PADS)).to(torch.float64)
        return {"policy": torch.cat((rows.get("qpos"), rows.get("qvel"), named), dim=1)}

    def reward(self, rows: Rows, actions: Tensor) -> Tensor:
        """Nearer is better, and so is less effort."""
        return -self._distance(rows) + self.cfg.effort_weight * (actions * actions).sum(dim=1)

    def terminated(self, rows: Rows) -> Tensor:
        """The pad is reached."""
        return self.success(rows)

    def success(self, rows: Rows) -> Tensor:
        """Near the pad that was named."""
        return self._distance(rows) < self.cfg.near

    def _distance(self, rows: Rows) -> Tensor:
        """From the tip of the gripper to the pad, seen from above, (n,)."""
        places = rows.get("site_xpos")
        chosen = torch.tensor(self._pads)[_chosen(rows)]
        pads = places[torch.arange(len(places)), chosen]
        return torch.linalg.vector_norm((places[:, self._tip] - pads)[:, :2], dim=1)


def _chosen(rows: Rows) -> Tensor:
    """The pad of each row's episode, int64 (n,)."""
    return (rows.uniform("pad", 1)[:, 0] * len(PADS)).long()


REACH = TaskEntry(
    name="my-robot-reach",
    task="my_robot.task:Reach",
    cfg="my_robot.task:ReachCfg",
    summary="an arm of one's own reaches for the pad that is named",
)
