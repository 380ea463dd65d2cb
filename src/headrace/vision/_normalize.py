"""From pictures in memory to the tensor that a policy reads, in one pass: copied as they are, or normalized.

To normalize is to take x/255 minus each image's own mean per channel.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from headrace import _device
from headrace._kernels.gather import scatter
from headrace._kernels.normalize import normalize_cpu, normalize_rows
from headrace._kernels.normalize_torch import normalize_torch
from headrace.buffers._pool import OutputPool
from headrace.errors import DeviceError, DtypeError, ShapeError, UnknownNameError
from headrace.types import StackSpec

Channels: TypeAlias = Literal["last", "first", "none"]
"""Where a picture has its channels: (…, H, W, C), (…, C, H, W) or, gray without an axis for it, (…, H, W)."""

_pool = OutputPool()
_ONE_SHARD = 62
"""For ``scatter``: all rows are in the first shard."""


def fresh(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialized memory that nobody else reads; on the CPU from a pool without page faults."""
    if device.type == "cpu":
        return _pool.take(shape, dtype)
    return torch.empty(shape, dtype=dtype, device=device)


def can_normalize(dtype: torch.dtype) -> bool:
    """Whether pictures of this dtype have a scale from 0 to 255."""
    return dtype == torch.uint8 or dtype.is_floating_point


def normalize_image(x: Tensor, *, channels: Channels = "last", out: Tensor | None = None) -> Tensor:
    """x/255 minus the mean over the pixels, for each image and channel apart.

    One fused pass: numba on the CPU, Warp on CUDA (extra ``warp``), plain torch on other devices with float64; all give
    the same bits, within 1 ulp of the exact value for pictures of any size. Channels do not mix, so normalizing a
    stack of frames equals, bit for bit, stacking normalized frames. Floating point pictures, with values from 0 to 255,
    are normalized in plain torch, in float64.

    Args:
        x: uint8 or floating point (…, H, W, C), (…, C, H, W) or (…, H, W), as ``channels`` says; any strides; never
            written to.
        channels: where the channels are.
        out: float32 of the same shape and device to write into. Whoever still holds it from an earlier step sees the
            new values; leave it out to get memory that nobody holds.

    Returns:
        float32 of the shape of ``x``: ``out``, or fresh contiguous memory that the receiver owns.
    """
    _check(x, channels, out)
    target = fresh(tuple(x.shape), torch.float32, x.device) if out is None else out
    if x.numel():
        normalize_into(x, target, channels)
    return target


def normalize_into(x: Tensor, out: Tensor, channels: Channels) -> None:
    """``normalize_image`` without checks, into memory of the same shape."""
    source, target = _as_images(x, channels), _as_images(out, channels)
    if target.data_ptr() != out.data_ptr() or source.shape[0] != target.shape[0]:
        # leading axes of ``out`` that no single stride describes
        for part, to in zip(x.unbind(0), out.unbind(0), strict=True):
            normalize_into(part, to, channels)
        return
    if x.dtype != torch.uint8:
        exact = source.double()
        target.copy_((exact - exact.mean((1, 2), keepdim=True)) / 255)
    elif x.device.type == "cpu":
        normalize_cpu(source, target)
    elif x.device.type == "cuda":
        from headrace._kernels.normalize_warp import normalize_warp  # an extra, loaded on use

        normalize_warp(source, target)
    else:
        normalize_torch(source, target)


def _as_images(x: Tensor, channels: Channels) -> Tensor:
    """(images, H, W, C); a copy only where the leading axes of ``x`` cannot be merged by strides."""
    if channels == "none":
        x = x.unsqueeze(-1)
    elif channels == "first":
        x = x.movedim(-3, -1)
    return x.reshape(-1, *x.shape[-3:])


def _check(x: Tensor, channels: Channels, out: Tensor | None) -> None:
    if not isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may be untyped
        raise DtypeError(f"x: expected a torch tensor, got {type(x).__name__}; use torch.as_tensor")
    if not can_normalize(x.dtype):
        raise DtypeError(f"x: expected uint8 or floating point pictures with values from 0 to 255, got {x.dtype}")
    if channels not in get_args(Channels):
        raise UnknownNameError("channels", str(channels), get_args(Channels))
    rank = 2 if channels == "none" else 3
    form = {"last": "(…, H, W, C)", "first": "(…, C, H, W)", "none": "(…, H, W)"}[channels]
    if x.dim() < rank or 0 in x.shape[-rank:]:
        raise ShapeError(f"x: expected {form} with at least one pixel, got shape {tuple(x.shape)}")
    if x.device.type == "mps":
        raise DeviceError("x: the exact mean needs float64, which mps has not; move the images to the CPU")
    if out is None:
        return
    if out.dtype != torch.float32:
        raise DtypeError(f"out: expected float32, got {out.dtype}")
    if out.shape != x.shape:
        raise ShapeError(f"out: expected shape {tuple(x.shape)}, that of x, got {tuple(out.shape)}")
    if out.device != x.device:
        raise DeviceError(f"out: expected a tensor on {x.device}, where x is, got one on {out.device}")


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
        source, target = (np.arange(count) if rows is None else rows.numpy() for rows in (ids, to))
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
