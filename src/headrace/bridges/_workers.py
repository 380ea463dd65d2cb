"""Single environments dealt out to workers in turn, whatever a worker is: a spawned process, another interpreter.

Spawned processes pass observations, actions and results through shared memory.
"""

from __future__ import annotations

import math
import multiprocessing
import signal
import time
import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Protocol, cast

import gymnasium
from gymnasium.vector.utils import CloudpickleWrapper

from headrace._interrupts import ignore_interrupts
from headrace.bridges._exchange import Exchange, ExchangeLayout
from headrace.bridges._group import EnvFactory, EnvGroup
from headrace.bridges.executors import Backend, Fidelity
from headrace.errors import ConfigError, EnvError, HeadraceError, LifecycleError, UnsupportedError

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


class WorkerLink(Protocol):
    """Has the environments of some rows of an exchange. One call at a time: ``send``, then ``receive``."""

    env_ids: range
    """The rows whose environments it has."""
    pid: int | None
    """Of its process; None for one on another machine."""
    deadline: float
    """On the monotonic clock: until when the call that was sent last may take."""

    def send(self, call: str, env_ids: list[int], more: list[Any]) -> None:
        """Begin ``reset`` (more: seeds), ``step``, ``observe``, ``save``, ``restore`` (more: states) or ``render``."""
        ...

    def receive(self, call: str) -> list[Any]:
        """Wait for what the call gives, one entry per environment; raises WorkerFailedError or WorkerLostError."""
        ...

    def fileno(self) -> int:
        """Return the descriptor that can be read once an answer is there."""
        ...

    def ask_to_end(self) -> None:
        """Tell it to close its environments; no answer is waited for."""
        ...

    def end(self) -> None:
        """Wait until it is gone; end it by force if that takes too long."""
        ...


class WorkerBackend(Backend):
    """Environments dealt out in turn, so that any run of neighbors is work for all; rows lie in the exchange."""

    overlaps_resets = True

    def __init__(
        self,
        exchange: Exchange,
        workers: Sequence[WorkerLink],
        *,
        fidelity: Fidelity = "native",
        reseeds: bool = True,
        no_identity: str = "",
        late: frozenset[str] = frozenset(),
    ) -> None:
        """Own ``workers``, which have made their environments: ``close`` ends them."""
        self.exchange = exchange
        self.fidelity: Fidelity = fidelity
        self.reseeds, self.no_identity, self.late = reseeds, no_identity, late
        self.workers = workers
        self._closed = False
        self._resets: dict[WorkerLink, list[int]] = {}
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
        asked: list[tuple[WorkerLink, list[int]]] = []
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

    def _free(self, env_ids: Sequence[int]) -> Generator[tuple[WorkerLink, list[int]]]:
        """Yield every worker that has some of ``env_ids``, and which, after waiting for its resets."""
        for worker in self.workers:
            if mine := [env_id for env_id in env_ids if env_id in worker.env_ids]:
                if worker in self._resets:
                    self._collect(worker)
                yield worker, mine

    def _collect(self, worker: WorkerLink) -> None:
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


def dealt(num_envs: int, workers: int) -> list[range]:
    """Return the env ids of each worker."""
    return [range(first, num_envs, workers) for first in range(workers)]


def how_ended(code: int | None) -> str:
    """Return an exit code in words."""
    if code is None:
        return "closed its pipe"
    return f"was ended by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"


def of_environments(env_ids: range) -> str:
    """Return the env ids of a worker as words of an error."""
    return ", ".join(map(str, env_ids[:8])) + (", …" if len(env_ids) > 8 else "")


@contextmanager
def starting(workers: Sequence[WorkerLink]) -> Generator[None]:
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


def end_workers(workers: Sequence[WorkerLink]) -> None:
    """End all of them, at once."""
    for worker in workers:
        worker.ask_to_end()
    for worker in workers:
        worker.end()


# a closing worker closes its environments; one that takes longer than this is ended
_CLOSE_SECONDS = 5.0


class SpawnedWorker:
    """A worker waits at its pipe; a call names env_ids, the rows themselves lie in shared memory.

    A worker that dies closes its pipe, so waiting for it ends; one whose parent dies ends itself.
    """

    deadline = math.inf

    def __init__(self, pipe: Connection, process: SpawnProcess, env_ids: range) -> None:
        self.env_ids = env_ids
        self.process = process
        self.pid = process.pid
        self._pipe = pipe

    def send(self, call: str, env_ids: list[int], more: list[Any]) -> None:
        """Begin a call."""
        try:
            self._pipe.send((call, env_ids, more))
        except OSError as error:
            raise self._lost(call) from error

    def receive(self, call: str) -> list[Any]:
        """Wait for its answer."""
        try:
            fine, content = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._lost(call) from error
        if not fine:
            raise WorkerFailedError(*content)
        return content

    def fileno(self) -> int:
        """Of its pipe."""
        return self._pipe.fileno()

    def ask_to_end(self) -> None:
        """Tell it to close its environments."""
        try:
            self._pipe.send(("close", [], []))
        except OSError:  # it is gone already
            return

    def end(self) -> None:
        """Wait until it is gone; kill it if that takes too long."""
        self.process.join(_CLOSE_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self._pipe.close()

    def _lost(self, call: str) -> WorkerLostError:
        self.process.join(_CLOSE_SECONDS)
        return WorkerLostError(
            f"the worker process of environments {of_environments(self.env_ids)} {how_ended(self.process.exitcode)} "
            f'during {call} (a script that makes one needs the guard `if __name__ == "__main__":`)'
        )


def process_backend(
    factories: Sequence[EnvFactory], layout: ExchangeLayout, action_space: gymnasium.Space[Any], workers: int
) -> WorkerBackend:
    """Start spawned workers and wait until each has made its environments."""
    context = multiprocessing.get_context("spawn")
    # anonymous: nothing is left behind in the file system when a process is killed
    memory = context.RawArray("b", max(layout.nbytes, 1))
    started: list[SpawnedWorker] = []
    with starting(started):
        for part in dealt(len(factories), workers):
            ours, theirs = context.Pipe()
            makers = CloudpickleWrapper(cast("Any", [factories[env_id] for env_id in part]))
            process = context.Process(
                target=_work,
                args=(theirs, memory, layout, makers, part, action_space),
                name=f"headrace-bridge-{part.start}",
                daemon=True,
            )
            process.start()
            # with our copy of its end closed, the worker's death is the end of the pipe
            theirs.close()
            started.append(SpawnedWorker(ours, process, part))
        for worker in started:
            worker.receive("start")
    return WorkerBackend(Exchange(layout, memoryview(memory).cast("B")), started)


def _work(
    pipe: Connection,
    memory: Any,  # a ctypes array, which has no public type
    layout: ExchangeLayout,
    makers: CloudpickleWrapper[Any],
    own: range,
    action_space: gymnasium.Space[Any],
) -> None:
    """Make the environments, then answer commands until the command to close, or until the parent is gone."""
    ignore_interrupts()
    try:
        exchange = Exchange(layout, memoryview(memory).cast("B"))
        group = EnvGroup([make() for make in cast("list[EnvFactory]", makers.fn)], exchange, own, action_space)
    except Exception as error:  # noqa: BLE001  (whatever it is, the parent raises it)
        pipe.send((False, _described(error)))
        return
    pipe.send((True, []))
    try:
        while True:
            name, env_ids, more = pipe.recv()
            if name == "close":
                break
            try:
                answer = True, group.call(name, env_ids, more)
            except Exception as error:  # noqa: BLE001  (whatever it is, the parent raises it)
                answer = False, _described(error)
            pipe.send(answer)
    except (EOFError, BrokenPipeError):  # the parent is gone
        pass
    finally:
        group.close()


def _described(error: Exception) -> tuple[str, str]:
    """Type and text of an error: the error itself may not pickle."""
    if isinstance(error, UnsupportedError | ConfigError):
        return type(error).__name__, str(error)
    trace = "".join(traceback.format_exception(error)).rstrip()
    return type(error).__name__, f"{error}\n\nin the worker process:\n{trace}"
