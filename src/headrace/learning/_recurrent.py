"""GRU and LSTM for acting and for learning from slices with resets inside.

Both have the parameters of ``torch.nn.GRU`` and ``torch.nn.LSTM``, so state dicts interchange; dropout, projections and
two directions are left out. ``forward`` takes slices, ``step`` takes one step of acting.
"""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor, nn

from headrace.errors import UnknownNameError
from headrace.learning import _backends as backends
from headrace.learning._backends import Kind, Outcome, Runner, Slice, States
from headrace.learning._packed import LayerWeights
from headrace.learning._segments import check_sizes, check_state, check_step, time_major

Backend: TypeAlias = Literal["auto", "packed", "scan"]

_RUNNERS: dict[str, Runner] = {
    "packed": backends.run_packed,
    "scan": backends.run_scan,
}


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
        work = Slice(self.kind, x, states, resets, active, self.weights())
        # not by measuring: the choice decides last bits, which a resumed training must have again
        usual = "scan" if torch.compiler.is_compiling() else "packed"
        backend = usual if self.backend == "auto" else self.backend
        out, after = _RUNNERS[backend](work)
        return (out.transpose(0, 1) if self.batch_first else out), after

    def _run_step(self, x: Tensor, states: States, reset: Tensor | None, active: Tensor | None) -> Outcome:
        check_step(x, reset, active, self.input_size)
        states = self._check_states(states, x.shape[0])
        if reset is not None:
            states = tuple(state.masked_fill(reset[None, :, None], 0) for state in states)
        return backends.step_layers(self.kind, x, states, active, self.weights())

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
        backend: how slices are run; see :mod:`headrace.learning._backends`. ``auto`` is ``packed``, and ``scan`` inside
            ``torch.compile``.
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
