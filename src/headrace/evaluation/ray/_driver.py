"""The driver: hands blocks of episode ids to workers over Ray, and takes their rows as episodes finish.

An episode is a function of (task, seed, id, policy), so a block that a dead worker left is played again by another, and
the table is the one of a single process, whichever worker played what.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import ray
from ray.exceptions import RayError, RayTaskError

from headrace.errors import EvaluationError, HeadraceError
from headrace.evaluation._journal import Header, check_same
from headrace.evaluation._progress import EpisodeProgress
from headrace.evaluation._result import Counters, EpisodeResult, Evaluation
from headrace.evaluation._result_files import common_values, total_counters
from headrace.evaluation.ray._worker import Opened

if TYPE_CHECKING:
    from headrace.evaluation.player import OnEpisodes

_LOG = logging.getLogger("headrace.evaluation.ray")
MOST_KILLS = 3
"""A block whose workers died so often is given up; so is an evaluation whose workers die while they are made."""
_BLOCK_WAVES = 4
"""Episodes of a block per environment, while there are plenty: waiting for its last episode is rare then."""
_GATHER_S = 50e-6
"""Per worker: a wait for Ray costs microseconds for each of them, so what arrives meanwhile is taken with it."""
_PATIENCE_S = 120.0
"""Until somebody is told that no worker is ready; also what workers may take to end in order."""


@dataclass(slots=True)
class _Block:
    """Ids that one worker plays; those that are finished are taken out."""

    ids: list[int]
    kills: int = 0


@dataclass(slots=True, eq=False)
class _Member:
    """A worker, as the driver sees it."""

    number: int
    actor: Any
    block: _Block | None = None
    opened: Opened | None = None
    steps: int = 0
    """Of the episodes that it finished."""
    since: float = field(default_factory=time.monotonic)

    @property
    def rate(self) -> float:
        """Finished env-steps per second since it is ready."""
        return self.steps / max(time.monotonic() - self.since, 1e-9)


class Driver:
    """Owns the workers. Starts them at once; those that become ready later join in."""

    def __init__(self, make: Callable[[int], Any], *, workers: int, num_envs: int, block: int | None) -> None:
        """Start workers.

        Args:
            make: starts the worker of a number, and returns its actor.
            workers: how many there should be.
            num_envs: of a worker.
            block: ids of a block; None for four per environment, and fewer near the end of the plan.
        """
        self._make, self._workers, self._num_envs, self._size = make, workers, num_envs, block
        self._members: list[_Member] = []
        self._waits: dict[Any, _Member] = {}
        """What is awaited: a reply of ``open``, or the rows of a block."""
        self._idle: deque[_Member] = deque()
        self._started = self._failed_starts = 0
        self._headers: list[Header] = []
        self._fresh: deque[int] = deque()
        self._again: deque[_Block] = deque()
        """What dead workers left."""
        self._given_up: list[int] = []
        self._rows: list[EpisodeResult] = []
        self._steps = 0
        """Of the rows."""
        self._news: list[dict[str, Any]] = []
        """Circumstances that nobody had before, and that are in no journal yet."""
        self._costs: list[Counters] = []
        for _ in range(workers):
            self._start()

    def header(self) -> Header:
        """Return what decides the rows, as the first worker that is ready says it."""
        begun = time.monotonic()
        while not self._headers:
            self._take(self._wait())
            if time.monotonic() - begun > _PATIENCE_S:
                begun = math.inf
                _LOG.warning("no worker is ready yet; the cluster has %s left", ray.available_resources())
        return self._headers[0]

    def take_news(self) -> list[dict[str, Any]]:
        """Circumstances of workers that have joined since the last call, where they differ from all before."""
        news, self._news = self._news, []
        return news

    def play(self, ids: Sequence[int], on_episodes: OnEpisodes | None, *, progress: bool) -> Evaluation:
        """Play every id once; what a dead worker left is played again. Ctrl-C gives what is finished."""
        self._fresh.extend(ids)
        begun = time.perf_counter()
        status: Literal["completed", "interrupted", "failed"] = "completed"
        interrupt: KeyboardInterrupt | None = None
        try:
            with EpisodeProgress(len(ids), shown=progress) as bar:
                # after the last row, a worker still has to say what its block cost
                while self._fresh or self._again or any(member.block is not None for member in self._members):
                    self._hand_out()
                    before = len(self._rows)
                    try:
                        self._take(self._wait())
                    finally:  # what came before an error is kept
                        if on_episodes is not None and len(self._rows) > before:
                            on_episodes(self._rows[before:])
                    bar.show(self._rows, self._steps, self._rates)
        except KeyboardInterrupt as error:
            status, interrupt = "interrupted", error
        except HeadraceError as error:
            error.finished = self._result(ids, "failed", begun)
            raise
        if self._given_up:
            status = "failed"
        return self._result(ids, status, begun, interrupt)

    def close(self) -> None:
        """End all workers."""
        for member in self._members:
            ray.kill(member.actor)
        self._members.clear()
        self._waits.clear()

    def finish(self) -> None:
        """Let the workers end in order, for what they have to close; then end them."""
        closing = [member.actor.close.remote() for member in self._members if member.opened is not None]
        ray.wait(closing, num_returns=len(closing), timeout=_PATIENCE_S)
        self.close()

    def _start(self) -> None:
        member = _Member(self._started, self._make(self._started))
        self._started += 1
        self._members.append(member)
        self._waits[member.actor.open.remote()] = member

    def _hand_out(self) -> None:
        while self._idle and (self._again or self._fresh):
            member = self._idle.popleft()
            member.block = self._again.popleft() if self._again else self._cut()
            call = member.actor.play.options(num_returns="streaming")
            self._waits[call.remote(list(member.block.ids))] = member

    def _cut(self) -> _Block:
        """Return the next block: large while there is much left, and at the end no more than a worker's share."""
        left = len(self._fresh)
        size = self._size
        if size is None:
            share = math.ceil(left / self._workers)
            size = min(_BLOCK_WAVES * self._num_envs, max(self._num_envs, share // 2), share)
        return _Block([self._fresh.popleft() for _ in range(min(size, left))])

    def _wait(self) -> list[Any]:
        """Return what has arrived; waits for something, for a second at most."""
        waiting = list(self._waits)
        if not ray.wait(waiting, num_returns=1, timeout=1.0)[0]:
            return []
        time.sleep(_GATHER_S * len(waiting))
        return ray.wait(waiting, num_returns=len(waiting), timeout=0)[0]

    def _take(self, arrived: Iterable[Any]) -> None:
        for reply in arrived:
            member = self._waits.pop(reply)
            try:
                self._take_one(reply, member)
            except RayTaskError as error:
                raise _raised(error, member) from None
            except RayError as error:  # the process or its machine is gone
                self._bury(member, error)

    def _take_one(self, reply: Any, member: _Member) -> None:
        block = member.block
        if block is None:
            self._welcome(member, ray.get(reply))
            return
        try:
            found: list[EpisodeResult] | Counters = ray.get(next(reply))
        except StopIteration:
            member.block = None
            self._idle.append(member)
            return
        self._waits[reply] = member
        if isinstance(found, Counters):
            self._costs.append(found)
            return
        done = {row.episode_id for row in found}
        left = [episode for episode in block.ids if episode not in done]
        if len(left) + len(found) != len(block.ids):
            raise EvaluationError(
                f"evaluate: worker {member.number} was to play episodes {block.ids[:8]}, each once, and sent rows of "
                f"{[row.episode_id for row in found][:8]}"
            )
        block.ids = left
        self._rows += found
        steps = sum(row.length for row in found)
        member.steps += steps
        self._steps += steps

    def _welcome(self, member: _Member, opened: Opened) -> None:
        name = f"worker {member.number} on {opened.host}"
        if self._headers:
            check_same(self._headers[0], opened.header, name)
            if all(opened.header.circumstances != known.circumstances for known in self._headers):
                self._news.append(opened.header.circumstances)
        self._headers.append(opened.header)
        self._failed_starts = 0
        member.opened, member.since = opened, time.monotonic()
        self._idle.append(member)

    def _bury(self, member: _Member, error: RayError) -> None:
        """Put back what a dead worker left, unless that killed others before, and start another."""
        ray.kill(member.actor)  # one that is only out of reach must not go on
        self._members.remove(member)
        block = member.block
        if block is None:
            self._failed_starts += 1
            if self._failed_starts == MOST_KILLS:
                raise EvaluationError(f"evaluate: {MOST_KILLS} workers died while they were made: {error}") from error
        else:
            block.kills += 1
            if block.kills == MOST_KILLS:
                self._given_up += block.ids
            elif block.ids:
                self._again.append(block)
        self._start()

    def _rates(self) -> str:
        """Finished env-steps per second of every worker; of many, the slowest and the fastest."""
        rates = [member.rate for member in self._members if member.opened is not None]
        if len(rates) > 8:
            return f"{len(rates)} workers, {min(rates):,.0f} to {max(rates):,.0f} each"
        return "workers " + ", ".join(f"{rate:,.0f}" for rate in rates)

    def _result(
        self,
        ids: Sequence[int],
        status: Literal["completed", "interrupted", "failed"],
        begun: float,
        interrupt: KeyboardInterrupt | None = None,
    ) -> Evaluation:
        counters = total_counters(self._costs)
        counters.seconds = time.perf_counter() - begun
        identity = self._headers[0].identity
        return Evaluation(
            episodes=sorted(self._rows),
            plan=tuple(sorted(ids)),
            status=status,
            counters=counters,
            strict_size=identity["strict_size"],
            fidelity=identity["fidelity"],
            interrupt=interrupt,
            given_up=tuple(sorted(self._given_up)),
            circumstances={
                **common_values([header.circumstances for header in self._headers]),
                "workers": self._workers,
            },
        )


def _raised(error: RayTaskError, member: _Member) -> HeadraceError:
    """Return what a worker raised; it would raise it again, in any worker."""
    cause: object = error.cause
    if isinstance(cause, HeadraceError):
        return cause
    return EvaluationError(f"evaluate: worker {member.number} raised {type(cause).__name__}: {cause}")
