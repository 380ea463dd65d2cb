"""A front for another policy server: many clients in, one connection out."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import cast

from headrace.errors import ConfigError, DataError, PolicyError
from headrace.policies.batching import Answer
from headrace.policies.engines import Reply, Request
from headrace.policies.protocol import ChunkContext, EpisodeRows
from headrace.policies.serving._batcher import ServingStats, join_rows
from headrace.policies.serving._links import LinkLost, WebsocketLink, persist
from headrace.policies.serving._remote import MOST_SENDS, RemoteEngine, resolve_address
from headrace.policies.serving._wire import unpack_map
from headrace.policies.serving.remote_cfg import RemoteCfg
from headrace.types import Obs


class Relay:
    """Gives the frames of many clients to a stock server one by one, and each client its own answers.

    Frames pass as they are. A connection has at most one frame in the queue, so that first come, first served is a turn
    for each of them.
    """

    def __init__(self, address: str, cfg: RemoteCfg) -> None:
        self._address, self._cfg = address, cfg
        self._link = WebsocketLink(address, cfg)
        self._lost = (0.0, "")
        self._clients: set[int] = set()
        self.stats = ServingStats()
        self._greeting: bytes | str | None = None
        self.metadata: dict[str, object] = {}
        """The server's first frame."""
        self._connect()
        self._thread = ThreadPoolExecutor(1, "headrace-forward")

    @property
    def clients(self) -> int:
        """Connected now."""
        return len(self._clients)

    def join(self, client: int) -> None:
        """Count a client in."""
        self._clients.add(client)

    def leave(self, client: int) -> None:
        """Count a client out; the server cancels its frame."""
        self._clients.discard(client)

    def submit(self, frame: bytes | str) -> Future[bytes]:
        """Queue the frame of a client; its future has the server's answer."""
        if isinstance(frame, str):
            raise DataError("request: expected a binary frame, got a text")
        self.stats.requests += 1
        answer = self._thread.submit(self._call, memoryview(frame), time.monotonic())
        answer.add_done_callback(self._count)
        return answer

    def close(self) -> None:
        """Wait for the server's current answer, and disconnect; what is queued is dropped."""
        self._thread.shutdown(cancel_futures=True)
        self._link.close()

    def _count(self, answer: Future[bytes]) -> None:
        self.stats.dropped += answer.cancelled()
        self.stats.failed += not answer.cancelled() and answer.exception() is not None

    def _call(self, frame: memoryview, arrived: float) -> bytes:
        begin, (lost, why) = time.monotonic(), self._lost
        if arrived < lost:  # it has waited in vain already, while the server was looked for
            raise PolicyError(why)
        try:
            answer = self._exchange(frame)
        except PolicyError as error:
            self._link.close()
            if isinstance(error.__cause__, LinkLost):
                self._lost = (time.monotonic(), str(error))
            raise
        stats = self.stats
        stats.batches, stats.calls, stats.rows = stats.batches + 1, stats.calls + 1, stats.rows + 1
        stats.model_seconds += time.monotonic() - begin
        return answer

    def _exchange(self, frame: memoryview) -> bytes:
        """Return the server's answer; a lost connection is opened again, and the frame sent once more."""
        server, link = f"server {self._address}", self._link
        for attempt in range(1, MOST_SENDS + 1):
            try:
                if not link.is_open:
                    self._connect()
                elif link.receive(0.0) is not None:
                    raise PolicyError(f"{server}: sent an answer without a request; it must answer each request once")
                link.send(frame)
                answer = link.receive(self._cfg.timeout)
            except LinkLost as error:
                link.close()
                if attempt == MOST_SENDS:
                    raise PolicyError(f"{server}: lost the connection {attempt} times under one request") from error
                continue
            if answer is None:
                raise PolicyError(f"{server}: no answer within {self._cfg.timeout:g} s; raise RemoteCfg(timeout=…)")
            if isinstance(answer, str):
                raise PolicyError(f"{server} failed; it says:\n{answer.strip()}")
            return answer
        raise AssertionError  # the last attempt returns or raises

    def _connect(self) -> None:
        greeting = persist(self._link.open, seconds=self._cfg.reconnect, server=self._address)
        try:
            if self._greeting not in (None, greeting):
                raise DataError(f"other metadata than before, {self.metadata}")
            self._greeting, self.metadata = greeting, unpack_map(greeting or b"", limit=self._cfg.frame_limit)
        except DataError as error:
            self._link.close()
            raise PolicyError(
                f"server {self._address}: expected the metadata of a policy server, got {error}"
            ) from error


class Upstream:
    """Asks a ``headrace serve`` behind with merged rows; a policy with memory there sees which episodes end."""

    def __init__(self, engine: RemoteEngine) -> None:
        self.engine = engine
        self._ended: list[EpisodeRows] = []

    def begin(self, rows: EpisodeRows) -> None:
        """Do nothing: the server sees the first chunk of each episode."""

    def end(self, rows: EpisodeRows) -> None:
        """Keep the ends of episodes for the next request."""
        self._ended.append(rows)

    def __call__(self, obs: Obs, context: ChunkContext, ended: EpisodeRows | None = None) -> Answer:
        """Return the server's answer, with its counts."""
        over, self._ended = [*self._ended, *([] if ended is None else [ended])], []
        self.engine.submit(Request(obs=obs, context=context, ended=join_rows(over)))
        return cast("Reply", self.engine.poll(wait=True)).answer


def connect_server(forward: str | RemoteCfg) -> Relay | Upstream:
    """Connect to the server behind a front: merged rows for one of ours, frame by frame for a stock one."""
    cfg = forward if isinstance(forward, RemoteCfg) else RemoteCfg(forward)
    address, dialect = resolve_address(cfg.address)
    if dialect != "openpi":
        raise ConfigError(
            f"forward: expected a server of openpi or 'headrace serve', got {cfg.address!r}: a reset in the dialect "
            f"{dialect!r} is for all of a server's state, and would reach the episodes of other clients"
        )
    relay = Relay(address, cfg)
    if "headrace" not in relay.metadata:
        return relay
    relay.close()
    return Upstream(RemoteEngine(cfg))
