"""``isaaclab.utils.buffers``: the names there, the memory of ``headrace.buffers``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from headrace import buffers
from headrace.errors import ConfigError, DtypeError, IdError, LifecycleError, ShapeError, UnsupportedError

BatchIds: TypeAlias = Sequence[int] | slice | Tensor | None
"""Elements of the batch: indices (negative ones count from the end), a slice, a bool mask, or None for all."""


class _Buffer:
    """What both have."""

    def __init__(self, batch_size: int, device: str) -> None:
        self._batch_size, self._device = batch_size, device

    @property
    def batch_size(self) -> int:
        """N."""
        return self._batch_size

    @property
    def device(self) -> str:
        """Where the memory lives, as it was given."""
        return self._device


class CircularBuffer(_Buffer):
    """The newest ``max_len`` rows of each element of a batch, oldest first in ``buffer``.

    Args:
        max_len: frames kept, at least 1.
        batch_size: N.
        device: where the memory lives; appended data is moved there.
        stack_dim: the axis of the appended data (N, …), not 0, that ``stacked`` merges the frames into.
    """

    def __init__(self, max_len: int, batch_size: int, device: str, stack_dim: int | None = None) -> None:
        if stack_dim == 0:
            raise ConfigError("CircularBuffer: stack_dim must not be 0, the batch axis; the last axis is -1")
        self._ours = buffers.CircularBuffer(max_len, batch_size, device, stack_dim)
        super().__init__(batch_size, device)
        self._stack_dim = stack_dim
        self._dtype: torch.dtype | None = None

    @property
    def max_length(self) -> int:
        """How many frames are kept."""
        return self._ours.max_len

    @property
    def current_length(self) -> Tensor:
        """int64 (N,): appends since the reset, at most ``max_length``."""
        return self._ours.lengths

    @property
    def buffer(self) -> Tensor:
        """(N, max_length, …), oldest to newest: a view that the next append changes."""
        return self._ours.buffer

    @property
    def stacked(self) -> Tensor:
        """The frames merged into ``stack_dim``, oldest to newest: a contiguous view that the next append changes."""
        if self._stack_dim is None:
            raise LifecycleError("stacked: this buffer was made without stack_dim; construct it with one")
        return self._ours.stacked

    def append(self, data: Tensor) -> None:
        """Add the newest frame (N, …) of every element; the first one after a reset fills all slots."""
        if data.dim() < 1 or data.shape[0] != self.batch_size:
            raise ShapeError(f"data: expected a batch of {self.batch_size}, got shape {tuple(data.shape)}")
        if self._stack_dim is not None and not -data.dim() < self._stack_dim < data.dim():
            raise IdError(f"stack_dim={self._stack_dim}: the data has {data.dim()} axes, the batch axis 0 among them")
        rows = data.to(self._ours.device, self._dtype or data.dtype)
        self._ours.append(rows)
        self._dtype = rows.dtype

    def reset(self, batch_ids: BatchIds = None) -> None:
        """Zero some elements (None: all); their next append fills all slots."""
        self._ours.reset(_mask(batch_ids, self.batch_size, self._ours.device))

    def __getitem__(self, key: Tensor) -> Tensor:
        """The frames of ``key`` (N,) appends ago, 0 = newest; the oldest where that is beyond them. Fresh (N, …)."""
        if self._stack_dim is not None:
            raise UnsupportedError("indexing is not there in stacked-output mode; read .stacked or .buffer")
        if len(key) != self.batch_size:
            raise ShapeError(f"key: expected {self.batch_size} lags, one per element, got {len(key)}")
        return self._ours[key.clamp(min=0)]


class DelayBuffer(_Buffer):
    """Data that arrives late by whole steps, per element of a batch; no delay at first.

    Args:
        history_length: the largest delay; below 0 means 0.
        batch_size: N.
        device: where the memory lives; data is moved there.
    """

    def __init__(self, history_length: int, batch_size: int, device: str) -> None:
        self._history_length = max(0, history_length)
        self._ours = buffers.DelayBuffer(self._history_length, batch_size, device)
        super().__init__(batch_size, device)
        self._lags = self._ours.lags.to(torch.int32)
        self._range = (0, 0)

    @property
    def history_length(self) -> int:
        """The largest delay that may be set."""
        return self._history_length

    @property
    def min_time_lag(self) -> int:
        """The smallest delay in use."""
        return self._range[0]

    @property
    def max_time_lag(self) -> int:
        """The largest delay in use."""
        return self._range[1]

    @property
    def time_lags(self) -> Tensor:
        """int32 (N,): the delays in use."""
        return self._lags

    def set_time_lag(self, time_lag: int | Tensor, batch_ids: BatchIds = None) -> None:
        """Set the delay of some elements (None: all); one that is refused changes nothing.

        Args:
            time_lag: one int for all of them, or int32 or int64 with one delay for each.
            batch_ids: the elements.
        """
        if not isinstance(time_lag, int | Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may be untyped
            raise DtypeError(f"time_lag: expected an int or a tensor of them, got {type(time_lag).__name__}")
        if isinstance(time_lag, Tensor):
            if time_lag.dtype not in (torch.int32, torch.int64):
                raise DtypeError(f"time_lag: expected int32 or int64, got {time_lag.dtype}")
            time_lag = time_lag.to(self._lags.device, torch.int64)
        lags = self._lags.to(torch.int64)
        lags[_index(batch_ids)] = time_lag
        lowest, highest = int(lags.min()), int(lags.max())
        if lowest < 0 or highest > self._history_length:
            got = lowest if lowest < 0 else highest
            raise ConfigError(f"time_lag: expected 0 to {self._history_length}, the history length, got {got}")
        self._ours.set_lag(lags)
        self._lags, self._range = lags.to(torch.int32), (lowest, highest)

    def reset(self, batch_ids: BatchIds = None) -> None:
        """Forget the data of some elements (None: all); delays stay."""
        self._ours.reset(_mask(batch_ids, self._batch_size, self._lags.device))

    def compute(self, data: Tensor) -> Tensor:
        """Append the data (N, …) of this step and give the delayed data, fresh.

        Where fewer steps were taken since the reset than the delay, it is the oldest data since then.
        """
        return self._ours.compute(data.to(self._lags.device))


def _mask(batch_ids: BatchIds, count: int, device: torch.device) -> Tensor | None:
    if batch_ids is None:
        return None
    mask = torch.zeros(count, dtype=torch.bool, device=device)
    mask[_index(batch_ids)] = True
    return mask


def _index(batch_ids: BatchIds) -> slice | Tensor:
    if batch_ids is None:
        return slice(None)
    if isinstance(batch_ids, slice | Tensor):
        return batch_ids
    ids = torch.tensor(list(batch_ids))
    return ids if ids.numel() else ids.long()  # an empty list has no integers to tell its dtype by
