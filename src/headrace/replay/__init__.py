"""Rollout and replay stores that keep every frame once."""

from headrace.replay._compact import reconstruct_next
from headrace.replay._delta import delta_error_bound, from_delta, to_delta
from headrace.replay._estimate import estimate
from headrace.replay._priorities import PrioritizedSampler
from headrace.replay._replay import ReplayBuffer
from headrace.replay._rollout import RolloutBuffer
from headrace.replay._samplers import Picked, Sampler, SamplerWithoutReplacement, UniformSampler, register_sampler
from headrace.replay._slices import SliceSampler, TrajectorySampler
from headrace.replay._spec import ArraySpec

__all__ = [
    "ArraySpec",
    "Picked",
    "PrioritizedSampler",
    "ReplayBuffer",
    "RolloutBuffer",
    "Sampler",
    "SamplerWithoutReplacement",
    "SliceSampler",
    "TrajectorySampler",
    "UniformSampler",
    "delta_error_bound",
    "estimate",
    "from_delta",
    "reconstruct_next",
    "register_sampler",
    "to_delta",
]
