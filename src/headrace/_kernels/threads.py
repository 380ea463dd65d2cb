"""The threads that CPU kernels share: one small pool per process, none of it OpenMP.

A kernel is a ``nogil`` function of rows ``[start, stop)``. :func:`run` calls it on the calling thread where there is
little to do, and otherwise cuts the rows into one part per thread. Parts lie in a queue from which the caller and the
workers take them: a worker that is late, because another program has its core, costs nothing, since the caller takes
its part, too. A row's result does not depend on the part that it is in, so results do not depend on any of this.

Workers start at the first use, sleep on a lock between calls, and are left behind by a fork: a child has none and
starts its own. Several threads may call :func:`run` at once; a call that finds no idle worker works alone.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from headrace.errors import ConfigError

SETTING = "HEADRACE_NUM_THREADS"
"""The environment variable that limits the threads of a process."""


def available_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _initial_limit() -> int:
    text = os.environ.get(SETTING)
    if text is None:
        return available_cores()
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{SETTING}: expected a whole number of at least 1, got {text!r}; unset it for all cores")
    return int(text)


class _Job:
    """One call of a kernel, cut into parts."""

    def __init__(self, kernel: Callable[..., None], rows: int, parts: int, args: tuple[Any, ...]) -> None:
        self._kernel = kernel
        self._args = args
        self._waiting = deque((k * rows // parts, (k + 1) * rows // parts) for k in range(parts))
        self._left = parts
        self._lock = threading.Lock()
        self._done = threading.Lock()
        self._done.acquire()
        self._error: BaseException | None = None

    def work(self) -> int:
        """Take parts until there are none left; how many were taken."""
        taken = 0
        while True:
            try:
                start, stop = self._waiting.popleft()
            except IndexError:
                return taken
            taken += 1
            try:
                self._kernel(start, stop, *self._args)
            except BaseException as error:  # noqa: BLE001  # raised again by the caller of run
                self._error = error

    def settle(self, taken: int) -> bool:
        """Count parts as done; whether none is left."""
        with self._lock:
            self._left -= taken
            if taken and not self._left:
                self._done.release()
            return not self._left

    def finish(self, taken: int) -> None:
        """Wait until every part is done, also when interrupted: workers write into the caller's memory until then."""
        interrupted: BaseException | None = None
        done = self.settle(taken)
        while not done:
            try:
                done = self._done.acquire()
            except BaseException as error:  # noqa: BLE001  # a signal: raised below, after the workers are done
                interrupted = error
        # a worker that has not woken up yet must not keep the arrays alive
        self._args = ()
        if interrupted is not None:
            raise interrupted
        if self._error is not None:
            raise self._error


class _Worker:
    """A thread that sleeps until it is given a job."""

    def __init__(self, pool: _Pool) -> None:
        self._pool = pool
        self._job: _Job | None = None
        self._go = threading.Lock()
        self._go.acquire()
        self.thread = threading.Thread(target=self._loop, name="headrace-kernel", daemon=True)
        self.thread.start()

    def give(self, job: _Job | None) -> None:
        """Wake the worker; None ends it."""
        self._job = job
        self._go.release()

    def _loop(self) -> None:
        stays = True
        while stays:
            self._go.acquire()
            job, self._job = self._job, None
            if job is None:
                return
            taken = job.work()
            # idle before the caller hears of it, or the caller's next call would find no worker
            stays = self._pool.take_back(self)
            job.settle(taken)
            del job


class _Pool:
    def __init__(self) -> None:
        self.limit = _initial_limit()
        self.forget()

    def forget(self) -> None:
        """Start again without workers: after a fork, the child has none of its parent's threads."""
        self._idle: list[_Worker] = []
        self._workers: set[_Worker] = set()
        self._lock = threading.Lock()

    def borrow(self, count: int) -> list[_Worker]:
        """Up to so many idle workers, started where the limit allows."""
        with self._lock:
            # those that slept last: their cores are the likeliest to be awake
            found = [self._idle.pop() for _ in range(min(count, len(self._idle)))]
            for _ in range(min(count - len(found), self.limit - 1 - len(self._workers))):
                found.append(_Worker(self))
                self._workers.add(found[-1])
        return found

    def take_back(self, worker: _Worker) -> bool:
        """Make a worker idle; False where it was stopped meanwhile."""
        with self._lock:
            stays = worker in self._workers
            if stays:
                self._idle.append(worker)
            return stays

    def stop(self) -> None:
        """End all workers, those that are at work after it, and wait for them."""
        with self._lock:
            idle, self._idle = self._idle, []
            workers, self._workers = self._workers, set()
        for worker in idle:
            worker.give(None)
        for worker in workers:
            if worker.thread is not threading.current_thread():  # a finalizer may run anywhere
                worker.thread.join()


_pool = _Pool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.forget)


def kernel_threads() -> int:
    """Return the most threads that a kernel uses in this process, the calling one included."""
    return _pool.limit


def set_kernel_threads(threads: int) -> None:
    """Limit the threads of every kernel in this process, from the next call on.

    At first the limit is the number of cores that the process may use, or the environment variable
    ``HEADRACE_NUM_THREADS``. Results do not depend on it.
    """
    if threads < 1:
        raise ConfigError(f"threads: expected at least 1, got {threads}")
    _pool.limit = threads
    _pool.stop()


def stop_workers() -> None:
    """End the pool's threads, once they have finished what they are at; a later call starts new ones.

    An environment that closes calls this, so that it leaves no thread behind.
    """
    _pool.stop()


def run(
    kernel: Callable[..., None], rows: int, *args: Any, min_rows: int = 1, threads: int | None = None, pieces: int = 1
) -> None:
    """Call ``kernel(start, stop, *args)`` for parts of ``range(rows)`` that cover it, on several threads if that pays.

    Args:
        kernel: compiled by :func:`~headrace._kernels.compiled.kernel`; writes what belongs to its rows and nothing
            else. ``args`` are borrowed for the call.
        rows: how many there are.
        args: what every part gets.
        min_rows: the fewest rows that are worth a thread; waking one takes 15 to 50 µs.
        threads: the most threads to use, the calling one included; None, and anything above it, for
            :func:`kernel_threads`.
        pieces: parts for each thread.
    """
    limit = _pool.limit if threads is None else min(threads, _pool.limit)
    parts = min(limit, rows // max(min_rows, 1))
    workers = _pool.borrow(parts - 1) if parts > 1 else []
    if not workers:
        if rows > 0:
            kernel(0, rows, *args)
        return
    job = _Job(kernel, rows, pieces * (len(workers) + 1), args)
    for worker in workers:
        worker.give(job)
    job.finish(job.work())
