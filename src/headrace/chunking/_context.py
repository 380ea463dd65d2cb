"""What a policy gets: whose rows they are, which chunk is due, what is left of the last, and past observations."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace import rng
from headrace.errors import ConfigError
from headrace.types import Obs

PADDING = -1
"""The episode and environment id of rows that only fill a batch up."""
_NOISE_PER_CHUNK = 1 << 24
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRows:
    """Episodes that begin or end: row i of everything is one of them. (seed, episode id) is an episode's identity."""

    seeds: Tensor
    """int64 (m,)."""
    episode_ids: Tensor
    """int64 (m,)."""
    instructions: tuple[str, ...]
    """One text each; empty where the task gives none."""

    def __len__(self) -> int:
        return len(self.instructions)

    def keys(self) -> list[tuple[int, int]]:
        """(seed, episode id) of each row: what a policy's memory is keyed by."""
        return list(zip(self.seeds.tolist(), self.episode_ids.tolist(), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkContext:
    """What a policy gets beside the observation. Row i of everything belongs to the same environment.

    The tensors are the policy's to keep, not to write into; nothing in them depends on which other environments are in
    the batch. The fields are the one list that the wire uses, too: see :meth:`to_arrays`.
    """

    seeds: Tensor
    """int64 (n,): with the episode id, the identity of the episode."""
    env_ids: Tensor
    """int64 (n,). For messages; a policy that decides by slot is not reproducible. -1 in padding rows."""
    episode_ids: Tensor
    """int64 (n,). -1 in rows that only fill a batch up."""
    chunk_index: Tensor
    """int64 (n,): which chunk of its episode is due, from 0."""
    instructions: tuple[str, ...]
    """n texts, constant within an episode; empty where the task gives none."""
    left_over: Tensor
    """float32 (n, horizon, A): what is left of the previous chunk, row 0 = now; zeros beyond ``left_over_length``."""
    left_over_length: Tensor
    """int64 (n,): valid rows of ``left_over``; 0 for the first chunk of an episode."""
    delay: Tensor
    """int64 (n,): steps of the previous chunk that will still be played before the answer takes over."""

    def __len__(self) -> int:
        return len(self.instructions)

    def noise(self, *shape: int, stream: str = "chunk noise") -> Tensor:
        """Standard normal numbers keyed by (seed, episode id, chunk index), float32 (n, *shape): not by batch order.

        The same call gives the same numbers; a policy that draws more than once names a ``stream`` for each.
        """
        count = math.prod(shape)
        if count > _NOISE_PER_CHUNK:
            raise ConfigError(f"noise: expected at most {_NOISE_PER_CHUNK} numbers per row, got shape {shape}")
        draw = self.chunk_index * _NOISE_PER_CHUNK
        flat = torch.empty((len(self), count), device=self.seeds.device)
        for seed in self.seeds.unique().tolist():
            rows = (self.seeds == seed).nonzero().squeeze(1)
            flat[rows] = rng.normal(seed, self.episode_ids[rows], stream, count, draw=draw[rows]).to(torch.float32)
        return flat.reshape(len(self), *shape)

    def rows(self, index: Tensor) -> ChunkContext:
        """The context of some rows, int64 (m,)."""
        tensors = {name: getattr(self, name).index_select(0, index) for name in TENSOR_FIELDS}
        return ChunkContext(instructions=tuple(self.instructions[row] for row in index.tolist()), **tensors)

    def beginning(self) -> EpisodeRows:
        """The rows whose episode begins with this chunk."""
        first = ((self.chunk_index == 0) & (self.episode_ids != PADDING)).nonzero().squeeze(1)
        return EpisodeRows(
            seeds=self.seeds[first],
            episode_ids=self.episode_ids[first],
            instructions=tuple(self.instructions[row] for row in first.tolist()),
        )

    def to_arrays(self) -> dict[str, NDArray[np.generic] | list[str]]:
        """Every field by name as host arrays and a list of texts: what crosses a wire."""
        arrays: dict[str, NDArray[np.generic] | list[str]] = {
            name: getattr(self, name).cpu().numpy() for name in TENSOR_FIELDS
        }
        return arrays | {"instructions": list(self.instructions)}


TENSOR_FIELDS = tuple(field.name for field in fields(ChunkContext) if field.name != "instructions")
"""The fields of a context that are tensors with a row per environment."""


def one_row(
    instruction: str,
    *,
    seed: int = 0,
    env_id: int = 0,
    episode_id: int = 0,
    chunk_index: int = 0,
    size: tuple[int, int] = (1, 1),
) -> ChunkContext:
    """The context of one row with nothing left over; ``size`` is that of a chunk, (horizon, A)."""
    zero = torch.zeros(1, dtype=torch.int64)
    return ChunkContext(
        seeds=zero + seed,
        env_ids=zero + env_id,
        episode_ids=zero + episode_id,
        chunk_index=zero + chunk_index,
        instructions=(instruction,),
        left_over=torch.zeros((1, *size)),
        left_over_length=zero,
        delay=zero,
    )


def named(context: ChunkContext) -> str:
    """The environments of a context in words, with their episodes; the first eight if there are more."""
    envs, episodes = context.env_ids.tolist(), context.episode_ids.tolist()
    shown = ", ".join(f"{env} (episode {episode})" for env, episode in zip(envs[:8], episodes[:8], strict=True))
    return f"environments {shown}" + (", …" if len(envs) > 8 else "")


class ObsHistory:
    """Owns the newest ``steps`` observations of N environments, group → (N, steps, …), oldest first.

    At the start of an episode the first observation fills all places. Environments not addressed do not change.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._kept: Obs = {}

    def begin(self, ids: Tensor, obs: Obs, num_envs: int) -> None:
        """Start with the first observations (m, …) of ``ids`` (m,)."""
        for name, values in obs.items():
            if name not in self._kept:
                shape = (num_envs, self.steps, *values.shape[1:])
                self._kept[name] = torch.zeros(shape, dtype=values.dtype, device=values.device)
            signed(self._kept[name])[ids] = signed(values)[:, None]

    def push(self, ids: Tensor, obs: Obs) -> None:
        """Append the observations (n, …) of ``ids`` (n,)."""
        for name, values in obs.items():
            kept = signed(self._kept[name])
            kept[ids] = torch.cat((kept[ids, 1:], signed(values)[:, None]), dim=1)

    def rows(self, ids: Tensor) -> Obs:
        """(n, steps, …) of ``ids`` (n,), fresh."""
        return {name: kept.index_select(0, ids) for name, kept in self._kept.items()}


def signed(values: Tensor) -> Tensor:
    """The same memory in a type whose rows torch can assign: of unsigned types it can those of uint8 alone."""
    return values.view(_SIGNED[values.dtype]) if values.dtype in _SIGNED else values
