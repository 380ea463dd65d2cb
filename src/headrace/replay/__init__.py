"""Rollout and replay stores that keep every frame once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.replay._batches import Mixture as Mixture
    from headrace.replay._buffer import ReplayBuffer as ReplayBuffer
    from headrace.replay._priorities import PrioritizedSampler as PrioritizedSampler
    from headrace.replay._relabeling import Relabeled as Relabeled
    from headrace.replay._samplers import Picked as Picked
    from headrace.replay._samplers import Sampler as Sampler
    from headrace.replay._samplers import SamplerWithoutReplacement as SamplerWithoutReplacement
    from headrace.replay._samplers import UniformSampler as UniformSampler
    from headrace.replay._samplers import register_sampler as register_sampler
    from headrace.replay._shared import SharedReplay as SharedReplay
    from headrace.replay._slices import SliceSampler as SliceSampler
    from headrace.replay._slices import TrajectorySampler as TrajectorySampler
    from headrace.replay._spec import ArraySpec as ArraySpec
    from headrace.replay._spec import estimate as estimate
    from headrace.replay.rollout import RolloutBuffer as RolloutBuffer

__getattr__, __dir__ = lazy_exports(__name__, __file__)
