"""From the rows that wait to the batches that a model sees.

``fast`` gives the model whoever waits, padded to a bucket where the engine wants fixed sizes. ``strict`` gives it
batches of one fixed size in which an episode always has the same row (its id modulo the size): a matrix product then
adds up the same numbers in the same order, and neither the number of environments nor neighbors change one bit of the
answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from headrace.chunking._context import PADDING, ChunkContext, EpisodeRows
from headrace.chunking._history import signed
from headrace.chunking._policy import ChunkPolicy, RemembersEpisodes, checked_chunk, has_memory
from headrace.errors import ConfigError
from headrace.types import Obs


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How model batches are formed."""

    mode: Literal["fast", "strict"] = "strict"
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
        if self.mode == "strict" and self.buckets:
            raise ConfigError(
                "batching buckets: expected none in strict mode, whose batches all have one size; use mode='fast'"
            )

    @property
    def strict_size(self) -> int | None:
        """Rows of a strict batch; None in ``fast`` mode."""
        return self.size if self.mode == "strict" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the model said, and what it cost."""

    actions: Tensor
    """float32 (n, horizon, A) on the host, in the order of the rows asked for."""
    calls: int
    padding: int
    """Wasted rows: computed, and read by no environment."""


@dataclass(frozen=True, slots=True)
class _Placement:
    """Some rows of a request in one batch of the model."""

    rows: Tensor
    """int64 (m,): rows of the request in this batch."""
    slots: Tensor
    """int64 (m,): where they stand in it."""
    size: int


def ask(
    policy: ChunkPolicy, obs: Obs, context: ChunkContext, batching: Batching, *, ended: EpisodeRows | None = None
) -> Answer:
    """Run the policy over n rows in batches, and check each answer; errors name the environments.

    A policy with memory is told first of the episodes that have ended, then of those that begin with this chunk.
    """
    count = len(context)
    if has_memory(policy):
        keeper = cast("RemembersEpisodes", policy)
        if ended is not None and len(ended):
            keeper.end(ended)
        if len(beginning := context.beginning()):
            keeper.begin(beginning)
    if not count:
        return Answer(actions=torch.zeros((0, policy.horizon, policy.action_dim)), calls=0, padding=0)
    if batching.mode == "fast" and not batching.buckets:
        return Answer(actions=checked_chunk(policy(obs, context), policy, context, read=None), calls=1, padding=0)
    actions = torch.zeros((count, policy.horizon, policy.action_dim))
    strict = batching.mode == "strict"
    ids = context.episode_ids
    placements = _strict_batches(ids, batching.size) if strict else _bucket_batches(ids, batching.buckets)
    for place in placements:
        whole = _placed_context(context, place)
        rows = {name: _placed(values, place) for name, values in obs.items()}
        actions[place.rows.cpu()] = checked_chunk(policy(rows, whole), policy, whole, read=place.slots)
    padding = sum(place.size for place in placements) - count
    return Answer(actions=actions, calls=len(placements), padding=padding)


def _bucket_batches(episode_ids: Tensor, buckets: tuple[int, ...]) -> list[_Placement]:
    """Batches of the largest bucket, and the rest in the smallest that holds it."""
    everyone = torch.arange(len(episode_ids), device=episode_ids.device)
    return [
        _Placement(
            rows,
            torch.arange(len(rows), device=rows.device),
            next(size for size in buckets if size >= len(rows)),
        )
        for rows in everyone.split(buckets[-1])
    ]


def _strict_batches(episode_ids: Tensor, size: int) -> list[_Placement]:
    """Batches in which each row stands at its episode's place; rows that collide go into the next call."""
    slots = episode_ids % size
    left = torch.arange(len(episode_ids), device=episode_ids.device)
    placements: list[_Placement] = []
    while len(left):
        taken = slots.index_select(0, left)
        order = torch.argsort(taken, stable=True)
        repeated = taken[order][1:] == taken[order][:-1]
        first = torch.ones_like(left, dtype=torch.bool)
        first[order[1:][repeated]] = False
        placements.append(_Placement(left[first], taken[first], size))
        left = left[~first]
    return placements


def _placed_context(context: ChunkContext, place: _Placement) -> ChunkContext:
    """The context of a batch; rows that only fill it up have no episode."""
    row_at = dict(zip(_integers(place.slots), _integers(place.rows), strict=True))
    return context.map_rows(
        lambda field, values: _placed(values, place, fill=PADDING if field in ("env_ids", "episode_ids") else 0),
        lambda texts: tuple(texts[row_at[slot]] if slot in row_at else "" for slot in range(place.size)),
    )


def _integers(values: Tensor) -> list[int]:
    return values.tolist()


def _placed(values: Tensor, place: _Placement, fill: int = 0) -> Tensor:
    """The rows of a batch (size, …): those of ``values`` (n, …) at their slots, ``fill`` elsewhere. Always fresh."""
    batch = torch.full((place.size, *values.shape[1:]), fill, dtype=values.dtype, device=values.device)
    signed(batch)[place.slots] = signed(values).index_select(0, place.rows)
    return batch
