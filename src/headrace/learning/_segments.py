"""Trajectory slices with resets inside, cut into segments and sorted for a recurrent network, without padding.

A segment runs from one reset of an environment to the next. Sorted by length, longest first, the k-th step of all
segments that have one is a block of rows, and the block of step k continues the first rows of the block of step k − 1:
the layout of torch's packed sequences. Suspended steps are left out altogether.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
