"""Rollout and replay stores that keep every frame once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.replay._buffer import ReplayBuffer
    from headrace.replay._mixture import Mixture
    from headrace.replay._priorities import PrioritizedSampler
    from headrace.replay._relabeling import Relabeled
    from headrace.replay._samplers import Picked, Sampler, SamplerWithoutReplacement, UniformSampler, register_sampler
    from headrace.replay._slices import SliceSampler, TrajectorySampler
    from headrace.replay._spec import ArraySpec, estimate
    from headrace.replay.rollout import RolloutBuffer

__all__ = [
    "ArraySpec",
    "Mixture",
    "Picked",
    "PrioritizedSampler",
    "Relabeled",
    "ReplayBuffer",
    "RolloutBuffer",
    "Sampler",
    "SamplerWithoutReplacement",
    "SliceSampler",
    "TrajectorySampler",
    "UniformSampler",
    "estimate",
    "register_sampler",
]

__getattr__, __dir__ = lazy_exports(__name__, __file__, __all__)
