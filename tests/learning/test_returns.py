"""Return recursions against slow references: numba kernels against torch, n-step returns against loops; gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from headrace import learning
from headrace.learning import _returns as returns
from headrace.learning import _returns_numba as returns_numba
from headrace.learning._returns import Recursion, Returns, Trace

SHAPES = [(0, 3), (3, 0), (1, 1), (7, 33), (24, 513), (130, 64), (3, 2500)]
# float64; a compiler may contract a product and a sum into one rounding, torch does not
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


def n_step_by_step(data: Trace, gamma: float, n: int) -> Returns:
    """Follow every step's next ones, as many as there are."""
    steps, envs = data.reward.shape
    live = torch.ones(steps, envs, dtype=torch.bool) if data.active is None else data.active
    reward, value, after, terminated, truncated = (column.tolist() for column in data[:5])
    advantage, target = torch.zeros(2, steps, envs, dtype=data.reward.dtype)
    for e in range(envs):
        acted = live[:, e].nonzero()[:, 0].tolist()
        for i, t in enumerate(acted):
            total, weight = 0.0, 1.0
            for place, u in enumerate(acted[i : i + n], start=i):
                total, weight = total + weight * reward[u][e], weight * gamma
                cut = truncated[u][e] or place + 1 == len(acted)
                if terminated[u][e]:
                    break
                if cut or place + 1 == i + n:
                    total += weight * (value[u][e] if cut and math.isnan(after[u][e]) else after[u][e])
                    break
            target[t, e], advantage[t, e] = total, total - value[t][e]
    return advantage, target


def estimate(case: str, data: Trace, ratio: Tensor, *, in_torch: bool = False) -> Returns:
    recursion = CASES[case]
    if isinstance(recursion, int):
        if in_torch:
            return n_step_by_step(data, 0.98, recursion)
        return returns.sum_steps(data, gamma=0.98, n=recursion)
    ratios = ratio if "vtrace" in case else None
    if in_torch:
        return returns.lambda_returns_in_torch(data, recursion, ratios)
    return returns.lambda_returns(data, recursion, ratios)


@pytest.mark.parametrize("sleepy", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", CASES)
def test_kernel_agrees_with_the_reference_and_is_finite(case: str, shape: tuple[int, int], sleepy: bool) -> None:
    data, ratio = rollout(shape, torch.float64, sleepy=sleepy)
    expected = estimate(case, data, ratio, in_torch=True)
    for ours, theirs in zip(estimate(case, data, ratio), expected, strict=True):
        assert theirs.isfinite().all()
        torch.testing.assert_close(ours, theirs, **TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_float32_kernel_computes_in_float32(case: str) -> None:
    data, ratio = rollout((24, 2500), torch.float32, sleepy=True)
    expected = estimate(case, data, ratio, in_torch=True)
    for ours, theirs in zip(estimate(case, data, ratio), expected, strict=True):
        assert ours.dtype == torch.float32
        # sums of tens of float32 numbers of size 1, in another order of rounding
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("sleepy", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_the_numerical_ones_and_finite_beside_nan(case: str, sleepy: bool) -> None:
    data, ratio = rollout((5, 3), torch.float64, sleepy=sleepy)
    # what is read, and nothing else: a number that is not read has no numerical gradient where it is NaN
    numbers = [data.reward, data.value, data.next_value, ratio]
    known = [number.isfinite() for number in numbers]
    recursion = CASES[case]

    def run(*read: Tensor) -> Returns:
        full = [number.masked_scatter(mask, part) for number, mask, part in zip(numbers, known, read, strict=True)]
        trace = Trace(*full[:3], *data[3:])
        if isinstance(recursion, int):
            return returns.sum_steps(trace, gamma=0.98, n=recursion, differentiable=True)
        return returns.lambda_returns(trace, recursion, full[3] if "vtrace" in case else None, differentiable=True)

    parts = [number[mask].clone().requires_grad_() for number, mask in zip(numbers, known, strict=True)]
    assert torch.autograd.gradcheck(run, parts)
    whole = [number.clone().requires_grad_() for number in numbers[:3]]
    trace = Trace(*whole, *data[3:])
    if isinstance(recursion, int):
        out = returns.sum_steps(trace, gamma=0.98, n=recursion, differentiable=True)
    else:
        out = returns.lambda_returns(trace, recursion, ratio if "vtrace" in case else None, differentiable=True)
    for gradient in torch.autograd.grad(sum(part.sum() for part in out), whole, allow_unused=True):
        assert gradient is None or gradient.isfinite().all()


def test_estimators_carry_gradients_only_if_asked() -> None:
    data, ratio = rollout((6, 4), torch.float64, sleepy=False)
    value = data.value.requires_grad_()
    args = (data.reward, value, data.next_value.nan_to_num(), data.terminated, data.truncated)
    for make in (
        lambda **how: learning.gae(*args, gamma=0.9, lam=0.8, **how),
        lambda **how: learning.n_step(*args, gamma=0.9, n=1, **how),
        lambda **how: learning.td_lambda(*args, gamma=0.9, lam=0.8, **how),
        lambda **how: learning.td_lambda(*args, gamma=0.9, lam=1.0, **how),
        lambda **how: learning.n_step(*args, gamma=0.9, n=2, **how),
        lambda **how: learning.vtrace(*args, ratio.log(), gamma=0.9, **how),
    ):
        with_gradient = make(differentiable=True)
        assert with_gradient.advantage.requires_grad
        for plain, other in zip(make(), with_gradient, strict=True):
            assert not plain.requires_grad
            torch.testing.assert_close(plain, other.detach(), **TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_result_does_not_depend_on_how_environments_are_shared_out(
    case: str, monkeypatch: pytest.MonkeyPatch, use_threads
) -> None:
    data, ratio = rollout((24, 2500), torch.float32, sleepy=True)
    alone = estimate(case, data, ratio)
    monkeypatch.setattr(returns_numba, "_SHARE", 0)
    use_threads(3)
    for one, other in zip(alone, estimate(case, data, ratio), strict=True):
        assert torch.equal(one, other)
