"""Frames kept in a ring per environment: an append writes one frame however long the history is."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace import _device
from headrace.buffers._storage import lasting_zeros
from headrace.ids import EnvRows, over


class RingFrames:
    """Owner of ``data``: (N, K, *frame_shape), zeros at first. Environments need not be in phase.

    How often each environment was appended to since its reset (``pushed``, int64 (N,)) belongs to the caller: the
    newest frame of an environment is in slot ``(pushed − 1) mod K``.
    """

    def __init__(
        self, length: int, num_envs: int, frame_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.length = length
        self.data = lasting_zeros((num_envs, length, *frame_shape), dtype, device)
        self._envs = torch.arange(num_envs, device=device)

    def push(self, rows: Tensor, where: EnvRows, pushed: Tensor) -> None:
        """Write ``rows`` (row_count, *frame_shape) as the newest frames; ``pushed`` counts those before."""
        if _device.has_warp(self.data.device):
            from headrace._kernels.frames_warp import append_warp  # an extra, loaded on use

            append_warp(self.data, rows, where.ids, where.mask, pushed, length=self.length)
            return
        slot = pushed % self.length
        if where.mask is None:
            envs = where.select(self._envs)
            self.data[envs, slot[envs]] = rows
        elif where.ids is not None:
            self.data[where.ids, slot[where.ids]] = rows[where.ids]
        else:
            held = self.data[self._envs, slot]
            self.data[self._envs, slot] = torch.where(over(where.mask, rows), rows, held)

    def at(self, lag: Tensor, pushed: Tensor) -> Tensor:
        """The frames ``lag`` appends ago, (N, *frame_shape), fresh; the oldest since reset where that is beyond it.

        An environment that was not appended to since its reset gives zeros.
        """
        reached = torch.minimum(lag, (pushed - 1).clamp(min=0))
        return self.data[self._envs, (pushed - 1 - reached) % self.length]
