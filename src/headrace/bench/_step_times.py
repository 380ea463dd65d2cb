"""What the steps of a loop took, kept as plain floats while it runs and made into records afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from headrace.bench._learning_schema import EpisodeCounts
from headrace.bench._schema import EnvironmentStepTiming, Runtime, StartupTime, TimingMode, Warmup
from headrace.bench._statistic import Statistic

StartupPhaseName = Literal["app_launch", "python_imports", "task_config", "env_creation", "first_step"]
STARTUP_PHASES: tuple[StartupPhaseName, ...] = get_args(StartupPhaseName)

_NOT_TASK = ("physics", "render", "observers")


class StartupClock:
    """Seconds of each phase before the first measured step."""

    def __init__(self) -> None:
        self.seconds: dict[StartupPhaseName, float] = {}

    @contextmanager
    def phase(self, name: StartupPhaseName) -> Generator[None]:
        """Time a block; phases of the same name add up. A block that raises is counted, too."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def record(self) -> StartupTime:
        """The phases so far; null for those that did not begin."""
        return StartupTime(**self.seconds)


class StepTimes:
    """Times of ``env.step``, one entry a call; ``add`` costs about a microsecond."""

    def __init__(self, mode: TimingMode = "host_return") -> None:
        self.mode: TimingMode = mode
        self.warmup: Warmup | None = None
        self.sim_calls: int | None = None
        """How often the physics was called, where the environment tells."""
        self.on_begin: Callable[[], None] = lambda: None
        """Called when the measured part begins; the context of the run sets it."""
        self._seconds: list[float] = []
        self._frames: list[int] = []
        self._totals: list[Mapping[str, float]] = []
        self._loops: list[float] = []

    def __len__(self) -> int:
        return len(self._seconds)

    @property
    def frames(self) -> int:
        """Environment-steps so far."""
        return sum(self._frames)

    @property
    def seconds(self) -> list[float]:
        """Of each ``env.step``; do not change it."""
        return self._seconds

    def begin(self, stage_totals: Mapping[str, float] | None = None) -> None:
        """Mark the moment before the first measured step.

        Args:
            stage_totals: ``env.timer.seconds()`` of that moment, where steps will give theirs.
        """
        self.on_begin()
        self._loops.append(time.perf_counter())
        if stage_totals is not None:
            self._totals.append(stage_totals)

    def add(self, seconds: float, frames: int, stage_totals: Mapping[str, float] | None = None) -> None:
        """One step of the batch has been done.

        Args:
            seconds: of ``env.step`` alone.
            frames: environments that acted in it.
            stage_totals: ``env.timer.seconds()`` after it; all calls or none.
        """
        self._seconds.append(seconds)
        self._frames.append(frames)
        self._loops.append(time.perf_counter())
        if stage_totals is not None:
            self._totals.append(stage_totals)

    def timing(self) -> EnvironmentStepTiming | None:
        """Where the time of ``env.step`` went; None if nothing was stepped."""
        if not self._seconds:
            return None
        seconds = _positive(self._seconds)
        split = self._split()
        physics, render, task = (None if split is None else split[name] for name in ("physics", "render", "task"))
        outside = None if physics is None else np.maximum(seconds - physics, 0.0)
        step_time = _time(seconds)
        assert step_time is not None
        return EnvironmentStepTiming(
            environment_step_time_s=step_time,
            environment_step_fps=self.frames / float(seconds.sum()),
            simulation_step_time_s=_time(physics),
            outside_simulation_step_time_s=_time(outside),
            outside_simulation_step_fraction=None if outside is None else float(outside.sum() / seconds.sum()),
            environment_step_calls=len(seconds),
            simulation_step_calls=self.sim_calls,
            measurement_mode=self.mode,
            render_step_time_s=_time(render),
            task_step_time_s=_time(task),
        )

    def runtime(self, startup: StartupTime, episodes: EpisodeCounts | None) -> Runtime:
        """The runtime of a loop without learning: an iteration is one step of the batch, choosing actions included."""
        loops = _positive(np.diff(np.array(self._loops)).tolist())
        count, wall = len(self._seconds), float(loops.sum())
        stepping = float(_positive(self._seconds).sum())
        even = len(set(self._frames)) == 1
        return Runtime(
            startup_time_s=startup,
            iterations_completed=count,
            total_wall_time_s=wall,
            steps_per_iteration=self._frames[0] if even else None,
            iteration_time_s=_time(loops),
            collection_fps=self.frames / stepping if count else None,
            total_fps=self.frames / wall if count else None,
            iterations_per_s=count / wall if count else None,
            environment_step_timing=self.timing(),
            frames=self.frames,
            warmup=self.warmup,
            episodes=episodes,
        )

    def _split(self) -> dict[str, NDArray[np.float64]] | None:
        """Seconds of each stage in each step; resets are the task's, recorders and films nobody's.

        None where the environment does not tell.
        """
        if len(self._totals) != len(self._seconds) + 1:
            return None
        stages = {name for totals in self._totals for name in totals}
        if "physics" not in stages:
            return None
        spent = {
            stage: np.diff(np.array([totals.get(stage, 0.0) for totals in self._totals])) for stage in sorted(stages)
        }
        nothing = np.zeros(len(self._seconds))
        task = sum((values for stage, values in spent.items() if stage not in _NOT_TASK), nothing)
        return {"physics": spent["physics"], "render": spent.get("render", nothing), "task": task}


def _positive(seconds: list[float]) -> NDArray[np.float64]:
    """At least a nanosecond each: a clock may stand still for a step that does nothing."""
    return np.maximum(np.array(seconds, dtype=np.float64), 1e-9)


def _time(values: NDArray[np.float64] | None) -> Statistic | None:
    return None if values is None else Statistic.of(values.tolist(), unit="s", better="lower")
