"""Frame stacks and image normalization in Warp. For CUDA; the CPU device serves tests."""

# Signatures of kernels are Warp's language, not Python's: a type checker cannot follow them.
# pyright: reportInvalidTypeForm=false, reportUnknownParameterType=false, reportMissingParameterType=false

from __future__ import annotations

import math
import threading
from typing import Any

import torch
from torch import Tensor

from headrace._device import current_stream, warp_launches
from headrace.errors import require_extra
from headrace.history._normalize import RECIPROCAL

wp: Any = require_extra("warp", extra="warp", purpose="frames and images on a CUDA device")
_Bytes: Any = wp.array(dtype=wp.uint8)
_Longs: Any = wp.array(dtype=wp.int64)
_Flags: Any = wp.array(dtype=wp.bool)
_Floats: Any = wp.array(dtype=wp.float32)
_Words: Any = wp.array2d(dtype=Any)
_Sums: Any = wp.array2d(dtype=wp.int64)
_Means: Any = wp.array2d(dtype=wp.vec2d)


@wp.func
def _env_of(row: wp.int32, ids: _Longs, has_ids: wp.int32, mask: _Flags, has_mask: wp.int32) -> wp.int32:
    """Return the environment of a row; -1 where the mask leaves it out."""
    env = row
    if has_ids == 1:
        env = wp.int32(ids[row])
    if has_mask == 1:  # noqa: SIM102  # `and` would read the mask that is not there
        if not mask[env]:
            env = wp.int32(-1)
    return env


@wp.kernel(enable_backward=False)
def _push(
    ids: _Longs,
    has_ids: wp.int32,
    mask: _Flags,
    has_mask: wp.int32,
    rows: _Words,
    writes: wp.int32,
    by: _Longs,
    fill: _Flags,
    inner: wp.int32,
    length: wp.int32,
    data: _Words,
):
    row, word = wp.tid()
    env = _env_of(row, ids, has_ids, mask, has_mask)
    if env < 0:
        return
    first = (word // inner) * length * inner + word % inner
    if writes == 1 and fill[env]:
        for slot in range(length):
            data[env, first + slot * inner] = rows[row, word]
        return
    steps = wp.min(wp.int32(by[env]), length)
    for slot in range(length - steps):
        data[env, first + slot * inner] = data[env, first + (slot + steps) * inner]
    if writes == 1:
        for slot in range(length - steps, length - 1):
            data[env, first + slot * inner] = rows.dtype(0)
        data[env, first + (length - 1) * inner] = rows[row, word]


@wp.kernel(enable_backward=False)
def _append(
    ids: _Longs,
    has_ids: wp.int32,
    mask: _Flags,
    has_mask: wp.int32,
    rows: _Words,
    pushed: _Longs,
    length: wp.int32,
    data: _Words,
):
    row, word = wp.tid()
    env = _env_of(row, ids, has_ids, mask, has_mask)
    if env < 0:
        return
    slot = wp.int32(pushed[env] % wp.int64(length))
    data[env, slot * rows.shape[1] + word] = rows[row, word]


@wp.kernel(enable_backward=False)
def _copy(source: _Longs, target: _Longs, rows: _Words, out: _Words):
    row, word = wp.tid()
    out[wp.int32(target[row]), word] = rows[wp.int32(source[row]), word]


def push_warp(
    data: Tensor,
    rows: Tensor | None,
    ids: Tensor | None,
    mask: Tensor | None,
    by: Tensor,
    fill: Tensor,
    *,
    inner_bytes: int,
    length: int,
) -> None:
    """``OrderedFrames.push`` on memory (N, …, K, …), in place.

    Args:
        data: contiguous; a frame is in runs of ``inner_bytes`` bytes.
        rows: (n, …) with ``ids``, else (N, …); no memory of ``data``. None only moves.
        ids: int64 (n,), or None for all.
        mask: bool (N,): which of (N, …) rows count; None for all.
        by: int64 (N,).
        fill: bool (N,).
        inner_bytes: see ``data``.
        length: K.
    """
    word = _word(inner_bytes, data, *(() if rows is None else (rows,)))
    memory = _words(data, word)
    given = memory if rows is None else _words(rows, word)
    count = data.shape[0] if ids is None else ids.shape[0]
    if not count or not memory.shape[1]:
        return
    inputs = [*_chosen(ids, mask, by, fill), given, int(rows is not None), by, fill, inner_bytes // word.itemsize]
    _launch(_push, (count, memory.shape[1] // length), [*inputs, length], memory)


def append_warp(
    data: Tensor, rows: Tensor, ids: Tensor | None, mask: Tensor | None, pushed: Tensor, *, length: int
) -> None:
    """``DelayBuffer``: rows into slot ``pushed mod K`` of memory (N, K, …); arguments as in :func:`push_warp`."""
    word = _word(rows[0].nbytes if len(rows) else 1, data, rows)
    given = _words(rows, word)
    if given.numel():
        no_mask = torch.zeros(1, dtype=torch.bool, device=data.device) if mask is None else mask
        _launch(_append, given.shape, [*_chosen(ids, mask, pushed, no_mask), given, pushed, length], _words(data, word))


def copy_rows_warp(data: Tensor, source: Tensor, out: Tensor, target: Tensor) -> None:
    """Copy row ``source[i]`` of ``data`` to row ``target[i]`` of ``out``, both contiguous with rows of equal bytes."""
    word = _word(out[0].nbytes, data, out)
    memory = _words(out, word)
    if source.shape[0] and memory.shape[1]:
        _launch(_copy, (source.shape[0], memory.shape[1]), [source, target, _words(data, word)], memory)


def _launch(kernel: Any, dim: tuple[int, ...], inputs: list[Any], out: Tensor) -> None:
    with warp_launches(out.device) as device:
        given = [wp.from_torch(each) if isinstance(each, Tensor) else each for each in inputs]
        wp.launch(kernel, dim=dim, inputs=given, outputs=[wp.from_torch(out)], device=device)


def _chosen(ids: Tensor | None, mask: Tensor | None, longs: Tensor, flags: Tensor) -> list[Any]:
    """Ids and mask with a flag each; where there is none, some array of its dtype that is not read."""
    return [longs if ids is None else ids, int(ids is not None), flags if mask is None else mask, int(mask is not None)]


def _word(run_bytes: int, *tensors: Tensor) -> torch.dtype:
    """Four bytes at a time where every run begins and ends at a multiple of four."""
    even = run_bytes % 4 == 0 and all(tensor.data_ptr() % 4 == 0 for tensor in tensors)
    return torch.int32 if even else torch.uint8


def _words(rows: Tensor, word: torch.dtype) -> Tensor:
    flat = rows.contiguous().view(rows.shape[0], math.prod(rows.shape[1:]))
    return flat.view(torch.uint8).view(word)


_LANES = 256
"""Threads that share the sum of one image: neighbors read neighboring bytes."""

_scratch: dict[tuple[int, int, torch.device, int], tuple[Tensor, Tensor]] = {}
_lock = threading.Lock()
"""Two Python threads may share a stream, and then the sums: the launches of one image batch stay together."""


@wp.func
def _place(image: wp.int32, rows: _Longs, per_row: wp.int32) -> wp.int64:
    """Return where an image is among those of all rows."""
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
        # without rows they are not read
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
