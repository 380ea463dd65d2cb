"""minGRU by scan against a loop over its definition, and the interface it shares with GRU."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace import errors
from headrace.learning import MinGRU
from headrace.learning._min_gru import linear_recurrence

# float64, the same sums in another order
CLOSE = {"rtol": 1e-11, "atol": 1e-12}


def make(layers: int = 1, *, batch_first: bool = False) -> MinGRU:
    torch.manual_seed(3)
    return MinGRU(3, 5, layers, batch_first=batch_first, dtype=torch.float64)


def loop(module: MinGRU, x: Tensor, state: Tensor, resets: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, an environment and a step at a time."""
    finals = []
    for depth, layer in enumerate(module.layers):
        outputs = []
        h = list(state[depth])
        for t in range(x.shape[0]):
            row = []
            for env in range(x.shape[1]):
                if resets[t, env]:
                    h[env] = torch.zeros_like(h[env])
                if active[t, env]:
                    z, g = layer(x[t, env]).chunk(2)
                    h[env] = (1 - z.sigmoid()) * h[env] + z.sigmoid() * g
                    row.append(h[env])
                else:
                    row.append(torch.zeros_like(h[env]))
            outputs.append(torch.stack(row))
        x = torch.stack(outputs)
        finals.append(torch.stack(h))
    return x, torch.stack(finals)


@settings(deadline=None, max_examples=25)
@given(
    steps=st.integers(1, 7),
    envs=st.integers(1, 4),
    layers=st.integers(1, 2),
    seed=st.integers(0, 2**31),
    reset=st.sampled_from([0.0, 0.3, 1.0]),
    awake=st.sampled_from([0.0, 0.7, 1.0]),
)
def test_a_slice_follows_the_definition_with_its_gradients(
    steps: int, envs: int, layers: int, seed: int, reset: float, awake: float
) -> None:
    module, random = make(layers), torch.Generator().manual_seed(seed)
    x = torch.randn(steps, envs, 3, generator=random, dtype=torch.float64).requires_grad_()
    state = torch.randn(layers, envs, 5, generator=random, dtype=torch.float64).requires_grad_()
    resets = torch.rand(steps, envs, generator=random) < reset
    active = torch.rand(steps, envs, generator=random) < awake
    inputs = [x, state, *module.parameters()]

    def results(out: Tensor, after: Tensor) -> list[Tensor]:
        loss = (out * torch.arange(out.numel()).view_as(out).cos()).sum() + after.square().sum()
        # so that an input that nothing depends on has a gradient too: zero
        loss = loss + sum((0 * tensor).sum() for tensor in inputs)
        return [out, after, *torch.autograd.grad(loss, inputs)]

    ours = results(*module(x, state, resets, active))
    for mine, theirs in zip(ours, results(*loop(module, x, state, resets, active)), strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)


def test_gradient_of_the_recurrence_is_the_numerical_one() -> None:
    keep, add, initial = (torch.rand(*shape, dtype=torch.float64).requires_grad_() for shape in [(4, 3), (4, 3), (3,)])
    assert torch.autograd.gradcheck(linear_recurrence, (keep, add, initial))


def test_acting_step_by_step_gives_the_slice() -> None:
    module = make(2)
    x = torch.randn(8, 4, 3, dtype=torch.float64)
    resets, active = torch.rand(8, 4) < 0.3, torch.rand(8, 4) < 0.7
    out, after = module(x, None, resets, active)
    state = module.initial_state(4)
    for t in range(8):
        now, state = module.step(x[t], state, resets[t], active[t])
        torch.testing.assert_close(now, out[t], **CLOSE)
    torch.testing.assert_close(state, after, **CLOSE)


def test_a_suspended_row_keeps_its_state_to_the_bit_whatever_its_input() -> None:
    module, state = make(), torch.randn(1, 2, 5, dtype=torch.float64)
    x = torch.tensor([[1.0, 2, 3], [math.nan] * 3], dtype=torch.float64)
    out, after = module.step(x, state, None, torch.tensor([True, False]))
    assert torch.equal(after[:, 1], state[:, 1])
    assert torch.equal(out[1], torch.zeros(5, dtype=torch.float64))
    assert after.isfinite().all()


def test_batch_first_and_empty_slices() -> None:
    module, other = make(), make(batch_first=True)
    x, resets = torch.randn(6, 4, 3, dtype=torch.float64), torch.rand(6, 4) < 0.3
    out, _ = module(x, None, resets)
    transposed, _ = other(x.transpose(0, 1), None, resets.T)
    assert torch.equal(transposed.transpose(0, 1), out)
    state = torch.randn(1, 4, 5, dtype=torch.float64)
    nothing, same = module(x[:0], state)
    assert nothing.shape == (0, 4, 5)
    assert torch.equal(same, state)


def test_wrong_arguments_are_refused() -> None:
    module, x = make(), torch.zeros(4, 2, 3, dtype=torch.float64)
    with pytest.raises(errors.ShapeError, match=r"x: expected \(T, B, 3\)"):
        module(x[0])
    with pytest.raises(errors.DtypeError, match=r"active: expected torch.bool"):
        module(x, active=torch.ones(4, 2))
    with pytest.raises(errors.ShapeError, match=r"resets: expected \(4, 2\)"):
        module(x, resets=torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(errors.ShapeError, match=r"state: expected"):
        module(x, torch.zeros(4, 5))
    with pytest.raises(errors.ShapeError, match=r"x: expected \(N, 3\)"):
        module.step(x, torch.zeros(1, 2, 5))
    with pytest.raises(errors.ConfigError, match="at least 1"):
        MinGRU(3, 0)
