"""Engines: where the model runs. Inline, in a thread beside the physics, or in a process of its own."""

from __future__ import annotations

import multiprocessing
import pickle
import queue
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Literal, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.chunking._batching import Answer, Batching, ask
from headrace.chunking._context import ChunkContext, EpisodeRows, named
from headrace.chunking._policy import ChunkPolicy
from headrace.errors import ConfigError, LifecycleError, PolicyError, UnknownNameError
from headrace.types import Obs

EngineName = Literal["inline", "thread", "process"]
_SECONDS_TO_END = 5.0


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


def make_engine(name: EngineName, policy: ChunkPolicy, batching: Batching) -> Engine:
    """An engine by name. ``process`` sends the policy there as a pickle."""
    if name == "inline":
        return InlineEngine(policy, batching)
    if name == "thread":
        return ThreadEngine(policy, batching)
    if name == "process":
        try:
            packed = pickle.dumps(policy)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"engine 'process': expected a policy that can be pickled, got {error}; "
                "pass ProcessEngine(make_policy, batching) with a function that can be imported"
            ) from error
        return ProcessEngine(partial(pickle.loads, packed), batching)
    raise UnknownNameError("engine", name, ("inline", "thread", "process"))


def _answered(policy: ChunkPolicy, request: Request, batching: Batching) -> Reply:
    begin = time.perf_counter()
    try:
        answer = ask(policy, request.obs, request.context, batching, ended=request.ended)
    except PolicyError:
        raise
    # whatever a policy raises is reported with the environments it was for
    except Exception as error:
        raise _blamed(request.context, error) from error
    return Reply(request=request, answer=answer, seconds=time.perf_counter() - begin)


def _blamed(context: ChunkContext, error: BaseException) -> PolicyError:
    return PolicyError(f"policy raised {type(error).__name__}: {error}; it was asked for {named(context)}")


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
        if self._busy or not self._thread.is_alive():
            raise LifecycleError(
                "engine: expected to be open and free, got a second request, or one after close; poll the first"
            )
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
            # sys.exit() in a policy would end this thread without a word, and the caller would wait for ever
            except BaseException as error:  # noqa: BLE001  # told to the caller, as said above
                self._replies.put(_blamed(request.context, error))


class ProcessEngine:
    """Runs the model in a process of its own, for policies that hold the GIL.

    The policy is made there by ``make_policy``, which must be picklable: a function that can be imported by name, or a
    partial of one. The process computes with as many threads as the caller's torch does.
    """

    overlaps = True

    def __init__(self, make_policy: Callable[[], ChunkPolicy], batching: Batching) -> None:
        # not fork: threads of physics and kernels do not survive one
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve,
            args=(make_policy, batching, torch.get_num_threads(), theirs),
            name="headrace-engine",
            daemon=True,
        )
        self._process.start()
        theirs.close()
        self._request: Request | None = None

    @property
    def pid(self) -> int | None:
        """Of the process."""
        return self._process.pid

    @property
    def busy(self) -> bool:
        """A request is under way, or its reply has not been fetched."""
        return self._request is not None

    def submit(self, request: Request) -> None:
        """Send a request."""
        if self._request is not None or self._pipe.closed:
            raise LifecycleError(
                "engine: expected to be open and free, got a second request, or one after close; poll the first"
            )
        try:
            self._pipe.send(_packed(request))
        except OSError as error:
            raise self._dead(request) from error
        self._request = request

    def poll(self, *, wait: bool) -> Reply | None:
        """The reply, if it is there or waited for."""
        request = self._request
        if request is None or not (wait or self._pipe.poll()):
            return None
        try:
            # Ctrl-C while waiting leaves the request under way: its reply must not be taken for that of the next
            self._pipe.poll(None)
            told = cast("_Told", self._pipe.recv())
        except (EOFError, OSError) as error:
            self._request = None
            raise self._dead(request) from error
        self._request = None
        if told.error is not None:
            raise PolicyError(told.error)
        answer = Answer(actions=torch.from_numpy(told.actions), calls=told.calls, padding=told.padding)
        return Reply(request=request, answer=answer, seconds=told.seconds)

    def close(self) -> None:
        """End the process; a call under way is dropped."""
        self._pipe.close()
        self._process.terminate()
        self._process.join(timeout=_SECONDS_TO_END)
        if self._process.is_alive():  # a library in the policy has its own idea of that signal
            self._process.kill()
            self._process.join()

    def _dead(self, request: Request) -> PolicyError:
        self._process.join(timeout=_SECONDS_TO_END)
        return PolicyError(
            f"policy: expected an answer, but its process has died (exit code {self._process.exitcode}); "
            f"it was asked for {named(request.context)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What a process says in answer to a request; ``error`` or the rest."""

    error: str | None = None
    actions: NDArray[np.float32]
    calls: int = 0
    padding: int = 0
    seconds: float = 0.0


_SILENCE = np.zeros(0, np.float32)
# arrays and texts: tensors would travel through shared memory, with a thread that serves their handles
_Fields = dict[str, "NDArray[np.generic] | list[str]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Packed:
    """A request on its way to a process."""

    obs: dict[str, NDArray[np.generic]]
    context: _Fields
    ended: tuple[list[int], list[int], tuple[str, ...]] | None


def _packed(request: Request) -> _Packed:
    ended = request.ended
    return _Packed(
        obs={name: values.cpu().numpy() for name, values in request.obs.items()},
        context=request.context.to_arrays(),
        ended=None if ended is None else (ended.seeds.tolist(), ended.episode_ids.tolist(), ended.instructions),
    )


def _unpacked(packed: _Packed) -> Request:
    ended = None
    if packed.ended is not None:
        seeds, episode_ids, instructions = packed.ended
        ended = EpisodeRows(
            seeds=torch.tensor(seeds, dtype=torch.int64),
            episode_ids=torch.tensor(episode_ids, dtype=torch.int64),
            instructions=instructions,
        )
    return Request(
        obs={name: torch.from_numpy(values) for name, values in packed.obs.items()},
        context=ChunkContext.from_arrays(packed.context),
        ended=ended,
    )


def _serve(make_policy: Callable[[], ChunkPolicy], batching: Batching, threads: int, pipe: Connection) -> None:
    """The life of the process: make the policy, answer until the other side is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the caller, who ends this process
    torch.set_num_threads(threads)
    policy: ChunkPolicy | None = None
    while True:
        try:
            request = _unpacked(cast("_Packed", pipe.recv()))
        except (EOFError, OSError):
            return
        try:
            policy = make_policy() if policy is None else policy
            reply = _answered(policy, request, batching)
        except PolicyError as error:
            pipe.send(_Told(error=str(error), actions=_SILENCE))
        # also sys.exit(), and a policy that cannot even be made: the caller must hear of it
        except BaseException as error:  # noqa: BLE001  # told to the caller, as said above
            pipe.send(_Told(error=str(_blamed(request.context, error)), actions=_SILENCE))
        else:
            answer = reply.answer
            pipe.send(
                _Told(actions=answer.actions.numpy(), calls=answer.calls, padding=answer.padding, seconds=reply.seconds)
            )
