"""One recurrent layer over packed segments, forward and backward in one autograd node each.

All input projections are one matrix product, and so are all weight gradients; what is left in the loop over steps is
the recurrent product on as many rows as there are segments of that length. A segment that begins with a reset has a
zero state, so its first step has no recurrent product at all.

Gate order and bias conventions are those of ``torch.nn.GRU`` and ``torch.nn.LSTM``. P packed rows, C carried ones.

Trajectory slices with resets inside, cut into segments and sorted for a recurrent network, without padding.

A segment runs from one reset of an environment to the next. Sorted by length, longest first, the k-th step of all
segments that have one is a block of rows, and the block of step k continues the first rows of the block of step k − 1:
the layout of torch's packed sequences. Suspended steps are left out altogether.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.errors import ConfigError, DtypeError, ShapeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Where the P rows of a (T, B) grid that were really taken go when they are packed. Indices are int64."""

    steps: int
    """T."""
    envs: int
    """B."""
    order: Tensor
    """(P,): the grid row (t·B + b) of each packed row."""
    batch_sizes: Tensor
    """(L,), on the CPU: how many segments have a first, second, … step; never rising. L is the longest segment."""
    blocks: tuple[tuple[int, int], ...]
    """(first row, last row + 1) of each step."""
    carried: Tensor
    """(C,): the rows of the first block whose segments continue from the state the caller gave."""
    carried_env: Tensor
    """(C,): their environments."""
    final: Tensor
    """(F,): the packed row that is the last of its environment."""
    final_env: Tensor
    """(F,): their environments. Those missing took no step after their last reset, or none at all."""
    forgotten: Tensor
    """bool (B,): reset at least once; the state that the caller gave is gone."""

    @property
    def rows(self) -> int:
        """P."""
        return int(self.order.shape[0])

    def previous(self) -> Tensor:
        """For every packed row after the first block, the packed row of the step before."""
        if len(self.blocks) < 2:
            return self.order.new_zeros(0)
        first = self.blocks[0][1]
        back = self.batch_sizes[:-1].repeat_interleave(self.batch_sizes[1:])
        return torch.arange(first, self.rows, device=self.order.device) - back.to(self.order.device)


def segments(resets: Tensor, active: Tensor | None) -> Segments:
    """Cut and sort.

    Args:
        resets: bool (T, B): the state is zeroed before this step.
        active: bool (T, B): False where the environment was suspended; None where all steps count. A reset at a
            suspended step counts.
    """
    steps, envs = resets.shape
    device = resets.device
    number = resets.cumsum(0)  # (T, B): which segment of its environment a step is in; 0 continues the given state
    segment = number + torch.arange(envs, device=device) * (steps + 1)
    if active is None:
        taken = torch.arange(steps, device=device)[:, None].expand(steps, envs)
    else:
        taken = active.cumsum(0) - active.long()  # steps really taken before this one
    offset = taken - taken.masked_fill(~resets, 0).cummax(0).values if steps else taken
    grid = torch.arange(steps * envs, device=device) if active is None else active.flatten().nonzero().squeeze(1)
    segment_of, offset_of = segment.flatten()[grid], offset.flatten()[grid]

    lengths = torch.bincount(segment_of, minlength=envs * (steps + 1))
    rank = torch.empty_like(lengths)
    rank[lengths.argsort(descending=True, stable=True)] = torch.arange(len(lengths), device=device)
    sizes = torch.bincount(offset_of)
    starts = sizes.cumsum(0) - sizes
    place = starts[offset_of] + rank[segment_of]
    order = torch.empty_like(grid)
    order[place] = grid

    rows = torch.arange(envs, device=device)
    opening = rows * (steps + 1)
    continues = lengths[opening] > 0
    latest = segment[-1] if steps else opening
    moved = lengths[latest] > 0
    final = starts[lengths[latest[moved]] - 1] + rank[latest[moved]] if len(starts) else grid
    host_sizes = sizes.cpu()
    ends = host_sizes.cumsum(0).tolist()
    return Segments(
        steps=steps,
        envs=envs,
        order=order,
        batch_sizes=host_sizes,
        blocks=tuple(zip([0, *ends][: len(ends)], ends, strict=True)),
        carried=rank[opening[continues]],
        carried_env=rows[continues],
        final=final,
        final_env=rows[moved],
        forgotten=resets.any(0),
    )


class _Pack(torch.autograd.Function):
    """Rows of a grid in packed order. No row comes twice, so the backward is a copy, not a sum."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, grid: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        ctx.grid_shape = grid.shape  # type: ignore[attr-defined]  # torch's way to keep what is no tensor
        return grid.index_select(0, order)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors  # type: ignore[attr-defined]  # set by save_for_backward
        shape: torch.Size = ctx.grid_shape  # type: ignore[attr-defined]  # set in forward
        whole = grads[0].new_zeros(shape) if len(order) < shape[0] else grads[0].new_empty(shape)
        return whole.index_copy_(0, order, grads[0]), None


def pack(grid: Tensor, layout: Segments) -> Tensor:
    """(T, B, …) → packed rows (P, …)."""
    packed = _Pack.apply(grid.flatten(0, 1), layout.order)
    assert isinstance(packed, Tensor)
    return packed


def unpack(packed: Tensor, layout: Segments) -> Tensor:
    """Packed rows (P, …) → (T, B, …); 0 where a step was left out."""
    grid = packed.new_zeros((layout.steps * layout.envs, *packed.shape[1:]))
    return grid.index_copy(0, layout.order, packed).unflatten(0, (layout.steps, layout.envs))


def final_states(initial: Tensor, packed: Tensor, layout: Segments) -> Tensor:
    """Return the states of every environment after the slice, (B, H): the last of its packed rows, if it has any."""
    kept = initial.masked_fill(layout.forgotten[:, None], 0)
    return kept.index_copy(0, layout.final_env, packed.index_select(0, layout.final))


def check_sizes(input_size: int, hidden_size: int, num_layers: int) -> None:
    """Refuse a recurrent module without inputs, units or layers."""
    if min(input_size, hidden_size, num_layers) < 1:
        raise ConfigError(
            "input_size, hidden_size, num_layers: expected at least 1 each, "
            f"got {input_size}, {hidden_size} and {num_layers}"
        )


def time_major(
    x: Tensor, resets: Tensor | None, active: Tensor | None, *, input_size: int, batch_first: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return a checked slice (T, B, I) and its flags (T, B)."""
    if x.dim() != 3 or x.shape[2] != input_size:
        raise ShapeError(f"x: expected {'(B, T, ' if batch_first else '(T, B, '}{input_size}), got {tuple(x.shape)}")
    _check_masks(tuple(x.shape[:2]), resets=resets, active=active)
    if not batch_first:
        return x, resets, active
    resets, active = (None if mask is None else mask.transpose(0, 1) for mask in (resets, active))
    return x.transpose(0, 1), resets, active


def check_step(x: Tensor, reset: Tensor | None, active: Tensor | None, input_size: int) -> None:
    """Refuse anything but one step: inputs (N, I), flags (N,)."""
    if x.dim() != 2 or x.shape[1] != input_size:
        raise ShapeError(f"x: expected (N, {input_size}), got {tuple(x.shape)}; slices go through forward()")
    _check_masks((x.shape[0],), reset=reset, active=active)


def check_state(state: Tensor, expected: tuple[int, int, int]) -> None:
    """Refuse a state of another shape."""
    if tuple(state.shape) != expected:
        raise ShapeError(f"state: expected (layers, environments, hidden) = {expected}, got {tuple(state.shape)}")


def _check_masks(shape: tuple[int, ...], **masks: Tensor | None) -> None:
    for name, mask in masks.items():
        if mask is None:
            continue
        if mask.dtype != torch.bool:
            raise DtypeError(f"{name}: expected torch.bool, got {mask.dtype}; convert it with .bool()")
        if tuple(mask.shape) != shape:
            raise ShapeError(f"{name}: expected {shape}, one flag per step and environment, got {tuple(mask.shape)}")


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
