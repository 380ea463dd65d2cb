"""A policy of one action per observation as a chunk policy of horizon 1: what the one playing loop plays."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.adapters._learner import InferencePolicy, Memory
from headrace.chunking import ChunkContext, ChunkPolicy, EpisodeRows
from headrace.types import Obs


class StepPolicy:
    """An :class:`InferencePolicy` without memory: (n, A) actions, or (n,) choices, as chunks (n, 1, A)."""

    horizon = obs_steps = 1

    def __init__(self, policy: InferencePolicy, action_dim: int) -> None:
        self.policy, self.action_dim = policy, action_dim

    def __call__(self, obs: Obs, context: ChunkContext) -> Tensor:
        """Plan one action per row."""
        del context
        actions = self.policy(obs)
        return actions[:, None, None] if actions.dim() == 1 else actions.unsqueeze(1)


class RecurrentStepPolicy(StepPolicy):
    """One with memory, which is kept here per episode: rows (layers, capacity, size) of what the library keeps.

    Row 0 is scratch, for rows that only fill a batch up.
    """

    def __init__(self, policy: InferencePolicy, action_dim: int) -> None:
        super().__init__(policy, action_dim)
        self._row_of: dict[tuple[int, int], int] = {}
        self._free: list[int] = []
        self._rows: Memory | None = None
        self._asked: tuple[Tensor, Tensor] | None = None
        self._index = torch.zeros(0, dtype=torch.int64)

    def begin(self, rows: EpisodeRows) -> None:
        """Give each episode a row of zeros."""
        for key in rows.keys():  # noqa: SIM118  (not a dict)
            if not self._free:
                self._grow()
            self._row_of[key] = self._free.pop()
        self._asked = None
        if self._rows is not None:
            begun = torch.tensor([self._row_of[key] for key in rows.keys()])  # noqa: SIM118  (not a dict)
            for kept in self._rows:
                kept[:, begun] = 0.0

    def end(self, rows: EpisodeRows) -> None:
        """Take the rows back."""
        for key in rows.keys():  # noqa: SIM118  (not a dict)
            self._free.append(self._row_of.pop(key))

    def __call__(self, obs: Obs, context: ChunkContext) -> Tensor:
        """Plan one action per row, each with the memory of its episode."""
        index = self._rows_of(context)
        self.policy.memory = None if self._rows is None else tuple(kept[:, index].contiguous() for kept in self._rows)
        plan = super().__call__(obs, context)
        after = self.policy.memory
        assert after is not None
        if self._rows is None:
            count = self._capacity
            self._rows = tuple(part.new_zeros((part.shape[0], count, part.shape[2])) for part in after)
        for kept, part in zip(self._rows, after, strict=True):
            kept[:, index] = part
            kept[:, 0] = 0.0
        return plan

    def _rows_of(self, context: ChunkContext) -> Tensor:
        """int64 (n,); looked up once for as long as the same episodes are asked about."""
        asked = self._asked
        if asked is None or asked[0] is not context.seeds or asked[1] is not context.episode_ids:
            self._asked = context.seeds, context.episode_ids
            keys = zip(context.seeds.tolist(), context.episode_ids.tolist(), strict=True)
            self._index = torch.tensor([self._row_of.get(key, 0) for key in keys])
        return self._index

    @property
    def _capacity(self) -> int:
        return 1 + len(self._row_of) + len(self._free)

    def _grow(self) -> None:
        """Twice as many rows."""
        before = self._capacity
        self._free = list(range(2 * before, before - 1, -1))
        if self._rows is not None:
            more = [kept.new_zeros((kept.shape[0], before + 1, kept.shape[2])) for kept in self._rows]
            self._rows = tuple(torch.cat(pair, dim=1) for pair in zip(self._rows, more, strict=True))


def as_steps(policy: InferencePolicy, action_dim: int) -> ChunkPolicy:
    """The policy as a chunk policy of horizon 1."""
    return (RecurrentStepPolicy if policy.recurrent else StepPolicy)(policy, action_dim)
