"""The one-pass and the parallel form of the linear recurrence against a loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.learning import linear_scan as linear_scan_module
from headrace.learning.linear_scan import linear_scan, linear_scan_parallel


def loop(a: Tensor, b: Tensor, h0: Tensor) -> Tensor:
    states = []
    for a_t, b_t in zip(a, b, strict=True):
        h0 = a_t * h0 + b_t
        states.append(h0)
    return torch.stack(states) if states else torch.zeros_like(b)


@pytest.mark.parametrize("form", [linear_scan, linear_scan_parallel])
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (2, 5), (7, 3, 4), (64, 2, 700), (100, 1)])
def test_scan_agrees_with_a_loop(form: object, shape: tuple[int, ...]) -> None:
    random = torch.Generator().manual_seed(sum(shape))
    a = torch.rand(shape, generator=random, dtype=torch.float64)
    b = torch.randn(shape, generator=random, dtype=torch.float64)
    h0 = torch.randn(shape[1:], generator=random, dtype=torch.float64)
    assert callable(form)
    # products of up to a hundred factors below 1, multiplied in another order
    torch.testing.assert_close(form(a, b, h0), loop(a, b, h0), rtol=1e-11, atol=1e-13)


def test_strided_inputs_and_float32() -> None:
    a, b = torch.rand(9, 4, 6)[:, ::2], torch.randn(9, 6, 4).transpose(1, 2)[:, ::2]
    out = linear_scan(a, b, torch.zeros(2, 6))
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, loop(a, b, torch.zeros(2, 6)))


def test_result_does_not_depend_on_how_columns_are_shared_out(monkeypatch: pytest.MonkeyPatch, use_threads) -> None:
    a, b, h0 = torch.rand(9, 2500), torch.randn(9, 2500), torch.randn(2500)
    alone = linear_scan_module.linear_scan(a, b, h0)
    monkeypatch.setattr(linear_scan_module, "_SHARE", 0)
    for threads in (2, 3, 7):
        use_threads(threads)
        assert torch.equal(linear_scan_module.linear_scan(a, b, h0), alone)
