"""Settings of a connection to a policy server.

One connection to a policy server: a websocket (openpi and its relatives) or a ZMQ socket (GR00T).
"""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeAlias, TypeVar

from headrace.errors import ConfigError, PolicyError, require_extra

FRAME_LIMIT = 64 << 20
"""Bytes of the largest frame, unless settings say otherwise."""
_LONGEST_S = 1e9
"""30 years; the clocks of threads and sockets overflow beyond."""


def check_seconds(cfg: object, what: str, *names: str, least: float = 1e-9) -> None:
    """Reject what no socket takes for a time-out: NaN, infinity, negative and huge numbers. Pings may be None."""
    for name in names:
        value: object = getattr(cfg, name)
        if value is None and name.startswith("ping"):
            continue
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= _LONGEST_S:
            raise ConfigError(f"{what} {name}: expected seconds from {least:g} to {_LONGEST_S:g}, got {value!r}")


def check_whole(cfg: object, what: str, **bounds: tuple[int, int | None]) -> None:
    """Reject what is not a whole number within (least, most)."""
    for name, (least, most) in bounds.items():
        value: object = getattr(cfg, name)
        if type(value) is not int or value < least or (most is not None and value > most):
            upto = "" if most is None else f" to {most}"
            raise ConfigError(f"{what} {name}: expected a whole number from {least}{upto}, got {value!r}")


@dataclass(frozen=True, slots=True)
class RemoteCfg:
    """A policy server, and how requests reach it."""

    address: str
    """``openpi://host:8000``, the same as ``ws://`` (``wss://`` with TLS), or ``gr00t://host:5555``, the same as
    ``tcp://``; ``headrace serve`` uses openpi's dialect."""
    _: KW_ONLY
    timeout: float = 120.0
    """Seconds that an answer may take, from the moment the request was sent."""
    reconnect: float = 30.0
    """Seconds in which a server must be there, at the start and after a lost connection; tries are spaced by a
    growing, random pause. A request whose connection was lost is sent again."""
    ping_interval: float | None = 20.0
    """Seconds between keep-alive pings; None for none."""
    ping_timeout: float | None = None
    """Seconds in which a ping must be answered; None waits for ever, since stock openpi servers answer no ping while
    their model runs or compiles."""
    frame_limit: int = FRAME_LIMIT
    """Bytes of the largest frame that is read."""
    api_key: str | None = None
    """Sent as ``Authorization: Api-Key …`` (openpi) or ``api_token`` (GR00T)."""

    def __post_init__(self) -> None:
        check_seconds(self, "remote", "timeout", "reconnect", "ping_interval", "ping_timeout")
        check_whole(self, "remote", frame_limit=(1, None))
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError("remote api_key: expected printable ASCII characters, as a header can hold them")


_LOGGER = logging.getLogger("headrace.policies.serving")
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 2.0
_SLICE = 0.1
"""Seconds between looks at whether the server is still there, where a library does not say."""
_TOO_BIG, _BAD_TEXT, _BAD_FRAME = 1009, 1007, 1002
T = TypeVar("T")


class LinkLost(Exception):  # noqa: N818  # not an error of the caller: the request is sent again
    """The connection is gone: reconnect and send again."""


def is_lost(error: BaseException | None) -> bool:
    """Whether an error comes from a server that cannot be reached."""
    return error is not None and (isinstance(error, LinkLost) or is_lost(error.__cause__))


class WebsocketLink:
    """A websocket without compression, as openpi's client opens it. Used by one thread."""

    window = 4
    """Frames that may be sent before their answers are fetched."""

    def __init__(self, uri: str, cfg: RemoteCfg) -> None:
        self._uri, self._cfg = uri, cfg
        self._library: Any = require_extra("websockets.sync.client", extra="serve", purpose="a remote policy")
        self._errors: Any = require_extra("websockets.exceptions", extra="serve", purpose="a remote policy")
        self._held = contextlib.ExitStack()
        self._connection: Any = None

    @property
    def is_open(self) -> bool:
        """Whether there is a connection that was not lost."""
        return self._connection is not None

    def open(self) -> bytes | str | None:
        """Connect, and read the metadata that the server sends first. Raises ``LinkLost`` where no server answers."""
        self.close()
        cfg = self._cfg
        headers = {"Authorization": f"Api-Key {cfg.api_key}"} if cfg.api_key else None
        try:
            connection = self._library.connect(
                self._uri,
                compression=None,
                max_size=cfg.frame_limit,
                additional_headers=headers,
                open_timeout=cfg.reconnect,
                close_timeout=1.0,
                ping_interval=cfg.ping_interval,
                ping_timeout=cfg.ping_timeout,
                proxy=None,
            )
            self._connection = self._held.enter_context(connection)
            seconds = struct.pack("ll", int(cfg.timeout) + 1, 0)
            self._connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
            return self._connection.recv(timeout=cfg.reconnect)
        except self._errors.InvalidStatus as error:
            status = error.response.status_code
            if status in (401, 403):
                raise PolicyError(
                    f"server {self._uri}: refused the API key (status {status}); pass api_key=…"
                ) from error
            raise LinkLost(f"the server answered with status {status}") from error
        except self._errors.InvalidURI as error:
            raise ConfigError(f"server {self._uri}: expected ws://HOST:PORT, got {error}") from error
        except (OSError, EOFError, TimeoutError, self._errors.WebSocketException) as error:
            self.close()
            raise LinkLost(str(error) or type(error).__name__) from error

    def send(self, frame: memoryview) -> None:
        """Send a frame; a server that takes nothing for the time of an answer is lost."""
        try:
            self._connection.send(frame)
        except (OSError, EOFError, self._errors.ConnectionClosed) as error:
            raise self._lost(error) from error

    def receive(self, seconds: float) -> bytes | str | None:
        """Return the next frame, also one that came before the connection was lost; None if none comes in time."""
        try:
            return self._connection.recv(timeout=max(seconds, 0.0))
        except TimeoutError:
            return None
        except (OSError, EOFError, self._errors.ConnectionClosed) as error:
            raise self._lost(error) from error

    def _lost(self, error: BaseException) -> Exception:
        """Return what a lost connection means: a frame that one side does not take, or a reason to connect again."""
        received, sent = (getattr(error, name, None) for name in ("rcvd", "sent"))
        if received is not None and received.code == _TOO_BIG:
            return PolicyError(f"server {self._uri}: the request is larger than the server takes ({received.reason})")
        if sent is not None and sent.code in (_TOO_BIG, _BAD_TEXT, _BAD_FRAME):
            return PolicyError(
                f"server {self._uri}: broken or oversized answer ({sent.reason or error}); the limit is "
                f"{self._cfg.frame_limit:,} bytes, RemoteCfg(frame_limit=…)"
            )
        return LinkLost(str(error) or type(error).__name__)

    def close(self) -> None:
        """Disconnect; ``open`` connects again."""
        self._connection = None
        held, self._held = self._held, contextlib.ExitStack()
        with contextlib.suppress(OSError, EOFError, self._errors.WebSocketException):
            held.close()


class ZmqLink:
    """As :class:`WebsocketLink`, over a REQ socket, which allows nothing but send and receive in turn: it is rebuilt
    after whatever goes wrong."""

    window = 1

    def __init__(self, uri: str, cfg: RemoteCfg) -> None:
        self._uri, self._cfg = uri, cfg
        self._zmq: Any = require_extra("zmq", extra="serve", purpose="a GR00T server")
        self._context: Any = None
        self._socket: Any = None
        self._monitor: Any = None

    @property
    def is_open(self) -> bool:
        """Whether there is a connection that was not lost."""
        return self._socket is not None

    def open(self) -> bytes | str | None:
        """Connect; the server says nothing until it is asked."""
        self.close()
        zmq = self._zmq
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REQ)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, self._cfg.frame_limit)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECTED)
        try:
            self._socket.connect(self._uri)
        except zmq.ZMQError as error:
            raise ConfigError(f"server {self._uri}: expected tcp://HOST:PORT, got {error}") from error
        connected = self._await_event(zmq.EVENT_CONNECTED, min(self._cfg.reconnect, 1.0))
        if not connected:
            self.close()
            raise LinkLost("nobody listens there")
        return None

    def send(self, frame: memoryview) -> None:
        """Send a frame."""
        try:
            self._socket.send(frame, self._zmq.NOBLOCK)
        except self._zmq.ZMQError as error:
            raise LinkLost(str(error)) from error

    def receive(self, seconds: float) -> bytes | str | None:
        """Return the next frame; a server that went away is looked for a few times a second."""
        deadline = time.monotonic() + seconds
        while not self._socket.poll(int(1000 * max(0.0, min(_SLICE, deadline - time.monotonic())))):
            if self._await_event(self._zmq.EVENT_DISCONNECTED, 0.0):
                raise LinkLost("the server closed the connection")
            if time.monotonic() >= deadline:
                return None
        return bytes(self._socket.recv())

    def close(self) -> None:
        """Disconnect, and end the library's threads."""
        if self._context is None:
            return
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()
        self._context = self._socket = self._monitor = None

    def _await_event(self, event: int, seconds: float) -> bool:
        from zmq.utils.monitor import recv_monitor_message

        deadline = time.monotonic() + seconds
        while self._monitor.poll(max(int(1000 * (deadline - time.monotonic())), 0)):
            if recv_monitor_message(self._monitor)["event"] == event:
                return True
        return False


Link: TypeAlias = WebsocketLink | ZmqLink


def persist(attempt: Callable[[], T], *, seconds: float, server: str) -> T:
    """Try until it works or the seconds are over; pauses grow and are random, so that clients do not come together."""
    deadline = time.monotonic() + seconds
    pause, warned = _FIRST_PAUSE, False
    while True:
        try:
            return attempt()
        except LinkLost as error:
            left = deadline - time.monotonic()
            if left <= 0:
                raise PolicyError(
                    f"server {server}: no connection within {seconds:g} s ({error}); start the server, check the "
                    "address, or raise RemoteCfg(reconnect=…)"
                ) from error
            if not warned:
                _LOGGER.warning("server %s: no connection (%s); trying for %g s", server, error, seconds)
                warned = True
            time.sleep(min(left, pause * random.uniform(0.5, 1.5)))
            pause = min(2 * pause, _LONGEST_PAUSE)
