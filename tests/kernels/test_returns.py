"""The numba and Warp kernels of the return recursions against the plain torch ones."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headrace._kernels import returns, returns_reference

SHAPES = [(0, 3), (3, 0), (1, 1), (7, 33), (24, 513), (130, 64), (3, 2500)]
# float64; Warp contracts a product and a sum into one rounding, torch does not
TOLERANCE = {"rtol": 1e-11, "atol": 1e-11}


def rollout(shape: tuple[int, int], dtype: torch.dtype, *, sleepy: bool) -> tuple[list[Tensor], Tensor | None, Tensor]:
    random = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    reward, value, next_value = (torch.randn(shape, generator=random, dtype=dtype) for _ in range(3))
    terminated, truncated = (torch.rand(shape, generator=random) < 0.1 for _ in range(2))
    ratio = torch.rand(shape, generator=random, dtype=dtype) * 2
    next_value[terminated] = math.nan
    active = torch.rand(shape, generator=random) < 0.8 if sleepy else None
    return [reward, value, next_value, terminated, truncated], active, ratio


CASES: dict[str, dict[str, float]] = {
    "gae": {"gamma": 0.98, "lam": 0.95},
    "td_lambda": {"gamma": 0.98, "lam": 0.95},
    "td_lambda_1": {"gamma": 0.98, "lam": 1.0},
    "n_step": {"gamma": 0.98, "n": 4},
    "vtrace": {"gamma": 0.98, "rho_clip": 1.2, "c_clip": 0.9},
}


def pair(case: str, prefix: str) -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., tuple[Tensor, Tensor]]]:
    name = case.removesuffix("_1")
    return getattr(returns, prefix + name), getattr(returns_reference, name)


@pytest.mark.parametrize("sleepy", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("prefix", ["", "warp_"])
def test_kernel_agrees_with_the_reference(prefix: str, case: str, shape: tuple[int, int], sleepy: bool) -> None:
    if prefix:
        pytest.importorskip("warp")
    kernel, reference = pair(case, prefix)
    tensors, active, ratio = rollout(shape, torch.float64, sleepy=sleepy)
    extra = [ratio] if case == "vtrace" else []
    live = torch.ones(shape, dtype=torch.bool) if active is None else active
    got = kernel(*tensors, active, *extra, **CASES[case])
    expected = reference(*tensors, live, *extra, **CASES[case])
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("prefix", ["", "warp_"])
def test_float32_kernel_computes_in_float32(prefix: str, case: str) -> None:
    if prefix:
        pytest.importorskip("warp")
    kernel, reference = pair(case, prefix)
    tensors, active, ratio = rollout((24, 2500), torch.float32, sleepy=True)
    extra = [ratio] if case == "vtrace" else []
    got = kernel(*tensors, active, *extra, **CASES[case])
    expected = reference(*tensors, active, *extra, **CASES[case])
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == torch.float32
        # sums of tens of float32 numbers of size 1, in another order of rounding
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("case", CASES)
def test_result_does_not_depend_on_how_environments_are_shared_out(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, _ = pair(case, "")
    tensors, active, ratio = rollout((24, 2500), torch.float32, sleepy=True)
    extra = [ratio] if case == "vtrace" else []
    alone = kernel(*tensors, active, *extra, **CASES[case])
    monkeypatch.setattr(returns, "_SHARE", 0)
    shared = kernel(*tensors, active, *extra, **CASES[case])
    for one, other in zip(alone, shared, strict=True):
        assert torch.equal(one, other)
