"""Blending: how predictions of the same step by several chunks become one action."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headrace.errors import ConfigError


class TemporalEnsemble:
    """ACT's temporal ensembling: the mean of all predictions of a step, weights exp(−m·i), i = 0 the oldest.

    A negative m favors the newest, as LeRobot documents.

    Needs a chunk every step. Owns float32 (N, horizon, A) and a count per step and environment, so that a predicted
    zero is not taken for "nothing predicted". Kept as a running mean: ``a ← (a·W[c−1] + new·w[c]) / W[c]`` with W the
    cumulative sum of w and c the predictions so far.
    """

    def __init__(
        self,
        num_envs: int,
        horizon: int,
        action_dim: int,
        *,
        decay: float = 0.01,
        device: torch.device | str = "cpu",
    ) -> None:
        if not math.isfinite(decay):
            raise ConfigError(f"ensemble decay: expected a finite number, got {decay}")
        # a negative decay favors new predictions; the largest weight is 1, whatever the sign
        ages = torch.arange(horizon, dtype=torch.float64, device=device)
        weights = torch.exp(-decay * (ages if decay >= 0 else ages - (horizon - 1)))
        self._weights = weights.to(torch.float32)
        self._sums = weights.cumsum(0).to(torch.float32)
        self._mean = torch.zeros((num_envs, horizon, action_dim), device=device)
        self._count = torch.zeros((num_envs, horizon), dtype=torch.int64, device=device)

    def begin(self, ids: Tensor) -> None:
        """Forget the predictions of environments that begin an episode (m,)."""
        self._count[ids] = 0

    def blend(self, ids: Tensor, chunks: Tensor) -> Tensor:
        """Add chunks (n, horizon, A) whose row 0 is now; gives the actions for now, (n, A), and moves on by a step."""
        mean, count = self._mean[ids], self._count[ids]
        before = self._sums[(count - 1).clamp(min=0)] * (count > 0)
        blended = (mean * before[..., None] + chunks * self._weights[count][..., None]) / self._sums[count][..., None]
        self._mean[ids] = torch.cat((blended[:, 1:], torch.zeros_like(blended[:, :1])), dim=1)
        self._count[ids] = torch.cat((count[:, 1:] + 1, torch.zeros_like(count[:, :1])), dim=1)
        return blended[:, 0]
