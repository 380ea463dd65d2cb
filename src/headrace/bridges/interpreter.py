"""A child in another interpreter, for environments and policies alike: frames with a deadline for each, and its output.

See ``child.py``, whose side of the frames and spaces this is the other one of.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import json
import logging
import math
import os
import select
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from gymnasium import spaces

from headrace._interrupts import Child
from headrace.bridges import child
from headrace.bridges.child import FRAME, LARGEST_BODY, LARGEST_HEAD, MAGIC
from headrace.errors import ConfigError, DataError

CHILD_FILE = Path(child.__file__)
"""The file to copy into another environment, a container or another machine; its docstring says how to start it."""
PACKAGE_ENTRY = CHILD_FILE.with_name("package_entry.py")
"""What a child loads that needs headrace."""

_LOG = logging.getLogger("headrace.bridge")
_CLOSE_SECONDS = 5.0
_TAIL_LINES = 20
_CHUNK = 1 << 20
_LOOK_SECONDS = 1.0


class Channel:
    """Sends and receives whole frames over file descriptors, which it owns; ``close`` closes them."""

    def __init__(self, incoming: int, outgoing: int, gone: Callable[[], bool] | None = None) -> None:
        """``gone`` is asked now and then: a process that died may leave its end of a pipe to another."""
        self._incoming, self._outgoing, self._gone = incoming, outgoing, gone
        for descriptor in {incoming, outgoing}:
            os.set_blocking(descriptor, False)

    def send(self, head: Mapping[str, Any], body: bytes = b"", *, timeout: float) -> None:
        """Send one frame; raises TimeoutError, or OSError where the other side is gone."""
        text = json.dumps(head).encode()
        left = memoryview(FRAME.pack(MAGIC, len(text), len(body)) + text + body)
        deadline = time.monotonic() + timeout
        while left:
            self._wait(self._outgoing, select.POLLOUT, deadline)
            left = left[os.write(self._outgoing, left[:_CHUNK]) :]

    def receive(self, *, timeout: float) -> tuple[dict[str, Any], bytes]:
        """Return the next head and body; raises TimeoutError, EOFError, or DataError for what is no frame."""
        deadline = time.monotonic() + timeout
        start = self._exactly(FRAME.size, deadline)
        magic, head_size, body_size = FRAME.unpack(start)
        if magic != MAGIC or head_size > LARGEST_HEAD or body_size > LARGEST_BODY:
            raise DataError(f"expected a frame that begins with {MAGIC!r}, got {bytes(start)!r}")
        text, body = self._exactly(head_size, deadline), self._exactly(body_size, deadline)
        try:
            head = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"expected a frame with a head of JSON, got {bytes(text[:80])!r}") from error
        if not isinstance(head, dict):
            raise DataError(f"expected a JSON object as head, got {head!r:.80}")
        return cast("dict[str, Any]", head), body

    def fileno(self) -> int:
        """Return the descriptor that frames come from."""
        return self._incoming

    def close(self) -> None:
        """Close both directions."""
        for descriptor in {self._incoming, self._outgoing}:
            os.close(descriptor)

    def _exactly(self, size: int, deadline: float) -> bytes:
        parts: list[bytes] = []
        missing = size
        while missing:
            self._wait(self._incoming, select.POLLIN, deadline)
            part = os.read(self._incoming, min(missing, _CHUNK))
            if not part:
                raise EOFError
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def _wait(self, descriptor: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        left = max(deadline - time.monotonic(), 0.0)
        while not poll.poll(min(left, _LOOK_SECONDS) * 1e3):
            if self._gone is not None and self._gone() and not poll.poll(0):
                raise EOFError
            if (left := deadline - time.monotonic()) <= 0.0:
                raise TimeoutError


class Interpreter:
    """``child.py`` under another interpreter. What it prints is read by a thread: the last lines are for errors."""

    def __init__(self, python: str, memory: int) -> None:
        """Start it; ``memory`` is a file descriptor of the memory that both will see."""
        their_in, our_out = os.pipe()
        our_in, their_out = os.pipe()
        theirs = (their_in, their_out, memory)
        try:
            self._process = Child(
                [python, str(CHILD_FILE), "--fds", *map(str, theirs)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=theirs,
                # a group of its own: Ctrl-C is the parent's, and what the simulator starts ends with it
                start_new_session=True,
            )
        except OSError as error:
            os.close(our_in)
            os.close(our_out)
            raise ConfigError(
                f"python: expected the path of a Python interpreter, got {python!r}: {error.strerror}; "
                "give the bin/python of the simulator's virtual environment"
            ) from error
        finally:
            os.close(their_in)
            os.close(their_out)
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
        return _how_ended(self._process.returncode) + (f", after printing:\n{said}\n" if said else "")

    def end(self) -> None:
        """Wait until it is gone; kill its whole group if that takes too long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # no process is left in the group
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(1.0)
        self.channel.close()

    def _read_output(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        with stream:
            # in bounded pieces: a simulator may print megabytes without a new line
            while piece := stream.readline(4096):
                text = piece.decode(errors="replace")
                self._tail.append(text)
                _LOG.debug("%d: %s", self.pid, text.rstrip("\n"))


@contextlib.contextmanager
def open_shared_memory() -> Generator[int]:
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


def _how_ended(code: int | None) -> str:
    """Return an exit code in words."""
    if code is None:
        return "closed its pipe"
    return f"was ended by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"


def space_from_json(data: Any) -> spaces.Space[Any]:
    """Return the space that a child described."""
    try:
        return _space(data)
    except (KeyError, TypeError, ValueError, AssertionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"space: expected what child.py writes, got {data!r:.300}: {error}") from error


def _space(data: Any) -> spaces.Space[Any]:
    match data["type"]:
        case "box":
            shape, dtype = tuple(data["shape"]), np.dtype(data["dtype"])
            low, high = (_bound(data[name], shape, dtype) for name in ("low", "high"))
            return spaces.Box(low, high, shape, cast("Any", dtype.type))
        case "discrete":
            return spaces.Discrete(int(data["n"]), start=int(data.get("start", 0)))
        case "multi_discrete":
            start = np.asarray(data["start"]) if "start" in data else None
            return spaces.MultiDiscrete(
                np.asarray(data["nvec"]), dtype=np.dtype(data.get("dtype", "int64")), start=start
            )
        case "multi_binary":
            return spaces.MultiBinary(tuple(data["shape"]))
        case "text":
            return spaces.Text(int(data["max_length"]))
        case "dict":
            return spaces.Dict({str(key): _space(part) for key, part in data["spaces"]})
        case "tuple":
            return spaces.Tuple([_space(part) for part in data["spaces"]])
        case kind:
            raise ConfigError(
                f"space: expected box, discrete, multi_discrete, multi_binary, text, dict or tuple, got {kind!r}"
            )


def _bound(text: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    values = np.frombuffer(base64.b64decode(text, validate=True), dtype)
    return np.broadcast_to(values, shape) if values.size == 1 and math.prod(shape) != 1 else values.reshape(shape)
