"""Batches of a model: which rows it computes together, and whether answers are what they should.

``fast`` gives the model the waiting rows. ``strict`` gives it batches of one fixed size: a matrix product then adds up
the same numbers in the same order, and neither the number of environments nor neighbors change one bit of a row's
answer. Some products round by the place of a row in its batch, too; the rows of a policy that has any stand at places
that follow from their episodes.

What decides the size is how often one row uses a weight. A convolution, or attention over tokens, uses it hundreds of
times: the model computes as long for a batch as for its rows one by one, and padding costs as much as rows. A plain MLP
uses it once: a batch shares the read of the weights. So rows are answered alone on a CPU from ``ALONE_FROM`` uses on,
else in tiles of 16, and on a GPU, which one row leaves idle, always in tiles. Nothing here depends on times, or on the
number of environments.

Answers of strict batches are verified: compared with those that the same rows get alone and in another batch.

torch's ``FlopCounterMode`` would count the same, but does not see into fused transformer layers, and takes one to two
seconds to import what it needs.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, Literal, cast

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # pyright: ignore[reportPrivateUsage]  # torch's base
from torch.nn.modules.conv import _ConvNd as Convolution  # pyright: ignore[reportPrivateUsage]  # torch's base
from torch.nn.modules.conv import _ConvTransposeNd as Transposed  # pyright: ignore[reportPrivateUsage]  # torch's base
from torch.nn.modules.dropout import _DropoutNd as Dropout  # pyright: ignore[reportPrivateUsage]  # torch's base

from headrace.errors import ConfigError, PolicyError
from headrace.policies.protocol import (
    PADDING,
    TENSOR_FIELDS,
    ChunkContext,
    ChunkPolicy,
    EpisodeRows,
    RemembersEpisodes,
    check_chunk,
    has_memory,
    name_rows,
    one_row,
    unwrap_policy,
)
from headrace.types import Obs

TILE = 16
"""Rows of a strict batch, where rows are not computed alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How model batches are formed."""

    mode: Literal["fast", "strict"] = "strict"
    size: int | None = None
    """Rows of a batch in ``strict`` mode. None for the size that fits device and policy: 1, rows alone, on a CPU where
    a row uses each weight often (convolutions, attention), else 16. An engine or a server that is made without an
    environment takes 16."""
    places: Literal["free", "spread", "modulo"] | None = None
    """Place of a row in a strict batch: ``free`` (any), ``spread`` (the digits of its episode's id, added up, so that
    neither ids in a row nor ids in steps of the size meet), or ``modulo`` (its id modulo the size, as in 0.2). None for
    ``free`` if a test shows that the policy's answers do not depend on it, else ``spread``."""

    def __post_init__(self) -> None:
        if self.mode not in ("fast", "strict"):
            raise ConfigError(f"batching mode: expected 'fast' or 'strict', got {self.mode!r}")
        if self.size is not None and (type(self.size) is not int or self.size < 1):
            raise ConfigError(f"batching size: expected at least 1 row, got {self.size}")
        if self.places not in ("free", "spread", "modulo", None):
            raise ConfigError(f"batching places: expected 'free', 'spread', 'modulo' or None, got {self.places!r}")

    @classmethod
    def of(cls, batching: object) -> Batching:
        """Return the batches that an argument ``batching`` stands for: strict ones for None."""
        if batching is None or isinstance(batching, Batching):
            return batching or Batching()
        if isinstance(batching, str):
            return Batching(mode=cast("Literal['fast', 'strict']", batching))
        raise ConfigError(
            f"batching: expected 'strict', 'fast' or a headrace.policies.Batching, got {batching!r}; "
            "Batching(size=4) sets the rows of a strict batch"
        )

    @property
    def strict_size(self) -> int | None:
        """Rows of a strict batch; None in ``fast`` mode."""
        return (self.size or TILE) if self.mode == "strict" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the model said, and what it cost."""

    actions: Tensor
    """float32 (n, horizon, A) on the host, in the order of the rows asked for."""
    calls: int
    padding: int
    """Wasted rows: computed, and read by no environment."""
    verified: int = 0
    """Rows that were answered again, alone and in another batch, with equal bits."""
    checking: int = 0
    """Rows that were computed for that, padding included."""


COUNTS = ("calls", "padding", "verified", "checking")
"""The fields of an answer that are numbers, which cross a wire."""


def answer_rows(policy: ChunkPolicy, obs: Obs, context: ChunkContext, batching: Batching) -> Answer:
    """Run the policy over n rows in batches, and check each answer; errors name the environments.

    Their episodes have begun.
    """
    count = len(context.instructions)
    alone = batching.strict_size == 1 and count == 1  # nothing to pad or to split
    if alone or (batching.mode == "fast" and count):
        return Answer(actions=check_chunk(policy(obs, context), policy, context, read=None), calls=1, padding=0)
    actions = torch.zeros((count, policy.horizon, policy.action_dim))
    batches = _batches(context.episode_ids.cpu().numpy(), batching)
    if any((places == count).any() for places in batches):
        context, obs = with_padding(context, obs, 1)
    for places in batches:
        slots, index = np.flatnonzero(places < count), torch.from_numpy(places).to(context.env_ids.device)
        whole, rows = context.rows(index), {name: values.index_select(0, index) for name, values in obs.items()}
        chosen = check_chunk(policy(rows, whole), policy, whole, read=torch.from_numpy(slots))
        actions[torch.from_numpy(places[slots])] = chosen
    return Answer(actions=actions, calls=len(batches), padding=sum(map(len, batches)) - count)


def tell_episodes(policy: ChunkPolicy, context: ChunkContext, ended: EpisodeRows | None) -> None:
    """Tell a policy with memory which episodes have ended, and which begin with this chunk."""
    if has_memory(policy):
        keeper = cast("RemembersEpisodes", policy)
        if ended is not None and len(ended):
            keeper.end(ended)
        if len(beginning := context.beginning()):
            keeper.begin(beginning)


def _batches(episode_ids: NDArray[np.int64], batching: Batching) -> list[NDArray[np.int64]]:
    """Return which of the n rows stands in each place of each batch; n where none does.

    Rows with a place of their own that collide go into the next call. Otherwise in order.
    """
    count = len(episode_ids)
    size = batching.strict_size or TILE
    own = None if batching.places == "free" or size == 1 else _places(episode_ids, size, batching.places)
    left = np.arange(count)
    batches: list[NDArray[np.int64]] = []
    while len(left):
        if own is not None:
            slots, first = np.unique(own[left], return_index=True)
        else:
            slots = first = np.arange(min(len(left), size))
        places = np.full(size, count)
        places[slots] = left[first]
        batches.append(places)
        left = np.delete(left, first)
    return batches


def _places(episode_ids: NDArray[np.int64], size: int, kind: str | None) -> NDArray[np.int64]:
    """Return the place of each episode in a batch, int64 (n,)."""
    if kind == "modulo":
        return episode_ids % size
    places, rest = np.zeros_like(episode_ids), episode_ids
    while rest.any():
        places, rest = places + rest % size, rest // size
    return places % size


def with_padding(context: ChunkContext, obs: Obs, count: int) -> tuple[ChunkContext, Obs]:
    """Return the same n rows, and ``count`` of zeros without an episode, which padding is read from."""
    tensors: dict[str, Tensor] = {}
    for name in TENSOR_FIELDS:
        values: Tensor = getattr(context, name)
        fill = PADDING if name in ("env_ids", "episode_ids") else 0
        tensors[name] = torch.cat((values, values.new_full((count, *values.shape[1:]), fill)))
    rows = {name: torch.cat((values, values.new_zeros((count, *values.shape[1:])))) for name, values in obs.items()}
    return ChunkContext(instructions=(*context.instructions, *("",) * count), **tensors), rows


ALONE_FROM = 8
"""Uses of a weight by one row, from which on a CPU answers rows alone."""
_LEAST, _SHARE = 8, 0.02
"""Rows that are verified at least, and the share of the computed rows that is spent on it beyond these."""
_WATCHED = 64
"""The global random generators are compared around the first calls, those with verified rows, and each of so many."""
_GENERATORS = "torch", "numpy", "Python"


def choose_batching(policy: ChunkPolicy, batching: Batching, env: object, timeout: float | None = None) -> Batching:
    """Return strict batches with a size and places: those that are set, else those that fit the policy.

    The policy is called on rows of zeros and of random numbers without an episode (id -1, as padding rows have), for
    at most ``timeout`` seconds.
    """
    from headrace.policies.engines import InlineEngine, Request

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
        padded, _ = with_padding(context, {}, size - 1)
        first = self._answer(rows, padded)
        if first is None:
            return False
        for shift in (1, size // 2, size - 1):
            moved = self._answer({name: values.roll(shift, 0) for name, values in rows.items()}, padded)
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


class Asker:
    """Asks a policy in batches; of strict ones it verifies a sample.

    Args:
        policy: what to ask.
        batching: how its batches are formed.
        alone: nothing else in this process draws random numbers while the policy computes, so that a global generator
            that has moved was moved by the policy.
    """

    def __init__(self, policy: ChunkPolicy, batching: Batching, *, alone: bool = True) -> None:
        self._policy, self._batching, self._alone = policy, batching, alone
        self._calls = self._rows = self._verified = self._checking = 0

    def __call__(self, obs: Obs, context: ChunkContext, ended: EpisodeRows | None = None) -> Answer:
        """Answer n rows, after telling the policy which episodes end and begin."""
        policy, batching = self._policy, self._batching
        tell_episodes(policy, context, ended)
        if batching.mode == "fast" or not len(context):
            return answer_rows(policy, obs, context, batching)
        count = self._quota(len(context))
        twins = self._twins(count)
        before = _generator_states() if count or self._calls % _WATCHED == 0 else None
        answer = answer_rows(policy, obs, context, batching)
        if before is not None and (moved := _find_moved(before)) and self._draws(obs, context, answer):
            raise PolicyError(
                f"policy: expected answers that are functions of their rows, got one that draws from {moved}'s global "
                f"random generator, for {name_rows(context)}: strict batches promise equal tables for any number of "
                "environments. Take noise from context.noise(), which is keyed by episode and chunk, or pass "
                "batching='fast'"
            )
        checking = self._verify(obs, context, answer, count, twins) if twins else 0
        self._calls += 1
        self._rows += len(context) + answer.padding
        self._verified += count if twins else 0
        self._checking += checking
        return Answer(
            actions=answer.actions,
            calls=answer.calls,
            padding=answer.padding,
            verified=count if twins else 0,
            checking=checking,
        )

    def _quota(self, rows: int) -> int:
        """Return how many of so many rows are verified now."""
        if self._verified < _LEAST:
            return min(rows, _LEAST - self._verified)
        size = self._batching.strict_size or 1
        return int(self._checking + (1 if size == 1 else 2 * size) <= _SHARE * self._rows)

    def _twins(self, count: int) -> Sequence[ChunkPolicy]:
        """Return the policy to ask alone and that to ask in another batch; none where its memory cannot be copied."""
        if not count or not has_memory(self._policy):
            return (self._policy,) * 2 if count else ()
        twins = [_copy_memory(self._policy) for _ in range(2)]
        return [twin for twin in twins if twin is not None]

    def _draws(self, obs: Obs, context: ChunkContext, answer: Answer) -> bool:
        """Whether a generator that has moved decides answers; a network made at its first call may draw once."""
        if has_memory(self._policy):
            return self._alone
        before = _generator_states()
        again = answer_rows(self._policy, obs, context, self._batching)
        return not torch.equal(again.actions, answer.actions) or (self._alone and _find_moved(before) != "")

    def _verify(self, obs: Obs, context: ChunkContext, answer: Answer, count: int, twins: Sequence[ChunkPolicy]) -> int:
        """Compare some rows with their answers alone and in another batch; returns the rows computed for it."""
        device = context.env_ids.device
        # other rows of a request each time, in reverse order: at another place, next to others
        chosen = ((self._calls + torch.arange(count)) % len(context)).flip(0)
        computed = 0
        single = self._batching.strict_size == 1
        groups = [*[(twins[0], rows, "alone") for rows in chosen.split(1)], (twins[1], chosen, "in another batch")]
        for policy, rows, how in groups[:-1] if single else groups:
            index = rows.to(device)
            part, seen = context.rows(index), {name: values.index_select(0, index) for name, values in obs.items()}
            # whichever environment a row is in; only a memory may be kept by it
            moved = part if has_memory(policy) else replace(part, env_ids=context.env_ids.roll(1)[index])
            again = answer_rows(policy, seen, moved, self._batching)
            computed += len(rows) + again.padding
            _compare(answer.actions[rows], again.actions, part, how)
        return computed


def _compare(given: Tensor, again: Tensor, context: ChunkContext, how: str) -> None:
    differs = (given != again).flatten(1).any(dim=1).nonzero().squeeze(1)
    if not len(differs):
        return
    row = context.rows(differs[:1].to(context.env_ids.device))
    largest = float((given - again).abs().max())
    raise PolicyError(
        f"policy: expected answers that are functions of their rows, got another one for {name_rows(row)}, chunk "
        f"{int(row.chunk_index[0])}, when it was answered again {how}: actions differ by up to {largest:.3g}. The "
        "policy keeps something between calls (declare it with begin(rows) and end(rows)), draws random numbers, reads "
        "env_ids, or mixes rows of a batch; if it only rounds otherwise, pass Batching(size=1) (--batch-size 1), or "
        "batching='fast' (--fast)"
    )


def _copy_memory(policy: ChunkPolicy) -> ChunkPolicy | None:
    """Return a copy with a memory of its own that shares the weights; None for what cannot be copied."""
    own: Any = unwrap_policy(policy)
    if not isinstance(getattr(own, "begin", None), MethodType):
        return None
    parts = [own, *vars(own).values()] if hasattr(own, "__dict__") else [own]
    weights = [weight for part in parts if isinstance(part, nn.Module) for weight in part.parameters()]
    try:
        return copy.deepcopy(policy, {id(weight): weight for weight in weights})
    except (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError):
        return None


def _generator_states() -> tuple[object, ...]:
    """Return the states of torch's, numpy's and Python's global generators."""
    legacy = cast("Any", np.random.get_state(legacy=False))["state"]
    gpu = torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_initialized() else b""
    ours = torch.default_generator.get_state().numpy().tobytes() + gpu
    return ours, (legacy["key"].tobytes(), legacy["pos"]), random.getstate()


def _find_moved(before: tuple[object, ...]) -> str:
    """Return whose generator has moved since; "" for none."""
    pairs = zip(_GENERATORS, before, _generator_states(), strict=True)
    return next((name for name, old, new in pairs if old != new), "")
