"""Batches of a model: which rows it computes together.

``fast`` gives the model the waiting rows, padded to a bucket where the engine wants fixed sizes. ``strict`` gives it
batches of one fixed size: a matrix product then adds up the same numbers in the same order, and neither the number of
environments nor neighbors change one bit of a row's answer. Some products round by the place of a row in its batch,
too; the rows of a policy that has any (see :mod:`headrace.policies.strictness`) stand at places that follow from their
episodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.errors import ConfigError
from headrace.policies.protocol import (
    PADDING,
    TENSOR_FIELDS,
    ChunkContext,
    ChunkPolicy,
    EpisodeRows,
    RemembersEpisodes,
    checked_chunk,
    has_memory,
)
from headrace.types import Obs

TILE = 16
"""Rows of a strict batch, where rows are not computed alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How model batches are formed."""

    mode: Literal["fast", "strict"] = "strict"
    size: int | None = None
    """Rows of a batch in ``strict`` mode. None for the size that fits device and policy: 1, rows alone, on a CPU where
    a row uses each weight often (convolutions, attention), else 16. An engine or a server that is made without an
    environment takes 16."""
    places: Literal["free", "spread", "modulo"] | None = None
    """Place of a row in a strict batch: ``free`` (any), ``spread`` (the digits of its episode's id, added up, so that
    neither ids in a row nor ids in steps of the size meet), or ``modulo`` (its id modulo the size, as in 0.2). None for
    ``free`` if a test shows that the policy's answers do not depend on it, else ``spread``."""
    buckets: tuple[int, ...] = ()
    """Sizes that batches are padded to in ``fast`` mode, ascending; empty for any size."""

    def __post_init__(self) -> None:
        if self.mode not in ("fast", "strict"):
            raise ConfigError(f"batching mode: expected 'fast' or 'strict', got {self.mode!r}")
        if self.size is not None and (type(self.size) is not int or self.size < 1):
            raise ConfigError(f"batching size: expected at least 1 row, got {self.size}")
        if self.places not in ("free", "spread", "modulo", None):
            raise ConfigError(f"batching places: expected 'free', 'spread', 'modulo' or None, got {self.places!r}")
        if list(self.buckets) != sorted(set(self.buckets)) or min(self.buckets, default=1) < 1:
            raise ConfigError(f"batching buckets: expected ascending sizes of at least 1, got {self.buckets}")
        if self.mode == "strict" and self.buckets:
            raise ConfigError(
                "batching buckets: expected none in strict mode, whose batches all have one size; use mode='fast'"
            )

    @classmethod
    def of(cls, batching: object) -> Batching:
        """Return the batches that an argument ``batching`` stands for: strict ones for None."""
        if batching is None or isinstance(batching, Batching):
            return batching or Batching()
        if isinstance(batching, str):
            return Batching(mode=cast("Literal['fast', 'strict']", batching))
        raise ConfigError(
            f"batching: expected 'strict', 'fast' or a headrace.policies.Batching, got {batching!r}; "
            "Batching(size=4) sets the rows of a strict batch"
        )

    @property
    def strict_size(self) -> int | None:
        """Rows of a strict batch; None in ``fast`` mode."""
        return (self.size or TILE) if self.mode == "strict" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the model said, and what it cost."""

    actions: Tensor
    """float32 (n, horizon, A) on the host, in the order of the rows asked for."""
    calls: int
    padding: int
    """Wasted rows: computed, and read by no environment."""
    verified: int = 0
    """Rows that were answered again, alone and in another batch, with equal bits."""
    checking: int = 0
    """Rows that were computed for that, padding included."""


COUNTS = ("calls", "padding", "verified", "checking")
"""The fields of an answer that are numbers, which cross a wire."""


def ask(
    policy: ChunkPolicy, obs: Obs, context: ChunkContext, batching: Batching, *, ended: EpisodeRows | None = None
) -> Answer:
    """Run the policy over n rows in batches, and check each answer; errors name the environments.

    A policy with memory is told first of the episodes that have ended, then of those that begin with this chunk.
    """
    tell_episodes(policy, context, ended)
    return answer_rows(policy, obs, context, batching)


def answer_rows(policy: ChunkPolicy, obs: Obs, context: ChunkContext, batching: Batching) -> Answer:
    """Run the policy over n rows in batches as :func:`ask` does; their episodes have begun."""
    count = len(context.instructions)
    alone = batching.strict_size == 1 and count == 1  # nothing to pad or to split
    if alone or (batching.mode == "fast" and count and not batching.buckets):
        return Answer(actions=checked_chunk(policy(obs, context), policy, context, read=None), calls=1, padding=0)
    actions = torch.zeros((count, policy.horizon, policy.action_dim))
    batches = _batches(context.episode_ids.cpu().numpy(), batching)
    if any((places == count).any() for places in batches):
        context, obs = with_padding(context, obs, 1)
    for places in batches:
        slots, index = np.flatnonzero(places < count), torch.from_numpy(places).to(context.env_ids.device)
        whole, rows = context.rows(index), {name: values.index_select(0, index) for name, values in obs.items()}
        chosen = checked_chunk(policy(rows, whole), policy, whole, read=torch.from_numpy(slots))
        actions[torch.from_numpy(places[slots])] = chosen
    return Answer(actions=actions, calls=len(batches), padding=sum(map(len, batches)) - count)


def tell_episodes(policy: ChunkPolicy, context: ChunkContext, ended: EpisodeRows | None) -> None:
    """Tell a policy with memory which episodes have ended, and which begin with this chunk."""
    if has_memory(policy):
        keeper = cast("RemembersEpisodes", policy)
        if ended is not None and len(ended):
            keeper.end(ended)
        if len(beginning := context.beginning()):
            keeper.begin(beginning)


def _batches(episode_ids: NDArray[np.int64], batching: Batching) -> list[NDArray[np.int64]]:
    """Return which of the n rows stands in each place of each batch; n where none does.

    Rows with a place of their own that collide go into the next call. Otherwise in order: batches of the largest
    size, and the rest in the smallest that holds it.
    """
    count = len(episode_ids)
    sizes = batching.buckets or (batching.strict_size or TILE,)
    if batching.mode == "strict" and batching.places != "free" and sizes[0] > 1:
        own = _places(episode_ids, sizes[0], batching.places)
    else:
        own = None
    left = np.arange(count)
    batches: list[NDArray[np.int64]] = []
    while len(left):
        if own is not None:
            slots, first = np.unique(own[left], return_index=True)
        else:
            slots = first = np.arange(min(len(left), sizes[-1]))
        places = np.full(next(size for size in sizes if size >= len(slots)), count)
        places[slots] = left[first]
        batches.append(places)
        left = np.delete(left, first)
    return batches


def _places(episode_ids: NDArray[np.int64], size: int, kind: str | None) -> NDArray[np.int64]:
    """Return the place of each episode in a batch, int64 (n,)."""
    if kind == "modulo":
        return episode_ids % size
    places, rest = np.zeros_like(episode_ids), episode_ids
    while rest.any():
        places, rest = places + rest % size, rest // size
    return places % size


def with_padding(context: ChunkContext, obs: Obs, count: int) -> tuple[ChunkContext, Obs]:
    """Return the same n rows, and ``count`` of zeros without an episode, which padding is read from."""
    tensors: dict[str, Tensor] = {}
    for name in TENSOR_FIELDS:
        values: Tensor = getattr(context, name)
        fill = PADDING if name in ("env_ids", "episode_ids") else 0
        tensors[name] = torch.cat((values, values.new_full((count, *values.shape[1:]), fill)))
    rows = {name: torch.cat((values, values.new_zeros((count, *values.shape[1:])))) for name, values in obs.items()}
    return ChunkContext(instructions=(*context.instructions, *("",) * count), **tensors), rows
