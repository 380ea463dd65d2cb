"""Engines: where the model runs. Inline, in a thread beside the physics, or (``foreign.py``) in another process."""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from headrace import _device
from headrace.errors import ConfigError, LifecycleError, PolicyError, UnknownNameError
from headrace.policies.batching import Answer, Asker, Batching
from headrace.policies.protocol import ChunkContext, ChunkPolicy, EpisodeRows, name_rows
from headrace.types import Obs

_LONGEST_S = 1e9
"""30 years; the clocks that threads wait by overflow beyond."""
SECONDS_TO_END = 5.0
"""For a call that was interrupted, before it is left behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Rows that wait for the model. The engine owns the tensors from now on."""

    obs: Obs
    """Group → (n, …)."""
    context: ChunkContext
    ended: EpisodeRows | None = None
    """Episodes that have ended since the last request, for policies with memory; None where the policy has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A request with its answer."""

    request: Request
    answer: Answer
    seconds: float
    """Time the model took."""


class Engine(Protocol):
    """Runs requests: one at a time, or several."""

    @property
    def overlaps(self) -> bool:
        """Whether the model runs while the caller goes on."""
        ...

    @property
    def strict_size(self) -> int | None:
        """Rows of the fixed-size batches that make answers equal bit for bit; None where they depend on the batch."""
        ...

    @property
    def busy(self) -> bool:
        """Whether no further request can be taken now."""
        ...

    @property
    def pending(self) -> bool:
        """Whether a request is under way, or a reply has not been fetched."""
        ...

    def submit(self, request: Request) -> None:
        """Hand over a request; the engine must not be busy."""
        ...

    def poll(self, *, wait: bool) -> Reply | None:
        """Return a reply, if one is there; with ``wait``, wait for one. A policy that raised raises ``PolicyError``
        here, and so does one that takes longer than the engine's time-out: the engine is of no use then."""
        ...

    def close(self) -> None:
        """End thread or process; a call under way is dropped."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePolicy:
    """A policy that runs in an engine of its own, such as that of a server."""

    engine: Engine
    horizon: int
    action_dim: int
    obs_steps: int

    def __call__(self, obs: Obs, context: ChunkContext) -> Tensor:
        """Wait for the answer of the engine."""
        self.engine.submit(Request(obs=obs, context=context))
        return cast("Reply", self.engine.poll(wait=True)).answer.actions


class RememberingEnginePolicy(EnginePolicy):
    """The policy of the engine has memory: the scheduler then sends it the ends of episodes."""

    def begin(self, rows: EpisodeRows) -> None:
        """Do nothing: the engine sees the first chunk of each episode."""

    def end(self, rows: EpisodeRows) -> None:
        """Do nothing: the ends are sent with the next request."""


def make_engine(name: str, policy: ChunkPolicy, batching: Batching, timeout: float | None = None) -> Engine:
    """Return an engine by name: ``inline``, ``thread`` or ``process``.

    ``process`` sends the policy there as a pickle, by value where it cannot be imported. ``timeout`` is the seconds
    that one request may take.
    """
    if timeout is not None and not 0 < timeout <= _LONGEST_S:
        raise ConfigError(f"timeout: expected more than 0 seconds, up to {_LONGEST_S:g}, or None, got {timeout}")
    if name not in _ENGINES:
        raise UnknownNameError("engine", name, _ENGINES)
    return _ENGINES[name](policy, batching, timeout)


def _process_engine(policy: ChunkPolicy, batching: Batching, timeout: float | None) -> Engine:
    from headrace.policies.foreign import ProcessEngine

    return ProcessEngine(lambda: policy, batching, timeout)


def answer_request(ask: Callable[..., Answer], request: Request) -> Reply:
    """Answer a request; whatever a policy raises is a PolicyError that names the environments."""
    begin = time.perf_counter()
    try:
        answer = ask(request.obs, request.context, request.ended)
    except PolicyError:
        raise
    # whatever a policy raises is reported with the environments it was for
    except Exception as error:
        raise _blame(request.context, error) from error
    return Reply(request=request, answer=answer, seconds=time.perf_counter() - begin)


def _blame(context: ChunkContext, error: BaseException) -> PolicyError:
    return PolicyError(f"policy raised {type(error).__name__}: {error}; it was asked for {name_rows(context)}")


class OneRequest(ABC):
    """Runs one request at a time beside the caller, for ``timeout`` seconds at most."""

    overlaps = True

    def __init__(self, batching: Batching, timeout: float | None) -> None:
        self.strict_size = batching.strict_size
        self._timeout = timeout
        self._deadline: float | None = None
        self._request: Request | None = None

    @property
    def busy(self) -> bool:
        """A request is under way, or its reply has not been fetched."""
        return self._request is not None

    pending = busy  # one request at a time

    def submit(self, request: Request) -> None:
        """Hand over a request."""
        if self.busy or not self._usable():
            raise LifecycleError(
                "engine: a request is under way, or the engine is closed; poll the first, or make a new one"
            )
        self._request = request
        self._deadline = None if self._timeout is None else time.monotonic() + self._timeout
        try:
            self._send(request)
        except Exception:  # an observation that cannot be sent leaves nothing under way; raised again
            self._request = None
            raise

    def poll(self, *, wait: bool) -> Reply | None:
        """Return the reply, if it is there or waited for."""
        request = self._request
        if request is None:
            return None
        left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        # Ctrl-C while waiting leaves the request under way: its reply must not be taken for that of the next
        if self._wait(left if wait else 0.0):
            return self._fetch()
        if left is not None and (wait or left == 0.0):
            self._request = None
            self._abandon()
            raise PolicyError(
                f"policy: expected an answer within {self._timeout:g} s, got none; it was asked for "
                f"{name_rows(request.context)}. The first call of a model that compiles is slow: call it once before, "
                "or allow for more with timeout="
            )
        return None

    @abstractmethod
    def _usable(self) -> bool: ...

    @abstractmethod
    def _send(self, request: Request) -> None: ...

    @abstractmethod
    def _wait(self, seconds: float | None) -> bool:
        """Whether the reply is there within the seconds (None: any)."""

    @abstractmethod
    def _fetch(self) -> Reply:
        """Return the reply that is there; the request is no longer under way."""

    @abstractmethod
    def _abandon(self) -> None:
        """Note that the call is late: never use what it gives."""


class ThreadEngine(OneRequest):
    """Runs the model in a thread beside the physics: torch and MuJoCo release the GIL."""

    def __init__(self, policy: ChunkPolicy, batching: Batching, timeout: float | None = None) -> None:
        super().__init__(batching, timeout)
        self._requests: queue.SimpleQueue[tuple[Request, Any] | None] = queue.SimpleQueue()
        # not a queue: Ctrl-C right after it gave its item would lose the reply, and the engine would wait for ever
        self._reply: Reply | PolicyError | None = None
        self._replied = threading.Event()
        self._stuck = False
        self._thread = threading.Thread(target=self._work, args=(policy, batching), name="headrace-engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. A call under way is waited for, but not for ever: a stuck one is left behind."""
        self._requests.put(None)
        self._thread.join(timeout=0.0 if self._stuck else SECONDS_TO_END)

    def _usable(self) -> bool:
        return not self._stuck and self._thread.is_alive()

    def _send(self, request: Request) -> None:
        self._replied.clear()
        device = next((leaf.device for leaf in request.obs.values()), torch.device("cpu"))
        self._requests.put((request, _device.current_stream(device)))

    def _wait(self, seconds: float | None) -> bool:
        return self._replied.is_set() or (seconds != 0.0 and self._replied.wait(seconds))

    def _fetch(self) -> Reply:
        reply, self._request = self._reply, None
        if isinstance(reply, PolicyError):
            raise reply
        return cast("Reply", reply)

    def _abandon(self) -> None:
        self._stuck = True

    def _work(self, policy: ChunkPolicy, batching: Batching) -> None:
        ask = Asker(policy, batching, alone=False)
        while (given := self._requests.get()) is not None:
            request, stream = given
            try:
                # the caller's stream made the observation, and will read the answer
                with _device.on_stream(stream):
                    self._reply = answer_request(ask, request)
            except PolicyError as error:
                self._reply = error
            # sys.exit() in a policy would end this thread without a word, and the caller would wait for ever
            except BaseException as error:  # noqa: BLE001  # raised in the caller, as said above
                self._reply = _blame(request.context, error)
            self._replied.set()


class InlineEngine:
    """Runs the model in the caller's thread, when it is asked; with a time-out, in a thread that is waited for."""

    overlaps = False

    def __init__(self, policy: ChunkPolicy, batching: Batching, timeout: float | None = None) -> None:
        self.strict_size = batching.strict_size
        self._ask = Asker(policy, batching)
        # a call that is stuck cannot be left but by leaving its thread
        self._thread = None if timeout is None else ThreadEngine(policy, batching, timeout)
        self._reply: Reply | None = None

    @property
    def busy(self) -> bool:
        """Never between calls, except that a reply has not been fetched, or Ctrl-C left a thread's call under way."""
        return self._reply is not None or (self._thread is not None and self._thread.busy)

    pending = busy  # one request at a time

    def submit(self, request: Request) -> None:
        """Run the model now."""
        if self._thread is None:
            self._reply = answer_request(self._ask, request)
        else:
            self._thread.submit(request)
            self._reply = self._thread.poll(wait=True)

    def poll(self, *, wait: bool) -> Reply | None:
        """Return the reply of the last request."""
        if self._reply is None and self._thread is not None:
            return self._thread.poll(wait=wait)
        reply, self._reply = self._reply, None
        return reply

    def close(self) -> None:
        """End the thread, if there is one."""
        if self._thread is not None:
            self._thread.close()


_ENGINES: dict[str, Callable[[ChunkPolicy, Batching, float | None], Engine]] = {
    "inline": InlineEngine,
    "process": _process_engine,
    "thread": ThreadEngine,
}
