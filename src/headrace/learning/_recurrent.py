"""GRU and LSTM for acting and for learning from slices with resets inside.

Both have the parameters of ``torch.nn.GRU`` and ``torch.nn.LSTM``, so state dicts interchange; dropout, projections and
two directions are left out. ``forward`` takes slices, ``step`` takes one step of acting.

Ways to run a stack of GRU or LSTM layers over a (T, B) slice with resets inside. All give the same numbers.

Every backend takes the kind, inputs (T, B, I), states, resets and active steps (T, B) and weights, and gives the top
layer's outputs (T, B, H), 0 at suspended steps, and the states after the slice.

- ``packed``: segments sorted and packed, no padding and no product with a state that was just reset.
- ``scan``: a loop over T on all B rows. No shape depends on the data, so it traces into one compiled region.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor, nn

from headrace.errors import UnknownNameError
from headrace.learning import _packed as packed
from headrace.learning._packed import (
    LayerWeights,
    check_sizes,
    check_state,
    check_step,
    final_states,
    pack,
    segments,
    time_major,
    unpack,
)

Kind: TypeAlias = Literal["gru", "lstm"]
States: TypeAlias = tuple[Tensor, ...]
Outcome: TypeAlias = tuple[Tensor, States]


RunLayer: TypeAlias = Callable[[Tensor, list[Tensor], LayerWeights], tuple[Tensor, Sequence[Tensor]]]
"""(inputs, states of this layer (B, H), its weights) → (outputs, its states after the slice)."""


def run_layers(x: Tensor, states: States, layers: list[LayerWeights], run_layer: RunLayer) -> Outcome:
    """Run one layer after another; outputs of the last one and the states of all."""
    finals: list[Sequence[Tensor]] = []
    for depth, weights in enumerate(layers):
        x, after = run_layer(x, [state[depth] for state in states], weights)
        finals.append(after)
    return x, tuple(torch.stack(of_layers) for of_layers in zip(*finals, strict=True))


def run_packed(
    kind: Kind, x: Tensor, states: States, resets: Tensor, active: Tensor | None, layers: list[LayerWeights]
) -> Outcome:
    """Run packed segments, layer by layer."""
    layout = segments(resets, active)

    def run_layer(rows: Tensor, initial: list[Tensor], weights: LayerWeights) -> tuple[Tensor, list[Tensor]]:
        carried = [state.index_select(0, layout.carried_env) for state in initial]
        results = packed.run_layer(kind, rows, carried, weights, layout)
        return results[0], [final_states(*both, layout) for both in zip(initial, results, strict=True)]

    rows, finals = run_layers(pack(x, layout), states, layers, run_layer)
    return unpack(rows, layout), finals


def run_scan(
    kind: Kind, x: Tensor, states: States, resets: Tensor, active: Tensor | None, layers: list[LayerWeights]
) -> Outcome:
    """Return a loop over steps on all rows, resets and sleep as selections; traces without a graph break."""

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

    return run_layers(x, states, layers, run_layer)


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


Backend: TypeAlias = Literal["auto", "packed", "scan"]


class _Recurrent(nn.Module):
    """Parameters of a stack of layers, named, shaped and initialized as ``torch.nn.RNNBase`` does it.

    Not a subclass of torch's: torch.compile refuses to trace those.
    """

    kind: ClassVar[Kind]
    gates: ClassVar[int]
    state_count: ClassVar[int]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        bias: bool = True,
        batch_first: bool = False,
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(input_size, hidden_size, num_layers)
        if backend not in get_args(Backend):
            raise UnknownNameError("backend", backend, get_args(Backend))
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias, self.batch_first = bias, batch_first
        self.backend: Backend = backend
        bound = hidden_size**-0.5
        for depth in range(num_layers):
            shapes: dict[str, tuple[int, ...]] = {
                "weight_ih": (self.gates * hidden_size, input_size if depth == 0 else hidden_size),
                "weight_hh": (self.gates * hidden_size, hidden_size),
                "bias_ih": (self.gates * hidden_size,),
                "bias_hh": (self.gates * hidden_size,),
            }
            for name, shape in shapes.items():
                if bias or name.startswith("weight"):
                    values = torch.empty(shape, device=device, dtype=dtype).uniform_(-bound, bound)
                    self.register_parameter(f"{name}_l{depth}", nn.Parameter(values))

    def extra_repr(self) -> str:
        """Return what ``print`` shows in the brackets."""
        return f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}, backend={self.backend!r}"

    def weights(self) -> list[LayerWeights]:
        """Return the parameters, layer by layer."""
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        return [
            LayerWeights(*(cast("Tensor", getattr(self, f"{name}_l{depth}", None)) for name in names))
            for depth in range(self.num_layers)
        ]

    def _run_slice(self, x: Tensor, states: States | None, resets: Tensor | None, active: Tensor | None) -> Outcome:
        x, resets, active = time_major(x, resets, active, input_size=self.input_size, batch_first=self.batch_first)
        states = self._check_states(states, x.shape[1])
        if resets is None:
            resets = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        if active is not None:
            # an input that is not read may be NaN, and a NaN survives every later selection's backward
            x = x.masked_fill(~active[..., None], 0)
        # not by measuring: the choice decides last bits, which a resumed training must have again
        usual = "scan" if torch.compiler.is_compiling() else "packed"
        backend = usual if self.backend == "auto" else self.backend
        run = run_packed if backend == "packed" else run_scan
        out, after = run(self.kind, x, states, resets, active, self.weights())
        return (out.transpose(0, 1) if self.batch_first else out), after

    def _run_step(self, x: Tensor, states: States, reset: Tensor | None, active: Tensor | None) -> Outcome:
        check_step(x, reset, active, self.input_size)
        states = self._check_states(states, x.shape[0])
        if reset is not None:
            states = tuple(state.masked_fill(reset[None, :, None], 0) for state in states)
        return step_layers(self.kind, x, states, active, self.weights())

    def _zeros(self, envs: int) -> Tensor:
        return self.weights()[0].w_hh.detach().new_zeros((self.num_layers, envs, self.hidden_size))

    def _check_states(self, states: States | None, envs: int) -> States:
        if states is None:
            return tuple(self._zeros(envs) for _ in range(self.state_count))
        for state in states:
            check_state(state, (self.num_layers, envs, self.hidden_size))
        return states


class GRU(_Recurrent):
    """Gated recurrent units. Parameters, their names and their initial values are those of ``torch.nn.GRU``.

    Args:
        input_size: I.
        hidden_size: H.
        num_layers: layers on top of each other.
        bias: with bias terms.
        batch_first: slices are (B, T, …) instead of (T, B, …). The state is (layers, B, H) either way.
        backend: how slices are run, as said above. ``auto`` is ``packed``, and ``scan`` inside ``torch.compile``.
        device: of the parameters.
        dtype: of the parameters.
    """

    kind: ClassVar[Kind] = "gru"
    gates = 3
    state_count = 1

    def forward(
        self, x: Tensor, state: Tensor | None = None, resets: Tensor | None = None, active: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run a slice.

        Args:
            x: (T, B, I), or (B, T, I) if ``batch_first``.
            state: (layers, B, H) before the slice; None for zeros. Gradients flow into it.
            resets: bool (T, B) in the layout of ``x``: the state is zeroed before this step. None: never.
            active: bool (T, B): False where the environment was suspended. Its state passes through unchanged, its
                output is 0, its input is not read. None: always.

        Returns:
            Outputs of the top layer (T, B, H) in the layout of ``x``, and the state after the slice.
        """
        states = None if state is None else (state,)
        out, after = self._run_slice(x, states, resets, active)
        return out, after[0]

    def step(
        self, x: Tensor, state: Tensor, reset: Tensor | None = None, active: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return one step of acting. The caller keeps the state; what is given is not changed.

        Args:
            x: (N, I).
            state: (layers, N, H), from :meth:`initial_state` or the step before.
            reset: bool (N,): zero the state of these rows before the step.
            active: bool (N,): the others keep their state and output 0.
        """
        out, after = self._run_step(x, (state,), reset, active)
        return out, after[0]

    def initial_state(self, envs: int) -> Tensor:
        """Zeros, (layers, envs, H), in the dtype and on the device of the parameters."""
        return self._zeros(envs)


class LSTM(_Recurrent):
    """Long short-term memory. Parameters are those of ``torch.nn.LSTM``; arguments as in :class:`GRU`.

    The state is a pair, hidden and cell, each (layers, B, H).
    """

    kind: ClassVar[Kind] = "lstm"
    gates = 4
    state_count = 2

    def forward(
        self,
        x: Tensor,
        state: tuple[Tensor, Tensor] | None = None,
        resets: Tensor | None = None,
        active: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run a slice; arguments as in :meth:`GRU.forward`."""
        out, after = self._run_slice(x, state, resets, active)
        return out, (after[0], after[1])

    def step(
        self, x: Tensor, state: tuple[Tensor, Tensor], reset: Tensor | None = None, active: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return one step of acting; arguments as in :meth:`GRU.step`."""
        out, after = self._run_step(x, state, reset, active)
        return out, (after[0], after[1])

    def initial_state(self, envs: int) -> tuple[Tensor, Tensor]:
        """Zeros, each (layers, envs, H)."""
        return self._zeros(envs), self._zeros(envs)
