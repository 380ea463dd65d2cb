"""What each environment plays, and when the model is run.

Episodes of a plan, cursors into chunks, the blend of several predictions, and rules of admission. An environment
*waits* when its next chunk is due and has not been asked for. Who waits is suspended; a rule says whom to infer when.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace._named import load_made
from headrace.bridges.bridge_env import BridgeEnv
from headrace.errors import ConfigError, LifecycleError, UnknownNameError
from headrace.policies.protocol import ChunkContext
from headrace.types import Chunk

_LARGEST = 2**63 - 1


class EpisodePlan:
    """Episode ids in order. Results do not lean to short episodes: every id is played to its end, none is skipped."""

    def __init__(self, episodes: int | np.integer | Iterable[int]) -> None:
        """Plan episodes.

        Args:
            episodes: how many, with ids from 0; or the ids themselves.
        """
        counted = range(int(episodes)) if isinstance(episodes, int | np.integer) else episodes
        try:
            self.ids: Sequence[int] = (
                counted if isinstance(counted, range) else [operator.index(episode) for episode in counted]
            )
        except TypeError as error:
            raise ConfigError(f"episodes: expected a number of episodes, or their ids, got {episodes!r}") from error
        if not self.ids:
            raise ConfigError(f"episodes: expected at least one, got {episodes!r}")
        if isinstance(self.ids, range):
            repeated, lowest, largest = False, min(self.ids[0], self.ids[-1]), max(self.ids[0], self.ids[-1])
        else:
            repeated, lowest, largest = len(set(self.ids)) != len(self.ids), min(self.ids), max(self.ids)
        if lowest < 0 or repeated or largest > _LARGEST:
            outside = [i for i in self.ids if not 0 <= i <= _LARGEST]
            wrong = outside or [i for i in set(self.ids) if self.ids.count(i) > 1]
            raise ConfigError(
                f"episodes: expected ids from 0 to {_LARGEST}, each once, got {wrong[:8]}; an episode is played once"
            )
        self._next = 0

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def left(self) -> int:
        """Episodes that no slot has taken yet."""
        return len(self.ids) - self._next

    def take(self, slots: Sequence[int]) -> list[int]:
        """Return the next ids, one for each of ``slots``; fewer at the end of the plan."""
        taken = list(self.ids[self._next : self._next + len(slots)])
        self._next += len(taken)
        return taken


class EndlessPlan:
    """Episodes without end: slot i plays i, i + N, i + 2N, …, as an environment that resets itself does."""

    ids: Sequence[int] = ()
    """None is waited for."""

    def __init__(self, num_envs: int) -> None:
        self._next = list(range(num_envs))

    def __len__(self) -> int:
        return 0

    def take(self, slots: Sequence[int]) -> list[int]:
        """Return the next id of each of ``slots``."""
        taken = [self._next[slot] for slot in slots]
        for slot in slots:
            self._next[slot] += len(self._next)
        return taken


class BackgroundResets:
    """Which slots wait for which episodes. They play none meanwhile: the loop goes on without them."""

    def __init__(self, env: BridgeEnv) -> None:
        self._env = env
        self._episodes: dict[int, int] = {}
        self.held: NDArray[np.bool_] = np.zeros(env.num_envs, np.bool_)
        """bool (N,): slots that cannot act now, since a reset is under way in them or in their worker process."""

    def __len__(self) -> int:
        """How many slots wait."""
        return len(self._episodes)

    def begin(self, slots: NDArray[np.int64], episode_ids: NDArray[np.int64], patience: float) -> list[int]:
        """Begin episodes in ``slots`` (m,); gives those that are ready at once.

        A reset that takes no longer than a step, ``patience`` seconds, is waited for, so that slots that ended together
        begin together. Not where others are under way: then resets take longer.
        """
        mask = np.zeros(self._env.num_envs, np.bool_)
        mask[slots] = True
        deadline = 0.0 if self._episodes else time.monotonic() + patience
        self._env.begin_reset({"reset_mask": torch.from_numpy(mask), "episode_ids": torch.from_numpy(episode_ids)})
        self._episodes.update(zip(slots.tolist(), episode_ids.tolist(), strict=True))
        ready = self._ready(0.0)
        while len(ready) < len(slots) and (left := deadline - time.monotonic()) > 0:
            ready += self._ready(left)
        return ready

    def take(self, *, wait: bool) -> list[int]:
        """Slots that have become ready; waits for one where no other can go on."""
        return self._ready(None if wait else 0.0)

    def pop(self, slots: list[int]) -> NDArray[np.int64]:
        """Return the episodes (m,) that have begun in slots that are ready."""
        return np.array([self._episodes.pop(slot) for slot in slots], np.int64)

    def _ready(self, timeout: float | None) -> list[int]:
        found = cast("list[int]", self._env.finish_resets(timeout).tolist())
        self.held = self._env.resetting.cpu().numpy()
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLengths:
    """The three lengths of a chunk, and the simulated latency."""

    horizon: int
    """Rows that the policy predicts."""
    execute: int
    """Steps from one chunk's observation to the next one's."""
    offset: int = 0
    """The first row that is played; Diffusion Policy starts at its number of observations less one."""
    latency: int = 0
    """Steps between the observation and the moment its chunk takes over: the old chunk is played meanwhile."""

    def __post_init__(self) -> None:
        if self.horizon < 1 or self.execute < 1 or self.offset < 0 or self.latency < 0:
            raise ConfigError(
                "horizon, execute, offset, latency (--horizon …): expected at least 1, 1, 0 and 0, got "
                f"horizon {self.horizon}, execute {self.execute}, offset {self.offset}, latency {self.latency}"
            )
        needed = self.offset + self.execute + self.latency
        if self.horizon < needed:
            raise ConfigError(
                f"horizon: expected at least offset + execute + latency = {needed} rows, got {self.horizon}; "
                "execute fewer rows of each chunk"
            )
        if self.latency >= self.execute:
            raise ConfigError(f"latency: expected less than execute = {self.execute} steps, got {self.latency}")


class Cursors:
    """The chunks that N environments are playing. Owns its memory.

    A chunk is due when no more than ``latency`` rows are left to play; the first d rows of the answer are skipped,
    since the d rows that were left were played in their place: ``prev[:d] + new[d:s]``, s = ``execute`` steps from
    observation to observation. d is kept per environment, from the moment its chunk was asked for.

    Positions are numpy arrays on the host, so that scheduling never waits for a device; actions are on ``device``.
    With an ``ensemble``, the first row that is played of a chunk is blended with what earlier ones predicted for it.
    """

    def __init__(
        self,
        num_envs: int,
        action_dim: int,
        lengths: ChunkLengths,
        device: torch.device,
        ensemble: TemporalEnsemble | None = None,
    ) -> None:
        self.lengths = lengths
        self.episode = np.full(num_envs, -1, np.int64)
        """int64 (N,): the episode each slot plays; -1 for none."""
        self.running = np.zeros(num_envs, np.bool_)
        """bool (N,): slots that play an episode."""
        self.chunk_index = np.zeros(num_envs, np.int64)
        """int64 (N,): chunks that were taken over in the current episode."""
        self._device, self._ensemble = device, ensemble
        # two places per environment: the chunk that is played, and the one that has arrived
        self._chunks = torch.zeros((num_envs * 2, lengths.horizon, action_dim), device=device)
        self._place = np.zeros(num_envs, np.int64)
        self._row = np.full(num_envs, lengths.horizon, np.int64)
        self._left = np.zeros(num_envs, np.int64)
        self._skip = np.zeros(num_envs, np.int64)
        self._in_flight = np.zeros(num_envs, np.bool_)
        self._arrived = np.zeros(num_envs, np.bool_)

    @property
    def asked(self) -> NDArray[np.bool_]:
        """bool (N,): slots whose policy has been asked for a chunk of the episode they play."""
        return ((self.chunk_index > 0) | self._arrived | self._in_flight) & self.running

    @property
    def due(self) -> NDArray[np.bool_]:
        """bool (N,): it is time to observe and to ask for the next chunk, and it has not been asked for."""
        # the first chunk of an episode has nothing to play meanwhile: it takes over at once
        delay = np.where(self.chunk_index > 0, self.lengths.latency, 0) if self.lengths.latency else 0
        return (self._left <= delay) & ~self._arrived & ~self._in_flight & self.running

    @property
    def has_action(self) -> NDArray[np.bool_]:
        """bool (N,): there is a row to play, of the current chunk or of the one that has arrived."""
        return (self._left > 0) | self._arrived

    @property
    def steps_to_due(self) -> NDArray[np.int64]:
        """int64 (N,): steps to play before the next chunk is due; right for slots that have an action."""
        coming = self._arrived | self._in_flight
        after = np.where(coming, self.lengths.execute + self.lengths.latency - self._skip, 0)
        return self._left + after - self.lengths.latency

    def begin(self, ids: NDArray[np.int64], episode_ids: NDArray[np.int64] | Literal[-1]) -> None:
        """Start episodes (m,), -1 for none: chunk, left-over, and answers that have arrived or are under way are
        dropped."""
        self.episode[ids] = episode_ids
        self.running[ids] = episode_ids >= 0
        self.chunk_index[ids] = 0
        self._left[ids] = 0
        self._arrived[ids] = False
        self._in_flight[ids] = False
        if self._ensemble is not None:
            self._ensemble.begin(self._tensor(ids))

    def ask(self, ids: NDArray[np.int64]) -> None:
        """Note that the chunks of ``ids`` (n,), which are due, are under way from now on."""
        self._in_flight[ids] = True
        self._skip[ids] = self._left[ids]

    def load(self, chunk: Chunk) -> NDArray[np.bool_]:
        """Take an answer: the rows that were asked for, and whose episode still runs. Returns bool (n,): these."""
        ids = chunk.env_ids.cpu().numpy()
        kept = self._in_flight[ids] & (self.episode[ids] == chunk.episode_ids.cpu().numpy())
        kept &= self.chunk_index[ids] == chunk.index.cpu().numpy()
        taken = ids[kept]
        actions = chunk.actions.to(self._device)
        if len(taken) < len(ids):
            actions = actions[self._tensor(kept)]
        if self._ensemble is not None:
            now = self.lengths.offset
            actions[:, now] = self._ensemble.blend(self._tensor(taken), actions[:, now:])
        self._chunks[self._tensor(taken * 2 + 1 - self._place[taken])] = actions
        self._arrived[taken] = True
        self._in_flight[taken] = False
        return kept

    def left_over(self, ids: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return what is left of the chunks that ``ids`` (n,) play: (n, horizon, A) with row 0 = now, and the
        lengths (n,).

        Rows beyond those that will be played are part of it, too: the policy predicted them.
        """
        horizon = self.lengths.horizon
        length = np.where(self.chunk_index[ids] > 0, horizon - self._row[ids], 0)
        if not length.any():
            return torch.zeros((len(ids), *self._chunks.shape[1:]), device=self._device), self._tensor(length)
        steps = np.arange(horizon)
        valid = steps < length[:, None]
        rows = np.where(valid, self._row[ids][:, None] + steps, 0)
        index = (ids * 2 + self._place[ids])[:, None] * horizon + rows
        shifted = self._chunks.flatten(0, 1).index_select(0, self._tensor(index.ravel()))
        shifted = shifted.view(len(ids), *self._chunks.shape[1:])
        return shifted.masked_fill_(self._tensor(~valid)[..., None], 0.0), self._tensor(length)

    def context(self, ids: NDArray[np.int64], seed: int, instructions: tuple[str, ...]) -> ChunkContext:
        """Return what the policy receives beside the observations of ``ids`` (n,); ``instructions`` are of all N."""
        left_over, left_over_length = self.left_over(ids)
        return ChunkContext(
            seeds=torch.full((len(ids),), seed, dtype=torch.int64, device=self._device),
            env_ids=self._tensor(ids),
            episode_ids=self._tensor(self.episode[ids]),
            chunk_index=self._tensor(self.chunk_index[ids]),
            instructions=tuple(map(instructions.__getitem__, ids.tolist())),
            left_over=left_over,
            left_over_length=left_over_length,
            delay=self._tensor(np.minimum(self._left[ids], self.lengths.latency)),
        )

    def play(self, ids: NDArray[np.int64]) -> Tensor:
        """Return the next action of each of ``ids`` (n,), float32 (n, A), fresh; moves their cursors.

        Environments that have played the old chunk to its end go on with the one that has arrived.
        """
        if self._arrived.any() and len(ready := ids[self._arrived[ids] & (self._left[ids] == 0)]):
            skipped = self._skip[ready]
            self._place[ready] = 1 - self._place[ready]
            self._row[ready] = self.lengths.offset + skipped
            self._left[ready] = self.lengths.execute + self.lengths.latency - skipped
            self._arrived[ready] = False
            self.chunk_index[ready] += 1
        left = self._left[ids]
        if not left.all():
            dry = ids[left == 0].tolist()
            raise LifecycleError(f"cursors: environments {dry[:8]} have no action to play; they must wait for a chunk")
        row = self._row[ids]
        index = (ids * 2 + self._place[ids]) * self.lengths.horizon + row
        self._row[ids] = row + 1
        self._left[ids] = left - 1
        return self._chunks.flatten(0, 1).index_select(0, self._tensor(index))

    def _tensor(self, values: NDArray[np.int64] | NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(values).to(self._device)


class TemporalEnsemble:
    """ACT's temporal ensembling: the mean of all predictions of a step, weights exp(−m·i), i = 0 the oldest.

    A negative m favors the newest, as LeRobot documents.

    Needs a chunk every step. Owns float32 (N, horizon, A) and a count per step and environment, so that a predicted
    zero is not taken for "nothing predicted". Kept as a running mean: ``a ← (a·W[c−1] + new·w[c]) / W[c]`` with W the
    cumulative sum of w and c the predictions so far.
    """

    def __init__(
        self,
        num_envs: int,
        horizon: int,
        action_dim: int,
        *,
        decay: float = 0.01,
        device: torch.device | str = "cpu",
    ) -> None:
        if not math.isfinite(decay):
            raise ConfigError(f"ensemble decay: expected a finite number, got {decay}")
        # a negative decay favors new predictions; the largest weight is 1, whatever the sign
        ages = torch.arange(horizon, dtype=torch.float64, device=device)
        weights = torch.exp(-decay * (ages if decay >= 0 else ages - (horizon - 1)))
        self._weights = weights.to(torch.float32)
        self._sums = weights.cumsum(0).to(torch.float32)
        self._mean = torch.zeros((num_envs, horizon, action_dim), device=device)
        self._count = torch.zeros((num_envs, horizon), dtype=torch.int64, device=device)

    def begin(self, ids: Tensor) -> None:
        """Forget the predictions of environments that begin an episode (m,)."""
        self._count[ids] = 0

    def blend(self, ids: Tensor, chunks: Tensor) -> Tensor:
        """Add chunks (n, horizon, A) whose row 0 is now; gives the actions for now, (n, A), and moves on by a step."""
        mean, count = self._mean[ids], self._count[ids]
        before = self._sums[(count - 1).clamp(min=0)] * (count > 0)
        blended = (mean * before[..., None] + chunks * self._weights[count][..., None]) / self._sums[count][..., None]
        self._mean[ids] = torch.cat((blended[:, 1:], torch.zeros_like(blended[:, :1])), dim=1)
        self._count[ids] = torch.cat((count[:, 1:] + 1, torch.zeros_like(count[:, :1])), dim=1)
        return blended[:, 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueState:
    """What a rule decides by. Masks are bool (N,) on the host, borrowed. At least one environment waits."""

    running: NDArray[np.bool_]
    """Environments that play an episode."""
    waiting: NDArray[np.bool_]
    """Environments that want a chunk and are not being inferred already."""
    can_act: NDArray[np.bool_]
    """Environments that have an action to play and may play it before the model answers."""
    due_next: NDArray[np.bool_]
    """Of these, environments that will wait after one more step."""
    engine_overlaps: bool
    """Whether the model runs beside the physics. If so, it is free: a rule is not asked while it is busy."""
    steps: int
    """Steps of the batch so far."""

    @property
    def nobody(self) -> NDArray[np.bool_]:
        """bool (N,), all False."""
        return np.zeros_like(self.waiting)


class Admission(Protocol):
    """A rule: which environments to infer now. It must name one when no environment can act."""

    def infer(self, queue: QueueState) -> NDArray[np.bool_]:
        """bool (N,): rows to give to the model now; rows that do not wait are inferred for nothing."""
        ...


@dataclass(frozen=True, slots=True)
class WholeBatchOnAny:
    """One waits → the whole batch is inferred. The baseline that escalates once environments are out of phase."""

    def infer(self, queue: QueueState) -> NDArray[np.bool_]:
        """Return all that run, as soon as one waits."""
        return queue.running


@dataclass(frozen=True, slots=True)
class Immediate:
    """What waits is inferred at once, and nothing else."""

    def infer(self, queue: QueueState) -> NDArray[np.bool_]:
        """Who waits."""
        return queue.waiting


@dataclass(frozen=True, slots=True)
class Synchronized:
    """All are inferred together, when all wait: the synchronized form."""

    def infer(self, queue: QueueState) -> NDArray[np.bool_]:
        """Return all that run, once all of them wait."""
        return queue.waiting if queue.waiting[queue.running].all() else queue.nobody


@dataclass(frozen=True, slots=True)
class Greedy:
    """The default. Beside a busy engine: all that wait, as soon as it is free. Inline: when no one can act.

    Inline, inferring earlier would only make more and smaller batches. Beside an engine there are two exceptions:

    - A batch in which all wait at once, as at the start, would stay a convoy: model and physics would take turns for
      ever, since environments that get their chunks together wait together again. So half of it is inferred first,
      and plays while the other half is.
    - If one more step would more than double those who wait, that step comes first: a call for the few who are early
      would keep the many waiting for the whole of its fixed part.
    """

    def infer(self, queue: QueueState) -> NDArray[np.bool_]:
        """Return the waiting environments, half of them if they are synchronized, or an empty mask."""
        stuck = not queue.can_act.any()
        if not queue.engine_overlaps:
            return queue.waiting if stuck else queue.nobody
        if not stuck:
            many_come = np.count_nonzero(queue.due_next) > np.count_nonzero(queue.waiting)
            return queue.nobody if many_come else queue.waiting
        slots = np.flatnonzero(queue.waiting)
        half = queue.nobody
        half[slots[: (len(slots) + 1) // 2]] = True
        return half


_RULES: dict[str, Callable[[], Admission]] = {
    "greedy": Greedy,
    "immediate": Immediate,
    "synchronized": Synchronized,
    "whole-batch-on-any": WholeBatchOnAny,
}


def make_admission(rule: Admission | str) -> Admission:
    """Return the rule of a name: ``greedy``, ``immediate``, …, or ``module:name``; a rule is returned as it is."""
    if isinstance(rule, str) and rule.partition(":")[0] in ("periodic", "threshold", *_RULES) and rule not in _RULES:
        raise ConfigError(f"admission: {rule!r} is gone; use greedy, or a rule of yours, module:name")
    if isinstance(rule, str) and ":" in rule:
        rule = cast("Admission", load_made(rule, "--admission"))
    if getattr(rule, "holds", False):
        raise ConfigError("admission: rules that hold are gone; environments that wait are suspended")
    if not isinstance(rule, str):
        return rule
    if rule not in _RULES:
        raise UnknownNameError("admission rule", rule, sorted(_RULES))
    return _RULES[rule]()
