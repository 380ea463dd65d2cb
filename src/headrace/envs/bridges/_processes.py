"""Single environments in worker processes; observations, actions and results pass through shared memory."""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, NoReturn, cast

import gymnasium
from gymnasium.vector.utils import CloudpickleWrapper

from headrace._interrupts import ignore_interrupts
from headrace.envs.bridges._exchange import Exchange, ExchangeLayout
from headrace.envs.bridges._executors import Fidelity
from headrace.envs.bridges._group import EnvFactory, EnvGroup
from headrace.errors import ConfigError, EnvError, HeadraceError, LifecycleError, UnsupportedError

# a closing worker closes its environments; one that takes longer than this is ended
_CLOSE_SECONDS = 5.0
# errors that keep their type when they cross from a worker
_ERRORS: dict[str, type[HeadraceError]] = {error.__name__: error for error in (ConfigError, EnvError, UnsupportedError)}


class ProcessBackend:
    """Environments dealt out to spawned workers in turn, so that any run of neighbors is work for all.

    A worker waits at its pipe; a command names env_ids, the rows themselves lie in shared memory. A worker that dies
    closes its pipe, so waiting for it ends; one whose parent dies ends itself.
    """

    fidelity: Fidelity = "native"
    reseeds = True

    def __init__(
        self,
        factories: Sequence[EnvFactory],
        layout: ExchangeLayout,
        action_space: gymnasium.Space[Any],
        workers: int,
    ) -> None:
        """Start the workers and wait until each has made its environments."""
        context = multiprocessing.get_context("spawn")
        # anonymous: nothing is left behind in the file system, whoever is killed
        self._memory = context.RawArray("b", max(layout.nbytes, 1))
        self.exchange = Exchange(layout, memoryview(self._memory).cast("B"))
        self._parts = [range(first, len(factories), workers) for first in range(workers)]
        self._pipes: list[Connection] = []
        self._processes: list[SpawnProcess] = []
        self._closed = False
        try:
            for part in self._parts:
                ours, theirs = context.Pipe()
                makers = CloudpickleWrapper(cast("Any", [factories[env_id] for env_id in part]))
                process = context.Process(
                    target=_work,
                    args=(theirs, self._memory, layout, makers, part, action_space),
                    name=f"headrace-bridge-{part.start}",
                    daemon=True,
                )
                process.start()
                # with our copy of its end closed, the worker's death is the end of the pipe
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
            self._answers(range(len(self._parts)), "start")
        except BaseException:  # also Ctrl-C; raised again
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers."""
        return [process.pid for process in self._processes if process.pid is not None]

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int]) -> list[str]:
        """Start an episode in each environment."""
        seed_of = dict(zip(env_ids, seeds, strict=True))
        answers = self._command("reset", env_ids, lambda mine: [seed_of[env_id] for env_id in mine])
        asked = [env_id for part in self._parts for env_id in env_ids if env_id in part]
        told = dict(zip(asked, (text for answer in answers for text in answer), strict=True))
        return [str(told[env_id]) for env_id in env_ids]

    def step(self, env_ids: Sequence[int]) -> None:
        """Step each environment."""
        self._command("step", env_ids, lambda _: [])

    def save(self) -> list[object]:
        """The state of every environment as bytes."""
        return self._of_each("save")

    def restore(self, states: Sequence[object]) -> None:
        """Put every environment back."""
        self._command("restore", range(len(states)), lambda mine: [states[env_id] for env_id in mine])

    def render(self) -> list[object]:
        """One picture per environment."""
        return self._of_each("render")

    def close(self) -> None:
        """End the workers; none is left when this returns."""
        if self._closed:
            return
        self._closed = True
        for pipe in self._pipes:
            try:
                pipe.send(("close", [], []))
            except OSError:  # it is gone already
                continue
        for process in self._processes:
            process.join(_CLOSE_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()

    def _of_each(self, name: str) -> list[object]:
        """What the workers answer to a command for all of their env_ids, in the order of the env_ids."""
        results: list[object] = [None] * self.exchange.layout.num_envs
        answers = self._command(name, range(len(results)), lambda _: [])
        for part, answer in zip(self._parts, answers, strict=True):
            results[part.start :: part.step] = answer
        return results

    def _command(self, name: str, env_ids: Sequence[int], more: Callable[[list[int]], list[Any]]) -> list[list[object]]:
        """Have every worker that has some of ``env_ids`` (ascending) do something, all at once; their answers."""
        if self._closed:
            raise LifecycleError("environment: its workers are gone; make a new one")
        asked: list[int] = []
        lost: list[int] = []
        for worker, part in enumerate(self._parts):
            mine = [env_id for env_id in env_ids if env_id in part]
            if not mine:
                continue
            try:
                self._pipes[worker].send((name, mine, more(mine)))
                asked.append(worker)
            except OSError:
                lost.append(worker)
        if lost:
            self._give_up(lost[0], name)
        return self._answers(asked, name)

    def _answers(self, workers: Sequence[int], call: str) -> list[list[object]]:
        results: list[list[object]] = []
        failure: tuple[str, str] | None = None
        for worker in workers:
            try:
                fine, content = self._pipes[worker].recv()
            except (EOFError, OSError):
                self._give_up(worker, call)
            except KeyboardInterrupt:
                # its answer would be taken for that of the next command
                self.close()
                raise
            if fine:
                results.append(content)
            elif failure is None:
                failure = content
        if failure is not None:
            kind, message = failure
            raise _ERRORS.get(kind, EnvError)(message)
        return results

    def _give_up(self, worker: int, call: str) -> NoReturn:
        """End everything: rows of the dead worker are lost, and their neighbors' are half written."""
        part, process = self._parts[worker], self._processes[worker]
        process.join(_CLOSE_SECONDS)
        code = process.exitcode
        self.close()
        how = (
            f"was ended by signal {-code} ({signal.Signals(-code).name})"
            if code is not None and code < 0
            else (f"ended with exit code {code}")
        )
        whose = ", ".join(map(str, part[:8])) + (", …" if len(part) > 8 else "")
        raise EnvError(
            f"the worker process of environments {whose} {how} during {call}; "
            "the other workers were closed: make a new environment (a script that makes one needs "
            'the guard `if __name__ == "__main__":`)'
        )


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
            pipe.send(_answer(group, name, env_ids, more))
    except (EOFError, BrokenPipeError):  # the parent is gone
        pass
    finally:
        group.close()


def _answer(group: EnvGroup, name: str, env_ids: list[int], more: list[Any]) -> tuple[bool, Any]:
    try:
        match name:
            case "step":
                group.step(env_ids)
            case "reset":
                return True, group.reset(env_ids, more)
            case "save":
                return True, [group.save(env_id) for env_id in env_ids]
            case "restore":
                for env_id, state in zip(env_ids, more, strict=True):
                    group.restore(env_id, state)
            case "render":
                return True, [group.render(env_id) for env_id in env_ids]
            case _:
                raise ConfigError(f"worker: unknown command {name!r}")
    except Exception as error:  # noqa: BLE001  (whatever it is, the parent raises it)
        return False, _described(error)
    return True, []


def _described(error: Exception) -> tuple[str, str]:
    """Type and text of an error: the error itself may not pickle."""
    if isinstance(error, UnsupportedError | ConfigError):
        return type(error).__name__, str(error)
    trace = "".join(traceback.format_exception(error)).rstrip()
    return type(error).__name__, f"{error}\n\nin the worker process:\n{trace}"
