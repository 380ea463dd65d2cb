"""A recurrent layer whose gates do not read the state, so that a slice is one parallel scan (Feng et al., 2024).

```
z_t = σ(W_z·x_t + b_z),   g_t = W_g·x_t + b_g
h_t = (1 − z_t)·h_{t−1} + z_t·g_t          h_{t−1} = 0 where t is reset; h_t = h_{t−1} where t is suspended
```

Two thirds of a GRU's parameters for its inputs, none for its state, no loop over matrix products. Several layers give
back what gates lose by not seeing the state.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from headrace.learning import linear_scan as kernels
from headrace.learning._segments import check_sizes, check_state, check_step, time_major


class MinGRU(nn.Module):
    """minGRU layers with the interface of :class:`headrace.learning.GRU`.

    Args:
        input_size: I.
        hidden_size: H.
        num_layers: layers on top of each other.
        batch_first: slices are (B, T, …) instead of (T, B, …). The state is (layers, B, H) either way.
        device: of the parameters.
        dtype: of the parameters.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(input_size, hidden_size, num_layers)
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.batch_first = batch_first
        sizes = [input_size] + [hidden_size] * (num_layers - 1)
        # z and g of a layer in one product
        self.layers = nn.ModuleList(nn.Linear(size, 2 * hidden_size, device=device, dtype=dtype) for size in sizes)

    def forward(
        self, x: Tensor, state: Tensor | None = None, resets: Tensor | None = None, active: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run a slice; arguments and results as in :meth:`headrace.learning.GRU.forward`."""
        x, resets, active = time_major(x, resets, active, input_size=self.input_size, batch_first=self.batch_first)
        state = self._checked_state(state, x.shape[1])
        finals: list[Tensor] = []
        for depth, layer in enumerate(self.layers):
            keep, add = _gates(layer, x, resets, active)
            states = linear_recurrence(keep, add, state[depth])
            finals.append(states[-1] if len(states) else state[depth])
            x = states if active is None else states.masked_fill(~active[..., None], 0)
        return (x.transpose(0, 1) if self.batch_first else x), torch.stack(finals)

    def step(
        self, x: Tensor, state: Tensor, reset: Tensor | None = None, active: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return one step of acting; arguments and results as in :meth:`headrace.learning.GRU.step`."""
        check_step(x, reset, active, self.input_size)
        state = self._checked_state(state, x.shape[0])
        finals: list[Tensor] = []
        for depth, layer in enumerate(self.layers):
            keep, add = _gates(layer, x, reset, active)
            after = keep * state[depth] + add
            finals.append(after)
            x = after if active is None else after.masked_fill(~active[:, None], 0)
        return x, torch.stack(finals)

    def initial_state(self, envs: int) -> Tensor:
        """Zeros, (layers, envs, H), in the dtype and on the device of the parameters."""
        like = next(self.parameters()).detach()
        return like.new_zeros((self.num_layers, envs, self.hidden_size))

    def _checked_state(self, state: Tensor | None, envs: int) -> Tensor:
        if state is None:
            return self.initial_state(envs)
        check_state(state, (self.num_layers, envs, self.hidden_size))
        return state


def linear_recurrence(keep: Tensor, add: Tensor, initial: Tensor) -> Tensor:
    """Return all h_t = keep_t·h_{t−1} + add_t, with gradients; keep and add (T, …), initial (…)."""
    return cast("Tensor", _LinearRecurrence.apply(keep, add, initial))


class _LinearRecurrence(torch.autograd.Function):
    """The gradient of a linear recurrence is a linear recurrence, backwards in time."""

    @staticmethod
    def forward(ctx: Any, keep: Tensor, add: Tensor, initial: Tensor) -> Tensor:
        states = kernels.linear_scan(keep, add, initial)
        ctx.save_for_backward(keep, initial, states)
        return states

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]  # once_differentiable hides the names of its parameters
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, ...]:
        keep, initial, states = ctx.saved_tensors
        if not len(states):
            return torch.zeros_like(keep), torch.zeros_like(states), torch.zeros_like(initial)
        following = torch.cat((keep[1:], torch.zeros_like(keep[:1])))
        d_add = kernels.linear_scan(following.flip(0), grads[0].flip(0), torch.zeros_like(initial)).flip(0)
        previous = torch.cat((initial[None], states[:-1]))
        return d_add * previous, d_add, d_add[0] * keep[0]


def _gates(layer: nn.Module, x: Tensor, resets: Tensor | None, active: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return what the state is multiplied with, and what is added to it."""
    if active is not None:
        # an input that is not read may be NaN, and a NaN survives every later selection's backward
        x = x.masked_fill(~active[..., None], 0)
    z, g = layer(x).chunk(2, -1)
    z = z.sigmoid()
    keep, add = 1 - z, z * g
    if active is not None:
        asleep = ~active[..., None]
        keep, add = keep.masked_fill(asleep, 1), add.masked_fill(asleep, 0)
    if resets is not None:
        keep = keep.masked_fill(resets[..., None], 0)
    return keep, add
