"""Stable-Baselines3: environment, learner and replay buffer. Needs ``headrace[sb3]``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.libraries.sb3._learner import Sb3Env as Sb3Env
    from headrace.libraries.sb3._replay import FrameReplayBuffer as FrameReplayBuffer

__getattr__, __dir__ = lazy_exports(__name__, __file__)
