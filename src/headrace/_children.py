"""Processes that we start: the kernel ends them with this one, however this one ends, also in the middle of a call."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import subprocess
import weakref
from collections.abc import Sequence
from typing import Any

from headrace._interrupts import SIGNALS


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
