"""The CPU kernels of :mod:`headrace.rng`: one pass over (episodes, numbers).

A module of its own, so that numba is imported at the first draw (it takes a fifth of a second), and so that the kernels
are functions of a module: numba keeps those on disk, while a closure over another kernel is compiled anew in every
process.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from headrace.rng import GOLDEN, MIX_1, MIX_2, TO_UNIT

# numba widens a uint64 beside a Python integer to float64, so every constant of the arithmetic is a uint64
_GOLDEN, _FIRST, _SECOND = np.uint64(GOLDEN), np.uint64(MIX_1), np.uint64(MIX_2)
_BY_11, _BY_27, _BY_30, _BY_31 = np.uint64(11), np.uint64(27), np.uint64(30), np.uint64(31)


@numba.njit(inline="always")
def _mix(value: np.uint64) -> np.uint64:
    value = (value ^ (value >> _BY_30)) * _FIRST
    value = (value ^ (value >> _BY_27)) * _SECOND
    return value ^ (value >> _BY_31)


@numba.njit(inline="always")
def start_of(key, episode_id):  # type: ignore[no-untyped-def]  # compiled: numba infers the types
    """Return where the numbers of an episode's stream begin; see :mod:`headrace.rng`."""
    return _mix(_mix(np.uint64(episode_id) + _GOLDEN) ^ np.uint64(key))


@numba.njit(cache=True, nogil=True)
def bits(key, episode_ids, first, out):  # type: ignore[no-untyped-def]  # compiled: numba infers the types
    """64 bits a number: int64 ids (n,), first draws (n,), output (n, count)."""
    for i in range(out.shape[0]):
        start = start_of(key, episode_ids[i])
        for j in range(out.shape[1]):
            out[i, j] = np.int64(_mix(start + np.uint64(first[i] + j + 1) * _GOLDEN))


@numba.njit(cache=True, nogil=True)
def uniforms(key, episode_ids, first, low, width, out):  # type: ignore[no-untyped-def]  # compiled: numba infers the types
    """Write uniform numbers in [low, low + width): int64 ids (n,), first draws (n,), float64 output (n, count)."""
    for i in range(out.shape[0]):
        start = start_of(key, episode_ids[i])
        for j in range(out.shape[1]):
            unit = np.float64(_mix(start + np.uint64(first[i] + j + 1) * _GOLDEN) >> _BY_11) * TO_UNIT
            out[i, j] = unit * width + low


@numba.njit(cache=True, nogil=True)
def normals(key, episode_ids, first, std, out):  # type: ignore[no-untyped-def]  # compiled: numba infers the types
    """Write normal numbers of mean 0 by Box–Muller: int64 ids (n,), first draws (n,), float64 output (n, count)."""
    for i in range(out.shape[0]):
        start = start_of(key, episode_ids[i])
        for j in range(out.shape[1]):
            # two uniform numbers each
            draw = 2 * (first[i] + j) + 1
            radius = np.float64(_mix(start + np.uint64(draw) * _GOLDEN) >> _BY_11) * TO_UNIT
            angle = np.float64(_mix(start + np.uint64(draw + 1) * _GOLDEN) >> _BY_11) * TO_UNIT
            out[i, j] = math.sqrt(-2.0 * math.log(1.0 - radius)) * math.cos(2.0 * math.pi * angle) * std
