"""A plan of episodes over the workers of a Ray cluster (extra ``ray``).

A driver hands blocks of episode ids to workers, and takes their rows as episodes finish. An episode is a function of
(task, seed, id, policy), so a block that a dead worker left is played again by another, and the table is the one of a
single process, whichever worker played what.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import ray
import torch
from ray import cloudpickle
from ray.exceptions import RayError, RayTaskError

from headrace._kernels.threads import set_kernel_threads
from headrace.envs.recipe import EnvRecipe
from headrace.errors import ConfigError, EvaluationError, HeadraceError
from headrace.evaluation._journal import Header, check_same
from headrace.evaluation._result import Counters, EpisodeResult, Evaluation
from headrace.evaluation._result_files import common_values, total_counters
from headrace.evaluation.cfg import JournalCfg, PlayCfg, WorkersCfg
from headrace.evaluation.player import EpisodeProgress, OnEpisodes, Player, open_player, play_plan
from headrace.evaluation.scheduling import EpisodePlan
from headrace.policies.serving.links import RemoteCfg
from headrace.policies.step_policy import policy_hash

if TYPE_CHECKING:
    from headrace.policies.load_policy import PolicySource

_LOG = logging.getLogger("headrace.evaluation.workers")
MOST_KILLS = 3
"""A block whose workers died so often is given up; so is an evaluation whose workers die while they are made."""
_BLOCK_WAVES = 4
"""Episodes of a block per environment, while there are plenty: waiting for its last episode is rare then."""
_GATHER_S = 50e-6
"""Per worker: a wait for Ray costs microseconds for each of them, so what arrives meanwhile is taken with it."""
_PATIENCE_S = 120.0
"""Until a warning that no worker is ready."""
_LEAST_STORE = 80_000_000
"""Bytes: about the smallest object store that Ray starts with. Rows are small, and images never go through it."""


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """Everything that a worker is made of; is sent to it once, as a pickle."""

    recipe: EnvRecipe
    policy: Any
    play: PlayCfg
    threads: int
    """Of physics, kernels and torch."""


class Worker:
    """One process of a distributed evaluation. Made anywhere; nothing happens before :meth:`open`."""

    def __init__(self, packed: bytes, path: Sequence[str]) -> None:
        self._packed, self._path = packed, path
        self._stack = ExitStack()
        self._player: Player

    def open(self) -> tuple[Header, str]:
        """Make environments and policy; returns what decides the rows, and the host.

        What fails here fails in every worker, and is raised in the driver.
        """
        # modules of the program that started this worker are found here, too, if the directories are there
        sys.path.extend(place for place in self._path if place not in sys.path)
        # a pickle of that program, through its own cluster
        spec = cast("WorkerSpec", cloudpickle.loads(self._packed))
        torch.set_num_threads(spec.threads)
        set_kernel_threads(spec.threads)
        env = self._stack.enter_context(closing(spec.recipe.make(autoreset="disabled", final_obs=False)))
        self._player = self._stack.enter_context(open_player(env, spec.policy, spec.play, spec.recipe.seed))
        return self._player.header, platform.node()

    def play(self, ids: Sequence[int]) -> Generator[list[EpisodeResult] | Counters]:
        """Play a block: rows as they finish, then what it cost."""
        news: queue.SimpleQueue[list[EpisodeResult] | Counters | BaseException] = queue.SimpleQueue()

        def run() -> None:
            try:
                news.put(self._player.play(ids, news.put).counters)
            except BaseException as error:  # noqa: BLE001  (also Ctrl-C: the generator raises it)
                news.put(error)

        threading.Thread(target=run, name="episodes", daemon=True).start()
        while True:
            found = news.get()
            if isinstance(found, BaseException):
                raise found
            yield found
            if isinstance(found, Counters):
                return


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
    heard: float = 0.0
    """When it was given a block, or finished an episode of it."""


class Driver:
    """Owns the workers. Starts them at once; those that become ready later join in."""

    def __init__(
        self,
        make: Callable[[int], Any],
        *,
        workers: int,
        num_envs: int,
        block: int | None,
        stall_s: float | None = None,
    ) -> None:
        """Start workers.

        Args:
            make: starts the worker of a number, and returns its actor.
            workers: how many there should be.
            num_envs: of a worker.
            block: ids of a block; None for four per environment, and fewer near the end of the plan.
            stall_s: seconds in which a worker that plays must finish an episode; None for any time.
        """
        self._make, self._workers, self._num_envs, self._size = make, workers, num_envs, block
        self._stall_s = math.inf if stall_s is None else stall_s
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
        """Circumstances that no worker had before, and that are in no journal yet."""
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
                        self._end_stalled()
                    finally:  # what came before an error is kept
                        if on_episodes is not None and len(self._rows) > before:
                            on_episodes(self._rows[before:])
                    bar.show(self._rows, self._steps)
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
            member.heard = time.monotonic()

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
                raise _rebuild_error(error, member) from None
            except RayError as error:  # the process or its machine is gone
                self._bury(member, error)

    def _take_one(self, reply: Any, member: _Member) -> None:
        block = member.block
        if block is None:
            self._welcome(member, *ray.get(reply))
            return
        try:
            found: list[EpisodeResult] | Counters = ray.get(next(reply))
        except StopIteration:
            member.block = None
            self._idle.append(member)
            return
        self._waits[reply] = member
        member.heard = time.monotonic()
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
        self._steps += sum(row.length for row in found)

    def _welcome(self, member: _Member, header: Header, host: str) -> None:
        name = f"worker {member.number} on {host}"
        if self._headers:
            check_same(self._headers[0], header, name)
            if all(header.circumstances != known.circumstances for known in self._headers):
                self._news.append(header.circumstances)
        self._headers.append(header)
        self._failed_starts = 0
        self._idle.append(member)

    def _end_stalled(self) -> None:
        """End the workers whose environments or policies are stuck."""
        now = time.monotonic()
        for reply, member in list(self._waits.items()):
            if member.block is not None and now - member.heard > self._stall_s:
                _LOG.warning("worker %d finished no episode for %g s; it is ended", member.number, self._stall_s)
                del self._waits[reply]
                self._bury(member, RayError("it finished no episode in time"))

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


def _rebuild_error(error: RayTaskError, member: _Member) -> HeadraceError:
    """Return what a worker raised; it would raise it again, in any worker."""
    cause: object = error.cause
    if isinstance(cause, HeadraceError):
        return cause
    return EvaluationError(f"evaluate: worker {member.number} raised {type(cause).__name__}: {cause}")


def play_distributed(
    recipe: EnvRecipe,
    policy: PolicySource,
    plan: EpisodePlan,
    play: PlayCfg,
    workers: WorkersCfg,
    *,
    journal: JournalCfg | None = None,
    progress: bool | OnEpisodes = True,
) -> Evaluation:
    """Play a plan over worker processes; the arguments are those of :func:`headrace.evaluate`.

    Each worker holds environments and policy, and takes small blocks of ids; rows come back as episodes finish, and
    the driver writes the journal. Workers that find room later join in.
    """
    if journal is not None and Path(journal.path).exists() and not journal.resume:
        raise ConfigError(f"journal: {journal.path} already exists; pass resume=True (--resume) to go on with it")
    with _driver(_spec(recipe, policy, play, workers), workers) as driver:
        return play_plan(
            plan, driver.play, header=driver.header(), journal=journal, progress=progress, news=driver.take_news
        )


def _spec(recipe: EnvRecipe, policy: PolicySource, play: PlayCfg, workers: WorkersCfg) -> WorkerSpec:
    if not isinstance(play.engine, str):
        raise ConfigError(f"engine: expected a name, which every worker makes one of, got {type(play.engine).__name__}")
    if play.policy_id is None:
        if isinstance(policy, RemoteCfg) or (isinstance(policy, str) and "://" in policy):
            raise ConfigError(
                f"policy_id (--policy-id): expected a text that names the policy of {policy}: workers must play the "
                "same one"
            )
        if policy is not None and not isinstance(policy, (str, Path)):
            play = replace(play, policy_id=policy_hash(policy))  # here, where its code is
    if not recipe.bridged and recipe.threads is None:
        recipe = recipe.replace(threads=workers.cpus)
    return WorkerSpec(recipe=recipe, policy=policy, play=play, threads=recipe.threads or workers.cpus)


@contextmanager
def _driver(spec: WorkerSpec, workers: WorkersCfg) -> Generator[Driver]:
    """Connect to Ray and start workers; at the end of the block they are gone, and so is a cluster that began here."""
    packed: bytes = cast("Any", cloudpickle).dumps(spec)
    own = not ray.is_initialized()
    if own:
        _connect(workers.ray_address, workers.count * workers.cpus, len(packed))
    try:
        sent = ray.put(packed)
        kind: Any = ray.remote(Worker)
        options = {"num_cpus": workers.cpus, "num_gpus": workers.gpus, "max_restarts": 0, "max_task_retries": 0}
        driver = Driver(
            lambda _: kind.options(**options).remote(sent, sys.path),
            workers=workers.count,
            num_envs=spec.recipe.num_envs,
            block=workers.block,
            stall_s=workers.stall_s,
        )
        try:
            yield driver
        finally:
            driver.close()
    finally:
        if own:
            ray.shutdown()


def _connect(address: str | None, cpus: int, size: int) -> None:
    """Join a cluster, or start one that is no larger than needed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no reports about use
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    if address is not None:
        ray.init(address=address, log_to_driver=False)
    else:
        store = max(_LEAST_STORE, 2 * size)
        ray.init(num_cpus=cpus, include_dashboard=False, object_store_memory=store, log_to_driver=False)
    if main:
        signal.signal(signal.SIGTERM, handler)  # Ray's own exits without what is finished
