"""Cursors: per environment, which chunk is played, which row comes next, and when it runs dry."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.errors import ConfigError, LifecycleError
from headrace.types import Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLengths:
    """The three lengths of a chunk, and the simulated latency."""

    horizon: int
    """Rows that the policy predicts."""
    execute: int
    """Rows that are played before the next chunk takes over."""
    offset: int = 0
    """The first row that is played; Diffusion Policy starts at its number of observations less one."""
    latency: int = 0
    """Steps between the observation and the moment its chunk takes over: the old chunk is played meanwhile."""

    def __post_init__(self) -> None:
        if self.horizon < 1 or self.execute < 1 or self.offset < 0 or self.latency < 0:
            raise ConfigError(
                "chunk lengths: expected horizon and execute of at least 1, offset and latency of at least 0, got "
                f"horizon {self.horizon}, execute {self.execute}, offset {self.offset}, latency {self.latency}"
            )
        needed = self.offset + self.execute + self.latency
        if self.horizon < needed:
            raise ConfigError(
                f"horizon: expected at least offset + execute + latency = {needed} rows, got {self.horizon}; "
                "execute fewer rows of each chunk"
            )
        if self.latency >= self.execute:
            raise ConfigError(f"latency: expected less than execute = {self.execute} steps, got {self.latency}")


class Cursors:
    """The chunks that N environments are playing. Owns its memory, on one device.

    A chunk is asked for when no more than ``latency`` rows are left to play; the first ``latency`` rows of the answer
    are skipped, since the old chunk was played in their place: ``prev[:d] + new[d:s]``, s steps from ask to ask.
    """

    def __init__(self, num_envs: int, action_dim: int, lengths: ChunkLengths, device: torch.device) -> None:
        self.lengths = lengths
        self.chunk_index = torch.zeros(num_envs, dtype=torch.int64, device=device)
        """int64 (N,): chunks that were taken over in the current episode."""
        self._actions = torch.zeros((num_envs, lengths.horizon, action_dim), device=device)
        self._row = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self._left = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self._next = torch.zeros_like(self._actions)
        self._has_next = torch.zeros(num_envs, dtype=torch.bool, device=device)
        self._episode = torch.full((num_envs,), -1, dtype=torch.int64, device=device)

    @property
    def can_act(self) -> Tensor:
        """bool (N,): there is a row to play, now or from the chunk that has arrived."""
        return (self._left > 0) | self._has_next

    @property
    def wants_chunk(self) -> Tensor:
        """bool (N,): it is time to ask, and no answer has arrived yet."""
        return (self._left <= self._delay()) & ~self._has_next & (self._episode >= 0)

    def begin(self, ids: Tensor, episode_ids: Tensor) -> None:
        """Start episodes (m,): chunk, left-over and an answer that has arrived are dropped."""
        self._episode[ids] = episode_ids
        self._left[ids] = 0
        self._has_next[ids] = False
        self.chunk_index[ids] = 0

    def retire(self, ids: Tensor) -> None:
        """These slots play no episode any more (m,)."""
        self._episode[ids] = -1
        self._left[ids] = 0
        self._has_next[ids] = False

    def load(self, chunk: Chunk) -> Tensor:
        """Take an answer; rows for episodes that have ended are thrown away. Returns bool (n,): the rows kept."""
        kept = self._episode.index_select(0, chunk.env_ids) == chunk.episode_ids
        kept &= self.chunk_index.index_select(0, chunk.env_ids) == chunk.index
        ids = chunk.env_ids[kept]
        self._next[ids] = chunk.actions[kept].to(self._next.device)
        self._has_next[ids] = True
        return kept

    def rest(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """What is left of the chunks that ``ids`` (n,) play: (n, horizon, A) with row 0 = now, and the lengths (n,)."""
        rows = self._row.index_select(0, ids)
        # rows beyond those that will be played are part of the rest, too: the policy predicted them
        length = torch.where(self.chunk_index.index_select(0, ids) > 0, self.lengths.horizon - rows, 0)
        steps = torch.arange(self.lengths.horizon, device=rows.device)
        index = (rows[:, None] + steps).clamp(max=self.lengths.horizon - 1)
        shifted = self._actions.index_select(0, ids).gather(1, index[..., None].expand(-1, -1, self._actions.shape[-1]))
        return torch.where((steps < length[:, None])[..., None], shifted, 0.0), length

    def delay(self, ids: Tensor) -> Tensor:
        """int64 (n,): steps of the old chunk that are played before an answer asked for now takes over."""
        return self._delay().index_select(0, ids)

    def play(self, ids: Tensor) -> Tensor:
        """The next action of each of ``ids`` (n,), float32 (n, A); moves their cursors."""
        self._take_over(ids)
        left = self._left.index_select(0, ids)
        if bool((left <= 0).any()):
            dry = ids[left <= 0].tolist()
            raise LifecycleError(f"cursors: environments {dry[:8]} have no action to play; they must wait for a chunk")
        rows = self._row.index_select(0, ids)
        actions = self._actions[ids, rows]
        self._row[ids] = rows + 1
        self._left[ids] = left - 1
        return actions

    def _delay(self) -> Tensor:
        """The first chunk of an episode has nothing to play meanwhile: it takes over at once."""
        return torch.where(self.chunk_index > 0, self.lengths.latency, 0)

    def _take_over(self, ids: Tensor) -> None:
        """Environments that have played the old chunk to its end go on with the one that has arrived."""
        ready = ids[self._has_next.index_select(0, ids) & (self._left.index_select(0, ids) == 0)]
        if not len(ready):
            return
        skipped = self.delay(ready)
        self._actions[ready] = self._next[ready]
        self._row[ready] = self.lengths.offset + skipped
        self._left[ready] = self.lengths.execute + self.lengths.latency - skipped
        self._has_next[ready] = False
        self.chunk_index[ready] += 1
