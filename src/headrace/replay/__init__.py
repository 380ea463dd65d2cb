"""Rollout and replay stores that keep every frame once."""

from headrace.replay.estimate import StoreEstimate, estimate
from headrace.replay.priorities import PrioritizedSampler
from headrace.replay.replay import ReplayBuffer
from headrace.replay.rollout import DistinctObservations, Rollout, RolloutBuffer
from headrace.replay.samplers import Sampler, SliceSampler, TrajectorySampler, UniformSampler
from headrace.replay.spec import ArraySpec

__all__ = [
    "ArraySpec",
    "DistinctObservations",
    "PrioritizedSampler",
    "ReplayBuffer",
    "Rollout",
    "RolloutBuffer",
    "Sampler",
    "SliceSampler",
    "StoreEstimate",
    "TrajectorySampler",
    "UniformSampler",
    "estimate",
]
