"""GRU and LSTM layers in Triton: the loop over steps inside one kernel, resets and sleep included.

A program takes a block of environments through all T steps; forward stores what backward needs, backward walks the same
way home. Input projections and weight gradients are large matrix products and stay outside. The recurrent product goes
tile by tile, with weights and state read from the device's memory (mostly its cache), so a program's shared memory does
not grow with the hidden size: any size runs on any card that Triton supports (``SHARED_BYTES``).

``TRITON_INTERPRET=1`` runs the kernels on CPU tensors, slowly: that is how their numbers are tested.
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

from headrace.learning._backends import Outcome, Slice, run_layers
from headrace.learning._packed import LayerWeights

_ROWS = 16  # environments per program; the least that tl.dot takes
_TILE = 64  # at most so many columns of each gate at once
_DEPTH = 32  # and so many rows of the weights

SHARED_BYTES = 48 << 10
"""Shared memory that no kernel here exceeds, whatever the hidden size: what every CUDA device gives by default."""


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _step(t, resets_ptr, active_ptr, envs, rows_per_program: tl.constexpr):
    """Return a program's environments, which of them exist, where their step t is, and its flags."""
    row = tl.program_id(0) * rows_per_program + tl.arange(0, rows_per_program)
    here = row < envs
    at = tl.cast(t, tl.int64) * envs + row
    reset = tl.load(resets_ptr + at, mask=here, other=0)[:, None] != 0
    live = tl.load(active_ptr + at, mask=here, other=0)[:, None] != 0
    return row, here, at, reset, live


@triton.jit
def _product_parts(states_ptr, w_ptr, row, here, reset, col, k, size, depth: tl.constexpr):
    """Return a tile of the states before a step, and where that of the first gate's weights is."""
    deep = k + tl.arange(0, depth)
    some = here[:, None] & (deep < size)[None, :]
    part = tl.load(states_ptr + row[:, None] * size + deep[None, :], mask=some, other=0.0)
    # w[k, j] multiplies state k into gate j, so the matrix is read transposed
    w_place = w_ptr + col[None, :] * size + deep[:, None]
    return tl.where(reset, 0.0, part), w_place, (col < size)[None, :] & (deep < size)[:, None]


@triton.jit
def _times(part, w_place, w_some):
    return tl.dot(part, tl.load(w_place, mask=w_some, other=0.0), input_precision="ieee")


@triton.jit
def _gates_back(d_ptr, w_ptr, row, here, col, gates, size, tile: tl.constexpr, depth: tl.constexpr):
    """Return the gradient through the gates, which lie side by side, as the rows of the weights do."""
    through = tl.zeros((row.shape[0], tile), tl.float32)
    for k in range(0, gates, depth):
        deep = k + tl.arange(0, depth)
        part_some = here[:, None] & (deep < gates)[None, :]
        part = tl.load(d_ptr + row[:, None] * 4 * size + deep[None, :], mask=part_some, other=0.0)
        through += _times(
            part, w_ptr + deep[:, None] * size + col[None, :], (deep < gates)[:, None] & (col < size)[None, :]
        )
    return through


@triton.jit
def _gru_forward(
    # inputs: gates (T, B, 3H) before the recurrent part, w_hh (3H, H), b_n (H), flags (T, B) as int8
    gates_ptr, w_ptr, b_n_ptr, resets_ptr, active_ptr,
    # states (T + 1, B, H), the first given; outputs: r z n and the inner part of n for backward
    states_ptr, saved_ptr, inner_ptr,
    steps, envs, size, rows_per_program: tl.constexpr, tile: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    for t in range(steps):
        _, here, at, reset, live = _step(t, resets_ptr, active_ptr, envs, rows_per_program)
        for first in range(0, size, tile):
            col = first + tl.arange(0, tile)
            some = here[:, None] & (col < size)[None, :]
            place = at[:, None] * size + col[None, :]
            gate = at[:, None] * 3 * size + col[None, :]
            h = tl.where(reset, 0.0, tl.load(states_ptr + place, mask=some, other=0.0))
            r = tl.load(gates_ptr + gate, mask=some, other=0.0)
            z = tl.load(gates_ptr + gate + size, mask=some, other=0.0)
            n = tl.load(gates_ptr + gate + 2 * size, mask=some, other=0.0)
            inner = tl.zeros_like(r) + tl.load(b_n_ptr + col, mask=col < size, other=0.0)[None, :]
            for k in range(0, size, depth):
                part, w_place, w_some = _product_parts(states_ptr, w_ptr, at, here, reset, col, k, size, depth)
                r += _times(part, w_place, w_some)
                z += _times(part, w_place + size * size, w_some)
                inner += _times(part, w_place + 2 * size * size, w_some)
            r, z = tl.sigmoid(r), tl.sigmoid(z)
            n = _tanh(n + r * inner)
            tl.store(states_ptr + envs * size + place, tl.where(live, n + z * (h - n), h), mask=some)
            tl.store(saved_ptr + gate, r, mask=some)
            tl.store(saved_ptr + gate + size, z, mask=some)
            tl.store(saved_ptr + gate + 2 * size, n, mask=some)
            tl.store(inner_ptr + place, inner, mask=some)
        tl.debug_barrier()  # the next step reads this state from memory, in other threads


@triton.jit
def _gru_backward(
    # inputs: gradients and states before each step, (T, B, H); d_h starts as zeros
    d_states_ptr, previous_ptr, saved_ptr, inner_ptr, w_ptr, resets_ptr, active_ptr,
    # outputs: (T, B, 4H) gradients of n r z r·n, (B, H) of the initial state
    d_ptr, d_h_ptr,
    steps, envs, size, rows_per_program: tl.constexpr, tile: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    for back in range(steps):
        row, here, at, reset, live = _step(steps - 1 - back, resets_ptr, active_ptr, envs, rows_per_program)
        for first in range(0, size, tile):
            col = first + tl.arange(0, tile)
            some = here[:, None] & (col < size)[None, :]
            env = row[:, None] * size + col[None, :]
            place = at[:, None] * size + col[None, :]
            gate = at[:, None] * 3 * size + col[None, :]
            r = tl.load(saved_ptr + gate, mask=some, other=0.0)
            z = tl.load(saved_ptr + gate + size, mask=some, other=0.0)
            n = tl.load(saved_ptr + gate + 2 * size, mask=some, other=0.0)
            inner = tl.load(inner_ptr + place, mask=some, other=0.0)
            previous = tl.load(previous_ptr + place, mask=some, other=0.0)
            d_h = tl.load(d_h_ptr + env, mask=some, other=0.0)
            d_h += tl.load(d_states_ptr + place, mask=some, other=0.0)
            d_live = tl.where(live, d_h, 0.0)
            d_n = d_live * (1 - z) * (1 - n * n)
            gradient = d_ptr + at[:, None] * 4 * size + col[None, :]
            tl.store(gradient, d_n, mask=some)
            tl.store(gradient + size, d_n * inner * r * (1 - r), mask=some)
            tl.store(gradient + 2 * size, d_live * (previous - n) * z * (1 - z), mask=some)
            tl.store(gradient + 3 * size, d_n * r, mask=some)
            tl.store(d_h_ptr + env, d_h, mask=some)
        tl.debug_barrier()
        for first in range(0, size, tile):
            col = first + tl.arange(0, tile)
            some = here[:, None] & (col < size)[None, :]
            env = row[:, None] * size + col[None, :]
            d_h = tl.load(d_h_ptr + env, mask=some, other=0.0)
            z = tl.load(saved_ptr + at[:, None] * 3 * size + size + col[None, :], mask=some, other=0.0)
            # r, z and r·n
            through = d_h * z + _gates_back(d_ptr + size, w_ptr, at, here, col, 3 * size, size, tile, depth)
            tl.store(d_h_ptr + env, tl.where(reset, 0.0, tl.where(live, through, d_h)), mask=some)
        tl.debug_barrier()


@triton.jit
def _lstm_forward(
    # inputs: gates (T, B, 4H) before the recurrent part, w_hh (4H, H), flags (T, B) as int8
    gates_ptr, w_ptr, resets_ptr, active_ptr,
    # states and cells (T + 1, B, H), the first given; output: i f g o for backward
    states_ptr, cells_ptr, saved_ptr,
    steps, envs, size, rows_per_program: tl.constexpr, tile: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    for t in range(steps):
        _, here, at, reset, live = _step(t, resets_ptr, active_ptr, envs, rows_per_program)
        for first in range(0, size, tile):
            col = first + tl.arange(0, tile)
            some = here[:, None] & (col < size)[None, :]
            place = at[:, None] * size + col[None, :]
            gate = at[:, None] * 4 * size + col[None, :]
            h = tl.where(reset, 0.0, tl.load(states_ptr + place, mask=some, other=0.0))
            c = tl.where(reset, 0.0, tl.load(cells_ptr + place, mask=some, other=0.0))
            i = tl.load(gates_ptr + gate, mask=some, other=0.0)
            f = tl.load(gates_ptr + gate + size, mask=some, other=0.0)
            g = tl.load(gates_ptr + gate + 2 * size, mask=some, other=0.0)
            o = tl.load(gates_ptr + gate + 3 * size, mask=some, other=0.0)
            for k in range(0, size, depth):
                part, w_place, w_some = _product_parts(states_ptr, w_ptr, at, here, reset, col, k, size, depth)
                i += _times(part, w_place, w_some)
                f += _times(part, w_place + size * size, w_some)
                g += _times(part, w_place + 2 * size * size, w_some)
                o += _times(part, w_place + 3 * size * size, w_some)
            i, f, g, o = tl.sigmoid(i), tl.sigmoid(f), _tanh(g), tl.sigmoid(o)
            new_c = f * c + i * g
            tl.store(states_ptr + envs * size + place, tl.where(live, o * _tanh(new_c), h), mask=some)
            tl.store(cells_ptr + envs * size + place, tl.where(live, new_c, c), mask=some)
            tl.store(saved_ptr + gate, i, mask=some)
            tl.store(saved_ptr + gate + size, f, mask=some)
            tl.store(saved_ptr + gate + 2 * size, g, mask=some)
            tl.store(saved_ptr + gate + 3 * size, o, mask=some)
        tl.debug_barrier()  # the next step reads this state from memory, in other threads


@triton.jit
def _lstm_backward(
    # inputs: gradients, cells after and before each step, (T, B, H); d_h and d_c start as zeros
    d_states_ptr, d_cells_ptr, cells_ptr, previous_cell_ptr, saved_ptr, w_ptr, resets_ptr, active_ptr,
    # outputs: (T, B, 4H) gradients of i f g o, (B, H) of the initial states
    d_ptr, d_h_ptr, d_c_ptr,
    steps, envs, size, rows_per_program: tl.constexpr, tile: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    for back in range(steps):
        row, here, at, reset, live = _step(steps - 1 - back, resets_ptr, active_ptr, envs, rows_per_program)
        for first in range(0, size, tile):
            col = first + tl.arange(0, tile)
            some = here[:, None] & (col < size)[None, :]
            env = row[:, None] * size + col[None, :]
            place = at[:, None] * size + col[None, :]
            gate = at[:, None] * 4 * size + col[None, :]
            i = tl.load(saved_ptr + gate, mask=some, other=0.0)
            f = tl.load(saved_ptr + gate + size, mask=some, other=0.0)
            g = tl.load(saved_ptr + gate + 2 * size, mask=some, other=0.0)
            o = tl.load(saved_ptr + gate + 3 * size, mask=some, other=0.0)
            squashed = _tanh(tl.load(cells_ptr + place, mask=some, other=0.0))
            previous = tl.load(previous_cell_ptr + place, mask=some, other=0.0)
            d_h = tl.load(d_h_ptr + env, mask=some, other=0.0)
            d_h += tl.load(d_states_ptr + place, mask=some, other=0.0)
            d_c = tl.load(d_c_ptr + env, mask=some, other=0.0)
            d_c += tl.load(d_cells_ptr + place, mask=some, other=0.0)
            d_live_h = tl.where(live, d_h, 0.0)
            d_live_c = tl.where(live, d_c, 0.0) + d_live_h * o * (1 - squashed * squashed)
            tl.store(d_ptr + gate, d_live_c * g * i * (1 - i), mask=some)
            tl.store(d_ptr + gate + size, d_live_c * previous * f * (1 - f), mask=some)
            tl.store(d_ptr + gate + 2 * size, d_live_c * i * (1 - g * g), mask=some)
            tl.store(d_ptr + gate + 3 * size, d_live_h * squashed * o * (1 - o), mask=some)
            tl.store(d_h_ptr + env, d_h, mask=some)
            tl.store(d_c_ptr + env, tl.where(reset, 0.0, tl.where(live, d_live_c * f, d_c)), mask=some)
        tl.debug_barrier()
        for first in range(0, size, tile):
            col = first + tl.arange(0, tile)
            some = here[:, None] & (col < size)[None, :]
            env = row[:, None] * size + col[None, :]
            d_h = tl.load(d_h_ptr + env, mask=some, other=0.0)
            through = _gates_back(d_ptr, w_ptr, at, here, col, 4 * size, size, tile, depth)
            tl.store(d_h_ptr + env, tl.where(reset, 0.0, tl.where(live, through, d_h)), mask=some)
        tl.debug_barrier()


def tiles(size: int) -> dict[str, int]:
    """Return the compile-time arguments of the kernels for a hidden size."""
    padded = max(16, triton.next_power_of_2(size))
    return {"rows_per_program": _ROWS, "tile": min(_TILE, padded), "depth": min(_DEPTH, padded)}


# one stage: a pipelined (asynchronous) copy could overtake the barrier between the steps, and takes more shared memory
OPTIONS = {"num_warps": 4, "num_stages": 1}


def _grid(envs: int) -> tuple[int]:
    return ((envs + _ROWS - 1) // _ROWS,)


def _history(initial: Tensor, steps: int) -> Tensor:
    """(T + 1, B, H): the initial state, and room for the state after each step."""
    history = initial.new_empty((steps + 1, *initial.shape))
    history[0] = initial
    return history


def _flags(resets: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
    return resets.to(torch.int8).contiguous(), active.to(torch.int8).contiguous()


def _previous(history: Tensor, resets: Tensor) -> Tensor:
    """Return the state each step started from, (T, B, H)."""
    return history[:-1].masked_fill(resets[..., None], 0)


class _GruLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, h0: Tensor, w_hh: Tensor, b_hh: Tensor, resets: Tensor, active: Tensor
    ) -> Tensor:
        steps, envs, size = gates.shape[0], gates.shape[1], w_hh.shape[1]
        gates = gates.clone(memory_format=torch.contiguous_format)
        gates[..., : 2 * size] += b_hh[: 2 * size]
        history, saved = _history(h0, steps), torch.empty_like(gates)
        inner = gates.new_empty((steps, envs, size))
        inputs = gates, w_hh.contiguous(), b_hh[2 * size :].contiguous(), *_flags(resets, active)
        _gru_forward[_grid(envs)](*inputs, history, saved, inner, steps, envs, size, **tiles(size), **OPTIONS)
        ctx.save_for_backward(w_hh, resets, active, history, saved, inner)
        return history[1:]

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]  # once_differentiable hides the names of its parameters
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        w_hh, resets, active, history, saved, inner = ctx.saved_tensors
        steps, envs, size = inner.shape
        previous = _previous(history, resets)
        d, d_h0 = saved.new_empty((steps, envs, 4 * size)), torch.zeros_like(history[0])
        inputs = grads[0].contiguous(), previous, saved, inner, w_hh.contiguous(), *_flags(resets, active)
        _gru_backward[_grid(envs)](*inputs, d, d_h0, steps, envs, size, **tiles(size), **OPTIONS)
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
        gates = gates.contiguous()
        states, cells, saved = _history(h0, steps), _history(c0, steps), torch.empty_like(gates)
        inputs = gates, w_hh.contiguous(), *_flags(resets, active)
        _lstm_forward[_grid(envs)](*inputs, states, cells, saved, steps, envs, size, **tiles(size), **OPTIONS)
        ctx.save_for_backward(w_hh, resets, active, states, cells, saved)
        return states[1:], cells[1:]

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]  # once_differentiable hides the names of its parameters
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        w_hh, resets, active, states, cells, saved = ctx.saved_tensors
        steps, envs, size = saved.shape[0], saved.shape[1], w_hh.shape[1]
        d, d_h0, d_c0 = torch.empty_like(saved), torch.zeros_like(states[0]), torch.zeros_like(cells[0])
        inputs = grads[0].contiguous(), grads[1].contiguous(), cells[1:], _previous(cells, resets), saved
        weights = w_hh.contiguous(), *_flags(resets, active)
        _lstm_backward[_grid(envs)](*inputs, *weights, d, d_h0, d_c0, steps, envs, size, **tiles(size), **OPTIONS)
        d_w_hh = d.flatten(0, 1).t() @ _previous(states, resets).flatten(0, 1)
        return d, d_h0, d_c0, d_w_hh, None, None


def run(work: Slice) -> Outcome:
    """Run all layers, as every backend does."""
    kind, x, states, resets, active, layers = work
    size = layers[0].w_hh.shape[1]
    live = torch.ones_like(resets) if active is None else active
    if not resets.numel():
        return x.new_zeros((*resets.shape, size)), states

    def run_layer(x: Tensor, initial: list[Tensor], weights: LayerWeights) -> tuple[Tensor, list[Tensor]]:
        w_ih, w_hh, b_ih, b_hh = weights
        gates = F.linear(x, w_ih, b_ih)
        if kind == "gru":
            bias = w_hh.new_zeros(3 * size) if b_hh is None else b_hh
            results = (cast("Tensor", _GruLayer.apply(gates, *initial, w_hh, bias, resets, live)),)
        else:
            gates = gates if b_hh is None else gates + b_hh
            results = cast("tuple[Tensor, Tensor]", _LstmLayer.apply(gates, *initial, w_hh, resets, live))
        out = results[0] if active is None else results[0].masked_fill(~live[..., None], 0)
        return out, [result[-1] for result in results]

    return run_layers(x, states, layers, run_layer)
