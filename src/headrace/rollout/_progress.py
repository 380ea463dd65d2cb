"""The progress bar of loops over episodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_REFRESH = 0.2


class Finished(Protocol):
    """A finished episode, as far as the bar shows it."""

    @property
    def success(self) -> bool | None:
        """None where the task has no such measure."""
        ...


class EpisodeProgress:
    """Episodes done, env-steps per second and the running success rate, on standard error."""

    def __init__(self, total: int, *, shown: bool) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown)
        self._bar = self._progress.add_task("episodes", total=total)
        self._begun = time.perf_counter()
        self._due = 0.0

    def __enter__(self) -> EpisodeProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, results: Sequence[Finished], env_steps: int, note: Callable[[], str] | None = None) -> None:
        """Show how far the loop is, with a note of its own, which is made where it is shown."""
        if self._progress.disable:
            return
        now = time.perf_counter()
        if now < self._due:
            return
        self._due = now + _REFRESH
        rate = env_steps / max(now - self._begun, 1e-9)
        known = [result.success for result in results if result.success is not None]
        success = f", {sum(known) / len(known):.0%} success" if known else ""
        more = "" if note is None else f"; {note()}"
        self._progress.update(self._bar, completed=len(results), description=f"{rate:,.0f} env-steps/s{success}{more}")
