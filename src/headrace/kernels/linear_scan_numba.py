"""The linear recurrence on the CPU: columns in parallel, blocks of them at a time, forwards in time."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.kernels.compiled import kernel, prange

Floats: TypeAlias = NDArray[np.floating[Any]]

_BLOCK = 1024  # columns: four arrays of a few steps stay in the first cache


@kernel()
def _row(a: Floats, b: Floats, before: Floats, out: Floats) -> None:
    for n in range(out.shape[0]):
        out[n] = a[n] * before[n] + b[n]


@kernel(parallel=True)
def scan(a: Floats, b: Floats, h0: Floats, out: Floats) -> None:
    """Write h_t into ``out``, (T, M); ``a`` and ``b`` are (T, M), ``h0`` (M,), all C-contiguous."""
    steps, columns = out.shape
    for block in prange((columns + _BLOCK - 1) // _BLOCK):
        lo, hi = block * _BLOCK, min(block * _BLOCK + _BLOCK, columns)
        for t in range(steps):
            before = h0[lo:hi] if t == 0 else out[t - 1, lo:hi]
            _row(a[t, lo:hi], b[t, lo:hi], before, out[t, lo:hi])
