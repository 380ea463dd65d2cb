"""What is said while kernels are compiled, on the first run on a machine and never again."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

_LOG = logging.getLogger("headrace.kernels")
_PATIENCE_S = 0.5
"""Compiling that is over sooner is not worth a line."""


class _Notice(logging.Handler):
    """Prints one line when compiling takes longer than a user likes to wait without a word."""

    def __init__(self) -> None:
        super().__init__()
        self._began: float | None = None
        self._said = False

    def emit(self, record: logging.LogRecord) -> None:
        del record
        now = time.monotonic()
        self._began = now if self._began is None else self._began
        if not self._said and now - self._began > _PATIENCE_S:
            self._said = True
            words = "compiling kernels, once on this machine: up to two minutes where there are cameras"
            Console(stderr=True).print(words, style="dim", highlight=False, soft_wrap=True)


class _Bar(logging.Handler):
    """Moves a bar with every kernel."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress
        self._task = progress.add_task("starting", total=None)
        self._count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self._count += 1
        shown = f"{record.getMessage()} ({self._count}, once on this machine)"
        self._progress.update(self._task, description=shown)


@contextmanager
def compile_notice() -> Generator[None]:
    """Let a user who waits for the compiler know it, in one line on standard error."""
    with _listening(_Notice()):
        yield


@contextmanager
def compile_bar() -> Generator[None]:
    """Show a bar in this block, and on it the kernels that are compiled: which one, how many so far, for how long."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress, _listening(_Bar(progress)):
        yield


@contextmanager
def _listening(handler: logging.Handler) -> Generator[None]:
    """Hear what is compiled, instead of whoever listened before."""
    level, others = _LOG.level, list(_LOG.handlers)
    _LOG.setLevel(logging.INFO)
    for other in others:
        _LOG.removeHandler(other)
    _LOG.addHandler(handler)
    try:
        yield
    finally:
        _LOG.removeHandler(handler)
        for other in others:
            _LOG.addHandler(other)
        _LOG.setLevel(level)
