"""Engines: where the model runs. Inline, in a thread beside the physics, or in a process of its own."""

from __future__ import annotations

import multiprocessing
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol, cast

from torch import Tensor

from headrace.chunking.batching import Answer, Batching, ask
from headrace.chunking.policy import ChunkContext, ChunkPolicy
from headrace.errors import LifecycleError, PolicyError
from headrace.types import Obs


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Rows that wait for the model. The engine owns the tensors from now on."""

    obs: Obs
    """Group → (n, …)."""
    context: ChunkContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A request with its answer."""

    request: Request
    answer: Answer
    seconds: float
    """Time the model took."""


class Engine(Protocol):
    """Runs one request at a time."""

    @property
    def overlaps(self) -> bool:
        """Whether the model runs while the caller goes on."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a request is under way."""
        ...

    def submit(self, request: Request) -> None:
        """Hand over a request; the engine must not be busy."""
        ...

    def poll(self, *, wait: bool) -> Reply | None:
        """The reply, if it is there; with ``wait``, wait for it. A policy that raised raises ``PolicyError`` here."""
        ...

    def close(self) -> None:
        """End thread or process; an unfinished request is waited for (thread) or dropped (process)."""
        ...


def _answered(policy: ChunkPolicy, request: Request, batching: Batching) -> Reply:
    begin = time.perf_counter()
    try:
        answer = ask(policy, request.obs, request.context, batching)
    except PolicyError:
        raise
    # whatever a policy raises is reported with the environments it was for
    except Exception as error:
        raise _blamed(request.context, f"{type(error).__name__}: {error}") from error
    return Reply(request=request, answer=answer, seconds=time.perf_counter() - begin)


def _blamed(context: ChunkContext, what: str) -> PolicyError:
    envs, episodes = context.env_ids.tolist(), context.episode_ids.tolist()
    return PolicyError(
        f"policy raised {what}; it was asked for environments {envs[:8]}{' …' if len(envs) > 8 else ''} "
        f"(episodes {episodes[:8]}{' …' if len(episodes) > 8 else ''})"
    )


class InlineEngine:
    """Runs the model in the caller's thread, when it is asked."""

    overlaps = False

    def __init__(self, policy: ChunkPolicy, batching: Batching) -> None:
        self._policy = policy
        self._batching = batching
        self._reply: Reply | None = None

    @property
    def busy(self) -> bool:
        """Never between calls, except that a reply has not been fetched."""
        return self._reply is not None

    def submit(self, request: Request) -> None:
        """Run the model now."""
        self._reply = _answered(self._policy, request, self._batching)

    def poll(self, *, wait: bool) -> Reply | None:
        """The reply of the last request."""
        del wait
        reply, self._reply = self._reply, None
        return reply

    def close(self) -> None:
        """Nothing to end."""


class ThreadEngine:
    """Runs the model in a thread beside the physics: torch and MuJoCo release the GIL."""

    overlaps = True

    def __init__(self, policy: ChunkPolicy, batching: Batching) -> None:
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[Reply | PolicyError] = queue.SimpleQueue()
        self._busy = False
        self._thread = threading.Thread(target=self._work, args=(policy, batching), name="headrace-engine", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """A request is under way, or its reply has not been fetched."""
        return self._busy

    def submit(self, request: Request) -> None:
        """Hand over a request."""
        if self._busy:
            raise LifecycleError("engine: expected to be free, got a second request; poll the first")
        self._busy = True
        self._requests.put(request)

    def poll(self, *, wait: bool) -> Reply | None:
        """The reply, if it is there or waited for."""
        if not self._busy:
            return None
        try:
            reply = self._replies.get(block=wait)
        except queue.Empty:
            return None
        self._busy = False
        if isinstance(reply, PolicyError):
            raise reply
        return reply

    def close(self) -> None:
        """Wait for the model's current call, then end the thread."""
        self._requests.put(None)
        self._thread.join()

    def _work(self, policy: ChunkPolicy, batching: Batching) -> None:
        while (request := self._requests.get()) is not None:
            try:
                self._replies.put(_answered(policy, request, batching))
            except PolicyError as error:
                self._replies.put(error)


class ProcessEngine:
    """Runs the model in a process of its own, for policies that hold the GIL.

    The policy is made there by ``make_policy``, a function that can be imported by name (it is pickled by reference).
    """

    overlaps = True

    def __init__(self, make_policy: Callable[[], ChunkPolicy], batching: Batching) -> None:
        # not fork: threads of physics and kernels do not survive one
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(make_policy, batching, theirs), name="headrace-engine", daemon=True
        )
        self._process.start()
        theirs.close()
        self._request: Request | None = None

    @property
    def busy(self) -> bool:
        """A request is under way, or its reply has not been fetched."""
        return self._request is not None

    def submit(self, request: Request) -> None:
        """Send a request."""
        if self._request is not None:
            raise LifecycleError("engine: expected to be free, got a second request; poll the first")
        self._request = request
        try:
            self._pipe.send((_plain(request.obs), _packed(request.context)))
        except (BrokenPipeError, OSError) as error:
            raise _blamed(request.context, "nothing: its process has died") from error

    def poll(self, *, wait: bool) -> Reply | None:
        """The reply, if it is there or waited for."""
        request = self._request
        if request is None or not (wait or self._pipe.poll()):
            return None
        self._request = None
        try:
            told, answer, seconds = cast("tuple[str | None, Answer | None, float]", self._pipe.recv())
        except (EOFError, OSError) as error:
            raise _blamed(request.context, "nothing: its process has died") from error
        if answer is None:
            raise PolicyError(told)
        return Reply(request=request, answer=answer, seconds=seconds)

    def close(self) -> None:
        """End the process; a call under way is dropped."""
        self._pipe.close()
        self._process.terminate()
        self._process.join()


def _serve(make_policy: Callable[[], ChunkPolicy], batching: Batching, pipe: Connection) -> None:
    policy = make_policy()
    while True:
        try:
            obs, context = cast("tuple[Obs, dict[str, object]]", pipe.recv())
        except (EOFError, OSError):
            return
        request = Request(obs=obs, context=_unpacked(context))
        try:
            reply = _answered(policy, request, batching)
            pipe.send((None, reply.answer, reply.seconds))
        except PolicyError as error:
            pipe.send((str(error), None, 0.0))


def _plain(obs: Obs) -> dict[str, Tensor]:
    return {name: values.cpu() for name, values in obs.items()}


_FIELDS = ("seed", "env_ids", "episode_ids", "chunk_index", "rest", "rest_length", "delay")


def _packed(context: ChunkContext) -> dict[str, object]:
    return {name: getattr(context, name) for name in _FIELDS}


def _unpacked(fields: dict[str, object]) -> ChunkContext:
    return ChunkContext(**cast("dict[str, Tensor]", fields))  # pyright: ignore[reportArgumentType]  # seed is an int
