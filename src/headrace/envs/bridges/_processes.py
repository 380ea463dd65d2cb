"""Single environments in worker processes; observations, actions and results pass through shared memory."""

from __future__ import annotations

import math
import multiprocessing
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, cast

import gymnasium
from gymnasium.vector.utils import CloudpickleWrapper

from headrace._interrupts import ignore_interrupts
from headrace.envs.bridges._exchange import Exchange, ExchangeLayout
from headrace.envs.bridges._group import EnvFactory, EnvGroup
from headrace.envs.bridges._workers import (
    WorkerBackend,
    WorkerFailedError,
    WorkerLostError,
    dealt,
    how_ended,
    of_environments,
    starting,
)
from headrace.errors import ConfigError, UnsupportedError

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
    # anonymous: nothing is left behind in the file system, whoever is killed
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
    """A worker's life: make the environments, then answer commands until told to close or left alone."""
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
