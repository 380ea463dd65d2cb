"""Stable-Baselines3: environment, learner and replay buffer. Needs ``headrace[sb3]``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports
from headrace.libraries.registry import EVERY_GROUP, NOT_OURS, CurveTags, LibrarySpec

if TYPE_CHECKING:
    from headrace.libraries.sb3._learner import Sb3Env
    from headrace.libraries.sb3._replay import FrameReplayBuffer

__all__ = ["FrameReplayBuffer", "Sb3Env"]

LIBRARY = LibrarySpec(
    name="sb3",
    distribution="stable-baselines3",
    module="stable_baselines3",
    extra="sb3",
    learner="headrace.libraries.sb3._learner:Sb3Learner",
    suffix=".zip",
    marks=frozenset({"policy.pth", "policy.optimizer.pth"}),
    curves=CurveTags("rollout/ep_rew_mean", "rollout/ep_len_mean", "frames"),
    reads={"none": EVERY_GROUP},
    cannot_honor=NOT_OURS,
    differences=("advantages are normalized per minibatch", "no recurrent policies"),
)
"""What the commands need to know of it."""

__getattr__, __dir__ = lazy_exports(__name__, __file__, __all__)
