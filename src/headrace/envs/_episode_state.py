"""The bookkeeping of a batch: which episode each environment is in, how far, and what it has earned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.types import EpisodeEnds

_NOTHING = np.empty(0, np.int64)
_NO_FLAGS = np.empty(0, np.bool_)
_NO_LIMIT = 2**62


class StepOutcome(NamedTuple):
    """What a step made of the rows that acted, as fresh tensors over all N environments."""

    reward: Tensor
    """float32 (N,)."""
    terminated: Tensor
    """bool (N,)."""
    truncated: Tensor
    """bool (N,)."""
    ended: Tensor
    """int64 (m,), on the host: the rows, not environments, whose episode ended."""
    diverged: Tensor
    """int64 (k,), on the host: those of them that ended because they diverged."""
    refused: bool = False
    """Whether a row's action was one that its space does not have; known here only on a GPU."""


class EpisodeState:
    """Per-environment bookkeeping; owns its tensors, all (N,) or (N, …) on one device.

    On the CPU a step's bookkeeping is a numba call and a few of numpy, which are quicker than torch's on a handful of
    rows; elsewhere it is the torch operations beside them, which are also the reference in the tests.
    """

    def __init__(
        self,
        num_envs: int,
        device: torch.device,
        memory: Mapping[str, tuple[int, ...]],
        episode_stride: int | None = None,
    ) -> None:
        self.seed = 0
        self.episode_stride = num_envs if episode_stride is None else episode_stride
        """From the id of an environment's episode to that of its next one."""
        self.num_envs = num_envs
        self.device = device
        self.everyone = torch.arange(num_envs, device=device)
        self.episode_ids = torch.full((num_envs,), -1, dtype=torch.int64, device=device)
        self.next_ids = torch.arange(num_envs, device=device)
        """int64 (N,): the id that each environment's next episode gets, unless the caller names another."""
        self.steps = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self.returns = torch.zeros(num_envs, dtype=torch.float64, device=device)
        self.memory = {
            name: torch.zeros((num_envs, *shape), dtype=torch.float64, device=device) for name, shape in memory.items()
        }
        self.field_views: dict[str, NDArray[Any]] = {}
        """Where rows keep numpy views of the simulation's fields, on the CPU."""
        # tests compare with the operations of torch by clearing it
        self._fused = device.type == "cpu"
        if self._fused:
            from headrace._kernels import episodes

            self._kernels = episodes
            # views of the tensors above
            self._arrays = (self.episode_ids.numpy(), self.next_ids.numpy(), self.steps.numpy(), self.returns.numpy())
            self._memory_arrays = [values.numpy() for values in self.memory.values()]

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the bookkeeping by name; the tensors themselves, not copies."""
        own = {"episode_ids": self.episode_ids, "next_ids": self.next_ids, "steps": self.steps, "returns": self.returns}
        return own | {f"memory.{name}": values for name, values in self.memory.items()}

    def advance(self, ids: Tensor | None) -> None:
        """Count one step for ``ids``, int64 (n,); None for all."""
        if ids is None:
            self.steps += 1
        elif self._fused:
            self._arrays[2][ids.numpy()] += 1
        else:
            self.steps.index_add_(0, ids, torch.ones_like(ids))

    def finish(
        self,
        ids: Tensor | None,
        reward: Tensor,
        terminated: Tensor,
        diverged: Tensor | None,
        limit: int = _NO_LIMIT,
        truncated: Tensor | None = None,
        refused: Tensor | None = None,
    ) -> StepOutcome:
        """Add rewards to returns and decide which episodes end.

        Args:
            ids: the environments that acted, int64 (n,); None for all.
            reward: float64 (n,); a diverged row earns nothing.
            terminated: bool (n,); a diverged row is truncated instead.
            diverged: bool (n,), or None for none.
            limit: steps after which an episode is truncated.
            truncated: bool (n,): episodes that were cut for another reason; None for none.
            refused: bool (n,): rows whose action was not fit; None for none.
        """
        ids = self.everyone if ids is None else ids
        if self._fused:
            rows = ids.numpy()
            gain, over, cut = np.zeros(self.num_envs, np.float32), *np.zeros((2, self.num_envs), np.bool_)
            ended = np.empty(len(rows), np.int64)
            count = self._kernels.finish_rows(
                rows,
                reward.numpy(),
                terminated.numpy(),
                _NO_FLAGS if truncated is None else truncated.numpy(),
                _NO_FLAGS if diverged is None else diverged.numpy(),
                limit,
                *self._arrays[2:],
                *(gain, over, cut, ended),
            )
            gone = _NOTHING if diverged is None else np.flatnonzero(diverged.numpy())
            told = [torch.from_numpy(array) for array in (gain, over, cut, ended[:count], gone)]
            return StepOutcome(*told, refused=False)
        too_long = self.steps.index_select(0, ids) >= limit
        truncated = too_long if truncated is None else truncated | too_long
        if diverged is not None:
            reward = torch.where(diverged, 0.0, reward)
            terminated = terminated & ~diverged
            truncated = truncated | diverged
        self.returns.index_add_(0, ids, reward)
        flags = (terminated | truncated).to(torch.uint8)
        # a number times a bool would be eight bytes
        flags = flags if diverged is None else flags.add_(diverged.to(torch.uint8), alpha=2)
        flags = flags if refused is None else flags.add_(refused.to(torch.uint8), alpha=4)
        results = [self._scattered(ids, each) for each in (reward.to(torch.float32), terminated, truncated)]
        # what the host must know comes in one copy: the one wait of a step
        told = flags.cpu().numpy()
        rows_told = [torch.from_numpy(np.flatnonzero(told & bit)) for bit in (1, 2)]
        return StepOutcome(*results, *rows_told, refused=bool((told & 4).any()))

    def ends(
        self, ids: Tensor, success: Tensor | None, diverged: Tensor | None
    ) -> tuple[EpisodeEnds, dict[str, Tensor], Tensor]:
        """What is known of the episodes that end in ``ids`` (m,): the record, ``r`` and ``l`` (N,), and the mask (N,).

        A diverged episode is never a success, whatever its broken state looks like.
        """
        gone = torch.zeros(ids.shape[0], dtype=torch.bool, device=self.device) if diverged is None else diverged
        if self._fused:
            # numpy is quicker than torch on a handful of rows
            rows, (episode_ids, _, steps, returns) = ids.numpy(), self._arrays
            ending = np.zeros(self.num_envs, np.bool_)
            ending[rows] = True
            mask, compact = torch.from_numpy(ending), [torch.from_numpy(a[rows]) for a in (episode_ids, returns, steps)]
            sums, lengths = np.where(ending, returns, 0.0), np.where(ending, steps, 0)
            totals = {"r": torch.from_numpy(sums), "l": torch.from_numpy(lengths)}
        else:
            mask = self._scattered(ids, torch.ones_like(gone))
            compact = [values.index_select(0, ids) for values in (self.episode_ids, self.returns, self.steps)]
            totals = {"r": self.returns * mask, "l": self.steps * mask}
        record = EpisodeEnds(
            env_ids=ids,
            episode_ids=compact[0],
            returns=compact[1],
            lengths=compact[2],
            success=success if success is None or diverged is None else success & ~diverged,
            diverged=gone,
        )
        return record, totals, mask

    def restart(self, seed: int) -> None:
        """Number episodes from the beginning, under a new seed."""
        self.seed = seed
        self.next_ids.copy_(self.everyone)

    def begin(self, ids: Tensor, episode_ids: Tensor | None) -> None:
        """Start an episode in each of ``ids`` (m,): the given ones, or those of ``next_ids``."""
        if self._fused:
            rows = ids.numpy()
            chosen = _NOTHING if episode_ids is None else episode_ids.numpy()
            self._kernels.begin_rows(rows, chosen, self.episode_stride, *self._arrays)
            for array in self._memory_arrays:
                array[rows] = 0.0
            return
        if episode_ids is None:
            episode_ids = self.next_ids.index_select(0, ids)
        self.episode_ids.index_copy_(0, ids, episode_ids)
        self.next_ids.index_copy_(0, ids, episode_ids + self.episode_stride)
        self.steps.index_fill_(0, ids, 0)
        for values in (self.returns, *self.memory.values()):
            values.index_fill_(0, ids, 0.0)

    def _scattered(self, ids: Tensor, values: Tensor) -> Tensor:
        full = torch.zeros(self.num_envs, dtype=values.dtype, device=self.device)
        full[ids] = values
        return full
