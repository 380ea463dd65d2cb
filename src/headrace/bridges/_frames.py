"""Frames between headrace and a child in another interpreter, with a deadline for each; see ``child.py``."""

from __future__ import annotations

import base64
import json
import math
import os
import select
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
from gymnasium import spaces

from headrace.bridges.child import FRAME, LARGEST_BODY, LARGEST_HEAD, MAGIC
from headrace.errors import ConfigError, DataError

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
