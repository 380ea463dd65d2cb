"""What commands print, and the bars that they draw."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

if TYPE_CHECKING:
    from headrace.bench._schema import Bundle


def say(words: str, style: str = "", *, stderr: bool = False) -> None:
    """Print a line as it is: no markup, no colors of its own, no breaks."""
    Console(stderr=stderr).print(Text(words, style), soft_wrap=True)


@contextmanager
def progress_bar(description: str, total: int) -> Generator[Callable[[int], None]]:
    """A bar on standard error, gone when the block ends; yields what to call with the number of steps done.

    It is updated and drawn twice a second, so that a loop is not slowed down.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    shown = console.is_terminal
    with Progress(*columns, console=console, transient=True, refresh_per_second=2, disable=not shown) as progress:
        bar = progress.add_task(description, total=total)
        due = 0.0

        def update(done: int) -> None:
            nonlocal due
            now = time.perf_counter()
            if now >= due:
                due = now + 0.5
                progress.update(bar, completed=done)

        yield update


def show_bundle(bundle: Bundle, paths: Sequence[Path]) -> None:
    """Print the summary box of a bundle, and the files it was written to."""
    from headrace.bench._formatters._summary import summary_table

    Console().print(summary_table(bundle))
    for path in paths:
        say(f"wrote {path}")
