"""Image normalization on the CPU: x/255 minus each image's and channel's own mean, in one pass over the output.

For an image of P pixels and a channel whose values sum to S (an exact 64-bit integer),

    out = (x − S/P) / 255,    S/P = m + f,  m = ⌊S/P⌋,  f = (S mod P)/P,

computed as ``((x − m) − f) · (1/255)`` in float64 and rounded once to float32. Splitting the mean keeps the
subtraction exact where x is close to it, so the result is within 1 ulp of the true value, however large the image
is. Every step is elementwise or an integer sum: the result does not depend on layout, threads or neighbors, and the
versions for other devices give the same bits.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace._kernels.compiled import helper, kernel, run
from headrace.errors import DeviceError, DtypeError, ShapeError, UnknownNameError
from headrace.history.output import fresh

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]
_Longs = npt.NDArray[np.int64]

Channels: TypeAlias = Literal["last", "first", "none"]
"""Where a picture has its channels: (…, H, W, C), (…, C, H, W) or, gray without an axis for it, (…, H, W)."""

RECIPROCAL = 1.0 / 255.0
"""Multiplied in float64; the error against a division is far below one float32 ulp."""

_PERIOD = 192
"""About how many values are summed side by side, a whole number of pixels: a few vector registers."""
_ROUNDS = 257
"""255 · 257 = 65535: so many uint8 fit into a uint16 sum."""
_SHARE = 1 << 15
"""Waking a thread takes longer than normalizing fewer values than this."""

_CHUNK_VALUES = 1 << 22
"""Values per chunk in plain torch: bounds the float64 temporaries to 32 MiB each."""


def normalize_into(x: Tensor, out: Tensor, channels: Channels) -> None:
    """Write the normalized pictures of ``x`` into ``out``, on any device with float64; see ``vision.normalize_image``.

    Args:
        x: uint8 or floating point with values from 0 to 255, (…, H, W, C) or as ``channels`` says, any strides.
        out: float32 of the same shape and device, any strides; shares no memory with ``x``.
        channels: where the channels are.
    """
    source, target = _as_images(x, channels), _as_images(out, channels)
    if target.data_ptr() != out.data_ptr() or source.shape[0] != target.shape[0]:
        # leading axes of ``out`` that no single stride describes
        for part, to in zip(x.unbind(0), out.unbind(0), strict=True):
            normalize_into(part, to, channels)
        return
    if x.dtype != torch.uint8:
        exact = source.double()
        # elsewhere than on the CPU, looking at values would wait for the device
        if x.device.type == "cpu" and 0 < (top := float(exact.max())) <= 1:
            raise DtypeError(
                f"x: expected floating point pictures with values from 0 to 255, got none above {top:g}; multiply "
                "pictures in 0 … 1 by 255"
            )
        target.copy_((exact - exact.mean((1, 2), keepdim=True)) / 255)
    elif x.device.type == "cpu":
        normalize_cpu(source, target)
    else:
        normalize_torch(source, target)


def _as_images(x: Tensor, channels: Channels) -> Tensor:
    """(images, H, W, C); a copy only where the leading axes of ``x`` cannot be merged by strides."""
    if channels == "none":
        x = x.unsqueeze(-1)
    elif channels == "first":
        x = x.movedim(-3, -1)
    return x.reshape(-1, *x.shape[-3:])


def normalize_torch(x: Tensor, out: Tensor) -> None:
    """Compute what :func:`normalize_cpu` does, on any device: the same bits.

    Args:
        x: uint8 (images, height, width, channels) on a device with float64, any strides.
        out: float32 of the same shape and device, any strides.
    """
    pixels = x.shape[1] * x.shape[2]
    step = max(1, _CHUNK_VALUES // max(1, pixels * x.shape[3]))
    for first in range(0, x.shape[0], step):
        part = x[first : first + step]
        sums = part.sum((1, 2), keepdim=True, dtype=torch.int64)
        whole = sums.div(pixels, rounding_mode="floor")
        fraction = (sums - whole * pixels).double() / pixels
        out[first : first + step] = torch.sub(part, whole.double()).sub_(fraction).mul_(RECIPROCAL)


def normalize_cpu(x: Tensor, out: Tensor) -> None:
    """Write the normalized images of ``x`` into ``out``.

    Args:
        x: uint8 (images, height, width, channels) on the CPU, any strides; H, W and C at least 1.
        out: float32 of the same shape, any strides; shares no memory with ``x``.
    """
    if x.shape[0] == 0:
        return
    _, height, width, channels = x.shape
    if _is_channel_last(x) and _is_channel_last(out):
        planes, unit_channels = 1, channels
    elif _is_channel_first(x) and _is_channel_first(out):
        planes, unit_channels = channels, 1
    else:
        found = torch.empty(out.shape)
        normalize_cpu(x.contiguous(), found)
        out.copy_(found)
        return
    size = height * width * unit_channels
    within, least = np.arange(planes) * size, _SHARE // size + 1
    starts, places = ((np.arange(x.shape[0])[:, None] * images.stride(0) + within).reshape(-1) for images in (x, out))
    shape = height * width, unit_channels, group_pixels(height * width, unit_channels)
    run(_write_units, len(starts), _flat(x), _flat(out), starts, places, *shape, min_rows=least)


def group_pixels(pixels: int, channels: int) -> int:
    """Return how many pixels the kernels sum and write side by side."""
    return max(1, min(_PERIOD // channels, pixels))


def _is_channel_last(images: Tensor) -> bool:
    return images[0].is_contiguous()


def _is_channel_first(images: Tensor) -> bool:
    return images[0].permute(2, 0, 1).is_contiguous()


def _flat(images: Tensor) -> npt.NDArray[Any]:
    """Return all memory that the images span, as one contiguous dimension."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(images.shape, images.stride(), strict=True))
    return images.as_strided((span,), (1,)).numpy()


@helper
def add_sums(values: _Bytes, channels: int, group: int, sums: _Longs) -> None:
    """Add the values of each channel to ``sums``; values are pixels of ``channels`` side by side."""
    period = group * channels
    columns = np.empty(period, np.uint16)
    whole = values.shape[0] // period
    first = 0
    while first < whole:
        last = min(whole, first + _ROUNDS)
        columns[:] = 0
        for k in range(first, last):
            part = values[k * period : (k + 1) * period]
            for j in range(period):
                columns[j] += part[j]
        for g in range(group):
            for c in range(channels):
                sums[c] += columns[g * channels + c]
        first = last
    for i in range(whole * period, values.shape[0]):
        sums[i % channels] += values[i]


@helper
def write_normalized(values: _Bytes, target: _Floats, sums: _Longs, pixels: int, group: int) -> None:
    """target = ((values − m) − f)/255; the mean is laid out for ``group`` pixels so that the inner loop is a vector."""
    channels = sums.shape[0]
    period = group * channels
    whole_part = np.empty(period, np.float64)
    fraction = np.empty(period, np.float64)
    for c in range(channels):
        m = np.float64(sums[c] // pixels)
        f = np.float64(sums[c] % pixels) / np.float64(pixels)
        for g in range(group):
            whole_part[g * channels + c] = m
            fraction[g * channels + c] = f
    whole = values.shape[0] // period
    for k in range(whole):
        part = values[k * period : (k + 1) * period]
        to = target[k * period : (k + 1) * period]
        for j in range(period):
            to[j] = np.float32(((np.float64(part[j]) - whole_part[j]) - fraction[j]) * RECIPROCAL)
    for i in range(whole * period, values.shape[0]):
        j = i - whole * period
        target[i] = np.float32(((np.float64(values[i]) - whole_part[j]) - fraction[j]) * RECIPROCAL)


@kernel()
def _write_units(
    start: int,
    stop: int,
    source: _Bytes,
    target: _Floats,
    starts: _Longs,
    places: _Longs,
    pixels: int,
    channels: int,
    group: int,
) -> None:
    """Sum each unit, then write it while it is in the cache.

    A unit is ``pixels`` of ``channels`` side by side: a channel-last image, or a channel-first plane. Unit i begins at
    ``starts[i]`` of ``source`` and goes to ``places[i]`` of ``target``.
    """
    size = pixels * channels
    for unit in range(start, stop):
        here, to = starts[unit], places[unit]
        sums = np.zeros(channels, np.int64)
        add_sums(source[here : here + size], channels, group, sums)
        write_normalized(source[here : here + size], target[to : to + size], sums, pixels, group)


def can_normalize(dtype: torch.dtype) -> bool:
    """Return whether pictures of this dtype have a scale from 0 to 255."""
    return dtype == torch.uint8 or dtype.is_floating_point


def normalize_image(x: Tensor, *, channels: Channels = "last", out: Tensor | None = None) -> Tensor:
    """x/255 minus the mean over the pixels, for each image and channel apart.

    One fused pass of numba on the CPU, plain torch on other devices with float64; both give the same bits, within 1 ulp
    of the exact value for pictures of any size. Channels do not mix, so normalizing a stack of frames equals, bit for
    bit, stacking normalized frames. Floating point pictures, with values from 0 to 255,
    are normalized in plain torch, in float64.

    Args:
        x: uint8 or floating point (…, H, W, C), (…, C, H, W) or (…, H, W), as ``channels`` says; any strides; never
            written to.
        channels: where the channels are.
        out: float32 of the same shape and device to write into. A reader that holds it from an earlier step sees the
            new values; leave it out to get memory of its own.

    Returns:
        float32 of the shape of ``x``: ``out``, or fresh contiguous memory that the receiver owns.
    """
    _check(x, channels, out)
    target = fresh(tuple(x.shape), torch.float32, x.device) if out is None else out
    if x.numel():
        normalize_into(x, target, channels)
    return target


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
