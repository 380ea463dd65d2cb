"""Ctrl-C, SIGTERM and SIGHUP, treated alike: each is raised in the main thread, so that what was begun ends in order.

A signal that is ignored when a block is entered stays ignored: ``nohup`` does that to SIGHUP, and a shell to the SIGINT
of commands in the background.

Processes that we start: the kernel ends them with this one, however this one ends, also in the middle of a call.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import signal
import subprocess
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalInterrupt(KeyboardInterrupt):
    """A signal asked the program to end. A ``KeyboardInterrupt``, since callers treat all of them as one."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(number)
        self.number = number


def signal_of(error: KeyboardInterrupt) -> signal.Signals:
    """Return the signal behind an interrupt."""
    return signal.Signals(error.number if isinstance(error, SignalInterrupt) else signal.SIGINT)


def signal_name(error: KeyboardInterrupt) -> str:
    """Return what a person calls it: Ctrl-C, SIGTERM or SIGHUP."""
    number = signal_of(error)
    return "Ctrl-C" if number == signal.SIGINT else number.name


def exit_code(error: KeyboardInterrupt) -> int:
    """Return what a shell expects of a program that a signal ended: 128 + its number."""
    return 128 + signal_of(error)


@contextlib.contextmanager
def interruptible() -> Generator[None]:
    """In the block, each of the signals raises :class:`SignalInterrupt`; after it, they do what they did before."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        del frame
        raise SignalInterrupt(number)

    with _handle(interrupt):
        yield


@contextlib.contextmanager
def hold_signals() -> Generator[None]:
    """Let none of the signals into a block; the first that came is raised after it."""
    came: list[int] = []
    with _handle(lambda number, _: came.append(number)):
        yield
    if came:
        raise SignalInterrupt(came[0])


@contextlib.contextmanager
def delay_signals() -> Generator[list[int]]:
    """Hold the first signal back until the block has ended, then deliver it; a second one is delivered at once.

    Yields the signals that came so far. Only those that have a handler are held back, and delivered to that handler.
    """
    came: list[int] = []
    handlers = {number: found for number in SIGNALS if callable(found := signal.getsignal(number))}

    def handle(number: int, frame: FrameType | None) -> None:
        if came:
            handlers[signal.Signals(number)](number, frame)
        came.append(number)

    with _handle(handle, handlers):
        yield came
    if came:
        handlers[signal.Signals(came[0])](came[0], None)


@contextlib.contextmanager
def _handle(
    handler: Callable[[int, FrameType | None], object], numbers: Iterable[signal.Signals] = SIGNALS
) -> Generator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # Python handles signals in the main thread only
        return
    wanted = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    old = {number: signal.signal(number, handler) for number in wanted}
    try:
        yield
    finally:
        for number, before in old.items():
            signal.signal(number, before)


def _tie(lifeline: int, process: int) -> None:
    """Kill a process, or the group ``-process``, when the writing end of a pipe closes.

    The kernel does it, so it needs no help of the process: that may hold the GIL, or be another interpreter's.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, process)
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)


class Child(subprocess.Popen[Any]):
    """A program that ends with this process, and with this object; with ``start_new_session`` its whole group does."""

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int] = (), **settings: Any) -> None:
        lifeline, ours = os.pipe()
        try:
            weakref.finalize(self, os.close, ours)
            super().__init__(command, pass_fds=(*pass_fds, lifeline), **settings)
            _tie(lifeline, -self.pid if settings.get("start_new_session") else self.pid)
        finally:
            os.close(lifeline)


def begin_child() -> None:
    """For a process of ``multiprocessing`` or a :class:`Child`: signals reach the whole group, and the parent decides
    what becomes of its children, which end when it closes their pipe, kills them or is gone."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        _tie(parent.sentinel, os.getpid())
