"""Ways to run a stack of GRU or LSTM layers over a (T, B) slice with resets inside. All give the same numbers.

Every backend takes a :class:`Slice` and gives the top layer's outputs (T, B, H), 0 at suspended steps, and the states
after the slice.

- ``packed``: segments sorted and packed, no padding and no product with a state that was just reset.
- ``scan``: a loop over T on all B rows. No shape depends on the data, so it traces into one compiled region.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from headrace.learning import _packed as packed
from headrace.learning._packed import LayerWeights
from headrace.learning._segments import final_states, pack, segments, unpack

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
    """Run packed segments, layer by layer."""
    layout = segments(work.resets, work.active)

    def run_layer(rows: Tensor, initial: list[Tensor], weights: LayerWeights) -> tuple[Tensor, list[Tensor]]:
        carried = [state.index_select(0, layout.carried_env) for state in initial]
        results = packed.run_layer(work.kind, rows, carried, weights, layout)
        return results[0], [final_states(*both, layout) for both in zip(initial, results, strict=True)]

    rows, finals = run_layers(pack(work.x, layout), work.states, work.layers, run_layer)
    return unpack(rows, layout), finals


def run_scan(work: Slice) -> Outcome:
    """Return a loop over steps on all rows, resets and sleep as selections; traces without a graph break."""
    kind, _, _, resets, active, _ = work

    def run_layer(x: Tensor, now: list[Tensor], weights: LayerWeights) -> tuple[Tensor, list[Tensor]]:
        outputs: list[Tensor] = []
        for t in range(x.shape[0]):
            before = [state.masked_fill(resets[t, :, None], 0) for state in now]
            after = _torch_cell(kind, x[t], before, weights)
            if active is None:
                now = after
                outputs.append(after[0])
            else:
                live = active[t, :, None]
                now = [torch.where(live, new, old) for new, old in zip(after, before, strict=True)]
                outputs.append(after[0].masked_fill(~live, 0))
        return torch.stack(outputs) if outputs else x.new_zeros((0, *now[0].shape)), now

    return run_layers(work.x, work.states, work.layers, run_layer)


def _torch_cell(kind: Kind, x: Tensor, states: list[Tensor], weights: LayerWeights) -> list[Tensor]:
    if kind == "gru":
        return [torch.gru_cell(x, states[0], *weights)]
    return list(torch.lstm_cell(x, states, *weights))


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
