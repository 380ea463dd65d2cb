"""Compile several kernels at the same time, each in a process of its own, since numba compiles one at a time in each.

The processes leave what they compile in the cache on disk, where the caller's own process finds it. They import kernels
and nothing else, end when the caller does, and are as many as the process has kernel threads, the caller included:
``HEADRACE_NUM_THREADS=1`` compiles everything here, in turn. What a process fails to compile is compiled here, too.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, TypeAlias, cast

import numba
from numba.core.dispatcher import Dispatcher

from headrace._interrupts import ignore_interrupts
from headrace._kernels.compiled import PACKAGE
from headrace._kernels.threads import kernel_threads

KernelCall: TypeAlias = tuple[Callable[..., None], tuple[Any, ...]]
"""A kernel and the arguments of a call of it."""

_LOG = logging.getLogger("headrace.kernels")
_SERVE = "from headrace._kernels.ahead import serve; serve()"


def compile_ahead(calls: Sequence[KernelCall]) -> None:
    """Compile kernels for these arguments, all that are neither in memory nor on disk. Give the slowest first.

    Several forms of one kernel are compiled by one process: they share a file.
    """
    jobs: dict[Any, list[tuple[Any, ...]]] = {}
    for function, args in calls:
        if not isinstance(function, Dispatcher):  # numba is switched off
            continue
        form = tuple(numba.typeof(arg) for arg in args)
        if form not in jobs.get(function, ()) and not _is_ready(function, form):
            jobs.setdefault(function, []).append(form)
    waiting = deque(jobs.items())
    processes: list[subprocess.Popen[bytes]] = []
    feeders: list[threading.Thread] = []
    try:
        for _ in range(min(kernel_threads(), len(jobs)) - 1):
            try:
                processes.append(_start())
            except OSError as error:  # no memory, or no right to start one: the caller that needs a kernel compiles it
                _LOG.info("no other process to compile in: %s", error)
                break
            feeders.append(threading.Thread(target=_feed, args=(processes[-1], waiting), daemon=True))
            feeders[-1].start()
        while processes:
            try:
                kernel, forms = waiting.popleft()
            except IndexError:
                break
            for form in forms:
                kernel.compile(form)
        for feeder in feeders:
            feeder.join()
    finally:
        for process in processes:
            process.kill()
        for feeder in feeders:
            feeder.join()
        for process in processes:
            with contextlib.suppress(BrokenPipeError), process:
                pass


def serve() -> None:
    """Compile what comes in on standard input until it ends: a module's name, a function's name and argument types."""
    ignore_interrupts()
    gc.disable()
    given, answers = sys.stdin.buffer, sys.stdout.buffer
    while True:
        try:
            module, name, forms = pickle.load(given)  # from the process that started this one
        except EOFError:
            return
        kernel = getattr(importlib.import_module(module), name)
        for form in forms:
            kernel.compile(form)
        answers.write(b"\n")
        answers.flush()


def _is_ready(kernel: Any, form: tuple[Any, ...]) -> bool:
    """Return whether a form is in memory or on disk, or has no place on disk where another process could leave it."""
    if form in kernel.overloads or not hasattr(kernel._cache, "_cache_file"):
        return True
    return kernel._cache._index_key(form, kernel.targetctx.codegen()) in kernel._cache._cache_file._load_index()


def _start() -> subprocess.Popen[bytes]:
    """Return a process that serves, with this package and the modules that this process could import."""
    paths = [str(PACKAGE.parent), *(path for path in sys.path if path)]
    return subprocess.Popen(
        [sys.executable, "-c", _SERVE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        # the directory that the program was started in may have files that are named like modules
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"},
    )


def _feed(process: subprocess.Popen[bytes], waiting: deque[tuple[Any, list[tuple[Any, ...]]]]) -> None:
    """Give a process one kernel after another; one that ends too soon takes no more."""
    given, answers = cast("BinaryIO", process.stdin), cast("BinaryIO", process.stdout)
    # a broken pipe and an empty answer mean the same: what it was given is compiled by the first caller that needs it
    with contextlib.suppress(IndexError, BrokenPipeError):
        while True:
            kernel, forms = waiting.popleft()
            function = kernel.py_func
            _LOG.info("compiling %s.%s", function.__module__, function.__qualname__)
            given.write(pickle.dumps((function.__module__, function.__name__, forms)))
            given.flush()
            if not answers.readline():
                _LOG.info("the process that compiled %s ended; it is compiled here", function.__qualname__)
                return
