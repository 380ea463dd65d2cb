"""From frames in memory to the tensor that a policy reads, in one pass: copied as they are, or normalized."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace import _device
from headrace._kernels.gather import scatter
from headrace._kernels.normalize import normalize_rows
from headrace.types import StackSpec
from headrace.vision._normalize import Channels, fresh, normalize_into

_ONE_SHARD = 62
"""For ``scatter``: all rows are in the first shard."""


class StackOutput:
    """How rows of frames (n, …, K, …), as ``OrderedFrames`` keeps them, become observations; owns nothing.

    Args:
        spec: K and layout.
        frame_shape: the shape of one environment's frame.
        dtype: of a frame.
        channels: where a frame has its channels; used to normalize.
        normalize: observations are float32, x/255 minus each frame's mean per channel.
    """

    def __init__(
        self, spec: StackSpec, frame_shape: tuple[int, ...], dtype: torch.dtype, channels: Channels, normalize: bool
    ) -> None:
        self.shape = spec.stacked_shape(frame_shape)
        """Of one environment's observation."""
        self.dtype = torch.float32 if normalize else dtype
        """Of an observation."""
        self._spec = spec
        self._frame_shape = frame_shape
        self._frame_dtype = dtype
        self._axis = spec.axis(len(frame_shape)) + 1
        self._channels: Channels = channels
        self._normalize = normalize
        self._pictures = self._as_pictures()

    def layout(self, data: Tensor) -> Tensor:
        """(n, …, K, …) as stacks: a view."""
        return data if self._spec.layout == "new_axis" else data.flatten(self._axis, self._axis + 1)

    def take(self, data: Tensor, ids: Tensor | None) -> Tensor:
        """The observations of rows ``ids``, int64 (n,), of ``data``, or of all: fresh memory that the receiver owns."""
        count = data.shape[0] if ids is None else int(ids.shape[0])
        out = fresh((count, *self.shape), self.dtype, data.device)
        self._write(data, ids, out, None)
        return out

    def put(self, data: Tensor, ids: Tensor, out: Tensor) -> None:
        """Write the observations of rows ``ids``, int64 (n,), of ``data`` into the same rows of ``out`` (N, …)."""
        self._write(data, ids, out, ids)

    def _write(self, data: Tensor, ids: Tensor | None, out: Tensor, to: Tensor | None) -> None:
        """Row ``ids[i]`` of ``data`` becomes row ``to[i]`` of ``out``; None counts from 0."""
        if not out.numel() or (ids is not None and not ids.shape[0]):
            return
        plain = not self._normalize
        if plain:
            out = out.view(data.dtype)
        else:
            data = data.view(self._frame_dtype)
        direct = plain or (self._pictures and data.dtype == torch.uint8)
        if direct and _device.has_warp(data.device):
            self._write_warp(data, ids, out, to)
            return
        if data.device.type != "cpu" or not direct:
            rows = self._observed(data if ids is None else data.index_select(0, ids))
            if to is None:
                out.copy_(rows)
            else:
                out.index_copy_(0, to, rows)
            return
        count = data.shape[0] if ids is None else int(ids.shape[0])
        source, target = _numbers(ids, count), _numbers(to, count)
        if plain:
            row_bytes = out[0].nbytes
            space = (np.array([out.data_ptr()]), _ONE_SHARD, row_bytes)
            scatter(space, target, (data.data_ptr(), row_bytes, source))
        else:
            # a plane of a channel-first picture is a picture with one channel
            normalize_rows(data.view(-1, *self._pictures), out.view(-1, *self._pictures), source, target)

    def _write_warp(self, data: Tensor, ids: Tensor | None, out: Tensor, to: Tensor | None) -> None:
        """Rows straight into their places, without a copy of them between."""
        from headrace._kernels.frames_warp import copy_rows_warp  # an extra, loaded on use
        from headrace._kernels.normalize_warp import normalize_warp

        rows: tuple[Tensor, Tensor] | None = None
        if ids is not None:
            rows = ids, torch.arange(ids.shape[0], device=ids.device) if to is None else to
        if self._normalize:
            flat = (-1, *self._pictures[1:])
            normalize_warp(data.view(flat), out.view(flat), rows, self._pictures[0])
        elif rows is None:
            out.copy_(self.layout(data))
        else:
            copy_rows_warp(data, rows[0], out, rows[1])

    def _observed(self, data: Tensor) -> Tensor:
        """Rows as observations, in plain operations."""
        if not self._normalize:
            return self.layout(data)
        out = torch.empty(data.shape, dtype=torch.float32, device=data.device)
        if self._pictures:
            flat = (-1, *self._pictures[1:])
            normalize_into(data.reshape(flat), out.view(flat), "last")
            return self.layout(out)
        for slot in range(self._spec.frames):
            normalize_into(data.select(self._axis, slot), out.select(self._axis, slot), self._channels)
        return self.layout(out)

    def _as_pictures(self) -> tuple[int, ...]:
        """The shape (images, height, width, channels) that makes the K frames of a row more images or more channels.

        So that one pass does the whole stack; () where frames are interleaved with the rows or columns of a picture.
        """
        axis, length = self._axis - 1, self._spec.frames
        if not self._normalize:
            return ()
        if self._channels == "none":
            height, width = self._frame_shape
            return {0: (length, height, width, 1), 2: (1, height, width, length)}.get(axis, ())
        if self._channels == "first":
            depth, height, width = self._frame_shape
            return (depth * length, height, width, 1) if axis <= 1 else ()
        height, width, depth = self._frame_shape
        if axis == 0:
            return (length, height, width, depth)
        return (1, height, width, depth * length) if axis >= 2 else ()


def _numbers(ids: Tensor | None, count: int) -> NDArray[np.int64]:
    return np.arange(count) if ids is None else ids.numpy()
