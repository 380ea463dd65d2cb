"""Merges the requests of many clients into batches of the model, and gives each its own rows back."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch

from headrace.errors import DataError, LifecycleError, PolicyError
from headrace.policies.batching import Answer, Asker, Batching
from headrace.policies.engines import Reply, Request
from headrace.policies.protocol import (
    TENSOR_FIELDS,
    ChunkContext,
    ChunkPolicy,
    EpisodeRows,
    RemembersEpisodes,
    has_memory,
)
from headrace.policies.serving.links import is_lost
from headrace.types import Obs

if TYPE_CHECKING:
    from headrace.policies.serving._remote import Upstream


@dataclass(slots=True, kw_only=True)
class ServingStats:
    """What a batcher has done so far."""

    batches: int = 0
    """Merged batches."""
    calls: int = 0
    rows: int = 0
    padding: int = 0
    requests: int = 0
    shared: int = 0
    """Merged batches with rows of more than one client."""
    dropped: int = 0
    """Requests whose client was gone before the model began with them."""
    failed: int = 0
    model_seconds: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    client: int
    request: Request
    arrived: float
    future: Future[Reply]

    @property
    def rows(self) -> int:
        return len(self.request.context)

    def kind(self) -> tuple[object, ...]:
        """Return what rows must have in common to be one batch."""
        obs, context = self.request.obs, self.request.context
        groups = tuple(sorted((name, values.shape[1:], values.dtype) for name, values in obs.items()))
        return (*groups, context.left_over.shape[1:])


class Batcher:
    """Owns the model's thread. Requests come from any thread; while the model runs, the next batch collects."""

    def __init__(
        self,
        policy: ChunkPolicy,
        batching: Batching,
        *,
        max_rows: int,
        max_wait: float,
        linger: float = 30.0,
        upstream: Upstream | None = None,
    ) -> None:
        self._ask, self._batching = upstream or Asker(policy, batching, alone=False), batching
        self._max_rows, self._max_wait, self._linger = max_rows, max_wait, linger
        self._memory = cast("RemembersEpisodes", upstream or policy) if has_memory(policy) else None
        self._episodes: dict[tuple[int, int], tuple[int, str]] = {}
        """Episodes in the policy's memory: the client that plays each, and its instruction."""
        self._gone: dict[int, float] = {}
        """Clients that have left → when their episodes end."""
        self._queue: deque[_Job] = deque()
        self._clients: set[int] = set()
        self._closed = False
        self._changed = threading.Condition()
        self.stats = ServingStats()
        self._thread = threading.Thread(target=self._work, name="headrace-model", daemon=True)
        self._thread.start()

    def join(self, client: int) -> None:
        """Count a client in: a batch waits for its request as long as ``max_wait`` allows."""
        with self._changed:
            self._clients.add(client)

    def leave(self, client: int) -> None:
        """Count a client out, with its rows."""
        with self._changed:
            self._clients.discard(client)
            if self._memory is not None:
                self._gone[client] = time.monotonic() + self._linger
            for job in [job for job in self._queue if job.client == client]:
                job.future.cancel()
            self._changed.notify()

    @property
    def clients(self) -> int:
        """Connected now."""
        return len(self._clients)

    def submit(self, client: int, request: Request) -> Future[Reply]:
        """Queue the rows of a client. The calls of a merged batch are counted for every client that shares it."""
        job = _Job(client, request, time.monotonic(), Future())
        with self._changed:
            if self._closed:
                raise LifecycleError("server: it is closed")
            self._queue.append(job)
            self.stats.requests += 1
            self._changed.notify()
        return job.future

    def close(self) -> None:
        """Wait for the model's current call; what is queued is dropped."""
        with self._changed:
            self._closed = True
            for job in self._queue:
                job.future.cancel()
            self._queue.clear()
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while jobs := self._collect():
            self._answer(jobs)

    def _collect(self) -> list[_Job]:
        """Return the requests of the next batch; empty once closed.

        A request that came while the model ran has waited already. A batch goes at once when it is full, or when every
        client has a request in it: no other could come.
        """
        with self._changed:
            while True:
                self._drop_cancelled()
                if self._closed:
                    return []
                due = self._end_left()
                if not self._queue:
                    self._changed.wait(due)
                    continue
                left = self._queue[0].arrived + self._max_wait - time.monotonic()
                full = sum(job.rows for job in self._queue) >= self._max_rows
                complete = self._clients <= {job.client for job in self._queue}
                if full or complete or left <= 0:
                    return self._take()
                self._changed.wait(left)

    def _end_left(self) -> float | None:
        """End the episodes of clients that left some time ago; returns the seconds until the next are due.

        A client whose connection was lost comes back as another one, and goes on with its episodes.
        """
        now = time.monotonic()
        over = {client for client, due in self._gone.items() if due <= now}
        for client in over:
            del self._gone[client]
        keys = [key for key, (client, _) in self._episodes.items() if client in over]
        if keys:
            texts = tuple(self._episodes.pop(key)[1] for key in keys)
            seeds, ids = (torch.tensor([key[part] for key in keys]) for part in (0, 1))
            try:
                cast("RemembersEpisodes", self._memory).end(
                    EpisodeRows(seeds=seeds, episode_ids=ids, instructions=texts)
                )
            except Exception:  # noqa: BLE001  # no client is left to hear of it, and the model's thread must live on
                self.stats.failed += 1
        return max(0.0, min(self._gone.values()) - now) if self._gone else None

    def _keep(self, jobs: Sequence[_Job]) -> list[Request]:
        """Note which episodes the policy's memory has after these requests; refuse one without a beginning."""
        for job in jobs if self._memory is not None else ():
            context = job.request.context
            keys = list(zip(context.seeds.tolist(), context.episode_ids.tolist(), strict=True))
            for key, chunk in zip(keys, context.chunk_index.tolist(), strict=True):
                if chunk and key not in self._episodes:
                    raise DataError(
                        f"request: expected chunk 0 of episode {key[1]} (seed {key[0]}) first, got chunk {chunk}: the "
                        "policy has memory, and has not seen this episode begin, or has ended it when its client left"
                    )
        return [self._note(job) for job in jobs]

    def _note(self, job: _Job) -> Request:
        """Note the episodes of a request; returns it without the ends of episodes that the memory has not."""
        request = job.request
        if self._memory is None:
            return request
        context, ended = request.context, request.ended
        if ended is not None:
            known = [row for row, key in enumerate(ended.keys()) if self._episodes.pop(key, None) is not None]
            texts = tuple(ended.instructions[row] for row in known)
            ended = EpisodeRows(seeds=ended.seeds[known], episode_ids=ended.episode_ids[known], instructions=texts)
        keys = zip(context.seeds.tolist(), context.episode_ids.tolist(), strict=True)
        self._episodes |= {key: (job.client, text) for key, text in zip(keys, context.instructions, strict=True)}
        return replace(request, ended=ended)

    def _take(self) -> list[_Job]:
        kind, rows = self._queue[0].kind(), 0
        taken: list[_Job] = []
        for job in list(self._queue):
            if taken and (rows + job.rows > self._max_rows or job.kind() != kind):
                continue
            self._queue.remove(job)
            if job.future.set_running_or_notify_cancel():
                taken.append(job)
                rows += job.rows
        return taken

    def _drop_cancelled(self) -> None:
        kept = deque(job for job in self._queue if not job.future.cancelled())
        self.stats.dropped += len(self._queue) - len(kept)
        self._queue = kept

    def _answer(self, jobs: Sequence[_Job]) -> None:
        begin = time.perf_counter()
        try:
            answer = self._run(_merge(self._keep(jobs)))
        # whatever a policy raises goes to the clients; the model's thread must live on
        except BaseException as error:  # noqa: BLE001  # raised in the client
            if len(jobs) > 1 and not is_lost(error):  # one client's rows must not fail the others'
                for job in jobs:
                    self._answer([job])
                return
            self.stats.failed += len(jobs)
            for job in jobs:
                job.future.set_exception(_as_policy_error(error))
            return
        seconds = time.perf_counter() - begin
        stats = self.stats
        stats.batches += 1
        stats.shared += len({job.client for job in jobs}) > 1
        stats.calls += answer.calls
        stats.padding += answer.padding
        stats.rows += len(answer.actions)
        stats.model_seconds += seconds
        start = 0
        for job in jobs:
            own = replace(answer, actions=answer.actions[start : start + job.rows])
            start += job.rows
            job.future.set_result(Reply(request=job.request, answer=own, seconds=seconds))

    def _run(self, request: Request) -> Answer:
        count = len(request.context)
        if self._batching.mode == "strict" or count <= self._max_rows:
            return self._ask(request.obs, request.context, request.ended)
        parts: list[Answer] = []
        for rows in torch.arange(count).split(self._max_rows):
            obs = {name: values.index_select(0, rows) for name, values in request.obs.items()}
            ended = None if parts else request.ended
            parts.append(self._ask(obs, request.context.rows(rows), ended))
        return Answer(
            actions=torch.cat([part.actions for part in parts]),
            calls=sum(part.calls for part in parts),
            padding=sum(part.padding for part in parts),
        )


def _merge(requests: Sequence[Request]) -> Request:
    """One request with the rows of all, in their order."""
    if len(requests) == 1:
        return requests[0]
    contexts = [request.context for request in requests]
    tensors = {name: torch.cat([getattr(context, name) for context in contexts]) for name in TENSOR_FIELDS}
    obs: Obs = {name: torch.cat([request.obs[name] for request in requests]) for name in requests[0].obs}
    texts = tuple(text for context in contexts for text in context.instructions)
    ended = join_rows([request.ended for request in requests if request.ended is not None])
    return Request(obs=obs, context=ChunkContext(instructions=texts, **tensors), ended=ended)


def join_rows(parts: Sequence[EpisodeRows]) -> EpisodeRows | None:
    """Return the episodes of all parts; None where there are none."""
    if not parts:
        return None
    return EpisodeRows(
        seeds=torch.cat([rows.seeds for rows in parts]),
        episode_ids=torch.cat([rows.episode_ids for rows in parts]),
        instructions=tuple(text for rows in parts for text in rows.instructions),
    )


def _as_policy_error(error: BaseException) -> BaseException:
    if isinstance(error, Exception):
        return error
    raised = PolicyError(f"policy raised {type(error).__name__}: {error}")  # sys.exit() is no reason to end the server
    raised.__cause__ = error
    return raised
