"""``RemoteEngine``: the model runs in a server, of ours or of others, while the physics goes on here."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

import numpy as np
import torch
from torch import Tensor

from headrace.chunking import Answer, ChunkContext, ChunkPolicy, EpisodeRows, Reply, Request
from headrace.chunking._context import named
from headrace.chunking._policy import checked_chunk
from headrace.errors import ConfigError, HeadraceError, LifecycleError, PolicyError, UnknownNameError
from headrace.serving._dialects import (
    WEBSOCKET_DIALECTS,
    DialectName,
    Gr00tSpeaker,
    RawAnswer,
    Speaker,
    WebsocketSpeaker,
)
from headrace.serving._images import ImageCoding
from headrace.serving._links import Link, LinkClosed, LinkLost, RemoteCfg, WebsocketLink, ZmqLink, persist
from headrace.serving._mapping import WireMapping
from headrace.types import Obs

_MOST_SENDS = 5
"""Of one request: a server that dies of it each time would do so for ever."""
_PORTS = {"openpi": 8000, "roboarena": 8000, "vllm-omni": 8000, "gr00t": 5555}


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePolicy:
    """What a remote engine's policy is to the scheduler: its sizes. It runs in the server only."""

    horizon: int
    action_dim: int
    obs_steps: int

    def __call__(self, obs: Obs, context: ChunkContext) -> Tensor:
        """Not here."""
        del obs, context
        raise LifecycleError("a remote policy runs in its server; pass engine=… together with engine.policy")


class _RememberingPolicy(RemotePolicy):
    """The server's policy has memory: the scheduler then sends it the ends of episodes."""

    def begin(self, rows: EpisodeRows) -> None:
        """Seen by the server in the first chunk of each episode."""

    def end(self, rows: EpisodeRows) -> None:
        """Sent with the next request."""


class RemoteEngine:
    """An :class:`headrace.chunking.Engine` whose model runs in a policy server.

    ``evaluate(env, engine.policy, engine=engine, …)``. A lost connection is opened again and the request sent once
    more; an answer that is late, damaged or of the wrong size is a ``PolicyError``, and so is what the server reports,
    with its traceback.
    """

    overlaps = True

    def __init__(
        self,
        address: str,
        *,
        dialect: DialectName | None = None,
        mapping: WireMapping | None = None,
        horizon: int | None = None,
        action_dim: int | None = None,
        connections: int = 1,
        images: ImageCoding = "raw",
        cfg: RemoteCfg | None = None,
    ) -> None:
        """Connect and check.

        Args:
            address: ``ws://host:8000``, ``tcp://host:5555``, or ``openpi://host:8000`` and ``gr00t://host:5555``, which
                name the dialect, too.
            dialect: what the server speaks; ``headrace serve`` speaks openpi's.
            mapping: from our groups to the server's keys; not needed for ``headrace serve``, which takes them by name.
            horizon: rows of a chunk, where the server does not say (openpi's does not; or call :meth:`probe`).
            action_dim: size of an action, where the server does not say.
            connections: how many requests may be under way at once, each over a connection of its own.
            images: how pictures travel to ``headrace serve``: ``png`` is smaller and exact, ``jpeg`` smaller still and
                not exact.
            cfg: time-outs, keep-alive, size limit and API key.
        """
        self._cfg = cfg or RemoteCfg()
        self._address, self._dialect = _resolve(address, dialect)
        if connections < 1:
            raise ConfigError(f"connections: expected at least 1, got {connections}")
        if images not in ("raw", "png", "jpeg"):
            raise UnknownNameError("image coding", images, ("raw", "png", "jpeg"))
        self._mapping = mapping
        self._coding: ImageCoding = images
        self._given = (horizon, action_dim)
        self._closing = threading.Event()
        self._work: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Reply | HeadraceError | LinkClosed] = queue.SimpleQueue()
        self._under_way = 0
        self._links = [self._link() for _ in range(connections)]
        first = self._speaker()
        try:
            self._greet(self._links[0], first)
        except HeadraceError:
            self._links[0].close()
            raise
        self.sizes = first.sizes
        self._policy: RemotePolicy | None = None
        rows, width = self._dimension("horizon"), self._dimension("action_dim")
        if rows is not None and width is not None:
            self._policy = self._sized_policy(rows, width)
        # a policy with memory sees the chunks of an episode in their order: one request at a time
        self.capacity = 1 if first.sizes.memory else connections
        self._threads = [
            threading.Thread(
                target=self._serve_link, args=(link, first if link is self._links[0] else None), daemon=True
            )
            for link in self._links[: self.capacity]
        ]
        for thread in self._threads:
            thread.start()

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
    def strict_size(self) -> int | None:
        """Rows of the server's strict batches; None where its answers depend on who shares a batch.

        Compressed pictures that are not exact make them differ from an inline run, too.
        """
        return None if self._coding == "jpeg" else self.sizes.strict_size

    @property
    def busy(self) -> bool:
        """No further request can be taken."""
        return self._under_way >= self.capacity

    @property
    def pending(self) -> bool:
        """A request is under way, or its reply has not been fetched."""
        return self._under_way > 0

    def probe(self, obs: Obs, instructions: tuple[str, ...] = ("",)) -> ChunkPolicy:
        """Learn the sizes from one answer to one observation row, group → (1, …)."""
        zero = torch.zeros(1, dtype=torch.int64)
        context = ChunkContext(
            seeds=zero,
            env_ids=zero,
            episode_ids=zero,
            chunk_index=zero,
            instructions=instructions,
            left_over=torch.zeros((1, 1, 1)),
            left_over_length=zero,
            delay=zero,
        )
        link, speaker = self._link(), self._speaker()
        try:
            self._greet(link, speaker)
            raw = self._ask(link, speaker, Request(obs=obs, context=context))
        finally:
            link.close()
        if raw.actions.ndim != 3 or len(raw.actions) != 1:
            raise PolicyError(f"server {self._address}: expected a chunk (horizon, A), got {raw.actions.shape[1:]}")
        self._policy = self._sized_policy(raw.actions.shape[1], raw.actions.shape[2])
        return self._policy

    def submit(self, request: Request) -> None:
        """Hand over a request."""
        if self.busy or self._closing.is_set():
            raise LifecycleError("engine: it is closed, or has as many requests under way as connections; poll first")
        self._under_way += 1
        self._work.put(request)

    def poll(self, *, wait: bool) -> Reply | None:
        """The first reply there is, in any order; with ``wait``, wait for one."""
        if not self._under_way:
            return None
        try:
            reply = self._done.get(block=wait)
        except queue.Empty:
            return None
        self._under_way -= 1
        if isinstance(reply, LinkClosed):
            raise LifecycleError("engine: closed while a request was under way")
        if isinstance(reply, HeadraceError):
            raise reply
        return reply

    def close(self) -> None:
        """Disconnect; requests under way are dropped."""
        if self._closing.is_set():
            return
        self._closing.set()
        for _ in self._threads:
            self._work.put(None)
        for link in self._links:
            link.abort()
        for thread in self._threads:
            thread.join()
        for link in self._links:
            link.close()

    def __enter__(self) -> RemoteEngine:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def _serve_link(self, link: Link, speaker: Speaker | None) -> None:
        """The life of one connection's thread."""
        try:
            while (request := self._work.get()) is not None and not self._closing.is_set():
                begin = time.perf_counter()
                try:
                    if speaker is None:
                        speaker = self._speaker()
                        self._greet(link, speaker)
                    raw = self._ask(link, speaker, request)
                    answer = self._checked(raw, request)
                    self._done.put(Reply(request=request, answer=answer, seconds=time.perf_counter() - begin))
                except (ConfigError, PolicyError) as error:  # the former: a mapping that does not fit the groups
                    self._done.put(_blamed(error, request))
                except LinkClosed as error:
                    self._done.put(error)
        finally:
            link.close()

    def _ask(self, link: Link, speaker: Speaker, request: Request) -> RawAnswer:
        """Exchange a request, over a new connection if the old one is lost."""
        frames = speaker.frames(request)
        reasons: list[str] = []
        try:
            while len(reasons) < _MOST_SENDS:
                if not link.is_open:
                    self._reopen(link, speaker)
                try:
                    return speaker.answer(link.exchange(frames, self._cfg.timeout), request)
                except LinkLost as error:
                    if self._closing.is_set():
                        raise LinkClosed from error
                    reasons.append(str(error))
        except PolicyError:
            link.close()  # a server that failed has closed its side, or is about to
            raise
        raise PolicyError(
            f"server {self._address}: lost the connection {_MOST_SENDS} times under one request: {reasons}"
        )

    def _reopen(self, link: Link, speaker: Speaker) -> None:
        before = speaker.sizes
        self._greet(link, speaker)
        if speaker.sizes != before:
            raise PolicyError(
                f"server {self._address}: came back with another policy, {speaker.sizes}; it was {before}"
            )

    def _greet(self, link: Link, speaker: Speaker) -> None:
        try:
            persist(
                lambda: speaker.greet(link, self._cfg.reconnect),
                seconds=self._cfg.reconnect,
                closing=self._closing,
                server=self._address,
            )
        except PolicyError:
            link.close()
            raise

    def _checked(self, raw: RawAnswer, request: Request) -> Answer:
        context = request.context
        if raw.actions.dtype.kind not in "fiu":
            raise PolicyError(f"server {self._address}: expected actions of numbers, got {raw.actions.dtype}")
        actions = torch.from_numpy(np.array(raw.actions, np.float32))
        chunk = checked_chunk(actions, self.policy, context, torch.arange(len(context)))
        return Answer(actions=chunk, calls=raw.calls, padding=raw.padding)

    def _sized_policy(self, horizon: int, action_dim: int) -> RemotePolicy:
        kind = _RememberingPolicy if self.sizes.memory else RemotePolicy
        return kind(horizon=horizon, action_dim=action_dim, obs_steps=self.sizes.obs_steps or 1)

    def _dimension(self, name: str) -> int | None:
        """A size that the server says or the caller gave; both must agree."""
        given = self._given[("horizon", "action_dim").index(name)]
        said: int | None = getattr(self.sizes, name)
        if None not in (given, said) and given != said:
            raise ConfigError(f"{name}: expected {given}, got a server whose policy has {name} {said}")
        return given if said is None else said

    def _speaker(self) -> Speaker:
        cfg = self._cfg
        if self._dialect == "gr00t":
            return Gr00tSpeaker(self._address, self._mapping, cfg.api_key, cfg.frame_limit)
        dialect = WEBSOCKET_DIALECTS[self._dialect]
        return WebsocketSpeaker(self._address, dialect, self._mapping, self._coding, cfg.frame_limit)

    def _link(self) -> Link:
        return (ZmqLink if self._dialect == "gr00t" else WebsocketLink)(self._address, self._cfg)


def _resolve(address: str, dialect: DialectName | None) -> tuple[str, str]:
    """The transport's address and the dialect."""
    known = (*WEBSOCKET_DIALECTS, "gr00t")
    parts = urlsplit(address)
    spoken = dialect or (parts.scheme if parts.scheme in known else "gr00t" if parts.scheme == "tcp" else "openpi")
    if spoken not in known:
        raise UnknownNameError("dialect", spoken, known)
    transport = "tcp" if spoken == "gr00t" else "wss" if parts.scheme == "wss" else "ws"
    if not parts.hostname or parts.scheme not in (transport, spoken):
        raise ConfigError(
            f"server address: expected {transport}://HOST:PORT or {spoken}://HOST:PORT for the dialect {spoken!r}, "
            f"got {address!r}"
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    path = parts.path or (WEBSOCKET_DIALECTS[spoken].path if spoken in WEBSOCKET_DIALECTS else "")
    return f"{transport}://{host}:{parts.port or _PORTS[spoken]}{path}", spoken


def _blamed(error: HeadraceError, request: Request) -> PolicyError:
    text = str(error)
    whose = "" if "environments " in text else f"\nit was asked for {named(request.context)}"
    blamed = PolicyError(text + whose)
    blamed.__cause__ = error
    return blamed
