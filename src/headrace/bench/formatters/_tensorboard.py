"""Curves for TensorBoard: steps of a run without learning, iterations of a training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headrace.bench.figures import metrics
from headrace.bench.schema import Bundle, PlayBundle, RuntimeBundle, StartupBundle, TrainingBundle
from headrace.errors import require_extra
from headrace.files import write_directory
from headrace.libraries.registry import OWN_CURVES, library, library_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch.utils.tensorboard.writer import SummaryWriter


def require_tensorboard() -> None:
    """Raise an error that names the extra, if TensorBoard is not installed."""
    require_extra("tensorboard", extra="tensorboard", purpose="the tensorboard formatter")


def write_tensorboard(bundle: Bundle, path: Path) -> None:
    """Write a directory of event files, whole or not at all."""
    require_tensorboard()
    from torch.utils.tensorboard.writer import SummaryWriter

    def fill(folder: Path) -> None:
        writer = SummaryWriter(str(folder))
        _write(bundle, writer)
        writer.close()

    write_directory(path, fill)


def _write(bundle: Bundle, writer: SummaryWriter) -> None:
    for metric in metrics(bundle):
        writer.add_scalar(f"final/{metric.path}", metric.value, 0)
    writer.add_text("run", f"{bundle.run.run_id}: {bundle.run.status}")
    if isinstance(bundle, StartupBundle):
        return
    for tag, series in _series(bundle).items():
        _add(writer, tag, series, range(len(series)))
    if isinstance(bundle, TrainingBundle):
        _add_as_the_library_does(bundle, writer)


def _add(writer: SummaryWriter, tag: str, series: Sequence[float | None], at: Iterable[int]) -> None:
    for place, value in zip(at, series, strict=True):
        if value is not None:
            writer.add_scalar(tag, value, place)


def _add_as_the_library_does(bundle: TrainingBundle, writer: SummaryWriter) -> None:
    """Reward and length once more under the names of the library and along its axis, besides those of all runs."""
    learning = bundle.learning
    name = bundle.run.framework
    if name not in library_names() or learning.frames is None or (tags := library(name).curves) == OWN_CURVES:
        return
    at = list(range(1, len(learning.frames) + 1))
    if tags.axis != "iterations":
        at = [frames // ((bundle.run.num_envs or 1) if tags.axis == "steps" else 1) for frames in learning.frames]
    for tag, curve in ((tags.reward, learning.reward), (tags.length, learning.ep_length)):
        if curve is not None and curve.series_per_iter is not None:
            _add(writer, tag, curve.series_per_iter, at)


def _series(bundle: RuntimeBundle | TrainingBundle | PlayBundle) -> Mapping[str, Sequence[float | None]]:
    found: dict[str, Sequence[float | None] | None] = {}
    if isinstance(bundle, TrainingBundle):
        learning = bundle.learning
        curves = {
            "reward": learning.reward,
            "episode_length": learning.ep_length,
            "success_rate": learning.success_rate,
        }
        for name, curve in curves.items():
            found[f"Train/mean_{name}"] = curve and curve.series_per_iter
            found[f"Train/mean_{name}_ema"] = curve and curve.series_ema
    timing, iteration = bundle.runtime.environment_step_timing, bundle.runtime.iteration_time_s
    found["Time/env_step_s"] = timing and timing.environment_step_time_s.samples
    found["Time/iteration_s"] = iteration and iteration.samples
    found["Resources/ram_gb"] = bundle.resources.ram_gb and bundle.resources.ram_gb.samples
    return {tag: series for tag, series in found.items() if series}
