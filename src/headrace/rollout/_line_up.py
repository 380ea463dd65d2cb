"""Who plays, where chunks have one action: the same environments for many steps."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.chunking import ChunkContext
from headrace.chunking._cursors import Cursors


class LineUp:
    """The slots that play in step, and what their policy is told; made anew only where something has changed.

    Chunks are counted here: nothing is loaded into the cursors, which only know who is in which episode.
    """

    def __init__(self, cursors: Cursors, seeds: Tensor, action_dim: int) -> None:
        """Line up the slots of ``cursors``, nobody at first; ``seeds`` is int64 (N,)."""
        self._cursors, self._seeds, self._action_dim = cursors, seeds, action_dim
        self._device = seeds.device
        self._index = np.zeros(len(seeds), np.int64)
        self.stale = True
        """Whether other slots play than before."""

    def gather(self, instructions: tuple[str, ...], able: NDArray[np.bool_]) -> None:
        """Line up the slots of ``able``, bool (N,); ``instructions`` are of all N."""
        self.slots = np.flatnonzero(able)
        """int64 (n,)."""
        self.env_ids = torch.from_numpy(self.slots).to(self._device)
        """The same, on the environment's device."""
        self.everyone = len(self.slots) == len(instructions)
        self._nothing = torch.zeros(len(self.slots), dtype=torch.int64, device=self._device)
        # nothing is ever left over of a chunk of one action
        self._left_over = torch.zeros((len(self.slots), 1, self._action_dim), device=self._device)
        self._own_seeds = self._seeds.index_select(0, self.env_ids)
        self.stale = False
        self.renew(instructions)

    def begin(self, slots: NDArray[np.int64], instructions: tuple[str, ...]) -> None:
        """Episodes begin in ``slots`` (m,)."""
        self._index[slots] = 0
        if not self.stale:
            self.renew(instructions)

    @property
    def asked(self) -> NDArray[np.bool_]:
        """bool (N,): slots whose policy has been asked for an action of the episode they play."""
        return (self._index > 0) & self._cursors.running

    def renew(self, instructions: tuple[str, ...]) -> None:
        """The same slots, some of them in other episodes."""
        self._episode_ids = torch.from_numpy(self._cursors.episode[self.slots]).to(self._device)
        texts = instructions if self.everyone else tuple([instructions[slot] for slot in self.slots.tolist()])
        self._instructions = texts

    def next_context(self) -> ChunkContext:
        """Of the chunks that are due now; what does not change is shared from step to step."""
        index = self._index[self.slots]
        self._index[self.slots] = index + 1
        return ChunkContext(
            seeds=self._own_seeds,
            env_ids=self.env_ids,
            episode_ids=self._episode_ids,
            chunk_index=torch.from_numpy(index).to(self._device),
            instructions=self._instructions,
            left_over=self._left_over,
            left_over_length=self._nothing,
            delay=self._nothing,
        )
