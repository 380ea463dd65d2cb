"""Engines: where the model runs. Inline, in a thread beside the physics, or in a process of its own."""

from __future__ import annotations

import multiprocessing
import pickle
import queue
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Literal, Protocol, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray

from headrace import _device
from headrace._interrupts import ignore_interrupts
from headrace.chunking._batching import Answer, Batching, ask
from headrace.chunking._context import ChunkContext, EpisodeRows, named
from headrace.chunking._policy import ChunkPolicy
from headrace.errors import ConfigError, LifecycleError, PolicyError, UnknownNameError
from headrace.types import Obs

EngineName = Literal["inline", "thread", "process"]
"""The engines that ship."""
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
        """A reply, if one is there; with ``wait``, wait for one. A policy that raised raises ``PolicyError`` here,
        and so does one that takes longer than the engine's time-out: the engine is of no use then."""
        ...

    def close(self) -> None:
        """End thread or process; a call under way is dropped."""
        ...


EngineFactory: TypeAlias = "Callable[[ChunkPolicy, Batching, float | None], Engine]"
"""Makes an engine of a policy, how its batches are formed, and the seconds that a call may take (None: any)."""


def make_engine(name: str, policy: ChunkPolicy, batching: Batching, *, timeout: float | None = None) -> Engine:
    """An engine by name: ``inline``, ``thread``, ``process``, or one of :func:`register_engine`.

    ``process`` sends the policy there as a pickle. ``timeout`` is the seconds that one request may take.
    """
    if timeout is not None and not 0 < timeout <= _LONGEST_S:
        raise ConfigError(
            f"timeout: expected more than 0 seconds, up to {_LONGEST_S:g}, or None for any, got {timeout}"
        )
    if name not in _ENGINES:
        raise UnknownNameError("engine", name, _ENGINES)
    return _ENGINES[name](policy, batching, timeout)


def register_engine(name: str, make: EngineFactory) -> None:
    """Give an engine of your own a name, for ``evaluate(engine=name)``; it is made and closed per evaluation."""
    if name in _ENGINES:
        raise ConfigError(f"engine {name!r}: there is one already; choose another name")
    _ENGINES[name] = make


def _process_engine(policy: ChunkPolicy, batching: Batching, timeout: float | None) -> Engine:
    try:
        packed = pickle.dumps(policy)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"engine 'process': expected a policy that can be pickled, got {error}; "
            "pass ProcessEngine(make_policy, batching) with a function that can be imported"
        ) from error
    return ProcessEngine(partial(pickle.loads, packed), batching, timeout=timeout)


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


def _late(context: ChunkContext, timeout: float) -> PolicyError:
    return PolicyError(
        f"policy: expected an answer within {timeout:g} s, got none; it was asked for {named(context)}. The first call "
        "of a model that compiles takes long: call it once before, or allow for more with timeout="
    )


def _cannot_take() -> LifecycleError:
    return LifecycleError("engine: a request is under way, or the engine is closed; poll the first, or make a new one")


class ThreadEngine:
    """Runs the model in a thread beside the physics: torch and MuJoCo release the GIL."""

    overlaps = True

    def __init__(self, policy: ChunkPolicy, batching: Batching, *, timeout: float | None = None) -> None:
        self.strict_size = batching.strict_size
        self._timeout = timeout
        self._requests: queue.SimpleQueue[tuple[Request, Any] | None] = queue.SimpleQueue()
        # not a queue: Ctrl-C right after it gave its item would lose the reply, and the engine would wait for ever
        self._reply: Reply | PolicyError | None = None
        self._replied = threading.Event()
        self._request: Request | None = None
        self._deadline: float | None = None
        self._stuck = False
        self._thread = threading.Thread(target=self._work, args=(policy, batching), name="headrace-engine", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """A request is under way, or its reply has not been fetched."""
        return self._request is not None

    @property
    def pending(self) -> bool:
        """The same: one request at a time."""
        return self.busy

    def submit(self, request: Request) -> None:
        """Hand over a request."""
        if self.busy or self._stuck or not self._thread.is_alive():
            raise _cannot_take()
        self._request = request
        self._deadline = None if self._timeout is None else time.monotonic() + self._timeout
        self._replied.clear()
        device = next((leaf.device for leaf in request.obs.values()), torch.device("cpu"))
        self._requests.put((request, _device.current_stream(device)))

    def poll(self, *, wait: bool) -> Reply | None:
        """The reply, if it is there or waited for."""
        request = self._request
        if request is None:
            return None
        left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        if not self._replied.is_set() and not (wait and self._replied.wait(left)):
            if left is not None and (wait or left == 0.0):
                self._request, self._stuck = None, True
                raise _late(request.context, cast("float", self._timeout))
            return None
        reply, self._request = self._reply, None
        if isinstance(reply, PolicyError):
            raise reply
        return reply

    def close(self) -> None:
        """End the thread. A call under way is waited for, but not for ever: a stuck one is left behind."""
        self._requests.put(None)
        self._thread.join(timeout=0.0 if self._stuck else SECONDS_TO_END)

    def _work(self, policy: ChunkPolicy, batching: Batching) -> None:
        while (given := self._requests.get()) is not None:
            request, stream = given
            try:
                # the caller's stream made the observation, and will read the answer
                with _device.on_stream(stream):
                    self._reply = _answered(policy, request, batching)
            except PolicyError as error:
                self._reply = error
            # sys.exit() in a policy would end this thread without a word, and the caller would wait for ever
            except BaseException as error:  # noqa: BLE001  # told to the caller, as said above
                self._reply = _blamed(request.context, error)
            self._replied.set()


class InlineEngine:
    """Runs the model in the caller's thread, when it is asked; with a time-out, in a thread that is waited for."""

    overlaps = False

    def __init__(self, policy: ChunkPolicy, batching: Batching, *, timeout: float | None = None) -> None:
        self.strict_size = batching.strict_size
        self._policy = policy
        self._batching = batching
        # a call that is stuck cannot be left but by leaving its thread
        self._thread = None if timeout is None else ThreadEngine(policy, batching, timeout=timeout)
        self._reply: Reply | None = None

    @property
    def busy(self) -> bool:
        """Never between calls, except that a reply has not been fetched, or Ctrl-C left a thread's call under way."""
        return self._reply is not None or (self._thread is not None and self._thread.busy)

    @property
    def pending(self) -> bool:
        """The same: one request at a time."""
        return self.busy

    def submit(self, request: Request) -> None:
        """Run the model now."""
        if self._thread is None:
            self._reply = _answered(self._policy, request, self._batching)
        else:
            self._thread.submit(request)
            self._reply = self._thread.poll(wait=True)

    def poll(self, *, wait: bool) -> Reply | None:
        """The reply of the last request."""
        if self._reply is None and self._thread is not None:
            return self._thread.poll(wait=wait)
        reply, self._reply = self._reply, None
        return reply

    def close(self) -> None:
        """End the thread, if there is one."""
        if self._thread is not None:
            self._thread.close()


class ProcessEngine:
    """Runs the model in a process of its own, for policies that hold the GIL.

    The policy is made there by ``make_policy``, which must be picklable: a function that can be imported by name, or a
    partial of one. The process computes with as many threads as the caller's torch does.
    """

    overlaps = True

    def __init__(
        self, make_policy: Callable[[], ChunkPolicy], batching: Batching, *, timeout: float | None = None
    ) -> None:
        self.strict_size = batching.strict_size
        self._timeout = timeout
        self._deadline: float | None = None
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

    @property
    def pending(self) -> bool:
        """The same: one request at a time."""
        return self.busy

    def submit(self, request: Request) -> None:
        """Send a request."""
        if self._request is not None or self._pipe.closed:
            raise _cannot_take()
        try:
            self._pipe.send(_packed(request))
        except OSError as error:
            raise self._dead(request) from error
        self._request = request
        self._deadline = None if self._timeout is None else time.monotonic() + self._timeout

    def poll(self, *, wait: bool) -> Reply | None:
        """The reply, if it is there or waited for."""
        request = self._request
        if request is None:
            return None
        left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        # Ctrl-C while waiting leaves the request under way: its reply must not be taken for that of the next
        if not self._pipe.poll(left if wait else 0.0):
            if left is not None and (wait or left == 0.0):
                self._request = None
                self.close()
                raise _late(request.context, cast("float", self._timeout))
            return None
        try:
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
        if self._pipe.closed:
            return
        self._pipe.close()
        self._process.kill()
        self._process.join()

    def _dead(self, request: Request) -> PolicyError:
        self._process.join(timeout=SECONDS_TO_END)
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


def _traced(error: PolicyError) -> str:
    """Where a policy raised; nothing for an answer that is bad."""
    return "" if error.__cause__ is None else f"\n\nin the policy's process:\n{_trace(error.__cause__)}"


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).rstrip()


def _serve(make_policy: Callable[[], ChunkPolicy], batching: Batching, threads: int, pipe: Connection) -> None:
    """The life of the process: make the policy, answer until the other side is gone."""
    ignore_interrupts()
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
            pipe.send(_Told(error=f"{error}{_traced(error)}", actions=_SILENCE))
        # also sys.exit(), and a policy that cannot even be made: the caller must hear of it
        except BaseException as error:  # noqa: BLE001  # told to the caller, as said above
            told = _blamed(request.context, error)
            pipe.send(_Told(error=f"{told}\n\nin the policy's process:\n{_trace(error)}", actions=_SILENCE))
        else:
            answer = reply.answer
            pipe.send(
                _Told(actions=answer.actions.numpy(), calls=answer.calls, padding=answer.padding, seconds=reply.seconds)
            )


_ENGINES: dict[str, EngineFactory] = {
    "inline": lambda policy, batching, timeout: InlineEngine(policy, batching, timeout=timeout),
    "process": _process_engine,
    "thread": lambda policy, batching, timeout: ThreadEngine(policy, batching, timeout=timeout),
}
