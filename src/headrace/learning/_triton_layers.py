"""GRU and LSTM layers in Triton: the loop over steps inside one kernel, resets and sleep included.

A program takes a block of environments through all T steps with its state in registers; forward stores what backward
needs, backward walks the same way home. Input projections and weight gradients are large matrix products and stay
outside. The hidden size is padded to a power of two, at most 256: the state of a block has to fit in registers.

``TRITON_INTERPRET=1`` runs the kernels on CPU tensors, slowly: that is how they are tested.
"""

# Triton reads these functions as its own language, which no type checker knows:
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportMissingTypeArgument=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportOptionalSubscript=false

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.errors import ConfigError
from headrace.learning._backends import Kind, States
from headrace.learning._packed import LayerWeights

_LARGEST = 256
_ROWS = 16  # environments a program; the least that tl.dot takes


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _gru_forward(
    # inputs: gates (T, B, 3H) before the recurrent part, w_hh (3H, H), b_n (H), h0 (B, H), flags (T, B) as int8
    gates_ptr, w_ptr, b_n_ptr, h0_ptr, resets_ptr, active_ptr,
    # outputs: state after each step, r z n and the inner part of n for backward
    states_ptr, saved_ptr, inner_ptr,
    steps, envs, size: tl.constexpr, rows_per_program: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows_per_program + tl.arange(0, rows_per_program)
    col = tl.arange(0, width)
    some = (row[:, None] < envs) & (col[None, :] < size)
    place = row[:, None] * size + col[None, :]
    # w[k, j] multiplies state k into gate j, so the matrix is read transposed
    w_place = col[None, :] * size + col[:, None]
    w_some = (col[None, :] < size) & (col[:, None] < size)
    b_n = tl.load(b_n_ptr + col, mask=col < size, other=0.0)
    h = tl.load(h0_ptr + place, mask=some, other=0.0)
    for t in range(steps):
        reset = tl.load(resets_ptr + t * envs + row, mask=row < envs, other=0)
        live = tl.load(active_ptr + t * envs + row, mask=row < envs, other=0)
        h = tl.where(reset[:, None] != 0, 0.0, h)
        w_r = tl.load(w_ptr + w_place, mask=w_some, other=0.0)
        w_z = tl.load(w_ptr + size * size + w_place, mask=w_some, other=0.0)
        w_n = tl.load(w_ptr + 2 * size * size + w_place, mask=w_some, other=0.0)
        gate_place = (t * envs + row[:, None]) * 3 * size + col[None, :]
        r = tl.sigmoid(tl.load(gates_ptr + gate_place, mask=some, other=0.0) + tl.dot(h, w_r, input_precision="ieee"))
        z = tl.sigmoid(
            tl.load(gates_ptr + gate_place + size, mask=some, other=0.0) + tl.dot(h, w_z, input_precision="ieee")
        )
        inner = tl.dot(h, w_n, input_precision="ieee") + b_n[None, :]
        n = _tanh(tl.load(gates_ptr + gate_place + 2 * size, mask=some, other=0.0) + r * inner)
        h = tl.where(live[:, None] != 0, n + z * (h - n), h)
        tl.store(states_ptr + t * envs * size + place, h, mask=some)
        tl.store(saved_ptr + gate_place, r, mask=some)
        tl.store(saved_ptr + gate_place + size, z, mask=some)
        tl.store(saved_ptr + gate_place + 2 * size, n, mask=some)
        tl.store(inner_ptr + t * envs * size + place, inner, mask=some)


@triton.jit
def _gru_backward(
    # inputs
    d_states_ptr, previous_ptr, saved_ptr, inner_ptr, w_ptr, resets_ptr, active_ptr,
    # outputs: (T, B, 4H) gradients of n r z r·n, (B, H) of the initial state
    d_ptr, d_h0_ptr,
    steps, envs, size: tl.constexpr, rows_per_program: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows_per_program + tl.arange(0, rows_per_program)
    col = tl.arange(0, width)
    some = (row[:, None] < envs) & (col[None, :] < size)
    place = row[:, None] * size + col[None, :]
    w_place = col[:, None] * size + col[None, :]
    w_some = (col[:, None] < size) & (col[None, :] < size)
    d_h = tl.load(d_h0_ptr + place, mask=some, other=0.0)  # zeros, in the dtype of the work
    for back in range(steps):
        t = steps - 1 - back
        reset = tl.load(resets_ptr + t * envs + row, mask=row < envs, other=0)
        live = tl.load(active_ptr + t * envs + row, mask=row < envs, other=0)
        gate_place = (t * envs + row[:, None]) * 3 * size + col[None, :]
        r = tl.load(saved_ptr + gate_place, mask=some, other=0.0)
        z = tl.load(saved_ptr + gate_place + size, mask=some, other=0.0)
        n = tl.load(saved_ptr + gate_place + 2 * size, mask=some, other=0.0)
        inner = tl.load(inner_ptr + t * envs * size + place, mask=some, other=0.0)
        previous = tl.load(previous_ptr + t * envs * size + place, mask=some, other=0.0)
        d_h += tl.load(d_states_ptr + t * envs * size + place, mask=some, other=0.0)
        d_live = tl.where(live[:, None] != 0, d_h, 0.0)
        d_n = d_live * (1 - z) * (1 - n * n)
        d_z = d_live * (previous - n) * z * (1 - z)
        d_r = d_n * inner * r * (1 - r)
        d_rn = d_n * r
        d_place = (t * envs + row[:, None]) * 4 * size + col[None, :]
        tl.store(d_ptr + d_place, d_n, mask=some)
        tl.store(d_ptr + d_place + size, d_r, mask=some)
        tl.store(d_ptr + d_place + 2 * size, d_z, mask=some)
        tl.store(d_ptr + d_place + 3 * size, d_rn, mask=some)
        w_r = tl.load(w_ptr + w_place, mask=w_some, other=0.0)
        w_z = tl.load(w_ptr + size * size + w_place, mask=w_some, other=0.0)
        w_n = tl.load(w_ptr + 2 * size * size + w_place, mask=w_some, other=0.0)
        through = d_live * z + tl.dot(d_r, w_r, input_precision="ieee")
        through += tl.dot(d_z, w_z, input_precision="ieee") + tl.dot(d_rn, w_n, input_precision="ieee")
        d_h = tl.where(live[:, None] != 0, through, d_h)
        d_h = tl.where(reset[:, None] != 0, 0.0, d_h)
    tl.store(d_h0_ptr + place, d_h, mask=some)


@triton.jit
def _lstm_forward(
    # inputs: gates (T, B, 4H) before the recurrent part, w_hh (4H, H), h0 and c0 (B, H), flags (T, B) as int8
    gates_ptr, w_ptr, h0_ptr, c0_ptr, resets_ptr, active_ptr,
    # outputs
    states_ptr, cells_ptr, saved_ptr,
    steps, envs, size: tl.constexpr, rows_per_program: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows_per_program + tl.arange(0, rows_per_program)
    col = tl.arange(0, width)
    some = (row[:, None] < envs) & (col[None, :] < size)
    place = row[:, None] * size + col[None, :]
    w_place = col[None, :] * size + col[:, None]
    w_some = (col[None, :] < size) & (col[:, None] < size)
    h = tl.load(h0_ptr + place, mask=some, other=0.0)
    c = tl.load(c0_ptr + place, mask=some, other=0.0)
    for t in range(steps):
        reset = tl.load(resets_ptr + t * envs + row, mask=row < envs, other=0)
        live = tl.load(active_ptr + t * envs + row, mask=row < envs, other=0)
        h = tl.where(reset[:, None] != 0, 0.0, h)
        c = tl.where(reset[:, None] != 0, 0.0, c)
        gate_place = (t * envs + row[:, None]) * 4 * size + col[None, :]
        w_i = tl.load(w_ptr + w_place, mask=w_some, other=0.0)
        w_f = tl.load(w_ptr + size * size + w_place, mask=w_some, other=0.0)
        w_g = tl.load(w_ptr + 2 * size * size + w_place, mask=w_some, other=0.0)
        w_o = tl.load(w_ptr + 3 * size * size + w_place, mask=w_some, other=0.0)
        x_i = tl.load(gates_ptr + gate_place, mask=some, other=0.0)
        x_f = tl.load(gates_ptr + gate_place + size, mask=some, other=0.0)
        x_g = tl.load(gates_ptr + gate_place + 2 * size, mask=some, other=0.0)
        x_o = tl.load(gates_ptr + gate_place + 3 * size, mask=some, other=0.0)
        i = tl.sigmoid(x_i + tl.dot(h, w_i, input_precision="ieee"))
        f = tl.sigmoid(x_f + tl.dot(h, w_f, input_precision="ieee"))
        g = _tanh(x_g + tl.dot(h, w_g, input_precision="ieee"))
        o = tl.sigmoid(x_o + tl.dot(h, w_o, input_precision="ieee"))
        new_c = f * c + i * g
        h = tl.where(live[:, None] != 0, o * _tanh(new_c), h)
        c = tl.where(live[:, None] != 0, new_c, c)
        tl.store(states_ptr + t * envs * size + place, h, mask=some)
        tl.store(cells_ptr + t * envs * size + place, c, mask=some)
        tl.store(saved_ptr + gate_place, i, mask=some)
        tl.store(saved_ptr + gate_place + size, f, mask=some)
        tl.store(saved_ptr + gate_place + 2 * size, g, mask=some)
        tl.store(saved_ptr + gate_place + 3 * size, o, mask=some)


@triton.jit
def _lstm_backward(
    # inputs
    d_states_ptr, d_cells_ptr, cells_ptr, previous_cell_ptr, saved_ptr, w_ptr, resets_ptr, active_ptr,
    # outputs: (T, B, 4H) gradients of i f g o, (B, H) of the initial states
    d_ptr, d_h0_ptr, d_c0_ptr,
    steps, envs, size: tl.constexpr, rows_per_program: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows_per_program + tl.arange(0, rows_per_program)
    col = tl.arange(0, width)
    some = (row[:, None] < envs) & (col[None, :] < size)
    place = row[:, None] * size + col[None, :]
    w_place = col[:, None] * size + col[None, :]
    w_some = (col[:, None] < size) & (col[None, :] < size)
    d_h = tl.load(d_h0_ptr + place, mask=some, other=0.0)  # zeros, in the dtype of the work
    d_c = tl.load(d_c0_ptr + place, mask=some, other=0.0)
    for back in range(steps):
        t = steps - 1 - back
        reset = tl.load(resets_ptr + t * envs + row, mask=row < envs, other=0)
        live = tl.load(active_ptr + t * envs + row, mask=row < envs, other=0)
        gate_place = (t * envs + row[:, None]) * 4 * size + col[None, :]
        i = tl.load(saved_ptr + gate_place, mask=some, other=0.0)
        f = tl.load(saved_ptr + gate_place + size, mask=some, other=0.0)
        g = tl.load(saved_ptr + gate_place + 2 * size, mask=some, other=0.0)
        o = tl.load(saved_ptr + gate_place + 3 * size, mask=some, other=0.0)
        squashed = _tanh(tl.load(cells_ptr + t * envs * size + place, mask=some, other=0.0))
        previous = tl.load(previous_cell_ptr + t * envs * size + place, mask=some, other=0.0)
        d_h += tl.load(d_states_ptr + t * envs * size + place, mask=some, other=0.0)
        d_c += tl.load(d_cells_ptr + t * envs * size + place, mask=some, other=0.0)
        d_live_h = tl.where(live[:, None] != 0, d_h, 0.0)
        d_live_c = tl.where(live[:, None] != 0, d_c, 0.0) + d_live_h * o * (1 - squashed * squashed)
        d_i = d_live_c * g * i * (1 - i)
        d_f = d_live_c * previous * f * (1 - f)
        d_g = d_live_c * i * (1 - g * g)
        d_o = d_live_h * squashed * o * (1 - o)
        tl.store(d_ptr + gate_place, d_i, mask=some)
        tl.store(d_ptr + gate_place + size, d_f, mask=some)
        tl.store(d_ptr + gate_place + 2 * size, d_g, mask=some)
        tl.store(d_ptr + gate_place + 3 * size, d_o, mask=some)
        w_i = tl.load(w_ptr + w_place, mask=w_some, other=0.0)
        w_f = tl.load(w_ptr + size * size + w_place, mask=w_some, other=0.0)
        w_g = tl.load(w_ptr + 2 * size * size + w_place, mask=w_some, other=0.0)
        w_o = tl.load(w_ptr + 3 * size * size + w_place, mask=w_some, other=0.0)
        through = tl.dot(d_i, w_i, input_precision="ieee") + tl.dot(d_f, w_f, input_precision="ieee")
        through += tl.dot(d_g, w_g, input_precision="ieee") + tl.dot(d_o, w_o, input_precision="ieee")
        d_h = tl.where(live[:, None] != 0, through, d_h)
        d_c = tl.where(live[:, None] != 0, d_live_c * f, d_c)
        d_h = tl.where(reset[:, None] != 0, 0.0, d_h)
        d_c = tl.where(reset[:, None] != 0, 0.0, d_c)
    tl.store(d_h0_ptr + place, d_h, mask=some)
    tl.store(d_c0_ptr + place, d_c, mask=some)


def _grid(envs: int, size: int) -> tuple[tuple[int], dict[str, int]]:
    blocks = ((envs + _ROWS - 1) // _ROWS,)
    return blocks, {"size": size, "rows_per_program": _ROWS, "width": max(16, triton.next_power_of_2(size))}


def _previous(states: Tensor, initial: Tensor, resets: Tensor) -> Tensor:
    """The state each step started from, (T, B, H)."""
    shifted = torch.cat((initial[None], states[:-1])) if len(states) else states
    return shifted.masked_fill(resets[..., None], 0)


class _GruLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, h0: Tensor, w_hh: Tensor, b_hh: Tensor, resets: Tensor, active: Tensor
    ) -> Tensor:
        steps, envs, size = gates.shape[0], gates.shape[1], w_hh.shape[1]
        gates = gates.clone()
        gates[..., : 2 * size] += b_hh[: 2 * size]
        states, saved = gates.new_empty((steps, envs, size)), torch.empty_like(gates)
        inner = torch.empty_like(states)
        flags = resets.to(torch.int8).contiguous(), active.to(torch.int8).contiguous()
        blocks, shape = _grid(envs, size)
        b_n = b_hh[2 * size :].contiguous()
        _gru_forward[blocks](
            gates, w_hh.contiguous(), b_n, h0.contiguous(), *flags, states, saved, inner, steps, envs, **shape
        )
        ctx.save_for_backward(h0, w_hh, resets, states, saved, inner, *flags)
        return states

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]  # once_differentiable hides the names of its parameters
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        h0, w_hh, resets, states, saved, inner, *flags = ctx.saved_tensors
        steps, envs, size = states.shape
        previous = _previous(states, h0, resets)
        d, d_h0 = saved.new_empty((steps, envs, 4 * size)), torch.zeros_like(h0)
        blocks, shape = _grid(envs, size)
        _gru_backward[blocks](
            grads[0].contiguous(), previous, saved, inner, w_hh.contiguous(), *flags, d, d_h0, steps, envs, **shape
        )
        d_n, d_r, d_z, _ = d.split(size, 2)
        d_recurrent = d[..., size:].flatten(0, 1)
        return (
            torch.cat((d_r, d_z, d_n), 2),
            d_h0,
            d_recurrent.t() @ previous.flatten(0, 1),
            d_recurrent.sum(0),
            None,
            None,
        )


class _LstmLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, h0: Tensor, c0: Tensor, w_hh: Tensor, resets: Tensor, active: Tensor
    ) -> tuple[Tensor, Tensor]:
        steps, envs, size = gates.shape[0], gates.shape[1], w_hh.shape[1]
        states, saved = gates.new_empty((steps, envs, size)), torch.empty_like(gates)
        cells = torch.empty_like(states)
        flags = resets.to(torch.int8).contiguous(), active.to(torch.int8).contiguous()
        blocks, shape = _grid(envs, size)
        inputs = gates.contiguous(), w_hh.contiguous(), h0.contiguous(), c0.contiguous()
        _lstm_forward[blocks](*inputs, *flags, states, cells, saved, steps, envs, **shape)
        ctx.save_for_backward(h0, c0, w_hh, resets, states, cells, saved, *flags)
        return states, cells

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]  # once_differentiable hides the names of its parameters
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        h0, c0, w_hh, resets, states, cells, saved, *flags = ctx.saved_tensors
        steps, envs, size = states.shape
        previous_cell = _previous(cells, c0, resets)
        d, d_h0, d_c0 = torch.empty_like(saved), torch.zeros_like(h0), torch.zeros_like(c0)
        blocks, shape = _grid(envs, size)
        inputs = grads[0].contiguous(), grads[1].contiguous(), cells, previous_cell, saved, w_hh.contiguous()
        _lstm_backward[blocks](*inputs, *flags, d, d_h0, d_c0, steps, envs, **shape)
        d_w_hh = d.flatten(0, 1).t() @ _previous(states, h0, resets).flatten(0, 1)
        return d, d_h0, d_c0, d_w_hh, None, None


def run(
    kind: Kind, x: Tensor, states: States, resets: Tensor, active: Tensor | None, layers: list[LayerWeights]
) -> tuple[Tensor, States]:
    """Run all layers; arguments as every backend takes them."""
    size = layers[0].w_hh.shape[1]
    if size > _LARGEST:
        raise ConfigError(f"hidden_size: the triton backend takes at most {_LARGEST}, got {size}; use backend='packed'")
    live = torch.ones_like(resets) if active is None else active
    if not resets.numel():
        return x.new_zeros((*resets.shape, size)), states
    finals: list[list[Tensor]] = [[] for _ in states]
    for depth, (w_ih, w_hh, b_ih, b_hh) in enumerate(layers):
        gates = F.linear(x, w_ih, b_ih)
        initial = [state[depth] for state in states]
        if kind == "gru":
            bias = w_hh.new_zeros(3 * size) if b_hh is None else b_hh
            results: tuple[Tensor, ...] = (
                cast("Tensor", _GruLayer.apply(gates, initial[0], w_hh, bias, resets, live)),
            )
        else:
            gates = gates if b_hh is None else gates + b_hh
            applied = _LstmLayer.apply(gates, initial[0], initial[1], w_hh, resets, live)
            results = cast("tuple[Tensor, Tensor]", applied)
        for final, result in zip(finals, results, strict=True):
            final.append(result[-1])
        x = results[0] if active is None else results[0].masked_fill(~live[..., None], 0)
    return x, tuple(torch.stack(final) for final in finals)
