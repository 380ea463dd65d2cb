"""Every backend gives the outputs, final states and gradients of torch's own cells, a step at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from headrace import errors
from headrace.learning import GRU, LSTM
from headrace.learning._packed import pack, segments, unpack

# float64, and the same sums in another order
CLOSE = {"rtol": 1e-11, "atol": 1e-12}
MODULES = {"gru": GRU, "lstm": LSTM}
FAST = ["packed", "scan"]
RESETS = ["never", "first", "last", "every", "some"]


def make(kind: str, layers: int = 1, *, inputs: int = 3, hidden: int = 5, bias: bool = True) -> GRU | LSTM:
    torch.manual_seed(7)
    return MODULES[kind](inputs, hidden, layers, bias=bias, dtype=torch.float64)


def resets_of(name: str, steps: int, envs: int) -> Tensor:
    resets = torch.zeros(steps, envs, dtype=torch.bool)
    if name == "first":
        resets[:1] = True
    elif name == "last":
        resets[-1:] = True
    elif name == "every":
        resets[:] = True
    elif name == "some":
        resets = torch.rand(steps, envs, generator=torch.Generator().manual_seed(3)) < 0.3
    return resets


def run_slice(
    module: GRU | LSTM, x: Tensor, state: Tensor | tuple[Tensor, ...], resets: Tensor, active: Tensor | None
) -> tuple[Tensor, Tensor | tuple[Tensor, ...]]:
    """A slice by the module's backend, or, where that is "steps", step by step as when acting."""
    if module.backend != "steps":
        return module(x, state, resets, active)
    outputs = [x.new_zeros((0, x.shape[1], module.hidden_size))]
    for t in range(len(x)):
        live = None if active is None else active[t]
        row = x[t] if live is None else x[t].masked_fill(~live[:, None], 0)
        out, state = module.step(row, state, resets[t], live)
        outputs.append(out[None])
    return torch.cat(outputs), state


def run(
    module: GRU | LSTM, backend: str, x: Tensor, states: Sequence[Tensor], resets: Tensor, active: Tensor | None
) -> list[Tensor]:
    """Outputs, final states, and the gradients of everything that has one."""
    vars(module)["backend"] = backend
    x = x.clone().requires_grad_()
    states = [state.clone().requires_grad_() for state in states]
    out, after = run_slice(module, x, tuple(states) if isinstance(module, LSTM) else states[0], resets, active)
    ends = list(after) if isinstance(after, tuple) else [after]
    weigh = torch.arange(out.numel(), dtype=torch.float64).view_as(out).cos()
    loss = (out * weigh).sum() + sum((end * (1 + k)).square().sum() for k, end in enumerate(ends))
    parameters = list(module.parameters())
    grads = torch.autograd.grad(loss, [x, *states, *parameters], allow_unused=True)
    filled = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, [x, *states, *parameters], strict=True)]
    return [out.detach(), *(end.detach() for end in ends), *filled]


def compare(kind: str, backend: str, steps: int, envs: int, resets: Tensor, active: Tensor | None, **how: int) -> None:
    module = make(kind, **how)
    random = torch.Generator().manual_seed(steps * 100 + envs)
    x = torch.randn(steps, envs, module.input_size, generator=random, dtype=torch.float64)
    shape = (module.num_layers, envs, module.hidden_size)
    states = [torch.randn(shape, generator=random, dtype=torch.float64) for _ in range(1 + (kind == "lstm"))]
    expected = run(module, "steps", x, states, resets, active)
    for ours, theirs in zip(run(module, backend, x, states, resets, active), expected, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("pattern", RESETS)
@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("kind", MODULES)
def test_backends_agree_in_outputs_states_and_gradients(kind: str, backend: str, pattern: str) -> None:
    compare(kind, backend, 6, 4, resets_of(pattern, 6, 4), None)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("kind", MODULES)
def test_backends_agree_with_two_layers_and_sleeping_environments(kind: str, backend: str) -> None:
    active = torch.rand(7, 5, generator=torch.Generator().manual_seed(4)) < 0.6
    active[:, 2] = False
    compare(kind, backend, 7, 5, resets_of("some", 7, 5), active, layers=2)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("kind", MODULES)
def test_backends_agree_without_biases(kind: str, backend: str) -> None:
    compare(kind, backend, 5, 3, resets_of("some", 5, 3), None, bias=False)


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("kind", MODULES)
def test_backends_agree_on_the_shortest_slices(kind: str, backend: str, steps: int) -> None:
    compare(kind, backend, steps, 3, resets_of("some", steps, 3), None)


@pytest.mark.parametrize("kind", MODULES)
@settings(deadline=None, max_examples=40)
@given(
    steps=st.integers(0, 9),
    envs=st.integers(0, 6),
    seed=st.integers(0, 2**31),
    reset=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    awake=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_packed_and_scan_agree_with_steps_on_any_pattern(
    kind: str, steps: int, envs: int, seed: int, reset: float, awake: float
) -> None:
    random = torch.Generator().manual_seed(seed)
    resets = torch.rand(steps, envs, generator=random) < reset
    active = torch.rand(steps, envs, generator=random) < awake
    compare(kind, "packed", steps, envs, resets, active)
    compare(kind, "scan", steps, envs, resets, active)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("kind", MODULES)
def test_a_slice_with_resets_is_its_episodes_one_by_one_in_torch(kind: str, backend: str) -> None:
    """Against torch.nn.GRU and LSTM on each episode, with a state dict that went over unchanged."""
    module = make(kind, 2)
    theirs = {"gru": nn.GRU, "lstm": nn.LSTM}[kind](3, 5, 2).double()
    theirs.load_state_dict(module.state_dict())
    module.load_state_dict(theirs.state_dict())
    resets = resets_of("some", 8, 3)
    x = torch.randn(8, 3, 3, dtype=torch.float64)
    vars(module)["backend"] = backend
    out, _ = module(x, None, resets)
    for env in range(3):
        starts = sorted({0, *resets[:, env].nonzero().flatten().tolist()})
        for lo, hi in zip(starts, [*starts[1:], 8], strict=True):
            episode, _ = theirs(x[lo:hi, env])
            torch.testing.assert_close(out[lo:hi, env], episode, **CLOSE)


@pytest.mark.parametrize("kind", MODULES)
def test_acting_step_by_step_gives_the_slice(kind: str) -> None:
    module = make(kind, 2)
    vars(module)["backend"] = "packed"
    resets, active = resets_of("some", 9, 4), torch.rand(9, 4, generator=torch.Generator().manual_seed(5)) < 0.7
    x = torch.randn(9, 4, 3, dtype=torch.float64)
    out, after = module(x, None, resets, active)
    state = module.initial_state(4)
    for t in range(9):
        now, state = module.step(x[t], state, resets[t], active[t])
        torch.testing.assert_close(now, out[t], **CLOSE)
    for ours, whole in zip(state if kind == "lstm" else [state], after if kind == "lstm" else [after], strict=True):
        torch.testing.assert_close(ours, whole, **CLOSE)


@pytest.mark.parametrize("kind", MODULES)
def test_a_suspended_row_keeps_its_state_to_the_bit_whatever_its_input(kind: str) -> None:
    module = make(kind)
    shape = (1, 3, 5)
    states = tuple(torch.randn(shape, dtype=torch.float64) for _ in range(2))
    x = torch.randn(3, 3, dtype=torch.float64)
    x[1] = math.nan
    active = torch.tensor([True, False, True])
    out, after = module.step(x, states if kind == "lstm" else states[0], None, active)
    for before, now in zip(states, after if kind == "lstm" else [after], strict=False):
        assert torch.equal(before[:, 1], now[:, 1])
        assert not torch.equal(before[:, 0], now[:, 0])
        assert now.isfinite().all()
    assert torch.equal(out[1], torch.zeros(5, dtype=torch.float64))


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("kind", MODULES)
def test_nan_in_a_suspended_step_reaches_neither_outputs_nor_gradients(kind: str, backend: str) -> None:
    module = make(kind)
    x = torch.randn(5, 3, 3, dtype=torch.float64)
    active = torch.rand(5, 3, generator=torch.Generator().manual_seed(6)) < 0.6
    x[~active] = math.nan
    states = [torch.zeros(1, 3, 5, dtype=torch.float64)] * (1 + (kind == "lstm"))
    for result in run(module, backend, x, states, resets_of("some", 5, 3), active):
        assert result.isfinite().all()


@pytest.mark.parametrize("kind", MODULES)
def test_batch_first_is_the_transpose(kind: str) -> None:
    module = make(kind)
    other = MODULES[kind](3, 5, batch_first=True, dtype=torch.float64, backend="packed")
    other.load_state_dict(module.state_dict())
    x, resets = torch.randn(6, 4, 3, dtype=torch.float64), resets_of("some", 6, 4)
    out, _ = module(x, None, resets)
    transposed, _ = other(x.transpose(0, 1), None, resets.T)
    torch.testing.assert_close(transposed.transpose(0, 1), out, **CLOSE)


@pytest.mark.parametrize("kind", MODULES)
def test_scan_traces_into_one_graph_with_its_backward(kind: str) -> None:
    module = make(kind)
    vars(module)["backend"] = "auto"  # inside a compiled region that is scan
    x, resets = torch.randn(4, 3, 3, dtype=torch.float64), resets_of("some", 4, 3)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    out, _ = compiled(x, None, resets)
    out.sum().backward()
    got = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    vars(module)["backend"] = "packed"
    expected, _ = module(x, None, resets)
    expected.sum().backward()
    torch.testing.assert_close(out, expected, **CLOSE)
    for ours, parameter in zip(got, module.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad, **CLOSE)


@pytest.mark.parametrize("kind", MODULES)
def test_auto_is_packed_whatever_is_quickest(kind: str) -> None:
    module, x, resets = make(kind), torch.randn(5, 3, 3, dtype=torch.float64), resets_of("some", 5, 3)
    found = module(x, None, resets)[0]
    vars(module)["backend"] = "packed"
    assert torch.equal(found, module(x, None, resets)[0])


def test_packing_and_unpacking_keep_every_row_that_was_taken() -> None:
    resets = resets_of("some", 6, 4)
    active = torch.rand(6, 4, generator=torch.Generator().manual_seed(8)) < 0.5
    rows = (torch.arange(6)[:, None] + 1000 * torch.arange(4))[..., None].double() + 1
    layout = segments(resets, active)
    there = pack(rows, layout)
    assert layout.rows == int(active.sum())
    assert torch.equal(unpack(there, layout), rows * active[..., None])
    # each block continues the rows of the one before: same environment, a later step
    for (lo, _), (next_lo, next_hi) in zip(layout.blocks, layout.blocks[1:], strict=False):
        earlier, later = there[lo : lo + next_hi - next_lo, 0], there[next_lo:next_hi, 0]
        assert ((earlier // 1000) == (later // 1000)).all()
        assert (earlier < later).all()


def test_wrong_arguments_are_refused() -> None:
    module = make("gru")
    x = torch.zeros(4, 2, 3, dtype=torch.float64)
    with pytest.raises(errors.ShapeError, match=r"x: expected \(T, B, 3\), got \(4, 2, 4\)"):
        module(torch.zeros(4, 2, 4))
    with pytest.raises(errors.DtypeError, match=r"resets: expected torch.bool"):
        module(x, None, torch.zeros(4, 2))
    with pytest.raises(errors.ShapeError, match=r"resets: expected \(4, 2\).*got \(4, 2, 1\)"):
        module(x, None, torch.zeros(4, 2, 1, dtype=torch.bool))
    with pytest.raises(errors.ShapeError, match=r"state: expected .* \(1, 2, 5\), got \(1, 3, 5\)"):
        module(x, torch.zeros(1, 3, 5))
    with pytest.raises(errors.ShapeError, match=r"x: expected \(N, 3\).*forward"):
        module.step(x, torch.zeros(1, 2, 5))
    with pytest.raises(errors.UnknownNameError, match=r"unknown backend 'packd'.*'packed'"):
        GRU(3, 5, backend="packd")


@pytest.mark.parametrize("kind", MODULES)
def test_a_seed_makes_the_parameters_that_torch_makes(kind: str) -> None:
    module = make(kind, 2)
    torch.manual_seed(7)
    theirs = {"gru": nn.GRU, "lstm": nn.LSTM}[kind](3, 5, 2, dtype=torch.float64)
    ours = module.state_dict()
    assert list(ours) == list(theirs.state_dict())
    for name, parameter in theirs.state_dict().items():
        assert torch.equal(ours[name], parameter)
