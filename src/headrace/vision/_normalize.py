"""``normalize_image``: x/255 minus each image's own mean per channel, in one pass."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from headrace._kernels.normalize import Channels, normalize_into
from headrace.buffers._output import fresh
from headrace.errors import DeviceError, DtypeError, ShapeError, UnknownNameError


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
