"""``normalize_image``: x/255 minus each image's own mean per channel, as fresh float32."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from headrace._kernels.normalize import normalize_cpu
from headrace._kernels.normalize_torch import normalize_torch
from headrace.buffers._pool import OutputPool
from headrace.errors import DeviceError, DtypeError, ShapeError, UnknownNameError

Channels: TypeAlias = Literal["last", "first", "none"]
"""Where a picture has its channels: (…, H, W, C), (…, C, H, W) or, gray without an axis for it, (…, H, W)."""

_pool = OutputPool()


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
