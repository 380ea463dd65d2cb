"""The linear recurrence on the CPU, forwards in time; the rows of the kernel are columns of the arrays."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace._kernels.compiled import kernel

Floats: TypeAlias = NDArray[np.floating[Any]]

_BLOCK = 1024  # columns: four arrays of a few steps stay in the first cache


@kernel()
def _row(a: Floats, b: Floats, before: Floats, out: Floats) -> None:
    for n in range(out.shape[0]):
        out[n] = a[n] * before[n] + b[n]


@kernel()
def scan(start: int, stop: int, a: Floats, b: Floats, h0: Floats, out: Floats) -> None:
    """Write h_t of some columns into ``out``, (T, M); ``a`` and ``b`` are (T, M), ``h0`` (M,), all C-contiguous."""
    for lo in range(start, stop, _BLOCK):
        hi = min(lo + _BLOCK, stop)
        for t in range(out.shape[0]):
            before = h0[lo:hi] if t == 0 else out[t - 1, lo:hi]
            _row(a[t, lo:hi], b[t, lo:hi], before, out[t, lo:hi])
