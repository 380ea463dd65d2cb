"""The size of strict batches that fits a policy, and the places of rows in them.

What decides the size is how often one row uses a weight. A convolution, or attention over tokens, uses it hundreds of
times: the model computes as long for a batch as for its rows one by one, and padding costs as much as rows. A plain MLP
uses it once: a batch shares the read of the weights. So rows are answered alone on a CPU from ``ALONE_FROM`` uses on,
else in tiles of 16, and on a GPU, which one row leaves idle, always in tiles. Nothing here depends on times, or on the
number of environments.

torch's ``FlopCounterMode`` would count the same, but does not see into fused transformer layers, and takes one to two
seconds to import what it needs.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # pyright: ignore[reportPrivateUsage]  # torch's base
from torch.nn.modules.conv import _ConvNd as Convolution  # pyright: ignore[reportPrivateUsage]  # torch's base
from torch.nn.modules.conv import _ConvTransposeNd as Transposed  # pyright: ignore[reportPrivateUsage]  # torch's base
from torch.nn.modules.dropout import _DropoutNd as Dropout  # pyright: ignore[reportPrivateUsage]  # torch's base

from headrace.errors import PolicyError
from headrace.policies.batching import TILE, Batching, with_padding
from headrace.policies.engines import InlineEngine, Request
from headrace.policies.protocol import ChunkContext, ChunkPolicy, one_row
from headrace.types import Obs

ALONE_FROM = 8
"""Uses of a weight by one row, from which on a CPU answers rows alone."""


def choose_batching(policy: ChunkPolicy, batching: Batching, env: object, timeout: float | None = None) -> Batching:
    """Return strict batches with a size and places: those that are set, else those that fit the policy.

    The policy is called on rows of zeros and of random numbers without an episode (id -1, as padding rows have), for
    at most ``timeout`` seconds.
    """
    space: object = getattr(env, "single_observation_space", None)
    if batching.mode == "fast" or None not in (batching.size, batching.places):
        return batching
    if not isinstance(space, spaces.Dict):
        return replace(batching, size=batching.strict_size, places=batching.places or "spread")
    probe = _Probe(policy, batching, space)
    row, _ = with_padding(one_row("", size=(policy.horizon, policy.action_dim)), {}, 1)
    obs = {name: values.zero_() for name, values in _sample_rows(space, policy.obs_steps, 1).items()}
    with closing(InlineEngine(probe, Batching(mode="fast"), timeout)) as engine:
        engine.submit(Request(obs=obs, context=row.rows(torch.tensor([1]))))
        engine.poll(wait=True)
    return probe.batching


class _Probe:
    """Calls a policy on rows without an episode, to see what one row uses, and whether its place matters."""

    obs_steps = 1

    def __init__(self, policy: ChunkPolicy, batching: Batching, space: spaces.Dict) -> None:
        self.horizon, self.action_dim = policy.horizon, policy.action_dim
        self._policy, self._space = policy, space
        self.batching = batching
        """As given; after a call, with size and places."""

    def __call__(self, obs: Obs, context: ChunkContext) -> Tensor:
        size, places = self.batching.size, self.batching.places
        with count_uses() as uses:
            answered = self._answer(obs, context) is not None
        uses.check_modes()
        if size is None:
            size = 1 if answered and uses.per_weight >= ALONE_FROM and not uses.on_gpu else TILE
        if places is None:
            places = "free" if size == 1 or self._is_free(context, size) else "spread"
        self.batching = replace(self.batching, size=size, places=places)
        return torch.zeros(1, self.horizon, self.action_dim)

    def _is_free(self, context: ChunkContext, size: int) -> bool:
        """Whether rows of random numbers get the same bits at other places of a batch."""
        rows = _sample_rows(self._space, self._policy.obs_steps, size)
        told, _ = with_padding(context, {}, size - 1)
        first = self._answer(rows, told)
        if first is None:
            return False
        for shift in (1, size // 2, size - 1):
            moved = self._answer({name: values.roll(shift, 0) for name, values in rows.items()}, told)
            if moved is None or not torch.equal(moved, first.roll(shift, 0)):
                return False
        return True

    def _answer(self, obs: Obs, context: ChunkContext) -> Tensor | None:
        """Return what the policy plans; None where it does not take such rows, and nothing follows from them."""
        try:
            return torch.as_tensor(self._policy(obs, context))
        except Exception:  # noqa: BLE001  # whatever a policy raises at made-up rows: it is not asked for an episode yet
            return None


@dataclass(slots=True, kw_only=True)
class Uses:
    """What the modules that one row passed through hold and compute."""

    weights: int = 0
    multiply_adds: int = 0
    on_gpu: bool = False
    training: str = ""
    """A module that computes as in training; "" where none does."""

    @property
    def per_weight(self) -> float:
        """How often the row used a weight, on average."""
        return self.multiply_adds / self.weights if self.weights else 0.0

    def check_modes(self) -> None:
        """Refuse a module in training mode, whose answers depend on the batch or on chance."""
        if self.training:
            raise PolicyError(
                f"policy: expected modules in evaluation mode, got a {self.training} in training mode, whose answer "
                "depends on the batch or on chance; call .eval() on the module that the policy calls"
            )


@contextmanager
def count_uses() -> Generator[Uses]:
    """Count the multiply-adds of layers that are called within the block, and their weights, each once."""
    uses, seen = Uses(), set[int]()

    def note_mode(module: nn.Module, _inputs: object) -> None:
        if module.training and (isinstance(module, BatchNorm) or (isinstance(module, Dropout) and module.p > 0)):
            uses.training = type(module).__name__

    def note(module: nn.Module, inputs: tuple[Any, ...], output: object) -> None:
        positions = _count_positions(module, inputs[0], output) if inputs and isinstance(inputs[0], Tensor) else 0
        if not positions:
            return
        weights = [part for part in module.parameters() if part.dim() > 1]
        uses.multiply_adds += positions * sum(part.numel() for part in weights)
        uses.weights += sum(part.numel() for part in weights if id(part) not in seen)
        uses.on_gpu |= any(part.is_cuda for part in weights)
        seen.update(map(id, weights))

    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # a compiled module is counted as it was written
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        # a fused layer calls none of the modules in it
        fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        stack.callback(torch.backends.mha.set_fastpath_enabled, fused)
        stack.callback(nn.modules.module.register_module_forward_pre_hook(note_mode).remove)
        stack.callback(nn.modules.module.register_module_forward_hook(note).remove)
        yield uses


def _count_positions(module: nn.Module, given: Tensor, output: object) -> int:
    """Return how often a layer applied its weights; 0 for modules that are not layers with a matrix of weights."""
    if isinstance(module, nn.Linear):
        return given.numel() // module.in_features
    if isinstance(module, Convolution):
        spread = given.numel() // module.in_channels  # a transposed one writes its weights once per input position
        return spread if isinstance(module, Transposed) else _numel(output) // module.out_channels
    if isinstance(module, nn.MultiheadAttention):
        return given.numel() // module.embed_dim
    return given.numel() // module.input_size if isinstance(module, nn.RNNBase) else 0


def _numel(output: object) -> int:
    return output.numel() if isinstance(output, Tensor) else 0


def _sample_rows(space: spaces.Dict, obs_steps: int, count: int) -> Obs:
    """Return ``count`` observation rows of a space with random numbers, the same in every process."""
    source, rows = torch.Generator().manual_seed(0), dict[str, Tensor]()
    for name, part in space.items():
        shape = (count, *((obs_steps,) if obs_steps > 1 else ()), *(part.shape or ()))
        dtype = torch.from_numpy(np.zeros(0, part.dtype)).dtype
        if dtype.is_floating_point:
            rows[name] = torch.randn(shape, generator=source).to(dtype)
        else:
            rows[name] = torch.randint(2 if dtype == torch.bool else 128, shape, generator=source).to(dtype)
    return rows
