"""Which transitions make a batch: uniform, without replacement, whole trajectories.

A sampler keeps its index up to date at every write, so a draw costs the same however full the buffer is. Slices are in
:mod:`headrace.replay._slices`, priorities in :mod:`headrace.replay._priorities`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from headrace import rng
from headrace.errors import ConfigError, DataError, LifecycleError
from headrace.replay import ring
from headrace.replay._blocks import Int64s, Namespace
from headrace.replay._pool import FramePool, Written
from headrace.replay.ring import Float64s

_T = TypeVar("_T")


class Picked(NamedTuple):
    """The transitions of one batch, as positions in their environments."""

    envs: Int64s
    positions: Int64s
    """First transition of each run; (B, run), every one of them, where there is a mask."""
    run: int | None = None
    """Transitions in a row that belong to each pick, for batches (B, run); None: one, for batches (B,)."""
    weights: NDArray[np.float32] | None = None
    """Importance weights (B,)."""
    burn_in: int = 0
    """How many of a run's first transitions only warm up a recurrent state."""
    mask: NDArray[np.bool_] | None = None
    """(B, run): False for padding rows, which repeat a transition of their run."""


class Sampler(ABC):
    """Chooses transitions of one store. Calls come under the store's lock.

    Without more than :meth:`draw` it has no index and no state; those that have some add it.
    """

    kind: ClassVar[str]
    """Name in the manifest; see :func:`register_sampler`."""
    _pool: FramePool | None = None

    def attach(self, pool: FramePool, memory: Namespace, seed: int) -> None:
        """Take up work on a pool, empty or filled.

        Args:
            pool: what is stored.
            memory: for what cannot be rebuilt from the pool; it is saved with the store, and comes back with it.
            seed: for randomness besides the tickets.
        """
        del memory, seed
        if self._pool is not None and self._pool is not pool:
            raise ConfigError("sampler: it serves another buffer already; make a new one")
        self._pool = pool

    def written(self, write: Written) -> None:
        """Transitions were stored; those that they pushed out are gone."""
        del write

    @abstractmethod
    def draw(self, tickets: Float64s) -> Picked:
        """Choose one item for each of the uniform numbers in [0, 1)."""

    @property
    def mass(self) -> float:
        """How much there is to draw from, to compare stores with samplers of one kind: items, or their weights."""
        return float(attached(self._pool).lengths().sum())

    def config(self) -> dict[str, Any]:
        """Kind and settings, for the manifest."""
        return {"kind": self.kind}

    @property
    def nbytes(self) -> int:
        """Bytes of its index, besides those of ``memory``."""
        return 0


_SAMPLERS: dict[str, Callable[..., Sampler]] = {}


def register_sampler(kind: str, make: Callable[..., Sampler]) -> None:
    """Let stores on disk be opened with a sampler of your own.

    Args:
        kind: what its ``config()`` says as ``kind``.
        make: called with the rest of ``config()``.
    """
    if kind in _SAMPLERS:
        raise ConfigError(f"register_sampler: {kind!r} is taken; choose another kind")
    _SAMPLERS[kind] = make


def make_sampler(config: Mapping[str, Any]) -> Sampler:
    """Return the sampler that a manifest describes."""
    kind, settings = str(config.get("kind")), {name: value for name, value in config.items() if name != "kind"}
    if kind not in _SAMPLERS:
        raise DataError(
            f"manifest: unknown sampler {kind!r}; expected one of {sorted(_SAMPLERS)}. "
            "One of your own needs register_sampler() before the store is opened"
        )
    try:
        return _SAMPLERS[kind](**settings)
    except (ConfigError, TypeError) as error:
        raise DataError(f"manifest: sampler {kind!r}: {error}") from error


class UniformSampler(Sampler):
    """Every stored transition equally likely, with replacement, also where environments hold different numbers."""

    kind = "uniform"

    def draw(self, tickets: Float64s) -> Picked:
        """See :class:`Sampler`."""
        pool = attached(self._pool)
        ends = np.cumsum(pool.lengths())
        refuse_if_empty(int(ends[-1]), "transitions", "extend() it first")
        envs, places = ring.spread(tickets, ends)
        return Picked(envs=envs, positions=places + pool.oldest()[envs])


class SamplerWithoutReplacement(Sampler):
    """Every stored transition once, in random order, before any comes again.

    An epoch is over what is stored when it begins. What is overwritten meanwhile is passed over, what is written
    meanwhile comes in the next epoch. A batch may span two epochs.
    """

    kind = "without_replacement"

    def __init__(self) -> None:
        self._seed = 0
        self._order = np.empty(0, np.int64)

    def attach(self, pool: FramePool, memory: Namespace, seed: int) -> None:
        """See :class:`Sampler`. An epoch that was under way goes on."""
        super().attach(pool, memory, seed)
        self._seed = seed
        # epoch, place in its order, then what was stored when it began, per environment: from and to
        self._state = memory.allocate("epoch", 8 * (2 + 2 * pool.num_envs)).view(np.int64)
        self._shuffle()

    @property
    def epoch(self) -> int:
        """Epochs begun so far."""
        return int(self._state[0])

    def draw(self, tickets: Float64s) -> Picked:
        """See :class:`Sampler`; the tickets are not used."""
        pool, wanted = attached(self._pool), tickets.shape[0]
        refuse_if_empty(int(pool.lengths().sum()), "transitions", "extend() it first")
        taken: list[Int64s] = []
        while wanted:
            if self._state[1] >= self._order.shape[0]:
                self._state[0] += 1
                self._state[1] = 0
                self._state[2:] = np.concatenate([pool.oldest(), pool.counts])
                self._shuffle()
            rest = self._order[self._state[1] :][: 2 * wanted]
            positions, envs = np.divmod(rest, pool.num_envs)
            stored = ((positions >= pool.oldest()[envs]) & (positions < pool.counts[envs])).nonzero()[0][:wanted]
            enough = stored.shape[0] == wanted
            self._state[1] += stored[-1] + 1 if enough else rest.shape[0]
            taken.append(rest[stored])
            wanted -= stored.shape[0]
        positions, envs = np.divmod(np.concatenate(taken), pool.num_envs)
        return Picked(envs=envs, positions=positions)

    def _shuffle(self) -> None:
        """Compute the order of the epoch: a function of the seed, the epoch and what was stored at its beginning."""
        low, high = self._state[2:].reshape(2, -1)
        n = low.shape[0]
        items = np.concatenate([np.arange(a, b) * n + e for e, (a, b) in enumerate(zip(low, high, strict=True))])
        bits = rng.random_bits(self._seed, torch.from_numpy(items), "replay-epoch", self.epoch, 1)
        self._order = items[bits[:, 0].argsort(stable=True).numpy()]

    @property
    def nbytes(self) -> int:
        """Eight bytes per transition."""
        return self._order.nbytes


def list_positions(pool: FramePool) -> list[Int64s]:
    """Return positions of the stored transitions, oldest first, per environment."""
    return [np.arange(low, high) for low, high in zip(pool.oldest(), pool.counts, strict=True)]


def refuse_if_empty(stored: int, what: str, advice: str) -> None:
    """Raise unless there is something to draw; draws are with replacement, so one item is enough for any number."""
    if stored < 1:
        raise LifecycleError(f"sample: expected {what} in the buffer, got none; {advice}")


def attached(value: _T | None) -> _T:
    """Return what :meth:`Sampler.attach` has set."""
    if value is None:
        raise LifecycleError("sampler: not attached to a buffer; pass it to ReplayBuffer(sampler=…) or with_sampler(…)")
    return value


register_sampler("uniform", UniformSampler)
register_sampler("without_replacement", SamplerWithoutReplacement)
