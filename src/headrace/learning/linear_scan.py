"""The linear recurrence h_t = a_t·h_{t−1} + b_t: one pass in numba on the CPU, a scan of depth log₂T elsewhere.

Pairs (a, b) compose: doing (a₁, b₁) and then (a₂, b₂) is doing (a₂·a₁, a₂·b₁ + b₂). Composition is associative, so all
T prefixes come out of log₂T rounds in which every step composes with the one 1, 2, 4, … before it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_SHARE = 1 << 18
"""Fewer numbers are done before a sleeping thread has woken up."""


def linear_scan(a: Tensor, b: Tensor, h0: Tensor) -> Tensor:
    """Return all h_t, (T, …), fresh, without gradients.

    Args:
        a, b: (T, …), float32 or float64.
        h0: (…), the state before the first step.
    """
    if a.device.type != "cpu":
        return linear_scan_parallel(a, b, h0)
    from headrace._kernels.compiled import run
    from headrace.learning._linear_scan_numba import scan

    out = torch.empty(b.shape, dtype=b.dtype)
    flat = (b.shape[0], h0.numel())
    arrays = _array(a, flat), _array(b, flat), _array(h0, (-1,)), out.view(flat).numpy()
    run(scan, flat[1], *arrays, min_rows=_SHARE // max(flat[0], 1) + 1)
    return out


def linear_scan_parallel(a: Tensor, b: Tensor, h0: Tensor) -> Tensor:
    """Return the parallel scan in torch operations, on any device."""
    a, h = a.detach(), b.detach()
    if not len(h):
        return h.clone()
    h = torch.cat(((h[0] + a[0] * h0.detach())[None], h[1:]))
    # the first step has taken the initial state in; nothing comes before it
    a = torch.cat((torch.zeros_like(a[:1]), a[1:]))
    reach = 1
    while reach < len(h):
        h = torch.cat((h[:reach], h[reach:] + a[reach:] * h[:-reach]))
        a = torch.cat((a[:reach], a[reach:] * a[:-reach]))
        reach *= 2
    return h


def _array(tensor: Tensor, shape: tuple[int, ...]) -> NDArray[np.floating[Any]]:
    return tensor.detach().reshape(shape).contiguous().numpy()
