"""Counter-based randomness: every number is a function of (seed, episode id, stream, draw), and of nothing else.

There is no state to save, to freeze or to share between environments. The bits are a SplitMix64 sequence whose start is
hashed from seed, stream and episode:

```
key      = mix(mix(seed) ^ mix(crc32(stream) + GOLDEN))        one 64-bit number per (seed, stream)
start    = mix(key ^ mix(episode_id + GOLDEN))                  per row
bits[j]  = mix(start + (first_draw + j + 1) · GOLDEN)           per number
```

On the CPU numba computes it in one pass; elsewhere the same integer arithmetic runs as torch operations. Uniform
numbers are equal on every device to the last bit; normal ones use log and cos and are equal per device.
"""

from __future__ import annotations

import functools
import importlib
import math
import zlib
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1
TO_UNIT = 2.0**-53


def mix64(value: int) -> int:
    """SplitMix64's finalizer on a Python integer, taken modulo 2⁶⁴: the reference of the vectorized forms."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * MIX_2) & _MASK
    return value ^ (value >> 31)


@functools.lru_cache(maxsize=4096)
def stream_key(seed: int, stream: str) -> int:
    """Return the 64-bit key of one named stream under one seed, as a signed integer."""
    named = mix64(zlib.crc32(stream.encode()) + GOLDEN)
    return _to_signed(mix64(mix64(seed) ^ named))


def random_bits(seed: int, episode_ids: Tensor, stream: str, draw: Tensor | int, count: int) -> Tensor:
    """64 random bits as int64, (n, count).

    Args:
        seed: any integer.
        episode_ids: int64 (n,).
        stream: name of the purpose, for example ``"reset"``. Different names are independent.
        draw: index of the first number, the same for all rows or int64 (n,); pass the episode's step count times
            ``count`` for noise that differs each step.
        count: numbers per row.
    """
    first = _draws(draw, episode_ids)
    key = stream_key(seed, stream)
    if episode_ids.device.type == "cpu":
        out = torch.empty((episode_ids.shape[0], count), dtype=torch.int64)
        _kernels().bits(key, episode_ids.numpy(), first.numpy(), out.numpy())
        return out
    return bits_reference(key, episode_ids, first, count)


def uniform(
    seed: int,
    episode_ids: Tensor,
    stream: str,
    count: int,
    *,
    low: float = 0.0,
    high: float = 1.0,
    draw: Tensor | int = 0,
) -> Tensor:
    """Return uniform numbers in [low, high), float64 (n, count). Arguments as in :func:`random_bits`."""
    key = stream_key(seed, stream)
    if episode_ids.device.type == "cpu":
        ids, first, out = _arrays(episode_ids, draw, count)
        _kernels().uniforms(key, ids, first, low, high - low, out)
        return torch.from_numpy(out)
    return _unit(bits_reference(key, episode_ids, _draws(draw, episode_ids), count)) * (high - low) + low


def normal(
    seed: int, episode_ids: Tensor, stream: str, count: int, *, std: float = 1.0, draw: Tensor | int = 0
) -> Tensor:
    """Return normal numbers with mean 0, float64 (n, count), by Box–Muller; each uses two draws, 2·draw and 2·draw + 1.

    Arguments as in :func:`random_bits`.
    """
    key = stream_key(seed, stream)
    if episode_ids.device.type == "cpu":
        ids, first, out = _arrays(episode_ids, draw, count)
        _kernels().normals(key, ids, first, std, out)
        return torch.from_numpy(out)
    bits = bits_reference(key, episode_ids, 2 * _draws(draw, episode_ids), 2 * count)
    radius, angle = _unit(bits[:, 0::2]), _unit(bits[:, 1::2])
    return torch.sqrt(-2.0 * torch.log(1.0 - radius)) * torch.cos(2.0 * math.pi * angle) * std


def bits_reference(key: int, episode_ids: Tensor, first: Tensor, count: int) -> Tensor:
    """Return the bits in plain torch operations: the reference of the CPU kernel, and the path of other devices."""
    golden = _to_signed(GOLDEN)
    start = _mix(_mix(episode_ids + golden) ^ key)
    steps = first[:, None] + torch.arange(1, count + 1, device=episode_ids.device)
    return _mix(start[:, None] + steps * golden)


def _draws(draw: Tensor | int, episode_ids: Tensor) -> Tensor:
    return draw if isinstance(draw, Tensor) else torch.full_like(episode_ids, draw)


def _arrays(
    episode_ids: Tensor, draw: Tensor | int, count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Episode ids and first draws as the CPU kernels take them, and an output (n, count)."""
    ids = episode_ids.numpy()
    # numpy's small arrays cost a fraction of torch's: this runs whenever an episode begins
    first = draw.numpy() if isinstance(draw, Tensor) else np.full(ids.shape[0], draw, np.int64)
    return ids, first, np.empty((ids.shape[0], count))


def _to_signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64, which torch has only as arithmetic."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _mix(value: Tensor) -> Tensor:
    value = (value ^ _shift(value, 30)) * _to_signed(MIX_1)
    value = (value ^ _shift(value, 27)) * _to_signed(MIX_2)
    return value ^ _shift(value, 31)


def _unit(bits: Tensor) -> Tensor:
    return _shift(bits, 11).to(torch.float64) * TO_UNIT


@functools.cache
def _kernels() -> ModuleType:
    """Import at the first draw, not with the package: numba takes a fifth of a second."""
    return importlib.import_module("headrace._rng_kernels")
