"""Image normalization in Warp: three launches, no host synchronization. For CUDA; the CPU device serves tests."""

# Signatures of kernels are Warp's language, not Python's: a type checker cannot follow them.
# pyright: reportInvalidTypeForm=false, reportUnknownParameterType=false

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from headrace._device import current_stream, warp_launches
from headrace._kernels.normalize import RECIPROCAL
from headrace.errors import require_extra

wp: Any = require_extra("warp", extra="warp", purpose="normalizing images on a CUDA device")
_Bytes: Any = wp.array(dtype=wp.uint8)
_Floats: Any = wp.array(dtype=wp.float32)
_Longs: Any = wp.array(dtype=wp.int64)
_Sums: Any = wp.array2d(dtype=wp.int64)
_Means: Any = wp.array2d(dtype=wp.vec2d)

_LANES = 256
"""Threads that share the sum of one image: neighbors read neighboring bytes."""

_scratch: dict[tuple[int, int, torch.device, int], tuple[Tensor, Tensor]] = {}
_lock = threading.Lock()
"""Two Python threads may share a stream, and then the sums: the launches of one image batch stay together."""


@wp.func
def _place(image: wp.int32, rows: _Longs, per_row: wp.int32) -> wp.int64:
    """Where an image is among those of all rows."""
    if per_row == 0:
        return wp.int64(image)
    return rows[image // per_row] * wp.int64(per_row) + wp.int64(image % per_row)


@wp.kernel(enable_backward=False)
def _sum(
    rows: _Longs,
    per_row: wp.int32,
    x: _Bytes,
    strides: wp.vec4l,
    width: wp.int32,
    channels: wp.int32,
    pixels: wp.int32,
    sums: _Sums,
) -> None:
    image, lane_channel = wp.tid()
    lane = lane_channel // channels
    channel = lane_channel % channels
    base = _place(image, rows, per_row) * strides[0] + wp.int64(channel) * strides[3]
    total = wp.int64(0)
    pixel = lane
    while pixel < pixels:
        at = base + wp.int64(pixel // width) * strides[1] + wp.int64(pixel % width) * strides[2]
        total += wp.int64(x[at])
        pixel += _LANES
    # integer sums are exact in any order, so atomics do not make the result vary
    wp.atomic_add(sums, image, channel, total)


@wp.kernel(enable_backward=False)
def _mean(sums: _Sums, pixels: wp.int64, mean: _Means) -> None:
    image, channel = wp.tid()
    total = sums[image, channel]
    whole = total / pixels
    rest = total - whole * pixels
    mean[image, channel] = wp.vec2d(wp.float64(whole), wp.float64(rest) / wp.float64(pixels))


@wp.kernel(enable_backward=False)
def _write(
    rows: _Longs,
    out_rows: _Longs,
    per_row: wp.int32,
    x: _Bytes,
    mean: _Means,
    strides: wp.vec4l,
    width: wp.int32,
    channels: wp.int32,
    out_strides: wp.vec4l,
    out: _Floats,
) -> None:
    image, value = wp.tid()
    channel = value % channels
    pixel = value // channels
    row = wp.int64(pixel // width)
    column = wp.int64(pixel % width)
    at = (
        _place(image, rows, per_row) * strides[0]
        + row * strides[1]
        + column * strides[2]
        + wp.int64(channel) * strides[3]
    )
    to = (
        _place(image, out_rows, per_row) * out_strides[0]
        + row * out_strides[1]
        + column * out_strides[2]
        + wp.int64(channel) * out_strides[3]
    )
    m = mean[image, channel]
    out[to] = wp.float32(((wp.float64(x[at]) - m[0]) - m[1]) * wp.float64(RECIPROCAL))


def normalize_warp(x: Tensor, out: Tensor, rows: tuple[Tensor, Tensor] | None = None, per_row: int = 1) -> None:
    """Write the normalized images of ``x`` into ``out``; the same bits as ``normalize_cpu``.

    Runs on torch's current stream. Sums are kept per (shape, device, stream).

    Args:
        x: uint8 (images, height, width, channels), any strides.
        out: float32 on the same device, any strides; of the same shape where ``rows`` is None.
        rows: int64 (n,) twice: the images of row ``rows[0][i]`` of ``x`` go to row ``rows[1][i]`` of ``out``, and no
            others are touched. None: all images go to their own places.
        per_row: images in a row.
    """
    images, height, width, channels = x.shape
    if rows is not None:
        images = rows[0].shape[0] * per_row
    if images == 0:
        return
    pixels = height * width
    stream = current_stream(x.device)
    with _lock, warp_launches(x.device) as device:
        sums, mean = _scratch_for(images, channels, x.device, 0 if stream is None else stream.cuda_stream)
        sums.zero_()
        source = wp.from_torch(_flat(x), dtype=wp.uint8)
        target = wp.from_torch(_flat(out), dtype=wp.float32)
        warp_sums = wp.from_torch(sums, dtype=wp.int64)
        warp_mean = wp.from_torch(mean, dtype=wp.vec2d)
        # without rows nobody reads them
        taken, put = (wp.from_torch(each) for each in rows or (sums.view(-1), sums.view(-1)))
        per_row = 0 if rows is None else per_row
        strides, out_strides = wp.vec4l(*x.stride()), wp.vec4l(*out.stride())
        wp.launch(
            _sum,
            dim=(images, _LANES * channels),
            inputs=[taken, per_row, source, strides, width, channels, pixels],
            outputs=[warp_sums],
            device=device,
        )
        wp.launch(_mean, dim=(images, channels), inputs=[warp_sums, pixels], outputs=[warp_mean], device=device)
        wp.launch(
            _write,
            dim=(images, pixels * channels),
            inputs=[taken, put, per_row, source, warp_mean, strides, width, channels, out_strides],
            outputs=[target],
            device=device,
        )


def _scratch_for(images: int, channels: int, device: torch.device, stream: int) -> tuple[Tensor, Tensor]:
    key = images, channels, device, stream
    if key not in _scratch:
        if len(_scratch) >= 16:
            _scratch.clear()
        _scratch[key] = (
            torch.empty((images, channels), dtype=torch.int64, device=device),
            torch.empty((images, channels, 2), dtype=torch.float64, device=device),
        )
    return _scratch[key]


def _flat(images: Tensor) -> Tensor:
    span = 1 + sum((size - 1) * stride for size, stride in zip(images.shape, images.stride(), strict=True))
    return images.as_strided((span,), (1,))
