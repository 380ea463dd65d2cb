"""A result as a box of text, for a terminal and for logs."""

from __future__ import annotations

import io

from rich import box
from rich.console import Console
from rich.table import Table

from headrace.bench._metrics import Metric, metrics, number
from headrace.bench._schema import Bundle, StartupBundle, TrainingBundle
from headrace.bench._statistic import Proportion, Statistic

_WIDTH = 100


def summary_text(bundle: Bundle) -> str:
    """The box as plain text."""
    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None, force_terminal=False)
    console.print(summary_table(bundle))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def summary_table(bundle: Bundle) -> Table:
    """The box as a table to print."""
    run = bundle.run
    title = f"{bundle.kind}: {run.task}, {run.num_envs or 0:,} environments, seed {run.seed}"
    table = Table(title=title, caption=_caption(bundle), box=box.ROUNDED, show_header=False)
    table.add_column(style="bold", overflow="fold")
    table.add_column(justify="right", overflow="fold")
    for name, value in _rows(bundle):
        table.add_row(name, value)
    return table


def _rows(bundle: Bundle) -> list[tuple[str, str]]:
    run = bundle.run
    rows = [("status", run.status if run.status_reason is None else f"{run.status} ({run.status_reason})")]
    rows += [(metric.path, _value(metric)) for metric in metrics(bundle)]
    if isinstance(bundle, StartupBundle):
        for phase, profile in bundle.phases.items():
            rows += [
                (f"  {phase}: {function.name}", f"{function.own_time_s:.3f} s own, {function.cum_time_s:.3f} s in all")
                for function in profile.top_functions[:3]
            ]
        return rows
    warmup = bundle.runtime.warmup
    if warmup is not None:
        judged = f"{warmup.steps} steps, {'steady' if warmup.steady else 'NOT steady'}"
        rows.append(("warm-up", warmup.rule if warmup.steady is None else judged))
    if isinstance(bundle, TrainingBundle) and bundle.checkpoint_path is not None:
        rows.append(("checkpoint", bundle.checkpoint_path))
    episodes = bundle.runtime.episodes
    if episodes is not None:
        rows.append(("episodes completed", f"{episodes.completed:,}"))
    rows += [("not sampled", problem) for problem in bundle.resources.problems]
    return rows


def _caption(bundle: Bundle) -> str:
    hardware, versions = bundle.hardware, bundle.versions
    git = "" if versions.git_commit is None else f", {versions.git_commit[:9]}{'+' if versions.git_dirty else ''}"
    load = "" if hardware.load_average is None else f", load {hardware.load_average[0]:.1f}"
    return f"{hardware.cpu_name}, {hardware.cpu_count} cores{load}; headrace {versions.headrace}{git}"


def _value(metric: Metric) -> str:
    spread = metric.spread
    if isinstance(spread, Proportion):
        around = "" if spread.interval is None else f" [{spread.interval.low:.1%}, {spread.interval.high:.1%}]"
        return f"{metric.value:.1%}{around}" + ("" if spread.n is None else f" of {spread.n:,}")
    shown = number(metric.value, metric.unit)
    if isinstance(spread, Statistic) and spread.percentiles is not None and metric.value == spread.mean:
        percentiles = spread.percentiles
        shown += f"  (median {number(percentiles.p50, metric.unit)}, p95 {number(percentiles.p95, metric.unit)})"
    return shown
