"""From the rows that wait to the batches that a model sees.

``fast`` gives the model whoever waits, padded to a bucket where the engine wants fixed sizes. ``strict`` gives it
batches of one fixed size in which an episode always has the same row (its id modulo the size): a matrix product then
adds up the same numbers in the same order, and neither the number of environments nor neighbours change one bit of the
answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headrace.chunking.policy import ChunkContext, ChunkPolicy, checked_chunk
from headrace.errors import ConfigError
from headrace.types import Obs


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How model batches are formed."""

    mode: Literal["fast", "strict"] = "fast"
    size: int = 16
    """Rows of a batch in ``strict`` mode."""
    buckets: tuple[int, ...] = ()
    """Sizes that batches are padded to in ``fast`` mode, ascending; empty for any size."""

    def __post_init__(self) -> None:
        if self.mode not in ("fast", "strict"):
            raise ConfigError(f"batching mode: expected 'fast' or 'strict', got {self.mode!r}")
        if self.size < 1:
            raise ConfigError(f"batching size: expected at least 1 row, got {self.size}")
        if list(self.buckets) != sorted(set(self.buckets)) or any(size < 1 for size in self.buckets):
            raise ConfigError(f"batching buckets: expected ascending sizes of at least 1, got {self.buckets}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the model said, and what it cost."""

    actions: Tensor
    """float32 (n, horizon, A), in the order of the rows asked for."""
    calls: int
    padding: int
    """Rows that were computed for nobody."""


@dataclass(frozen=True, slots=True)
class _Placement:
    rows: Tensor
    """int64 (m,): rows of the request in this batch."""
    slots: Tensor
    """int64 (m,): where they stand in it."""
    size: int


def ask(policy: ChunkPolicy, obs: Obs, context: ChunkContext, batching: Batching) -> Answer:
    """Run the policy over n rows in batches, and check each answer; errors name the environments."""
    count = len(context.env_ids)
    actions = torch.zeros((count, policy.horizon, policy.action_dim))
    calls = padding = 0
    for place in _placements(context.episode_ids, batching):
        asked = context.rows(place.rows)
        whole = _spread_context(asked, place) if place.size > len(place.rows) or batching.mode == "strict" else asked
        rows = {name: _spread(values.index_select(0, place.rows), place) for name, values in obs.items()}
        answer = checked_chunk(policy(rows, whole), policy, whole, read=place.slots)
        actions[place.rows] = answer.cpu()
        calls += 1
        padding += place.size - len(place.rows)
    return Answer(actions=actions, calls=calls, padding=padding)


def _placements(episode_ids: Tensor, batching: Batching) -> list[_Placement]:
    everyone = torch.arange(len(episode_ids), device=episode_ids.device)
    if batching.mode == "fast":
        fitting = [size for size in batching.buckets if size >= len(episode_ids)]
        largest = batching.buckets[-1] if batching.buckets else len(episode_ids)
        if batching.buckets and not fitting:
            parts = everyone.split(largest)
            return [placement for part in parts for placement in _in_bucket(part, batching.buckets)]
        return [_Placement(everyone, everyone, fitting[0] if fitting else len(episode_ids))]
    placements: list[_Placement] = []
    slots = episode_ids % batching.size
    left = everyone
    while len(left):
        # the first row of each slot goes into this call; rows that collide go into the next
        taken = slots.index_select(0, left)
        first = torch.ones_like(left, dtype=torch.bool)
        order = torch.argsort(taken, stable=True)
        repeated = taken[order][1:] == taken[order][:-1]
        first[order[1:][repeated]] = False
        placements.append(_Placement(left[first], taken[first], batching.size))
        left = left[~first]
    return placements


def _in_bucket(rows: Tensor, buckets: tuple[int, ...]) -> list[_Placement]:
    size = next(size for size in buckets if size >= len(rows))
    return [_Placement(rows, torch.arange(len(rows), device=rows.device), size)]


def _spread(values: Tensor, place: _Placement) -> Tensor:
    """Rows (m, …) at their slots of a batch (size, …); zeros elsewhere."""
    if len(values) == place.size and torch.equal(place.slots, torch.arange(place.size, device=place.slots.device)):
        return values
    batch = torch.zeros((place.size, *values.shape[1:]), dtype=values.dtype, device=values.device)
    batch[place.slots] = values
    return batch


def _spread_context(context: ChunkContext, place: _Placement) -> ChunkContext:
    return ChunkContext(
        seed=context.seed,
        env_ids=_spread(context.env_ids, place),
        episode_ids=_spread(context.episode_ids, place),
        chunk_index=_spread(context.chunk_index, place),
        rest=_spread(context.rest, place),
        rest_length=_spread(context.rest_length, place),
        delay=_spread(context.delay, place),
    )
