"""Past observations of policies that read several, kept per environment."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.types import Obs

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


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
            _signed(self._kept[name])[ids] = _signed(values)[:, None]

    def push(self, ids: Tensor, obs: Obs) -> None:
        """Append the observations (n, …) of ``ids`` (n,)."""
        for name, values in obs.items():
            kept = _signed(self._kept[name])
            kept[ids] = torch.cat((kept[ids, 1:], _signed(values)[:, None]), dim=1)

    def rows(self, ids: Tensor) -> Obs:
        """Return (n, steps, …) of ``ids`` (n,), fresh."""
        return {name: kept.index_select(0, ids) for name, kept in self._kept.items()}


def _signed(values: Tensor) -> Tensor:
    """Return the same memory in a type whose rows torch can assign: of unsigned types it can those of uint8 alone."""
    return values.view(_SIGNED[values.dtype]) if values.dtype in _SIGNED else values
