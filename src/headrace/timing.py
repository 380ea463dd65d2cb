"""Stage timers: where the time of a step goes, at a cost of about a microsecond a stage."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager


class StageTimer:
    """Adds up wall time per named stage.

    Stages do not nest into each other: a second ``start`` ends the first. Times are host times; on a GPU they are
    the time until the call returned, not until the work was done.
    """

    def __init__(self) -> None:
        self._total_ns: dict[str, int] = {}
        self._calls: dict[str, int] = {}
        self._stage: str | None = None
        self._since = 0

    def start(self, stage: str | None) -> None:
        """End the running stage, if any, and begin ``stage``; None begins none."""
        now, ended = time.perf_counter_ns(), self._stage
        if ended is not None:
            self._total_ns[ended] = self._total_ns.get(ended, 0) + now - self._since
            self._calls[ended] = self._calls.get(ended, 0) + 1
        self._stage, self._since = stage, now

    def stop(self) -> None:
        """End the running stage."""
        self.start(None)

    @contextmanager
    def measure(self, stage: str) -> Generator[None]:
        """Time a block as ``stage``."""
        self.start(stage)
        try:
            yield
        finally:
            self.start(None)

    def seconds(self) -> dict[str, float]:
        """Seconds spent in each stage so far, in order of first use."""
        return {stage: total / 1e9 for stage, total in self._total_ns.items()}

    def calls(self) -> dict[str, int]:
        """How often each stage ran."""
        return dict(self._calls)

    def clear(self) -> None:
        """Forget everything measured."""
        self._total_ns.clear()
        self._calls.clear()
        self._stage = None
