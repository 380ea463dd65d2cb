"""Environments in another interpreter, or on another machine: the parent's side of ``child.py``."""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import math
import mmap
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import gymnasium
import numpy as np

from headrace.bridges import child
from headrace.bridges._exchange import INSTRUCTION_KEYS, Exchange, exchange_layout, instruction_path
from headrace.bridges._frames import Channel, space_from_json
from headrace.bridges._workers import (
    WorkerBackend,
    WorkerFailedError,
    WorkerLostError,
    dealt,
    how_ended,
    of_environments,
    starting,
)
from headrace.bridges.executors import Fidelity
from headrace.errors import ConfigError, DataError, EnvError

CHILD_FILE = Path(child.__file__)
"""The file to copy into another environment, a container or another machine; its docstring says how to start it."""

_LOG = logging.getLogger("headrace.bridge")
_CLOSE_SECONDS = 5.0
_TAIL_LINES = 20
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
                f"bridge: expected python= or address=, got python={self.python!r}, address={self.address!r}"
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


class ChildProcess:
    """``child.py`` under another interpreter. What it prints is read by a thread: the last lines are for errors."""

    def __init__(self, python: str, memory: int) -> None:
        """Start it; ``memory`` is a file descriptor of the memory that both will see."""
        their_in, our_out = os.pipe()
        our_in, their_out = os.pipe()
        lifeline, self._lifeline = os.pipe()
        theirs = (their_in, their_out, lifeline, memory)
        try:
            self._process = subprocess.Popen(
                [python, str(CHILD_FILE), "--fds", *map(str, theirs)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=theirs,
                # a group of its own: Ctrl-C is the parent's, and what the simulator starts ends with it
                start_new_session=True,
            )
        except OSError as error:
            for descriptor in (our_in, our_out, self._lifeline):
                os.close(descriptor)
            raise ConfigError(
                f"python: expected the path of a Python interpreter, got {python!r}: {error.strerror}; "
                "give the bin/python of the simulator's virtual environment"
            ) from error
        finally:
            for descriptor in (their_in, their_out, lifeline):
                os.close(descriptor)
        self.pid = self._process.pid
        self.channel = Channel(our_in, our_out, gone=lambda: self._process.poll() is not None)
        self._tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self._reader = threading.Thread(target=self._read_output, name="headrace-bridge-output", daemon=True)
        self._reader.start()

    def how_ended(self) -> str:
        """Return what became of it, with the last lines that it printed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_SECONDS)
        self._reader.join(1.0)
        said = "".join(self._tail).rstrip()
        return how_ended(self._process.returncode) + (f", after printing:\n{said}\n" if said else "")

    def end(self) -> None:
        """Wait until it is gone; kill its whole group if that takes too long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # no process is left in the group
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(1.0)
        self.channel.close()
        os.close(self._lifeline)

    def _read_output(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        with stream:
            # in bounded pieces: a simulator may print megabytes without a new line
            while piece := stream.readline(4096):
                text = piece.decode(errors="replace")
                self._tail.append(text)
                _LOG.debug("%d: %s", self.pid, text.rstrip("\n"))


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

    def __init__(self, link: ChildProcess | RemoteChild, env_ids: range, timeout: float) -> None:
        self.env_ids = env_ids
        self.link = link
        self.pid = link.pid if isinstance(link, ChildProcess) else None
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
            head["proof"] = child.proof_of(os.environ[_TOKEN], str(greeting.get("nonce")))
        self._send("make", head)

    def hello(self) -> Hello:
        """Wait until the environments are made."""
        answer, _ = self._receive("make")
        fidelity, abilities = answer.get("fidelity", "native"), answer.get("abilities", {})
        if fidelity not in ("native", "restore", "hold") or not isinstance(abilities, dict):
            raise self._lost("make", DataError(f"expected a fidelity and abilities, got {fidelity!r}, {abilities!r}"))
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
            body = self._remote.actions[env_ids].tobytes()
        self._send(call, head, body)

    def receive(self, call: str) -> list[Any]:
        """Wait for its answer."""
        head, body = self._receive(call)
        try:
            return self._read(call, head, body)
        except (KeyError, TypeError, ValueError) as error:
            wrong = DataError(f"expected what protocol {child.PROTOCOL} says, got {head!r:.200}")
            raise self._lost(call, wrong) from error

    def _read(self, call: str, head: Mapping[str, Any], body: bytes) -> list[Any]:
        match call:
            case "reset":
                self._read_rows(body, late=False)
                told = head["told"]
                if len(told) != len(self._asked) or not all(isinstance(text, str) for text in told):
                    raise ValueError
                return told
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
        targets = [exchange.obs[leaf.name] for leaf in leaves]
        targets += [getattr(exchange, name) for name in results]
        rows = len(self._asked)
        sizes = [rows * math.prod(target.shape[1:]) * target.itemsize for target in targets]
        for target, piece in zip(targets, _pieces(body, sizes), strict=True):
            target[self._asked] = np.frombuffer(piece, target.dtype).reshape(rows, *target.shape[1:])

    def _send(self, call: str, head: Mapping[str, Any], body: bytes = b"") -> None:
        self.deadline = time.monotonic() + self._timeout
        try:
            self.link.channel.send(head, body, timeout=self._timeout)
        except (OSError, EOFError) as error:
            raise self._lost(call, error) from error

    def _receive(self, call: str) -> tuple[dict[str, Any], bytes]:
        try:
            head, body = self.link.channel.receive(timeout=max(self.deadline - time.monotonic(), 0.0))
        except (EOFError, OSError, DataError) as error:
            raise self._lost(call, error) from error
        if "error" in head:
            kind, told = "EnvError", "" if head["error"] == child.FailedError.__name__ else f"{head['error']}: "
            if head.get("refused"):
                kind, told = ("UnsupportedError" if head["error"] == "UnsupportedError" else "ConfigError"), ""
            trace = f"\n\nin the simulator's interpreter:\n{head['traceback']}" if "traceback" in head else ""
            whose = of_environments(self.env_ids)
            raise WorkerFailedError(kind, f"environments {whose} in {call}: {told}{head.get('message')}{trace}")
        return head, body

    def _lost(self, call: str, error: Exception) -> WorkerLostError:
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


def foreign_backend(source: ForeignSource, num_envs: int, workers: int) -> tuple[WorkerBackend, Hello]:
    """Start children, or connect to those that listen, and wait until each has made its environments."""
    python, addresses = source.python, source.addresses
    parts = dealt(num_envs, min(num_envs, len(addresses) or workers))
    started: list[ForeignWorker] = []
    with _shared_memory() as memory, starting(started):
        for index, part in enumerate(parts):
            link = ChildProcess(python, memory) if python is not None else RemoteChild(addresses[index], source.timeout)
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
        exchange = Exchange(layout, None if python is None else _mapped(memory, layout.nbytes))
        for worker in started:
            worker.lay_out(exchange, hellos[0].observation_space, hellos[0].late)
    said = hellos[0]
    backend = WorkerBackend(
        exchange, started, fidelity=said.fidelity, reseeds=said.reseeds, no_identity=said.no_identity, late=said.late
    )
    return backend, said


@contextlib.contextmanager
def _shared_memory() -> Generator[int]:
    """Open a file without a name, of which nothing is left behind when a process is killed."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("headrace-bridge")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _mapped(descriptor: int, nbytes: int) -> memoryview:
    os.ftruncate(descriptor, max(nbytes, 1))
    return memoryview(mmap.mmap(descriptor, max(nbytes, 1)))


def _pieces(body: bytes, sizes: Sequence[int]) -> list[bytes]:
    try:
        return child.pieces(body, sizes)
    except child.RefusedError as error:
        raise WorkerLostError(f"a child: {error} of rows; it must run headrace's child.py") from error
