"""``RemoteEngine``: the model runs in a server, of ours or of others, while the physics goes on here.

A front for another policy server: many clients in, one connection out.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import cast
from urllib.parse import urlsplit

from headrace.errors import ConfigError, DataError, HeadraceError, LifecycleError, PolicyError
from headrace.policies.batching import Answer
from headrace.policies.engines import EnginePolicy, RememberingEnginePolicy, Reply, Request
from headrace.policies.observation_map import ObservationMap
from headrace.policies.protocol import ChunkContext, ChunkPolicy, EpisodeRows, check_chunk, name_rows, one_row
from headrace.policies.serving._batcher import ServingStats, join_rows
from headrace.policies.serving._dialects import Gr00tSpeaker, Speaker, WebsocketSpeaker
from headrace.policies.serving._wire import unpack_map
from headrace.policies.serving.links import Link, LinkLost, RemoteCfg, WebsocketLink, ZmqLink, persist
from headrace.types import Obs

MOST_SENDS = 5
"""Of one request: a server that dies of it each time would do so for ever."""
_PORTS = {"openpi": 8000, "gr00t": 5555}
_DIALECTS = {"openpi": "openpi", "ws": "openpi", "wss": "openpi", "gr00t": "gr00t", "tcp": "gr00t"}
"""Scheme of an address → what the server speaks."""


class RemoteEngine:
    """An :class:`headrace.policies.engines.Engine` whose model runs in a policy server.

    ``evaluate(env, engine.policy)``. A lost connection is opened again and the request sent once
    more; an answer that is late, damaged or of the wrong size is a ``PolicyError``, and so is what the server reports,
    with its traceback.
    """

    overlaps = True

    def __init__(
        self,
        server: str | RemoteCfg,
        *,
        mapping: ObservationMap | None = None,
        horizon: int | None = None,
        action_dim: int | None = None,
    ) -> None:
        """Connect and check.

        Args:
            server: its settings, or its address.
            mapping: from our groups to the server's keys; not needed for ``headrace serve``, which takes them by name.
            horizon: rows of a chunk, where the server does not say (openpi's does not; or call :meth:`probe`).
            action_dim: size of an action, where the server does not say.
        """
        self._cfg = server if isinstance(server, RemoteCfg) else RemoteCfg(server)
        self._address, self._dialect = resolve_address(self._cfg.address)
        self.mapping = mapping
        self._given = (horizon, action_dim)
        self._closed = False
        self._line = self._make_line()
        self._line.greet()
        self.sizes = self._line.speaker.sizes
        self.feature_specs = self.sizes.features
        self.strict_size = self.sizes.strict_size
        """Rows of the server's strict batches; None where its answers depend on who shares a batch."""
        self._policy: EnginePolicy | None = None
        rows, width = self._dimension("horizon"), self._dimension("action_dim")
        if rows is not None and width is not None:
            self._policy = self._make_policy(rows, width)

    @property
    def policy(self) -> ChunkPolicy:
        """The sizes of the server's policy, for ``evaluate``."""
        if self._policy is None:
            raise ConfigError(
                f"server {self._address}: expected its sizes, which it does not say; pass RemoteEngine(horizon=…, "
                "action_dim=…), or call engine.probe(obs, instructions) with an observation"
            )
        return self._policy

    @property
    def busy(self) -> bool:
        """A request is under way, or its reply has not been fetched."""
        return self._line.call is not None

    pending = busy  # one request at a time

    def probe(self, obs: Obs, instructions: tuple[str, ...] = ("",)) -> ChunkPolicy:
        """Learn the sizes from one answer to one observation row, group → (1, …)."""
        self._line.begin(Request(obs=obs, context=one_row(instructions[0])))
        answer: Answer | None = None
        while answer is None:
            answer = self._line.advance(self._cfg.timeout)
        shape = tuple(answer.actions.shape)
        if len(shape) != 3 or shape[0] != 1:
            raise PolicyError(f"server {self._address}: expected a chunk (horizon, A), got {shape[1:]}")
        self._policy = self._make_policy(shape[1], shape[2])
        return self._policy

    def submit(self, request: Request) -> None:
        """Send a request; its answer is fetched by :meth:`poll`."""
        if self.busy or self._closed:
            raise LifecycleError("engine: it is closed, or a request is under way; poll first")
        with _blaming(request):
            self._line.begin(request)

    def poll(self, *, wait: bool) -> Reply | None:
        """Return the reply, if it is there; with ``wait``, wait for it."""
        while (call := self._line.call) is not None:
            with _blaming(call.request):
                answer = self._line.advance(self._cfg.timeout if wait else 0.0)
                if answer is not None:
                    actions = check_chunk(answer.actions, self.policy, call.request.context, read=None)
                    actions = actions if self.mapping is None else self.mapping.finish(actions)
                    seconds = time.monotonic() - call.begun
                    return Reply(request=call.request, answer=replace(answer, actions=actions), seconds=seconds)
            if not wait:
                return None
        return None

    def close(self) -> None:
        """Disconnect; a request under way is dropped."""
        self._closed = True
        self._line.call = None
        self._line.link.close()

    def __enter__(self) -> RemoteEngine:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def _make_policy(self, horizon: int, action_dim: int) -> EnginePolicy:
        kind = RememberingEnginePolicy if self.sizes.memory else EnginePolicy
        return kind(engine=self, horizon=horizon, action_dim=action_dim, obs_steps=self.sizes.obs_steps or 1)

    def _dimension(self, name: str) -> int | None:
        """Return a size that the server says or the caller gave; both must agree."""
        given = self._given[("horizon", "action_dim").index(name)]
        said: int | None = getattr(self.sizes, name)
        if None not in (given, said) and given != said:
            raise ConfigError(f"{name}: expected {given}, got a server whose policy has {name} {said}")
        return given if said is None else said

    def _make_line(self) -> _Line:
        cfg, address = self._cfg, self._address
        if self._dialect == "gr00t":
            speaker = Gr00tSpeaker(address, self.mapping, cfg.api_key, cfg.frame_limit)
            return _Line(address, ZmqLink(address, cfg), speaker, cfg)
        speaker = WebsocketSpeaker(address, self.mapping, cfg.frame_limit)
        return _Line(address, WebsocketLink(address, cfg), speaker, cfg)


@dataclass(slots=True, kw_only=True)
class _Call:
    """A request under way."""

    request: Request
    frames: list[memoryview]
    begun: float
    deadline: float = 0.0
    sent: int = 0
    answers: list[bytes | str] = field(default_factory=list["bytes | str"])
    losses: list[str] = field(default_factory=list[str])
    """Why its connection was lost, each time."""


class _Line:
    """One connection with at most one request under way. Lost, it is opened again and the request sent once more."""

    def __init__(self, address: str, link: Link, speaker: Speaker, cfg: RemoteCfg) -> None:
        self._address, self.link, self.speaker, self._cfg = address, link, speaker, cfg
        self._greeted = False
        self.call: _Call | None = None

    def greet(self) -> None:
        """Connect, trying for as long as the settings say, and read what the server is."""
        before = self.speaker.sizes
        try:
            persist(
                lambda: self.speaker.greet(self.link, self._cfg.reconnect),
                seconds=self._cfg.reconnect,
                server=self._address,
            )
        except HeadraceError:
            self.link.close()
            raise
        if self._greeted and self.speaker.sizes != before:
            self.link.close()
            if replace(self.speaker.sizes, process=before.process) == before:
                raise PolicyError(
                    f"server {self._address}: was started anew, and its policy remembers nothing of the episodes that "
                    "were running; evaluate those that are not finished again"
                )
            raise PolicyError(
                f"server {self._address}: came back with another policy, {self.speaker.sizes}; it was {before}"
            )
        self._greeted = True

    def begin(self, request: Request) -> None:
        """Send the first frames of a request."""
        call = _Call(request=request, frames=self.speaker.frames(request), begun=time.monotonic())
        self.call = call
        self._attempt(lambda: self._send_first(call))

    def advance(self, seconds: float) -> Answer | None:
        """Fetch what has come, waiting for some seconds; the answer once it is whole."""
        call = self.call
        assert call is not None
        whole = self._attempt(lambda: self._receive(call, seconds))
        if not whole:
            return None
        self.call = None
        try:
            return self.speaker.answer(call.answers, call.request)
        except PolicyError:
            self.link.close()  # a server that failed has closed its side, or is about to
            raise

    def _attempt(self, act: Callable[[], bool]) -> bool:
        """Do something with the connection; a lost one is replaced, and the request begun anew."""
        call = self.call
        assert call is not None
        try:
            while True:
                try:
                    if not self.link.is_open:
                        self.greet()
                        call.sent = 0
                        call.answers.clear()
                        self._send(call)
                    return act()
                except LinkLost as error:
                    if self._last_words(call):
                        return True
                    self.link.close()
                    call.losses.append(str(error))
                    if len(call.losses) >= MOST_SENDS:
                        raise PolicyError(
                            f"server {self._address}: lost the connection {MOST_SENDS} times under one request: "
                            f"{call.losses}"
                        ) from error
        except HeadraceError:
            self.link.close()
            self.call = None
            raise

    def _send_first(self, call: _Call) -> bool:
        """Send; an answer that is there already would be taken for the one to this request, and for every later one."""
        if not call.sent and self.link.receive(0.0) is not None:
            raise PolicyError(
                f"server {self._address}: sent an answer that nobody asked for; it must answer each request once"
            )
        return self._send(call)

    def _send(self, call: _Call) -> bool:
        """Send as many frames as the window allows."""
        if not call.sent:
            call.deadline = time.monotonic() + self._cfg.timeout
        while call.sent < min(len(call.frames), len(call.answers) + self.link.window):
            self.link.send(call.frames[call.sent])
            call.sent += 1
        return False

    def _receive(self, call: _Call, seconds: float) -> bool:
        """Fetch answers; whether all are there."""
        until = time.monotonic() + seconds
        while len(call.answers) < len(call.frames):
            now = time.monotonic()
            answer = self.link.receive(max(0.0, min(until, call.deadline) - now))
            if answer is not None:
                call.answers.append(answer)
                self._send(call)
            elif time.monotonic() >= call.deadline:
                raise PolicyError(
                    f"server {self._address}: no answer within {self._cfg.timeout:g} s; raise RemoteCfg(timeout=…) for "
                    "a slow model"
                )
            else:
                return False
        return True

    def _last_words(self, call: _Call) -> bool:
        """Whether the server said a text before it closed: its error, which may lie unread behind other answers."""
        with contextlib.suppress(LinkLost, PolicyError):
            while (answer := self.link.receive(0.0)) is not None:
                call.answers.append(answer)
        return bool(call.answers) and isinstance(call.answers[-1], str)


@contextlib.contextmanager
def _blaming(request: Request) -> Generator[None]:
    """Errors of a server or a mapping name the environments that wait for it."""
    try:
        yield
    except (ConfigError, PolicyError) as error:
        text = str(error)
        whose = "" if "environments " in text else f"\nit was asked for {name_rows(request.context)}"
        raise PolicyError(text + whose) from error


def resolve_address(address: str) -> tuple[str, str]:
    """Return the transport's address and the dialect."""
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError as error:
        raise ConfigError(
            f"server address: expected SCHEME://HOST:PORT with a port from 1 to 65535, got {address!r} ({error})"
        ) from error
    spoken = _DIALECTS.get(parts.scheme)
    if spoken is None or not parts.hostname or port == 0:
        raise ConfigError(f"server address: expected openpi://HOST:PORT or gr00t://HOST:PORT, got {address!r}")
    transport = "tcp" if spoken == "gr00t" else "wss" if parts.scheme == "wss" else "ws"
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{transport}://{host}:{port or _PORTS[spoken]}{parts.path}", spoken


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
