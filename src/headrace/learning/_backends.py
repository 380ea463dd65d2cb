"""Ways to run a stack of GRU or LSTM layers over a (T, B) slice with resets inside. All give the same numbers.

Every backend takes a :class:`Slice` and gives the top layer's outputs (T, B, H), 0 at suspended steps, and the states
after the slice.

- ``packed``: segments sorted and packed, no padding and no product with a state that was just reset; cuDNN's packed
  sequences on CUDA.
- ``scan``: a loop over T on all B rows. No shape depends on the data, so it traces into one compiled region.
- ``pad``: segments padded to the longest, torch's own cells step by step. The reference.
- ``triton``: the loop over T inside one kernel a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.errors import require_extra
from headrace.learning import _packed as packed
from headrace.learning._packed import LayerWeights
from headrace.learning._segments import Segments, final_states, opening_states, pack, segments, unpack

Kind: TypeAlias = Literal["gru", "lstm"]
States: TypeAlias = tuple[Tensor, ...]
Outcome: TypeAlias = tuple[Tensor, States]


class Slice(NamedTuple):
    """What a stack of layers is run on."""

    kind: Kind
    x: Tensor
    """(T, B, I)."""
    states: States
    """(layers, B, H): one tensor for a GRU, hidden and cell for an LSTM."""
    resets: Tensor
    """bool (T, B)."""
    active: Tensor | None
    """bool (T, B); None where all steps count."""
    layers: list[LayerWeights]


Runner: TypeAlias = Callable[[Slice], Outcome]
RunLayer: TypeAlias = Callable[[Tensor, list[Tensor], LayerWeights], tuple[Tensor, Sequence[Tensor]]]
"""(inputs, states of this layer (B, H), its weights) → (outputs, its states after the slice)."""


def run_layers(x: Tensor, states: States, layers: list[LayerWeights], run_layer: RunLayer) -> Outcome:
    """Run one layer after another; outputs of the last one and the states of all."""
    finals: list[Sequence[Tensor]] = []
    for depth, weights in enumerate(layers):
        x, after = run_layer(x, [state[depth] for state in states], weights)
        finals.append(after)
    return x, tuple(torch.stack(of_layers) for of_layers in zip(*finals, strict=True))


def run_packed(work: Slice) -> Outcome:
    """Packed segments: our own layer on the CPU, torch's (cuDNN) on CUDA."""
    if work.x.is_cuda:
        return run_packed_by_torch(work)
    layout = segments(work.resets, work.active)

    def run_layer(rows: Tensor, initial: list[Tensor], weights: LayerWeights) -> tuple[Tensor, list[Tensor]]:
        carried = [state.index_select(0, layout.carried_env) for state in initial]
        results = packed.run_layer(work.kind, rows, carried, weights, layout)
        return results[0], _finals(initial, results, layout)

    rows, finals = run_layers(pack(work.x, layout), work.states, work.layers, run_layer)
    return unpack(rows, layout), finals


def _finals(initial: Sequence[Tensor], packed: Sequence[Tensor], layout: Segments) -> list[Tensor]:
    return [final_states(*both, layout.final, layout) for both in zip(initial, packed, strict=True)]


def run_packed_by_torch(work: Slice) -> Outcome:
    """Packed segments through torch's own packed sequences, all layers in one call."""
    kind, x, states, resets, active, layers = work
    layout = segments(resets, active)
    if not layout.rows:
        forget = layout.forgotten[:, None]
        return x.new_zeros((*resets.shape, states[0].shape[-1])), tuple(s.masked_fill(forget, 0) for s in states)
    opening = [opening_states(state, layout) for state in states]
    bias = layers[0].b_ih is not None
    flat = [parameter for weights in layers for parameter in weights if parameter is not None]
    if x.is_cuda:
        _join_for_cudnn(kind, flat, len(layers))
    common = (flat, bias, len(layers), 0.0, torch.is_grad_enabled(), False)
    rows = pack(x, layout)
    if kind == "gru":
        out, hidden = torch.gru(rows, layout.batch_sizes, opening[0], *common)
        ended: States = (hidden,)
    else:
        out, hidden, cell = torch.lstm(rows, layout.batch_sizes, opening, *common)
        ended = (hidden, cell)
    finals = (final_states(*both, layout.final_rank, layout) for both in zip(states, ended, strict=True))
    return unpack(out, layout), tuple(finals)


def _join_for_cudnn(kind: Kind, flat: list[Tensor], layers: int) -> None:
    """Let the parameters share one piece of memory, as cuDNN wants; else it copies them at every call and warns."""
    weight = flat[0]
    joined = len({parameter.untyped_storage().data_ptr() for parameter in flat}) == 1
    if joined or not torch.backends.cudnn.is_acceptable(weight):
        return
    mode = 3 if kind == "gru" else 2  # CUDNN_GRU and CUDNN_LSTM
    # torch.nn.GRU calls it at its own construction; it has no public name
    flatten = torch._cudnn_rnn_flatten_weight  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    with torch.no_grad():
        flatten(flat, len(flat) // layers, weight.shape[1], mode, flat[1].shape[1], 0, layers, False, False)


def run_scan(work: Slice) -> Outcome:
    """Return a loop over steps on all rows, resets and sleep as selections; traces without a graph break."""
    kind, _, _, resets, active, _ = work

    def run_layer(x: Tensor, now: list[Tensor], weights: LayerWeights) -> tuple[Tensor, list[Tensor]]:
        w_ih, w_hh, b_ih, b_hh = weights
        size = w_hh.shape[1]
        projected = F.linear(x, w_ih, b_ih)
        outputs: list[Tensor] = []
        for t in range(x.shape[0]):
            before = [state.masked_fill(resets[t, :, None], 0) for state in now]
            recurrent = F.linear(before[0], w_hh, b_hh)
            if kind == "gru":
                after = [_gru_cell(projected[t], recurrent, before[0], size)]
            else:
                after = _lstm_cell(projected[t] + recurrent, before[1], size)
            if active is None:
                now = after
                outputs.append(after[0])
            else:
                live = active[t, :, None]
                now = [torch.where(live, new, old) for new, old in zip(after, before, strict=True)]
                outputs.append(after[0].masked_fill(~live, 0))
        return torch.stack(outputs) if outputs else x.new_zeros((0, x.shape[1], size)), now

    return run_layers(work.x, work.states, work.layers, run_layer)


def _gru_cell(projected: Tensor, recurrent: Tensor, hidden: Tensor, size: int) -> Tensor:
    rz = (projected[:, : 2 * size] + recurrent[:, : 2 * size]).sigmoid()
    n = (projected[:, 2 * size :] + rz[:, :size] * recurrent[:, 2 * size :]).tanh()
    return n + rz[:, size:] * (hidden - n)


def _lstm_cell(gates: Tensor, cell: Tensor, size: int) -> list[Tensor]:
    i, f, g, o = gates.split(size, 1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    return [o.sigmoid() * cell.tanh(), cell]


def run_pad(work: Slice) -> Outcome:
    """Segments padded to the longest, torch's own cells on every padded step."""
    layout = segments(work.resets, work.active)
    steps, count = len(layout.blocks), layout.blocks[0][1] if layout.blocks else 0
    places = _padded_places(layout, count)

    def run_layer(rows: Tensor, initial: list[Tensor], weights: LayerWeights) -> tuple[Tensor, list[Tensor]]:
        padded = rows.new_zeros((steps * count, rows.shape[1])).index_copy(0, places, rows)
        now = [opening_states(state, layout) for state in initial]
        history: list[list[Tensor]] = [[] for _ in initial]
        for row in padded.unflatten(0, (steps, count)):
            now = _torch_cell(work.kind, row, now, weights)
            for kept, state in zip(history, now, strict=True):
                kept.append(state)
        results = [
            torch.cat(kept).index_select(0, places) if kept else rows.new_zeros((0, len(weights.w_hh[0])))
            for kept in history
        ]
        return results[0], _finals(initial, results, layout)

    rows, finals = run_layers(pack(work.x, layout), work.states, work.layers, run_layer)
    return unpack(rows, layout), finals


def _padded_places(layout: Segments, count: int) -> Tensor:
    """Return where each packed row goes in the padded (longest, segments) grid, flattened."""
    sizes = layout.batch_sizes
    step = torch.arange(len(sizes)).repeat_interleave(sizes)
    within = torch.arange(layout.rows) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    return (step * count + within).to(layout.order.device)


def _torch_cell(kind: Kind, x: Tensor, states: list[Tensor], weights: LayerWeights) -> list[Tensor]:
    if kind == "gru":
        return [torch.gru_cell(x, states[0], *weights)]
    return list(torch.lstm_cell(x, states, *weights))


def run_triton(work: Slice) -> Outcome:
    """Return the loop over steps inside a Triton kernel."""
    require_extra("triton", extra="triton", purpose="the triton backend of a recurrent module")
    from headrace.learning import _triton_layers as triton_layers

    return triton_layers.run(work)


def triton_obstacle(device: torch.device) -> str | None:
    """Why Triton's kernels cannot run on a CUDA device; None where nothing speaks against it."""
    if find_spec("triton") is None:
        return "triton is not installed; pip install 'headrace[triton]'"
    from headrace.learning._triton_layers import SHARED_BYTES

    limit = int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)
    if limit < SHARED_BYTES:
        return f"its kernels take up to {SHARED_BYTES:,} bytes of shared memory, the device gives {limit:,}"
    return None


def triton_error() -> type[Exception]:
    """Return what Triton raises when a kernel cannot be compiled or does not fit the device."""
    from triton.errors import TritonError

    return TritonError


def step_layers(kind: Kind, x: Tensor, states: States, active: Tensor | None, layers: list[LayerWeights]) -> Outcome:
    """Return one step of acting: ``x`` (N, I), ``active`` (N,) → outputs (N, H) and new states. Torch's own cells."""

    def run_layer(x: Tensor, before: list[Tensor], weights: LayerWeights) -> tuple[Tensor, list[Tensor]]:
        after = _torch_cell(kind, x, before, weights)
        return after[0], after

    out, new = run_layers(x, states, layers, run_layer)
    if active is None:
        return out, new
    live = active[:, None]
    return out.masked_fill(~live, 0), tuple(torch.where(live, n, o) for n, o in zip(new, states, strict=True))
