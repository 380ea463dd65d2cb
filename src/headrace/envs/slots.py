"""The bookkeeping of a batch: which episode each slot is in, how far, and what it has earned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.types import EpisodeEnds

_NOTHING = torch.empty(0, dtype=torch.int64)
_NO_FLAGS = torch.empty(0, dtype=torch.bool)
_NO_LIMIT = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a step made of the rows that acted, as fresh tensors over all N environments."""

    reward: Tensor
    """float32 (N,)."""
    terminated: Tensor
    """bool (N,)."""
    truncated: Tensor
    """bool (N,)."""
    ended: Tensor
    """int64 (m,): the rows, not environments, whose episode ended."""


class Slots:
    """Per-environment bookkeeping; owns its tensors, all (N,) or (N, …) on one device.

    On the CPU a step's bookkeeping is one numba call; elsewhere it is the torch operations beside it, which are also
    the reference in the tests.
    """

    def __init__(self, num_envs: int, device: torch.device, memory: Mapping[str, tuple[int, ...]]) -> None:
        self.seed = 0
        self.num_envs = num_envs
        self.device = device
        self.everyone = torch.arange(num_envs, device=device)
        self.episode_ids = torch.full((num_envs,), -1, dtype=torch.int64, device=device)
        self.started = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self.steps = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self.returns = torch.zeros(num_envs, dtype=torch.float64, device=device)
        self.memory = {
            name: torch.zeros((num_envs, *shape), dtype=torch.float64, device=device) for name, shape in memory.items()
        }
        self._fused = device.type == "cpu"

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the bookkeeping by name; the tensors themselves, not copies."""
        own = {"episode_ids": self.episode_ids, "started": self.started, "steps": self.steps, "returns": self.returns}
        return own | {f"memory.{name}": values for name, values in self.memory.items()}

    def advance(self, ids: Tensor | None) -> None:
        """Count one step for ``ids``, int64 (n,); None for all."""
        if ids is None:
            self.steps += 1
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
    ) -> Verdict:
        """Add rewards to returns and decide which episodes end.

        Args:
            ids: the environments that acted, int64 (n,); None for all.
            reward: float64 (n,); a diverged row earns nothing.
            terminated: bool (n,); a diverged row is truncated instead.
            diverged: bool (n,), or None for none.
            limit: steps after which an episode is truncated.
            truncated: bool (n,): episodes that were cut for another reason; None for none.
        """
        acted = self.everyone if ids is None else ids
        judge = self._finish_fused if self._fused else self.finish_reference
        return judge(acted, reward, terminated, diverged, limit, truncated)

    def finish_reference(
        self,
        ids: Tensor,
        reward: Tensor,
        terminated: Tensor,
        diverged: Tensor | None,
        limit: int,
        truncated: Tensor | None = None,
    ) -> Verdict:
        """:meth:`finish` in torch operations."""
        too_long = self.steps.index_select(0, ids) >= limit
        truncated = too_long if truncated is None else truncated | too_long
        if diverged is not None:
            reward = torch.where(diverged, 0.0, reward)
            terminated = terminated & ~diverged
            truncated = truncated | diverged
        self.returns.index_add_(0, ids, reward)
        return Verdict(
            reward=self._scattered(ids, reward.to(torch.float32)),
            terminated=self._scattered(ids, terminated),
            truncated=self._scattered(ids, truncated),
            ended=(terminated | truncated).nonzero().squeeze(1),
        )

    def ends(
        self, ids: Tensor, success: Tensor | None, diverged: Tensor | None
    ) -> tuple[EpisodeEnds, dict[str, Tensor], Tensor]:
        """What is known of the episodes that end in ``ids`` (m,): the record, ``r`` and ``l`` (N,), and the mask (N,).

        A diverged episode is never a success, whatever its broken state looks like.
        """
        gone = torch.zeros_like(ids, dtype=torch.bool) if diverged is None else diverged
        if self._fused:
            compact, totals, mask = self._ends_fused(ids)
        else:
            mask = self._scattered(ids, torch.ones_like(gone))
            compact = [values.index_select(0, ids) for values in (self.episode_ids, self.returns, self.steps)]
            totals = {"r": self.returns * mask, "l": self.steps * mask}
        record = EpisodeEnds(
            env_ids=ids,
            episode_ids=compact[0],
            returns=compact[1],
            lengths=compact[2],
            success=None if success is None else success & ~gone,
            diverged=gone,
        )
        return record, totals, mask

    def begin(self, ids: Tensor, episode_ids: Tensor | None) -> None:
        """Start an episode in each of ``ids`` (m,): the given ones, or the slots' next ones, i + k·N in slot i."""
        if self._fused:
            from headrace.kernels import episodes

            chosen = _NOTHING if episode_ids is None else episode_ids
            own = (self.episode_ids, self.started, self.steps, self.returns)
            episodes.begin_rows(ids.numpy(), chosen.numpy(), *(tensor.numpy() for tensor in own))
        else:
            self.begin_reference(ids, episode_ids)
        for values in self.memory.values():
            values.index_fill_(0, ids, 0.0)

    def begin_reference(self, ids: Tensor, episode_ids: Tensor | None) -> None:
        """:meth:`begin` in torch operations, without the task's memory."""
        if episode_ids is None:
            episode_ids = self.started.index_select(0, ids) * self.num_envs + ids
        self.episode_ids.index_copy_(0, ids, episode_ids)
        self.started.index_add_(0, ids, torch.ones_like(ids))
        self.steps.index_fill_(0, ids, 0)
        self.returns.index_fill_(0, ids, 0.0)

    def _finish_fused(
        self,
        ids: Tensor,
        reward: Tensor,
        terminated: Tensor,
        diverged: Tensor | None,
        limit: int,
        truncated: Tensor | None,
    ) -> Verdict:
        from headrace.kernels import episodes

        out_reward = torch.zeros(self.num_envs, dtype=torch.float32)
        out_terminated = torch.zeros(self.num_envs, dtype=torch.bool)
        out_truncated = torch.zeros(self.num_envs, dtype=torch.bool)
        ended = torch.empty_like(ids)
        count = episodes.finish_rows(
            ids.numpy(),
            reward.numpy(),
            terminated.numpy(),
            (_NO_FLAGS if truncated is None else truncated).numpy(),
            (_NO_FLAGS if diverged is None else diverged).numpy(),
            limit,
            *(self.steps.numpy(), self.returns.numpy()),
            *(out_reward.numpy(), out_terminated.numpy(), out_truncated.numpy(), ended.numpy()),
        )
        return Verdict(reward=out_reward, terminated=out_terminated, truncated=out_truncated, ended=ended[:count])

    def _ends_fused(self, ids: Tensor) -> tuple[list[Tensor], dict[str, Tensor], Tensor]:
        from headrace.kernels import episodes

        compact = [torch.empty_like(ids), torch.empty(len(ids), dtype=torch.float64), torch.empty_like(ids)]
        totals = {"r": torch.zeros_like(self.returns), "l": torch.zeros_like(self.steps)}
        mask = torch.zeros(self.num_envs, dtype=torch.bool)
        tensors = (ids, self.episode_ids, self.returns, self.steps, *compact, *totals.values(), mask)
        episodes.collect_ends(*(tensor.numpy() for tensor in tensors))
        return compact, totals, mask

    def _scattered(self, ids: Tensor, values: Tensor) -> Tensor:
        full = torch.zeros(self.num_envs, dtype=values.dtype, device=self.device)
        full[ids] = values
        return full
