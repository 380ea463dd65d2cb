"""Environments dealt out in turn to child processes, in this interpreter or another one, or on another machine."""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import socket
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any, cast

import gymnasium
import numpy as np

from headrace.bridges import child
from headrace.bridges._exchange import INSTRUCTION_KEYS, Exchange, exchange_layout, instruction_path
from headrace.bridges.executors import Backend, EnvFactory, Fidelity, make_packed, pack_factories
from headrace.bridges.interpreter import (
    CHILD_FILE,
    PACKAGE_ENTRY,
    Channel,
    Interpreter,
    open_shared_memory,
    space_from_json,
)
from headrace.errors import ConfigError, DataError, EnvError, HeadraceError, LifecycleError, UnsupportedError

# the clock of poll ends soon after
_LONGEST_SECONDS = 1e6
# errors that keep their type when they cross from a worker
_ERRORS: dict[str, type[HeadraceError]] = {error.__name__: error for error in (ConfigError, EnvError, UnsupportedError)}


class WorkerFailedError(Exception):
    """An environment of a worker raised; the worker goes on."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.error = _ERRORS.get(kind, EnvError)(message)


class WorkerLostError(Exception):
    """A worker is dead, hangs, or sent an unreadable answer; the text has the reason."""


_TOKEN = "HEADRACE_TOKEN"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignSource:
    """Where environments of another interpreter come from: ``python`` and ``entry``, or ``address``."""

    python: str | None
    address: str | Sequence[str] | None
    entry: str | None
    kwargs: Mapping[str, object]
    timeout: float

    def __post_init__(self) -> None:
        if (self.python is None) == (self.address is None):
            raise ConfigError(
                f"bridge: expected python= or address=, got python={self.python!r}, address={self.address!r}; for this "
                "interpreter pass python=sys.executable, or a list of functions that make environments"
            )
        if (self.python is None) != (self.entry is None):
            raise ConfigError(
                f"entry: expected module:name with python=, and none with address=, whose child has its own, got "
                f"{self.entry!r}"
            )
        for name, value in (("python", self.python), ("entry", self.entry)):
            if value is not None and (not isinstance(value, str) or not value):  # pyright: ignore[reportUnnecessaryIsInstance]  # users pass anything
                raise ConfigError(f"{name}: expected a text, got {value!r}")
        if not isinstance(self.timeout, int | float) or not self.timeout > 0:  # pyright: ignore[reportUnnecessaryIsInstance]  # users pass anything
            raise ConfigError(f"timeout: expected more than 0 seconds, got {self.timeout!r}")
        listed = self.address is None or isinstance(self.address, Sequence)  # pyright: ignore[reportUnnecessaryIsInstance]  # users pass anything
        known = listed and all(isinstance(address, str) for address in self.addresses)  # pyright: ignore[reportUnnecessaryIsInstance]  # users pass anything
        if not known or (self.address is not None and not self.addresses):
            raise ConfigError(f"address: expected tcp://host:port, one or several, got {self.address!r}")
        try:
            json.dumps(dict(self.kwargs))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"env_kwargs: expected names and values that JSON can hold, since they go to another interpreter, got "
                f"{self.kwargs!r:.200}: {error}"
            ) from error
        if self.address is not None and not os.environ.get(_TOKEN):
            raise ConfigError(f"token: expected the one of the child in the environment variable {_TOKEN}, got none")

    @property
    def addresses(self) -> list[str]:
        """Where children listen."""
        return [self.address] if isinstance(self.address, str) else list(self.address or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What the environments of a child are and can do."""

    name: str
    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    render_mode: str | None
    fidelity: Fidelity
    no_identity: str
    reseeds: bool
    """Whether episodes are functions of their seeds."""
    late: frozenset[str]
    """Keys of observations that are drawn on demand."""


class RemoteChild:
    """``child.py --listen`` at an address."""

    def __init__(self, address: str, timeout: float) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
            raise ConfigError(f"address: expected tcp://host:port, got {address!r}")
        try:
            connection = socket.create_connection((host.strip("[]"), int(port)), timeout=min(timeout, 30.0))
        except OSError as error:
            raise EnvError(
                f"{address}: expected child.py --listen there, got {error}; start it, or mend the address"
            ) from error
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        descriptor = connection.detach()
        self._address = address
        self.channel = Channel(descriptor, descriptor)

    def how_ended(self) -> str:
        """Return what became of it."""
        return f"at {self._address} closed the connection"

    def end(self) -> None:
        """Leave it; it waits for its next client."""
        self.channel.close()


class ForeignWorker:
    """A child and the rows that it has. ``timeout`` is for every call, making the environments included."""

    def __init__(self, link: Interpreter | RemoteChild, env_ids: range, timeout: float) -> None:
        self.env_ids = env_ids
        self.link = link
        self.pid = link.pid if isinstance(link, Interpreter) else None
        self._timeout = timeout
        self.deadline = time.monotonic() + timeout
        self._remote: Exchange | None = None
        self._late = frozenset[str]()
        self._asked: list[int] = []

    def make(self, source: ForeignSource) -> None:
        """Check the protocol and ask for the environments; :meth:`hello` waits for the answer."""
        greeting, _ = self._receive("start")
        if greeting.get("protocol") != child.PROTOCOL:
            raise ConfigError(
                f"child.py: expected protocol {child.PROTOCOL}, got {greeting.get('protocol')!r}; copy the file of "
                f"this version of headrace ({CHILD_FILE})"
            )
        head = {"call": "make", "entry": source.entry, "kwargs": dict(source.kwargs), "env_ids": list(self.env_ids)}
        if isinstance(self.link, RemoteChild):
            head["proof"] = child.prove_token(os.environ[_TOKEN], str(greeting.get("nonce")))
        self._send("make", head)

    def hello(self) -> Hello:
        """Wait until the environments are made."""
        answer, _ = self._receive("make")
        fidelity, abilities = answer.get("fidelity", "native"), answer.get("abilities", {})
        if fidelity not in ("native", "restore") or not isinstance(abilities, dict):
            raise self._make_lost_error(
                "make", DataError(f"expected a fidelity and abilities, got {fidelity!r}, {abilities!r}")
            )
        return Hello(
            name=str(answer.get("name")),
            observation_space=space_from_json(answer.get("observation_space")),
            action_space=space_from_json(answer.get("action_space")),
            render_mode=answer.get("render_mode"),
            fidelity=fidelity,
            no_identity=str(answer.get("no_identity", "")),
            reseeds=bool(cast("dict[str, object]", abilities).get("reseed", True)),
            late=frozenset(map(str, answer.get("drawn_on_demand", ()))),
        )

    def lay_out(self, exchange: Exchange, observation_space: gymnasium.Space[Any], late: frozenset[str]) -> None:
        """Tell the child where rows lie; observations of ``late`` come on demand."""
        layout = exchange.layout
        head = {
            "call": "layout",
            "nbytes": layout.nbytes,
            "fields": [[name, shape, dtype.str, offset] for name, shape, dtype, offset in layout.places()],
            "leaves": [[leaf.name, leaf.path] for leaf in layout.leaves],
            "text_path": instruction_path(observation_space),
            "instruction_keys": INSTRUCTION_KEYS,
        }
        self._send("layout", head)
        self._receive("layout")
        self._remote = exchange if isinstance(self.link, RemoteChild) else None
        self._late = late

    def send(self, call: str, env_ids: list[int], more: list[Any]) -> None:
        """Begin a call."""
        head: dict[str, Any] = {"call": call, "env_ids": env_ids}
        body = b""
        self._asked = env_ids
        if call == "reset":
            head["seeds"] = more
        elif call == "restore":
            head["sizes"] = [len(state) for state in more]
            body = b"".join(more)
        elif call == "step" and self._remote is not None:
            body = self._remote.arrays["actions"][env_ids].tobytes()
        self._send(call, head, body)

    def receive(self, call: str) -> list[Any]:
        """Wait for its answer."""
        head, body = self._receive(call)
        try:
            return self._read(call, head, body)
        except (KeyError, TypeError, ValueError) as error:
            wrong = DataError(f"expected what protocol {child.PROTOCOL} says, got {head!r:.200}")
            raise self._make_lost_error(call, wrong) from error

    def _read(self, call: str, head: Mapping[str, Any], body: bytes) -> list[Any]:
        match call:
            case "reset":
                self._read_rows(body, late=False)
                texts = head["told"]
                if len(texts) != len(self._asked) or not all(isinstance(text, str) for text in texts):
                    raise ValueError
                return texts
            case "step":
                self._read_rows(body, child.RESULTS, late=False)
            case "observe":
                self._read_rows(body, late=True)
            case "save":
                return _pieces(body, head["sizes"])
            case "render":
                drawn = _pieces(body, [math.prod(shape) for shape in head["shapes"]])
                return [
                    np.frombuffer(piece, np.uint8).reshape(shape)
                    for piece, shape in zip(drawn, head["shapes"], strict=True)
                ]
            case _:
                pass
        return []

    def fileno(self) -> int:
        """Of its channel."""
        return self.link.channel.fileno()

    def ask_to_end(self) -> None:
        """Tell it to close its environments."""
        with contextlib.suppress(OSError, EOFError):  # it is gone already, or hangs: ``end`` does the rest
            self.link.channel.send({"call": "close"}, timeout=1.0)

    def end(self) -> None:
        """Wait until it is gone."""
        self.link.end()

    def _read_rows(self, body: bytes, results: tuple[str, ...] = (), *, late: bool) -> None:
        exchange = self._remote
        if exchange is None:
            return
        leaves = [leaf for leaf in exchange.layout.leaves if leaf.is_of(self._late) == late]
        targets = [exchange.arrays[name] for name in (*(f"obs:{leaf.name}" for leaf in leaves), *results)]
        rows = len(self._asked)
        sizes = [rows * math.prod(target.shape[1:]) * target.itemsize for target in targets]
        for target, piece in zip(targets, _pieces(body, sizes), strict=True):
            target[self._asked] = np.frombuffer(piece, target.dtype).reshape(rows, *target.shape[1:])

    def _send(self, call: str, head: Mapping[str, Any], body: bytes = b"") -> None:
        self.deadline = time.monotonic() + self._timeout
        try:
            self.link.channel.send(head, body, timeout=self._timeout)
        except (OSError, EOFError) as error:
            raise self._make_lost_error(call, error) from error

    def _receive(self, call: str) -> tuple[dict[str, Any], bytes]:
        try:
            head, body = self.link.channel.receive(timeout=max(self.deadline - time.monotonic(), 0.0))
        except (EOFError, OSError, DataError) as error:
            raise self._make_lost_error(call, error) from error
        if "error" in head:
            kind, prefix = "EnvError", "" if head["error"] == child.FailedError.__name__ else f"{head['error']}: "
            if head.get("refused") or head["error"] in _ERRORS:
                kind, prefix = (head["error"] if head["error"] in _ERRORS else "ConfigError"), ""
            trace = f"\n\nin the simulator's interpreter:\n{head['traceback']}" if "traceback" in head else ""
            whose = of_environments(self.env_ids)
            raise WorkerFailedError(kind, f"environments {whose} in {call}: {prefix}{head.get('message')}{trace}")
        return head, body

    def _make_lost_error(self, call: str, error: Exception) -> WorkerLostError:
        whose = f"the interpreter of environments {of_environments(self.env_ids)}"
        if isinstance(error, TimeoutError):
            busy = "; a child serves one client at a time" if call == "start" and self.pid is None else ""
            return WorkerLostError(
                f"{whose} gave no answer to {call} within {self._timeout:g} s; allow for more with timeout=, or look "
                f"for what hangs in the simulator{busy}"
            )
        if isinstance(error, DataError):
            return WorkerLostError(f"{whose} answered {call} with garbage: {error}; it must run headrace's child.py")
        return WorkerLostError(f"{whose} {self.link.how_ended()} during {call}")


class WorkerBackend(Backend):
    """Environments dealt out in turn, so that any run of neighbors is work for all; rows lie in the exchange."""

    overlaps_resets = True

    def __init__(self, exchange: Exchange, workers: Sequence[ForeignWorker], said: Hello) -> None:
        """Own ``workers``, which have made their environments: ``close`` ends them."""
        self.exchange = exchange
        self.fidelity: Fidelity = said.fidelity
        self.reseeds, self.no_identity, self.late = said.reseeds, said.no_identity, said.late
        self.workers = workers
        self._closed = False
        self._resets: dict[ForeignWorker, list[int]] = {}
        """Workers with a reset under way, and the environments that it is of."""
        self._ready: dict[int, str] = {}
        """Instructions of environments whose reset is done, and that were not read yet."""
        self._failure: WorkerFailedError | None = None
        """Of a reset under way."""

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers of this machine."""
        return [worker.pid for worker in self.workers if worker.pid is not None]

    def call(self, name: str, env_ids: Sequence[int], more: Sequence[Any]) -> list[Any]:
        """Have every worker that has some of ``env_ids`` do something, all at once."""
        given = dict(zip(env_ids, more, strict=False))
        asked: list[tuple[ForeignWorker, list[int]]] = []
        results: dict[int, Any] = {}
        failure: WorkerFailedError | None = None
        with self._guard():
            for worker, mine in self._free(env_ids):
                worker.send(name, mine, [given[env_id] for env_id in mine if given])
                asked.append((worker, mine))
            for worker, mine in asked:
                try:
                    results.update(zip(mine, worker.receive(name), strict=False))
                except WorkerFailedError as error:
                    failure = failure or error
        if failure is not None:
            raise failure.error
        return [results[env_id] for env_id in env_ids if results]

    def begin_reset(self, env_ids: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin to start an episode in each environment; a worker does nothing else until that is done."""
        seed_of = dict(zip(env_ids, seeds, strict=True))
        with self._guard():
            for worker, mine in self._free(env_ids):
                worker.send("reset", mine, [seed_of[env_id] for env_id in mine])
                self._resets[worker] = mine

    def take_resets(self, timeout: float | None) -> dict[int, str]:
        """Return the environments that are ready."""
        if self._resets and not self._ready:
            left = min(worker.deadline for worker in self._resets) - time.monotonic()
            longest = left if timeout is None else min(timeout, left)
            by_file = {worker.fileno(): worker for worker in self._resets}
            readable = connection.wait(list(by_file), max(longest, 0.0) if longest < _LONGEST_SECONDS else None)
            late = [file for file, worker in by_file.items() if time.monotonic() >= worker.deadline]
            with self._guard():
                for file in by_file.keys() & {*readable, *late}:
                    self._collect(by_file[file])
        if self._failure is not None:
            raise self._failure.error
        ready, self._ready = self._ready, {}
        return ready

    def resetting(self) -> list[int]:
        """Return the environments of workers with a reset under way, and those that are ready and not taken."""
        return [*self._ready, *(env_id for worker in self._resets for env_id in worker.env_ids)]

    def drop_resets(self) -> None:
        """Wait for the resets that are under way."""
        with self._guard():
            for worker in list(self._resets):
                self._collect(worker)
        self._ready, self._failure = {}, None

    def close(self) -> None:
        """End the workers; none is left when this returns."""
        if not self._closed:
            self._closed = True
            end_workers(self.workers)

    def _free(self, env_ids: Sequence[int]) -> Generator[tuple[ForeignWorker, list[int]]]:
        """Yield every worker that has some of ``env_ids``, and which, after waiting for its resets."""
        for worker in self.workers:
            if mine := [env_id for env_id in env_ids if env_id in worker.env_ids]:
                if worker in self._resets:
                    self._collect(worker)
                yield worker, mine

    def _collect(self, worker: ForeignWorker) -> None:
        """Wait for the reset that is under way in a worker."""
        mine = self._resets.pop(worker)
        try:
            self._ready.update(zip(mine, map(str, worker.receive("reset")), strict=True))
        except WorkerFailedError as error:
            self._failure = self._failure or error

    @contextmanager
    def _guard(self) -> Generator[None]:
        """Around sending and receiving: a lost worker takes the others with it, and so does Ctrl-C."""
        if self._closed:
            raise LifecycleError("environment: its workers are gone; make a new one")
        try:
            yield
        except WorkerLostError as lost:
            # rows of the lost worker are gone, and their neighbors' are half written
            self.close()
            raise EnvError(f"{lost}; the other workers were closed: make a new environment") from lost
        except KeyboardInterrupt:
            # an answer that is under way would be taken for that of the next command
            self.close()
            raise


def of_environments(env_ids: range) -> str:
    """Return the env ids of a worker as words of an error."""
    return ", ".join(map(str, env_ids[:8])) + (", …" if len(env_ids) > 8 else "")


@contextmanager
def starting(workers: Sequence[ForeignWorker]) -> Generator[None]:
    """While workers are started: if one fails or is lost, or on Ctrl-C, those that were started are ended."""
    try:
        yield
    except BaseException as error:  # also Ctrl-C; raised again
        end_workers(workers)
        if isinstance(error, WorkerFailedError):
            raise error.error from None
        if isinstance(error, WorkerLostError):
            raise EnvError(str(error)) from error
        raise


def end_workers(workers: Sequence[ForeignWorker]) -> None:
    """End all of them, at once."""
    for worker in workers:
        worker.ask_to_end()
    for worker in workers:
        worker.end()


def foreign_backend(source: ForeignSource, num_envs: int, workers: int) -> tuple[WorkerBackend, Hello]:
    """Start children, or connect to those that listen, and wait until each has made its environments."""
    python, addresses = source.python, source.addresses
    count = min(num_envs, len(addresses) or workers)
    parts = [range(first, num_envs, count) for first in range(count)]
    started: list[ForeignWorker] = []
    with open_shared_memory() as memory, starting(started):
        for index, part in enumerate(parts):
            link = Interpreter(python, memory) if python is not None else RemoteChild(addresses[index], source.timeout)
            started.append(ForeignWorker(link, part, source.timeout))
        for worker in started:
            worker.make(source)
        hellos = [worker.hello() for worker in started]
        first = hellos[0].observation_space, hellos[0].action_space
        for hello in hellos[1:]:
            if (other := (hello.observation_space, hello.action_space)) != first:
                raise ConfigError(
                    f"environments: expected one kind, got spaces {first} and {other}; make the entry give one kind"
                )
        layout = exchange_layout(num_envs, *first)
        exchange = Exchange(layout, None if python is None else _map_memory(memory, layout.nbytes))
        for worker in started:
            worker.lay_out(exchange, hellos[0].observation_space, hellos[0].late)
    return WorkerBackend(exchange, started, hellos[0]), hellos[0]


def process_backend(factories: Sequence[EnvFactory], workers: int, timeout: float) -> tuple[WorkerBackend, Hello]:
    """Start processes of this interpreter, each of which makes some of the environments."""
    entry = f"{PACKAGE_ENTRY}:{make_packed.__name__}"
    kwargs = pack_factories(factories)
    source = ForeignSource(python=sys.executable, address=None, entry=entry, kwargs=kwargs, timeout=timeout)
    return foreign_backend(source, len(factories), workers)


def _map_memory(descriptor: int, nbytes: int) -> memoryview:
    os.ftruncate(descriptor, max(nbytes, 1))
    return memoryview(mmap.mmap(descriptor, max(nbytes, 1)))


def _pieces(body: bytes, sizes: Sequence[int]) -> list[bytes]:
    try:
        return child.pieces(body, sizes)
    except child.RefusedError as error:
        raise WorkerLostError(f"a child: {error} of rows; it must run headrace's child.py") from error
