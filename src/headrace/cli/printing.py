"""What commands print, and the bars that they draw."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

if TYPE_CHECKING:
    from headrace.bench.schema import Bundle

_LOG = logging.getLogger("headrace.kernels")
_PATIENCE_S = 0.5
"""Compiling that is over sooner is not worth a line."""


def say(words: str, style: str = "", *, stderr: bool = False) -> None:
    """Print a line as it is: no markup, no colors of its own, no breaks."""
    Console(stderr=stderr).print(Text(words, style), soft_wrap=True)


@contextmanager
def progress(description: str, total: int | None, *columns: ProgressColumn) -> Generator[Callable[..., None]]:
    """Show a bar on standard error, gone when the block ends; yields what changes it, as ``Progress.update`` does."""
    console = Console(stderr=True)
    words = TextColumn("{task.description}")
    with Progress(
        *(words, BarColumn(), *columns),
        console=console,
        transient=True,
        refresh_per_second=2,
        disable=not console.is_terminal,
    ) as bars:
        yield partial(bars.update, bars.add_task(description, total=total))


@contextmanager
def progress_bar(description: str, total: int | None) -> Generator[Callable[..., None]]:
    """Show a bar for a loop; yields what to call with the number of steps done, and their total where it was not known.

    It is updated and drawn twice a second, so that a loop is not slowed down.
    """
    with progress(description, total, MofNCompleteColumn(), TimeRemainingColumn()) as show:
        due = 0.0

        def update(done: int, total: int | None = None) -> None:
            nonlocal due
            now = time.perf_counter()
            if now >= due:
                due = now + 0.5
                show(completed=done, total=total)

        yield update


@contextmanager
def compile_notice() -> Generator[None]:
    """Let a user who waits for the compiler know it, in one line on standard error."""
    began: float | None = None
    said = False

    def hear(record: logging.LogRecord) -> None:
        nonlocal began, said
        del record
        now = time.monotonic()
        began = now if began is None else began
        if not said and now - began > _PATIENCE_S:
            said = True
            words = "compiling kernels, once on this machine: up to two minutes where there are cameras"
            say(words, "dim", stderr=True)

    with listening(hear):
        yield


@contextmanager
def compile_bar() -> Generator[None]:
    """Show a bar in this block, and on it the kernels that are compiled: which one, how many so far, for how long."""
    numbers = count(1)
    with progress("starting", None, TimeElapsedColumn()) as show:

        def hear(record: logging.LogRecord) -> None:
            show(description=f"{record.getMessage()} ({next(numbers)}, once on this machine)")

        with listening(hear):
            yield


def show_bundle(bundle: Bundle, paths: Sequence[Path]) -> None:
    """Print the summary box of a bundle, and the files it was written to."""
    from headrace.bench.figures import summary_table

    Console().print(summary_table(bundle))
    for path in paths:
        say(f"wrote {path}")


@contextmanager
def listening(hear: Callable[[logging.LogRecord], object]) -> Generator[None]:
    """Receive what is compiled, instead of the handlers from before."""
    handler = logging.Handler()
    handler.emit = hear  # type: ignore[method-assign]  # all that a handler does here
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
