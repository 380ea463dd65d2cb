"""Counter-based randomness: a number is a function of (seed, episode id, stream, draw), and looks random."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import rng

INT64 = st.integers(-(2**63), 2**63 - 1)


def scalar_bits(seed: int, episode: int, stream: str, draw: int) -> int:
    """The definition in the module's docstring, on Python integers."""
    golden = 0x9E3779B97F4A7C15
    start = rng.mix64(rng.stream_key(seed, stream) ^ rng.mix64(episode + golden))
    value = rng.mix64(start + (draw + 1) * golden)
    return value - 2**64 if value >= 2**63 else value


@settings(deadline=None, max_examples=50)
@given(seed=INT64, episodes=st.lists(INT64, min_size=1, max_size=5), draw=st.integers(0, 2**40), stream=st.text())
def test_bits_equal_the_definition_on_python_integers(seed, episodes, draw, stream) -> None:
    bits = rng.random_bits(seed, torch.tensor(episodes), stream, draw, 3)
    assert bits.tolist() == [[scalar_bits(seed, e, stream, draw + j) for j in range(3)] for e in episodes]


@settings(deadline=None, max_examples=50)
@given(seed=INT64, episodes=st.lists(INT64, max_size=5), first=st.integers(0, 2**40), count=st.integers(0, 9))
def test_kernel_equals_the_torch_reference(seed, episodes, first, count) -> None:
    ids = torch.tensor(episodes, dtype=torch.int64)
    draws = torch.arange(len(episodes)) + first
    expected = rng.bits_reference(rng.stream_key(seed, "reset"), ids, draws, count)
    assert torch.equal(rng.random_bits(seed, ids, "reset", draws, count), expected)
    unit = ((expected >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53
    uniform = rng.uniform(seed, ids, "reset", count, low=-2.0, high=3.0, draw=draws)
    assert torch.equal(uniform, unit * 5.0 - 2.0)


def test_mix64_is_splitmix64() -> None:
    # the first outputs of the published SplitMix64 generator with seed 1234567
    golden = 0x9E3779B97F4A7C15
    outputs = [rng.mix64(1234567 + (k + 1) * golden) for k in range(3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("draw_numbers", [rng.uniform, rng.normal], ids=["uniform", "normal"])
def test_row_of_an_episode_does_not_depend_on_the_other_rows(draw_numbers) -> None:
    ids = torch.arange(100)
    together = draw_numbers(7, ids, "noise", 5)
    shuffled = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    assert torch.equal(draw_numbers(7, ids[shuffled], "noise", 5), together[shuffled])
    assert torch.equal(draw_numbers(7, ids[41:42], "noise", 5), together[41:42])


@pytest.mark.parametrize("draw_numbers", [rng.uniform, rng.normal], ids=["uniform", "normal"])
def test_numbers_can_be_drawn_in_one_call_or_in_several(draw_numbers) -> None:
    ids = torch.tensor([3, 1, 4])
    at_once = draw_numbers(7, ids, "noise", 6)
    halves = (draw_numbers(7, ids, "noise", 3), draw_numbers(7, ids, "noise", 3, draw=3))
    assert torch.equal(torch.cat(halves, dim=1), at_once)


def test_normal_is_the_box_muller_transform_of_the_bits() -> None:
    ids = torch.arange(50)
    bits = rng.random_bits(3, ids, "n", 0, 8)
    unit = ((bits >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53
    radius, angle = unit[:, 0::2], unit[:, 1::2]
    expected = 2.5 * torch.sqrt(-2 * torch.log(1 - radius)) * torch.cos(2 * math.pi * angle)
    # the kernel calls libm where torch calls its own vectorized log and cos: an ulp or two apart
    torch.testing.assert_close(rng.normal(3, ids, "n", 4, std=2.5), expected, rtol=1e-13, atol=1e-13)


def test_seed_stream_episode_and_draw_each_give_other_numbers() -> None:
    ids = torch.arange(1000)
    streams = [rng.uniform(seed, ids, stream, 1)[:, 0] for seed in (0, 1) for stream in ("qpos", "qvel")]
    streams.append(rng.uniform(0, ids, "qpos", 1, draw=1)[:, 0])
    streams.append(rng.uniform(0, ids + 1, "qpos", 1)[:, 0])
    distinct = torch.stack(streams)
    # independent columns of 1000: correlations are about 1/√1000 = 0.03; five times that would be a bug
    correlations = torch.corrcoef(distinct) - torch.eye(len(streams), dtype=torch.float64)
    # the last one is the first, shifted by one episode: uncorrelated row by row
    assert float(correlations.abs().max()) < 0.16
    assert len(distinct.flatten().unique()) >= 5 * 1000


def test_uniform_fills_its_range_and_nothing_else() -> None:
    numbers = rng.uniform(11, torch.arange(2000), "u", 50, low=-3.0, high=5.0).flatten()
    assert float(numbers.min()) >= -3.0
    assert float(numbers.max()) < 5.0
    counts = torch.histc(numbers, bins=16, min=-3.0, max=5.0)
    # 100,000 numbers in 16 cells: chi-squared with 15 degrees of freedom is below 45 but once in 10⁴ seeds
    expected = numbers.numel() / 16
    assert float(((counts - expected) ** 2 / expected).sum()) < 45


def test_normal_has_the_moments_of_a_normal_distribution() -> None:
    numbers = rng.normal(11, torch.arange(2000), "n", 50, std=2.0).flatten() / 2.0
    assert bool(torch.isfinite(numbers).all())
    # standard errors at n = 100,000: mean 0.003, variance 0.0045, fourth moment 0.03; five of each
    assert abs(float(numbers.mean())) < 0.016
    assert abs(float(numbers.var()) - 1.0) < 0.023
    assert abs(float((numbers**4).mean()) - 3.0) < 0.16


def test_no_rows_and_no_numbers_are_fine() -> None:
    none = torch.empty(0, dtype=torch.int64)
    assert rng.uniform(0, none, "u", 3).shape == (0, 3)
    assert rng.normal(0, torch.arange(3), "n", 0).shape == (3, 0)


def test_numbers_are_the_same_in_another_process_which_imports_numba_when_it_draws() -> None:
    program = (
        "import sys, torch; from headrace import rng; print('numba' in sys.modules)\n"
        "print(rng.normal(5, torch.arange(4), 'x', 3).tolist())"
    )
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert there.splitlines() == ["False", str(rng.normal(5, torch.arange(4), "x", 3).tolist())]


@pytest.mark.slow
def test_a_second_process_finds_the_kernels_on_disk(tmp_path) -> None:
    program = (
        "import torch; from headrace import rng, _rng_kernels as rng_kernels\n"
        "ids = torch.arange(3)\n"
        "rng.random_bits(0, ids, 'a', 0, 2), rng.uniform(0, ids, 'a', 2), rng.normal(0, ids, 'a', 2)\n"
        "kernels = (rng_kernels.bits, rng_kernels.uniforms, rng_kernels.normals)\n"
        "print(sum(kernel.stats.cache_misses.total() for kernel in kernels))"
    )
    missed = [
        int(
            subprocess.run(
                [sys.executable, "-c", program],
                env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        )
        for _ in range(2)
    ]
    assert missed == [3, 0]
