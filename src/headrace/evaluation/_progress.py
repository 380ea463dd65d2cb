"""The progress bar of loops over episodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from headrace.evaluation._result import EpisodeResult

_REFRESH = 0.2


class EpisodeProgress(Progress):
    """Episodes done, env-steps per second and the running success rate, on standard error."""

    def __init__(self, total: int, *, shown: bool = True) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        super().__init__(*columns, console=Console(stderr=True), transient=True, disable=not shown)
        self._bar = self.add_task("episodes", total=total)
        self._begun = time.perf_counter()
        self._due = 0.0

    def show(self, results: Sequence[EpisodeResult], env_steps: int, note: Callable[[], str] | None = None) -> None:
        """Show how far the loop is, with a note of its own, which is made where it is shown."""
        now = time.perf_counter()
        if self.disable or now < self._due:
            return
        self._due = now + _REFRESH
        rate = env_steps / max(now - self._begun, 1e-9)
        known = [result.success for result in results if result.success is not None]
        success = f", {sum(known) / len(known):.0%} success" if known else ""
        more = "" if note is None else f"; {note()}"
        self.update(self._bar, completed=len(results), description=f"{rate:,.0f} env-steps/s{success}{more}")
