"""``RemoteEngine``: the model runs in a server, of ours or of others, while the physics goes on here."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from headrace.errors import ConfigError, HeadraceError, LifecycleError, PolicyError
from headrace.policies.batching import Answer
from headrace.policies.engines import EnginePolicy, RememberingEnginePolicy, Reply, Request
from headrace.policies.observation_map import ObservationMap
from headrace.policies.protocol import ChunkPolicy, check_chunk, named, one_row
from headrace.policies.serving._dialects import Gr00tSpeaker, Speaker, WebsocketSpeaker
from headrace.policies.serving._links import Link, LinkLost, WebsocketLink, ZmqLink, persist
from headrace.policies.serving.remote_cfg import RemoteCfg
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
            self._policy = self._sized_policy(rows, width)

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
        self._policy = self._sized_policy(shape[1], shape[2])
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

    def _sized_policy(self, horizon: int, action_dim: int) -> EnginePolicy:
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
        whose = "" if "environments " in text else f"\nit was asked for {named(request.context)}"
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
