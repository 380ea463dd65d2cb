"""Ways to run a stack of GRU or LSTM layers over a (T, B) slice with resets inside. All give the same numbers.

Every backend takes ``x`` (T, B, I), ``states`` (one tensor (layers, B, H) for a GRU, hidden and cell for an LSTM),
``resets`` bool (T, B), ``active`` bool (T, B) or None, and the layers' weights. It gives the top layer's outputs
(T, B, H), 0 at suspended steps, and the states after the slice.

- ``packed``: segments sorted and packed, no padding and no product with a state that was just reset; cuDNN's packed
  sequences on CUDA.
- ``scan``: a loop over T on all B rows. No shape depends on the data, so it traces into one compiled region.
- ``pad``: segments padded to the longest, torch's own cells step by step. The reference.
- ``triton``: the loop over T inside one kernel a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.errors import require_extra
from headrace.learning import _packed as packed
from headrace.learning._packed import LayerWeights
from headrace.learning._segments import Segments, final_state, pack, segments, unpack

Kind: TypeAlias = Literal["gru", "lstm"]
States: TypeAlias = tuple[Tensor, ...]
Runner: TypeAlias = Callable[[Kind, Tensor, States, Tensor, "Tensor | None", list[LayerWeights]], tuple[Tensor, States]]


def run_packed(
    kind: Kind, x: Tensor, states: States, resets: Tensor, active: Tensor | None, layers: list[LayerWeights]
) -> tuple[Tensor, States]:
    """Packed segments: our own layer on the CPU, torch's (cuDNN) on CUDA."""
    if x.is_cuda:
        return run_packed_by_torch(kind, x, states, resets, active, layers)
    layout = segments(resets, active)
    rows = pack(x, layout)
    finals: list[list[Tensor]] = [[] for _ in states]
    for depth, weights in enumerate(layers):
        initial = [state[depth] for state in states]
        carried = [state.index_select(0, layout.carried_env) for state in initial]
        if kind == "gru":
            results = (packed.gru_layer(rows, carried[0], weights, layout),)
        else:
            results = packed.lstm_layer(rows, carried[0], carried[1], weights, layout)
        for final, result, start in zip(finals, results, initial, strict=True):
            final.append(final_state(result, start, layout))
        rows = results[0]
    return unpack(rows, layout), tuple(torch.stack(final) for final in finals)


def run_packed_by_torch(
    kind: Kind, x: Tensor, states: States, resets: Tensor, active: Tensor | None, layers: list[LayerWeights]
) -> tuple[Tensor, States]:
    """Packed segments through torch's own packed sequences, all layers in one call."""
    layout = segments(resets, active)
    if not layout.rows:
        forget = layout.forgotten[:, None]
        return x.new_zeros((*resets.shape, states[0].shape[-1])), tuple(s.masked_fill(forget, 0) for s in states)
    count = layout.blocks[0][1]
    opening = [
        state.new_zeros((len(layers), count, state.shape[-1])).index_copy(
            1, layout.carried, state.index_select(1, layout.carried_env)
        )
        for state in states
    ]
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
    final = tuple(
        state.masked_fill(layout.forgotten[:, None], 0).index_copy(
            1, layout.final_env, after.index_select(1, layout.final_rank)
        )
        for state, after in zip(states, ended, strict=True)
    )
    return unpack(out, layout), final


def _join_for_cudnn(kind: Kind, flat: list[Tensor], layers: int) -> None:
    """Let the parameters share one piece of memory, as cuDNN wants; else it copies them at every call and warns."""
    weight = flat[0]
    joined = len({parameter.untyped_storage().data_ptr() for parameter in flat}) == 1
    if joined or not torch.backends.cudnn.is_acceptable(weight):
        return
    mode = 3 if kind == "gru" else 2  # CUDNN_GRU and CUDNN_LSTM
    hidden = flat[1].shape[1]
    with torch.no_grad():
        torch._cudnn_rnn_flatten_weight(  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]  # torch has no public name for it
            # torch.nn.GRU calls it at its own construction; it has no public name
            flat,
            len(flat) // layers,
            weight.shape[1],
            mode,
            hidden,
            0,
            layers,
            False,
            False,
        )


def run_scan(
    kind: Kind, x: Tensor, states: States, resets: Tensor, active: Tensor | None, layers: list[LayerWeights]
) -> tuple[Tensor, States]:
    """A loop over steps on all rows, resets and sleep as selections; traces without a graph break."""
    steps = x.shape[0]
    finals: list[list[Tensor]] = [[] for _ in states]
    for depth, (w_ih, w_hh, b_ih, b_hh) in enumerate(layers):
        size = w_hh.shape[1]
        projected = F.linear(x, w_ih, b_ih)
        now = [state[depth] for state in states]
        outputs: list[Tensor] = []
        for t in range(steps):
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
        for final, state in zip(finals, now, strict=True):
            final.append(state)
        x = torch.stack(outputs) if outputs else x.new_zeros((0, x.shape[1], size))
    return x, tuple(torch.stack(final) for final in finals)


def _gru_cell(projected: Tensor, recurrent: Tensor, hidden: Tensor, size: int) -> Tensor:
    rz = (projected[:, : 2 * size] + recurrent[:, : 2 * size]).sigmoid()
    n = (projected[:, 2 * size :] + rz[:, :size] * recurrent[:, 2 * size :]).tanh()
    return n + rz[:, size:] * (hidden - n)


def _lstm_cell(gates: Tensor, cell: Tensor, size: int) -> list[Tensor]:
    i, f, g, o = gates.split(size, 1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    return [o.sigmoid() * cell.tanh(), cell]


def run_pad(
    kind: Kind, x: Tensor, states: States, resets: Tensor, active: Tensor | None, layers: list[LayerWeights]
) -> tuple[Tensor, States]:
    """Segments padded to the longest, torch's own cells on every padded step."""
    layout = segments(resets, active)
    count = layout.blocks[0][1] if layout.blocks else 0
    places = _padded_places(layout, count)
    rows = pack(x, layout)
    finals: list[list[Tensor]] = [[] for _ in states]
    for depth, weights in enumerate(layers):
        shape = (len(layout.blocks) * count, rows.shape[1])
        padded = rows.new_zeros(shape).index_copy(0, places, rows).unflatten(0, (len(layout.blocks), count))
        initial = [state[depth] for state in states]
        now: list[Tensor] = [
            state.new_zeros((count, state.shape[-1])).index_copy(
                0, layout.carried, state.index_select(0, layout.carried_env)
            )
            for state in initial
        ]
        history: list[list[Tensor]] = [[] for _ in states]
        for row in padded:
            now = _torch_cell(kind, row, now, weights)
            for kept, state in zip(history, now, strict=True):
                kept.append(state)
        results = [
            torch.cat(kept).index_select(0, places) if kept else rows.new_zeros((0, len(weights.w_hh[0])))
            for kept in history
        ]
        for final, result, start in zip(finals, results, initial, strict=True):
            final.append(final_state(result, start, layout))
        rows = results[0]
    return unpack(rows, layout), tuple(torch.stack(final) for final in finals)


def _padded_places(layout: Segments, count: int) -> Tensor:
    """Where each packed row goes in the padded (longest, segments) grid, flattened."""
    sizes = layout.batch_sizes
    step = torch.arange(len(sizes)).repeat_interleave(sizes)
    within = torch.arange(layout.rows) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    return (step * count + within).to(layout.order.device)


def _torch_cell(kind: Kind, x: Tensor, states: list[Tensor], weights: LayerWeights) -> list[Tensor]:
    if kind == "gru":
        return [torch.gru_cell(x, states[0], *weights)]
    return list(torch.lstm_cell(x, states, *weights))


def run_triton(
    kind: Kind, x: Tensor, states: States, resets: Tensor, active: Tensor | None, layers: list[LayerWeights]
) -> tuple[Tensor, States]:
    """The loop over steps inside a Triton kernel."""
    require_extra("triton", extra="triton", purpose="the triton backend of a recurrent module")
    from headrace.learning import _triton_layers as triton_layers

    return triton_layers.run(kind, x, states, resets, active, layers)


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
    """What Triton raises when a kernel cannot be compiled or does not fit the device."""
    from triton.errors import TritonError

    return TritonError


def step_layers(
    kind: Kind, x: Tensor, states: States, reset: Tensor | None, active: Tensor | None, layers: list[LayerWeights]
) -> tuple[Tensor, States]:
    """One step of acting: (N, I) → outputs (N, H) and new states. Torch's own cells."""
    if reset is not None:
        states = tuple(state.masked_fill(reset[None, :, None], 0) for state in states)
    finals: list[list[Tensor]] = [[] for _ in states]
    for depth, weights in enumerate(layers):
        after = _torch_cell(kind, x, [state[depth] for state in states], weights)
        for final, state in zip(finals, after, strict=True):
            final.append(state)
        x = after[0]
    new = tuple(torch.stack(final) for final in finals)
    if active is None:
        return x, new
    live = active[:, None]
    return x.masked_fill(~live, 0), tuple(torch.where(live, n, o) for n, o in zip(new, states, strict=True))
