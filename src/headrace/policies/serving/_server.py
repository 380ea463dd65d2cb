"""``PolicyServer``: serves a chunk policy on openpi's wire, batching over clients."""

from __future__ import annotations

import asyncio
import hmac
import http
import re
import secrets
import ssl
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, cast

from headrace import __version__
from headrace.envs.recipe import EnvRecipe
from headrace.errors import ConfigError, DataError, LifecycleError, StorageError, require_extra
from headrace.policies.batching import COUNTS, Batching, choose_batching
from headrace.policies.engines import Reply, Request
from headrace.policies.load_policy import find_policy, load_policy
from headrace.policies.preflight import read_features
from headrace.policies.protocol import ChunkPolicy, PolicyLike, as_chunk_policy, has_memory
from headrace.policies.serving._batcher import Batcher, ServingStats
from headrace.policies.serving._dialects import PROTOCOL, Visitor, read_request
from headrace.policies.serving._remote import Relay, Upstream, connect_server
from headrace.policies.serving._wire import pack, unpack_map
from headrace.policies.serving.links import FRAME_LIMIT, RemoteCfg, check_seconds, check_whole

_INTERNAL_ERROR, _POLICY_VIOLATION = 1011, 1008
_SMALL_FRAME = 1 << 16
_LOOPBACK = re.compile(r"(localhost|127(\.\d+){3}|\[?::1\]?)(:\d+)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeCfg:
    """How a policy is served."""

    host: str = "127.0.0.1"
    """The address to listen on; the default is reachable from this machine only."""
    port: int = 8000
    """0 for any free one."""
    max_rows: int = 64
    """Most rows of a merged batch."""
    max_wait: float = 0.01
    """Seconds that the first request of a batch waits for others, while the model is idle."""
    linger: float = 30.0
    """Seconds in which a client that left may come back to its episodes, before a policy with memory ends them."""
    batching: Batching = field(default_factory=lambda: Batching(mode="strict"))
    """How the model sees the rows: ``strict`` gives every row the bits of an inline strict run of that size."""
    forward: str | RemoteCfg | None = None
    """Serve another server's policy: the address of a server of openpi, or of ``headrace serve``."""
    api_key: str | None = None
    """Clients must send it; None lets everybody in who reaches the port."""
    certificate: str | Path | None = None
    """PEM file with a certificate and its private key: the server speaks TLS, at ``wss://``. None: it does not."""
    frame_limit: int = FRAME_LIMIT
    """Bytes of the largest request."""
    max_clients: int = 256
    """Most connections at a time; others are answered with status 503."""

    def __post_init__(self) -> None:
        check_whole(self, "serve", port=(0, 65535), max_rows=(1, None), frame_limit=(1, None), max_clients=(1, None))
        check_seconds(self, "serve", "max_wait", "linger", least=0.0)
        if self.forward is not None and self.batching != Batching():
            raise ConfigError("serve batching: expected none with forward=…: the server behind forms its own batches")


class PolicyServer:
    """Serves one policy. ``with PolicyServer(policy, cfg) as server: … server.address``.

    With ``ServeCfg(forward=…)`` there is no policy here, and ``start`` connects to the server that has it.
    """

    def __init__(self, policy: PolicyLike | None, cfg: ServeCfg | None = None, *, name: str = "") -> None:
        self._library: Any = require_extra("websockets.asyncio.server", extra="serve", purpose="serving a policy")
        self._errors: Any = require_extra("websockets.exceptions", extra="serve", purpose="serving a policy")
        self.cfg = cfg or ServeCfg()
        if (policy is None) == (self.cfg.forward is None):
            raise ConfigError("server: expected a policy, or ServeCfg(forward=…) and no policy")
        self.policy: ChunkPolicy | None = None if policy is None else as_chunk_policy(policy)
        self._name = name or type(policy).__name__
        self._numbers = count()
        self._process = secrets.token_hex(8)
        self._batcher: Batcher | Relay | None = None
        self._upstream: Upstream | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._tls = None if self.cfg.certificate is None else _load_certificate(Path(self.cfg.certificate))
        self.port = 0
        """The port that it listens on, once started."""

    @property
    def address(self) -> str:
        """Where clients find it: ``ws://host:port``, or ``wss://host:port`` with a certificate."""
        host = "127.0.0.1" if self.cfg.host in ("0.0.0.0", "::", "") else self.cfg.host
        return f"{'ws' if self.cfg.certificate is None else 'wss'}://{host}:{self.port}"

    @property
    def metadata(self) -> dict[str, object]:
        """The first frame: openpi clients find the sizes, our own the rest."""
        if isinstance(self._batcher, Relay):
            return self._batcher.metadata
        policy = self.policy
        if policy is None:
            raise LifecycleError("server: expected start() first, which connects to the server behind")
        strict_size = self.cfg.batching.strict_size if self._upstream is None else self._upstream.engine.strict_size
        ours: dict[str, object] = {
            "protocol": PROTOCOL,
            "version": __version__,
            "policy": self._name,
            "horizon": policy.horizon,
            "action_dim": policy.action_dim,
            "obs_steps": policy.obs_steps,
            "strict_size": strict_size or 0,
            "memory": has_memory(policy),
            "process": self._process,
            "features": {key: spec.to_json() for key, spec in read_features(policy).items()},
        }
        return {"action_horizon": policy.horizon, "action_dim": policy.action_dim, "headrace": ours}

    @property
    def stats(self) -> ServingStats:
        """What the model has done so far."""
        return ServingStats() if self._batcher is None else self._batcher.stats

    @property
    def clients(self) -> int:
        """Connected now."""
        return 0 if self._batcher is None else self._batcher.clients

    def start(self) -> PolicyServer:
        """Serve from a thread of this process; returns once it listens."""
        if self._thread is not None:
            raise LifecycleError("server: already started; make a new one")
        if self.cfg.forward is not None:
            behind = connect_server(self.cfg.forward)
            if isinstance(behind, Relay):
                self._batcher = behind
            else:
                self._upstream, self.policy = behind, behind.engine.policy
        self._thread = threading.Thread(target=self._run, name="headrace-server", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            self._thread.join()
            raise StorageError(f"server: cannot listen on {self.cfg.host}:{self.cfg.port}: {self._failure}")
        return self

    def wait(self) -> None:
        """Wait until another thread closes the server; Ctrl-C is raised here."""
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(timeout=1.0)  # a join without a time-out cannot be interrupted everywhere

    def close(self) -> None:
        """Disconnect everybody; the model's current call is waited for."""
        if self._thread is None or self._loop is None:
            return
        if self._thread.is_alive():
            assert self._stop is not None
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def __enter__(self) -> PolicyServer:
        return self.start()

    def __exit__(self, *reason: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:  # noqa: BLE001  # whatever it is, the thread that started the server must hear of it
            self._failure = error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        cfg = self.cfg
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        if self.policy is not None:
            self._batcher = Batcher(
                self.policy,
                cfg.batching if self._upstream is None else Batching(mode="fast"),
                max_rows=cfg.max_rows,
                max_wait=cfg.max_wait,
                linger=cfg.linger,
                upstream=self._upstream,
            )
        assert self._batcher is not None
        try:
            async with self._library.serve(
                self._handle,
                cfg.host,
                cfg.port,
                ssl=self._tls,
                compression=None,
                max_size=cfg.frame_limit,
                ping_timeout=60.0,
                close_timeout=1.0,
                process_request=self._admit,
                server_header=None,
            ) as server:
                self.port = next(iter(server.sockets)).getsockname()[1]
                self._started.set()
                await self._stop.wait()
        finally:
            await asyncio.to_thread(self._batcher.close)
            if self._upstream is not None:
                self._upstream.engine.close()

    def _admit(self, connection: Any, request: Any) -> Any:
        """Answer ``/healthz``; reject web pages, a foreign Host, connections without the API key, and too many."""
        if request.path == "/healthz":
            return connection.respond(http.HTTPStatus.OK, "OK\n")
        if "Origin" in request.headers:
            return connection.respond(http.HTTPStatus.FORBIDDEN, "web pages are not served\n")
        # a site can give its own name the address of this machine
        if _LOOPBACK.fullmatch(self.cfg.host) and not all(map(_LOOPBACK.fullmatch, request.headers.get_all("Host"))):
            return connection.respond(http.HTTPStatus.FORBIDDEN, "expected a Host of this machine\n")
        if self.clients >= self.cfg.max_clients:
            return connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, "too many clients\n")
        if self.cfg.api_key is not None:
            given = request.headers.get("Authorization", "")
            if not hmac.compare_digest(given.encode(), f"Api-Key {self.cfg.api_key}".encode()):
                return connection.respond(http.HTTPStatus.UNAUTHORIZED, "wrong or missing API key\n")
        return None

    async def _handle(self, connection: Any) -> None:
        """One client: metadata, then an answer per request until it goes."""
        assert self._batcher is not None
        number = next(self._numbers)
        batcher = self._batcher
        batcher.join(number)
        try:
            await connection.send(pack(self.metadata))
            requests, total = 0, None
            async for frame in connection:
                begin = time.monotonic()
                reply = await self._answer(connection, frame, Visitor(number=number, requests=requests), total)
                if reply is None:
                    return
                await connection.send(reply)
                requests, total = requests + 1, 1000 * (time.monotonic() - begin)
        except self._errors.ConnectionClosed:
            return
        finally:
            batcher.leave(number)

    async def _answer(
        self, connection: Any, frame: bytes | str, visitor: Visitor, total: float | None
    ) -> bytes | memoryview | None:
        """Return the reply to one frame; None once the client is gone, or has an error."""
        assert self._batcher is not None
        try:
            finish: Callable[[Any], bytes | memoryview] = bytes
            if isinstance(self._batcher, Relay):
                served: asyncio.Future[Any] = asyncio.wrap_future(self._batcher.submit(frame))
            else:
                assert self.policy is not None
                decode = partial(self._decode, frame, self.policy, visitor)
                # what may take long is decoded beside the event loop, which answers others meanwhile
                small = len(frame) < _SMALL_FRAME
                request, ours = decode() if small else await asyncio.to_thread(decode)
                served = asyncio.wrap_future(self._batcher.submit(visitor.number, request))
                finish = partial(_reply, ours=ours, total=total)
            gone = asyncio.ensure_future(connection.wait_closed())
            await asyncio.wait({served, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not served.done():
                served.cancel()
                return None
            gone.cancel()
            return finish(served.result())
        except (CancelledError, asyncio.CancelledError):
            return None
        except DataError as error:
            await self._complain(connection, f"{type(error).__name__}: {error}", _POLICY_VIOLATION)
        except Exception:  # noqa: BLE001  # whatever a policy raises is the client's to read, as openpi's server does it
            await self._complain(connection, traceback.format_exc(), _INTERNAL_ERROR)
        return None

    def _decode(self, frame: bytes | str, policy: ChunkPolicy, visitor: Visitor) -> tuple[Request, bool]:
        return read_request(unpack_map(frame, limit=self.cfg.frame_limit), policy, visitor)

    async def _complain(self, connection: Any, text: str, code: int) -> None:
        await connection.send(text)
        await connection.close(code, "the error is in the previous frame")


def _load_certificate(path: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(path)
    except OSError as error:  # ssl.SSLError, too
        raise ConfigError(
            f"serve certificate: expected a PEM file with a certificate and its private key, got {path}: {error}"
        ) from error
    return context


def _reply(served: Reply, *, ours: bool, total: float | None) -> memoryview:
    answer, actions = served.answer, served.answer.actions.numpy()
    timing: dict[str, object] = {"infer_ms": 1000 * served.seconds}
    message: dict[str, object] = {
        "actions": actions if ours else actions[0],
        "policy_timing": timing,
        "server_timing": timing if total is None else {**timing, "prev_total_ms": total},
    }
    if ours:
        message["headrace"] = {name: getattr(answer, name) for name in COUNTS}
    return pack(message)


def serve(
    task: str | None = None,
    *,
    policy: PolicyLike | str | Path | None = None,
    cfg: ServeCfg | None = None,
    horizon: int | None = None,
    action_dim: int | None = None,
    obs_steps: int | None = None,
) -> PolicyServer:
    """Serve a policy that plans chunks of actions to clients elsewhere, batching over them::

        with headrace.policies.serve("pusher-solid") as server:
            print(server.address)
            server.wait()

    Args:
        task: serve the policy that we ship for it; needed for the checkpoint of a training.
        policy: a checkpoint that ``headrace imitate`` or ``headrace train`` wrote, ``module:name`` of a policy object,
            class or function, or ``lerobot:DIR``; None for the policy that we ship for the task; in Python also
            everything that :func:`headrace.load_policy` takes.
        cfg: address, batching and key; ``ServeCfg(forward=…)``, alone, is a front for the policy of another server.
        horizon: rows of a chunk, where the policy does not state them.
        action_dim: size of an action, where the policy does not state it.
        obs_steps: observations per row, where the policy does not state them.

    Returns:
        A server that listens from within its ``with`` block on, or from ``start()``.
    """
    if cfg is not None and cfg.forward is not None:
        if any(given is not None for given in (task, policy, horizon, action_dim, obs_steps)):
            raise ConfigError("serve: expected no task, policy or sizes with forward=…: the server behind has them")
        return PolicyServer(None, cfg, name="forward")
    if task is None and policy is None:
        raise ConfigError("serve: expected TASK or --policy; 'headrace serve pusher-solid' serves the policy we ship")
    name = str(policy) if isinstance(policy, (str, Path)) else task or type(policy).__name__
    found = find_policy(policy, task)
    loaded = found.source if found.kind == "object" else load_policy(policy, EnvRecipe.of(task) if task else None)
    fitted = as_chunk_policy(
        cast("PolicyLike", loaded), horizon=horizon, action_dim=action_dim, obs_steps=obs_steps, single=True
    )
    cfg = cfg or ServeCfg()
    if task is not None and cfg.batching.mode == "strict":
        with closing(EnvRecipe.of(task).make(num_envs=1)) as env:
            cfg = replace(cfg, batching=choose_batching(fitted, cfg.batching, env))
    return PolicyServer(fitted, cfg, name=name)
