"""The normalize kernels against exact arithmetic: compiled, Warp and plain torch give the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.history._normalize import normalize_cpu, normalize_torch


def exact(x: Tensor) -> np.ndarray:
    """(x − S/P)/255 = (x·P − S)/(255·P): the numerator is an exact integer, so float64 rounds once."""
    values = x.numpy().astype(np.int64)
    pixels = x.shape[1] * x.shape[2]
    return (values * pixels - values.sum((1, 2), keepdims=True)) / np.float64(255 * pixels)


def ulps(result: Tensor, truth: np.ndarray) -> float:
    """The largest distance in units of the last place of the float32 nearest to the truth."""
    nearest = truth.astype(np.float32)
    return float((np.abs(result.numpy().astype(np.float64) - truth) / np.spacing(np.abs(nearest))).max(initial=0.0))


def pictures(shape: tuple[int, ...], seed: int = 0, low: int = 0, high: int = 256) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(low, high, shape, dtype=np.uint8))


def channel_first_memory(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)


layouts = st.sampled_from(["last", "first", "strided", "gaps"])


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same pictures (images, H, W, C) in other memory."""
    if layout == "first":
        return channel_first_memory(x)
    if layout == "strided":
        wide = torch.zeros(x.shape[0], x.shape[1] * 2, x.shape[2] * 3, x.shape[3] + 1, dtype=x.dtype)
        wide[:, ::2, 1::3, 1:] = x
        return wide[:, ::2, 1::3, 1:]
    if layout == "gaps":
        apart = torch.zeros(x.shape[0] * 2, *x.shape[1:], dtype=x.dtype)
        apart[1::2] = x
        return apart[1::2]
    return x


@settings(deadline=None, max_examples=150)
@given(
    shape=st.tuples(
        st.integers(0, 5), st.integers(1, 37), st.integers(1, 41), st.sampled_from([1, 2, 3, 4, 7, 12, 300])
    ),
    layout=layouts,
    out_layout=layouts,
    seed=st.integers(0, 1000),
)
def test_any_size_and_layout_is_within_one_ulp_of_the_exact_value(shape, layout, out_layout, seed) -> None:
    x = pictures(shape, seed)
    before = x.clone()
    out = laid_out(torch.full(shape, 9.0), out_layout)
    normalize_cpu(laid_out(x, layout), out)
    # one rounding to float32 is half an ulp; the float64 before it may move a tie
    assert ulps(out, exact(x)) <= 1.0
    assert torch.equal(x, before)
    plain = torch.empty(shape)
    normalize_torch(laid_out(x, layout), plain)
    assert torch.equal(out, plain)


@pytest.mark.parametrize(
    ("shape", "low", "high"),
    [
        ((1, 2160, 3840, 3), 0, 256),
        ((1, 2160, 3840, 1), 254, 256),
        ((2, 3000, 3000, 1), 255, 256),
        ((1, 1, 1, 3), 0, 256),
        ((3, 257, 193, 3), 250, 256),
        ((1, 70_000, 1, 5), 0, 256),
    ],
)
def test_large_pictures_do_not_overflow_and_keep_the_bound(shape, low, high) -> None:
    x = pictures(shape, low=low, high=high)
    out, plain = torch.empty(shape), torch.empty(shape)
    normalize_cpu(x, out)
    assert ulps(out, exact(x)) <= 1.0
    normalize_torch(x, plain)
    assert torch.equal(out, plain)
    first = channel_first_memory(torch.empty(shape))
    normalize_cpu(channel_first_memory(x), first)
    assert torch.equal(first, out)


def test_a_sum_past_32_bits_is_exact() -> None:
    # 4200² pixels of 255 sum to 4.5e9, past 2^32; all of them equal their mean
    x = torch.full((1, 4200, 4200, 1), 255, dtype=torch.uint8)
    out = torch.ones(x.shape)
    normalize_cpu(x, out)
    assert not out.any()
    x[0, 17, 23, 0] = 254
    normalize_cpu(x, out)
    pixels = 4200 * 4200
    assert out[0, 0, 0, 0] == np.float32(1 / (255 * pixels))
    assert out[0, 17, 23, 0] == np.float32((1 - pixels) / (255 * pixels))


def test_the_number_of_threads_and_of_neighbors_does_not_change_a_bit(use_threads) -> None:
    x = pictures((9, 64, 64, 3))
    out = torch.empty(x.shape)
    use_threads(3)
    normalize_cpu(x, out)
    use_threads(1)
    for image in range(9):
        alone = torch.empty(1, 64, 64, 3)
        normalize_cpu(x[image : image + 1], alone)
        assert torch.equal(alone[0], out[image])
