"""Strictness that is verified: answers are compared with those that the same rows get alone and in another batch."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from types import MethodType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from headrace.errors import PolicyError
from headrace.policies.batching import Answer, Batching, answer_rows, tell_episodes
from headrace.policies.protocol import ChunkContext, ChunkPolicy, EpisodeRows, has_memory, named, written_policy
from headrace.types import Obs

_LEAST, _SHARE = 8, 0.02
"""Rows that are verified at least, and the share of the computed rows that is spent on it beyond these."""
_WATCHED = 64
"""The global random generators are compared around the first calls, those with verified rows, and each of so many."""
_GENERATORS = "torch", "numpy", "Python"


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
        """Answer n rows as :func:`headrace.policies.batching.ask` does."""
        policy, batching = self._policy, self._batching
        tell_episodes(policy, context, ended)
        if batching.mode == "fast" or not len(context):
            return answer_rows(policy, obs, context, batching)
        count = self._quota(len(context))
        twins = self._twins(count)
        before = _generator_states() if count or self._calls % _WATCHED == 0 else None
        answer = answer_rows(policy, obs, context, batching)
        if before is not None and (moved := _moved(before)) and self._draws(obs, context, answer):
            raise PolicyError(
                f"policy: expected answers that are functions of their rows, got one that draws from {moved}'s global "
                f"random generator, for {named(context)}: strict batches promise equal tables for any number of "
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
        return not torch.equal(again.actions, answer.actions) or (self._alone and _moved(before) != "")

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
            told, seen = context.rows(index), {name: values.index_select(0, index) for name, values in obs.items()}
            again = answer_rows(policy, seen, told, self._batching)
            computed += len(rows) + again.padding
            _compare(answer.actions[rows], again.actions, told, how)
        return computed


def _compare(given: Tensor, again: Tensor, context: ChunkContext, how: str) -> None:
    differs = (given != again).flatten(1).any(dim=1).nonzero().squeeze(1)
    if not len(differs):
        return
    row = context.rows(differs[:1].to(context.env_ids.device))
    largest = float((given - again).abs().max())
    raise PolicyError(
        f"policy: expected answers that are functions of their rows, got another one for {named(row)}, chunk "
        f"{int(row.chunk_index[0])}, when it was answered again {how}: actions differ by up to {largest:.3g}. The "
        "policy keeps something between calls (declare it with begin(rows) and end(rows)), draws random numbers, or "
        "mixes rows of a batch; if it only rounds otherwise, pass Batching(size=1) (--batch-size 1), or "
        "batching='fast' (--fast)"
    )


def _copy_memory(policy: ChunkPolicy) -> ChunkPolicy | None:
    """Return a copy with a memory of its own that shares the weights; None for what cannot be copied."""
    own: Any = written_policy(policy)
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


def _moved(before: tuple[object, ...]) -> str:
    """Return whose generator has moved since; "" for none."""
    pairs = zip(_GENERATORS, before, _generator_states(), strict=True)
    return next((name for name, old, new in pairs if old != new), "")
