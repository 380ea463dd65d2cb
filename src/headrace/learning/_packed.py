"""One recurrent layer over packed segments, forward and backward in one autograd node each.

All input projections are one matrix product, and so are all weight gradients; what is left in the loop over steps is
the recurrent product on as many rows as there are segments of that length. A segment that begins with a reset has a
zero state, so its first step has no recurrent product at all.

Gate order and bias conventions are those of ``torch.nn.GRU`` and ``torch.nn.LSTM``. P packed rows, C carried ones.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.learning._segments import Segments


class LayerWeights(NamedTuple):
    """Parameters of one layer, named as torch names them; biases are None where the module has none."""

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None


def run_layer(
    kind: Literal["gru", "lstm"], x: Tensor, carried: list[Tensor], weights: LayerWeights, layout: Segments
) -> tuple[Tensor, ...]:
    """Hidden and, for an LSTM, cell states (P, H) on inputs (P, I); segments carry ``carried`` (C, H) in."""
    if kind == "gru":
        return (cast("Tensor", _GruLayer.apply(x, *carried, *weights, layout)),)
    return cast("tuple[Tensor, Tensor]", _LstmLayer.apply(x, *carried, *weights, layout))


def _opening(state: Tensor, layout: Segments) -> Tensor:
    """Return the states before the first block: zero, except where a segment carries one in."""
    first = layout.blocks[0][1] if layout.blocks else 0
    return state.new_zeros((first, state.shape[1])).index_copy_(0, layout.carried, state)


def _all_previous(states: Tensor, opening: Tensor, layout: Segments) -> Tensor:
    return torch.cat((opening, states.index_select(0, layout.previous())))


def _recurrent_weight_grad(d_gates: Tensor, hidden: Tensor, h0: Tensor, layout: Segments) -> Tensor:
    """Gradient of the recurrent weights: first steps count only where a state was carried in."""
    first = layout.blocks[0][1] if layout.blocks else 0
    later = d_gates[first:].t() @ hidden.index_select(0, layout.previous())
    return later.addmm_(d_gates.index_select(0, layout.carried).t(), h0)


class _GruLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        h0: Tensor,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None,
        b_hh: Tensor | None,
        layout: Segments,
    ) -> Tensor:
        size = w_hh.shape[1]
        gates = F.linear(x, w_ih, b_ih)  # (P, 3H): r, z, n; worked in place
        if b_hh is not None:
            gates[:, : 2 * size] += b_hh[: 2 * size]
        # what the recurrent side gives to n before r weighs it
        inner = x.new_zeros((layout.rows, size)) if b_hh is None else b_hh[2 * size :].repeat(layout.rows, 1)
        hidden = x.new_empty((layout.rows, size))
        previous = _opening(h0, layout)
        last = 0  # where the block of the step before begins
        for step, (lo, hi) in enumerate(layout.blocks):
            rz, n = gates[lo:hi, : 2 * size], gates[lo:hi, 2 * size :]
            if step:
                previous = hidden[last : last + hi - lo]
                product = previous @ w_hh.t()
                rz += product[:, : 2 * size]
                inner[lo:hi] += product[:, 2 * size :]
            elif len(layout.carried):
                product = h0 @ w_hh.t()
                gates[:, : 2 * size].index_add_(0, layout.carried, product[:, : 2 * size])
                inner.index_add_(0, layout.carried, product[:, 2 * size :])
            rz.sigmoid_()
            n.addcmul_(rz[:, :size], inner[lo:hi]).tanh_()
            torch.lerp(n, previous, rz[:, size:], out=hidden[lo:hi])
            last = lo
        ctx.save_for_backward(x, h0, w_ih, w_hh, gates, inner, hidden)
        ctx.layout, ctx.bias = layout, b_ih is not None
        return hidden

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]  # once_differentiable hides the names of its parameters
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, h0, w_ih, w_hh, gates, inner, hidden = ctx.saved_tensors
        layout: Segments = ctx.layout
        size = w_hh.shape[1]
        r, z, n = gates.split(size, 1)
        # columns: n, r, z, r·n. The first three are the gradient of the input side, the last three of the recurrent
        # side. They start as the derivatives that do not depend on the loop, and are multiplied by it in place.
        d = gates.new_empty((layout.rows, 4 * size))
        d_n, d_r, d_z, d_rn = d.split(size, 1)
        torch.mul(1 - z, 1 - n * n, out=d_n)
        torch.mul(inner, r * (1 - r), out=d_r)
        torch.mul(_all_previous(hidden, _opening(h0, layout), layout).sub_(n), z * (1 - z), out=d_z)
        d_rn.copy_(r)
        d_hidden = grads[0].clone()
        d_h0 = torch.zeros_like(h0)
        for step in reversed(range(len(layout.blocks))):
            lo, hi = layout.blocks[step]
            d_h = d_hidden[lo:hi]
            d_n[lo:hi] *= d_h
            d_z[lo:hi] *= d_h
            d_r[lo:hi] *= d_n[lo:hi]
            d_rn[lo:hi] *= d_n[lo:hi]
            if step:
                before = layout.blocks[step - 1][0]
                target = d_hidden[before : before + hi - lo]
                target.addcmul_(d_h, z[lo:hi]).addmm_(d[lo:hi, size:], w_hh)
            elif len(layout.carried):
                rows = layout.carried
                d_h0 = d_h.index_select(0, rows) * z.index_select(0, rows)
                d_h0.addmm_(d.index_select(0, rows)[:, size:], w_hh)
        d_inputs, d_recurrent = d[:, : 3 * size], d[:, size:]
        # the input side is in the order n, r, z
        rolled = torch.cat((w_ih[2 * size :], w_ih[: 2 * size]))
        d_w_ih = torch.roll(d_inputs.t() @ x, -size, 0)
        sums = d.sum(0) if ctx.bias else None
        return (
            d_inputs @ rolled if ctx.needs_input_grad[0] else None,
            d_h0,
            d_w_ih,
            _recurrent_weight_grad(d_recurrent, hidden, h0, layout),
            None if sums is None else torch.cat((sums[size : 3 * size], sums[:size])),
            None if sums is None else sums[size:],
            None,
        )


class _LstmLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        h0: Tensor,
        c0: Tensor,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None,
        b_hh: Tensor | None,
        layout: Segments,
    ) -> tuple[Tensor, Tensor]:
        size = w_hh.shape[1]
        bias = None if b_ih is None or b_hh is None else b_ih + b_hh
        gates = F.linear(x, w_ih, bias)  # (P, 4H): i, f, g, o; worked in place
        hidden, cell = x.new_empty((layout.rows, size)), x.new_empty((layout.rows, size))
        previous_cell = _opening(c0, layout)
        last = 0  # where the block of the step before begins
        for step, (lo, hi) in enumerate(layout.blocks):
            now = gates[lo:hi]
            if step:
                now.addmm_(hidden[last : last + hi - lo], w_hh.t())
                previous_cell = cell[last : last + hi - lo]
            elif len(layout.carried):
                gates.index_add_(0, layout.carried, h0 @ w_hh.t())
            now[:, : 2 * size].sigmoid_()
            now[:, 2 * size : 3 * size].tanh_()
            now[:, 3 * size :].sigmoid_()
            i, f, g, o = now.split(size, 1)
            torch.mul(i, g, out=cell[lo:hi]).addcmul_(f, previous_cell)
            torch.tanh(cell[lo:hi], out=hidden[lo:hi]).mul_(o)
            last = lo
        ctx.save_for_backward(x, h0, c0, w_ih, w_hh, gates, hidden, cell)
        ctx.layout, ctx.bias = layout, bias is not None
        return hidden, cell

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]  # once_differentiable hides the names of its parameters
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, h0, c0, w_ih, w_hh, gates, hidden, cell = ctx.saved_tensors
        layout: Segments = ctx.layout
        size = w_hh.shape[1]
        i, f, g, o = gates.split(size, 1)
        # each starts as the derivative that does not depend on the loop, and is multiplied by it in place
        d = torch.empty_like(gates)
        d_i, d_f, d_g, d_o = d.split(size, 1)
        squashed = cell.tanh()
        torch.mul(g, i * (1 - i), out=d_i)
        torch.mul(_all_previous(cell, _opening(c0, layout), layout), f * (1 - f), out=d_f)
        torch.mul(i, 1 - g * g, out=d_g)
        torch.mul(squashed, o * (1 - o), out=d_o)
        through = squashed.square_().neg_().add_(1).mul_(o)  # o·(1 − tanh²c), from d_h to d_c
        d_hidden, d_cell = grads[0].clone(), grads[1].clone()
        d_h0, d_c0 = torch.zeros_like(h0), torch.zeros_like(c0)
        for step in reversed(range(len(layout.blocks))):
            lo, hi = layout.blocks[step]
            d_h, d_c = d_hidden[lo:hi], d_cell[lo:hi]
            d_c.addcmul_(d_h, through[lo:hi])
            d[lo:hi, : 3 * size].unflatten(1, (3, size)).mul_(d_c[:, None])
            d_o[lo:hi] *= d_h
            if step:
                before = layout.blocks[step - 1][0]
                d_hidden[before : before + hi - lo].addmm_(d[lo:hi], w_hh)
                d_cell[before : before + hi - lo].addcmul_(d_c, f[lo:hi])
            elif len(layout.carried):
                rows = layout.carried
                d_h0 = d.index_select(0, rows) @ w_hh
                d_c0 = d_c.index_select(0, rows) * f.index_select(0, rows)
        d_bias = d.sum(0) if ctx.bias else None
        return (
            d @ w_ih if ctx.needs_input_grad[0] else None,
            d_h0,
            d_c0,
            d.t() @ x,
            _recurrent_weight_grad(d, hidden, h0, layout),
            d_bias,
            None if d_bias is None else d_bias.clone(),
            None,
        )
