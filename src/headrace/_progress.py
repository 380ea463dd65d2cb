"""Lines that commands print, and bars for what takes long: on terminals, in notebooks, and as lines elsewhere."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

_LINE_S = 10.0
"""Seconds between lines of progress where no bar can be drawn."""


def say(words: str, style: str = "", *, stderr: bool = False) -> None:
    """Print a line as it is: no markup, no colors of its own, no breaks."""
    Console(stderr=stderr, force_jupyter=False).print(Text(words, style), soft_wrap=True)


def draws_bars(console: Console) -> bool:
    """Return whether bars can be drawn: on a terminal, and in a notebook with ipywidgets."""
    return console.is_terminal or (console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None)


@contextmanager
def progress(description: str, total: int | None, *columns: ProgressColumn) -> Generator[Callable[..., None]]:
    """Show a bar on standard error, gone when the block ends; yields what changes it, as ``Progress.update`` does.

    Where nothing can draw a bar, a line is printed every ten seconds.
    """
    console = Console(stderr=True)
    if not draws_bars(console):
        yield _print_lines(description, total)
        return
    words = TextColumn("{task.description}")
    with Progress(words, BarColumn(), *columns, console=console, transient=True, refresh_per_second=2) as bars:
        yield partial(bars.update, bars.add_task(description, total=total))


def _print_lines(description: str, total: int | None) -> Callable[..., None]:
    """Return what prints a line with the state that it is given, unless it has just printed one."""
    shown: dict[str, object] = {"description": description, "total": total}
    due = time.monotonic() + _LINE_S

    def update(**changed: object) -> None:
        nonlocal due
        shown.update(changed)
        if time.monotonic() >= due and "completed" in shown:
            due = time.monotonic() + _LINE_S
            of = "" if shown["total"] is None else f" of {shown['total']:,}"
            say(f"{shown['description']}: {shown['completed']:,}{of}", stderr=True)

    return update


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
