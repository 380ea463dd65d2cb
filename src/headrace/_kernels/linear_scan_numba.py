"""The linear recurrence on the CPU, forwards in time: ``scan_block`` on the calling thread, ``scan`` on several."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace._kernels.compiled import kernel, prange

Floats: TypeAlias = NDArray[np.floating[Any]]

_BLOCK = 1024  # columns: four arrays of a few steps stay in the first cache


@kernel()
def _row(a: Floats, b: Floats, before: Floats, out: Floats) -> None:
    for n in range(out.shape[0]):
        out[n] = a[n] * before[n] + b[n]


@kernel()
def scan_block(a: Floats, b: Floats, h0: Floats, lo: int, hi: int, out: Floats) -> None:
    """Write h_t of columns lo to hi into ``out``, (T, M); ``a`` and ``b`` are (T, M), ``h0`` (M,), all C-contiguous."""
    for t in range(out.shape[0]):
        before = h0[lo:hi] if t == 0 else out[t - 1, lo:hi]
        _row(a[t, lo:hi], b[t, lo:hi], before, out[t, lo:hi])


@kernel(parallel=True)
def scan(a: Floats, b: Floats, h0: Floats, out: Floats) -> None:
    """Write h_t into ``out``, blocks of columns in parallel."""
    columns = out.shape[1]
    for block in prange((columns + _BLOCK - 1) // _BLOCK):
        scan_block(a, b, h0, block * _BLOCK, min(block * _BLOCK + _BLOCK, columns), out)
