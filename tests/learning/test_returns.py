"""The numba and Warp kernels of the return recursions against the plain torch ones."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from headrace.learning import _return_recursions as returns
from headrace.learning import _returns_numba as returns_numba
from headrace.learning._return_recursions import Backend, Recursion, Returns, Trace

SHAPES = [(0, 3), (3, 0), (1, 1), (7, 33), (24, 513), (130, 64), (3, 2500)]
# float64; Warp contracts a product and a sum into one rounding, torch does not
TOLERANCE = {"rtol": 1e-11, "atol": 1e-11}

CASES = {
    "gae": Recursion(0.98, 0.95, base=1),
    "td_lambda": Recursion(0.98, 0.95, base=0),
    "monte_carlo": Recursion(0.98, 1.0, base=0),
    "vtrace": Recursion(0.98, 1.0, base=1, rho_clip=1.2, c_clip=0.9),
    "vtrace_lambda": Recursion(0.98, 0.9, base=1, rho_clip=1.2, c_clip=0.9),
    "n_step": 4,
    "one_step": 1,
}


def rollout(shape: tuple[int, int], dtype: torch.dtype, *, sleepy: bool) -> tuple[Trace, Tensor]:
    """NaN wherever nothing may be read, and half of what a cut trajectory would bootstrap with."""
    random = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    reward, value, next_value = (torch.randn(shape, generator=random, dtype=dtype) for _ in range(3))
    terminated, truncated = (torch.rand(shape, generator=random) < 0.1 for _ in range(2))
    ratio = torch.rand(shape, generator=random, dtype=dtype) * 2
    active = torch.rand(shape, generator=random) < 0.8 if sleepy else None
    missing = torch.rand(shape, generator=random) < 0.5
    live = torch.ones(shape, dtype=torch.bool) if active is None else active
    last = live & (live.flip(0).cumsum(0).flip(0) == 1)
    next_value[terminated | (missing & (truncated | last))] = math.nan
    for tensor in (reward, value, next_value, ratio):
        tensor[~live] = math.nan
    return Trace(reward, value, next_value, terminated, truncated, active), ratio


def estimate(case: str, data: Trace, ratio: Tensor, backend: Backend | None) -> Returns:
    recursion = CASES[case]
    if isinstance(recursion, int):
        return returns.n_step(data, gamma=0.98, n=recursion, backend=backend)
    return returns.lambda_returns(data, recursion, ratio if "vtrace" in case else None, backend=backend)


@pytest.mark.parametrize("sleepy", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", ["numba", "warp"])
def test_kernel_agrees_with_the_reference_and_is_finite(
    backend: Backend, case: str, shape: tuple[int, int], sleepy: bool
) -> None:
    if backend == "warp":
        pytest.importorskip("warp")
    data, ratio = rollout(shape, torch.float64, sleepy=sleepy)
    expected = estimate(case, data, ratio, "reference")
    for ours, theirs in zip(estimate(case, data, ratio, backend), expected, strict=True):
        assert theirs.isfinite().all()
        torch.testing.assert_close(ours, theirs, **TOLERANCE)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", ["numba", "warp"])
def test_float32_kernel_computes_in_float32(backend: Backend, case: str) -> None:
    if backend == "warp":
        pytest.importorskip("warp")
    data, ratio = rollout((24, 2500), torch.float32, sleepy=True)
    expected = estimate(case, data, ratio, "reference")
    for ours, theirs in zip(estimate(case, data, ratio, backend), expected, strict=True):
        assert ours.dtype == torch.float32
        # sums of tens of float32 numbers of size 1, in another order of rounding
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("case", CASES)
def test_result_does_not_depend_on_how_environments_are_shared_out(
    case: str, monkeypatch: pytest.MonkeyPatch, use_threads
) -> None:
    data, ratio = rollout((24, 2500), torch.float32, sleepy=True)
    alone = estimate(case, data, ratio, None)
    monkeypatch.setattr(returns_numba, "_SHARE", 0)
    use_threads(3)
    for one, other in zip(alone, estimate(case, data, ratio, None), strict=True):
        assert torch.equal(one, other)
