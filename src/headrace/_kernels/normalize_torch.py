"""Image normalization in plain torch: the reference of the compiled versions, and what other devices run."""

from __future__ import annotations

from torch import Tensor

from headrace._kernels.normalize import RECIPROCAL

_CHUNK_VALUES = 1 << 22
"""Values per chunk: bounds the float64 temporaries to 32 MiB each."""


def normalize_torch(x: Tensor, out: Tensor) -> None:
    """Write the normalized images of ``x`` into ``out``; the same bits as ``normalize_cpu``.

    Args:
        x: uint8 (images, height, width, channels) on a device with float64, any strides.
        out: float32 of the same shape and device, any strides.
    """
    pixels = x.shape[1] * x.shape[2]
    step = max(1, _CHUNK_VALUES // max(1, pixels * x.shape[3]))
    for first in range(0, x.shape[0], step):
        part = x[first : first + step]
        sums = part.long().sum((1, 2), keepdim=True)
        whole = sums.div(pixels, rounding_mode="floor")
        fraction = (sums - whole * pixels).double() / pixels
        out[first : first + step] = ((part.double() - whole) - fraction) * RECIPROCAL
