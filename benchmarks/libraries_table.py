"""The table of ``libraries.py``, made from bundle files alone, and the bars."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

LIBRARIES = ("rsl_rl", "rl_games", "skrl", "sb3")
TASKS = ("cartpole", "ant", "cartpole-camera")
PARTS = ("speed", "learning", "overhead", "play")
BAR = 1.05


class Row(NamedTuple):
    """A line of the table."""

    section: str
    case: str
    library: str
    measured: str
    ratio: str


class Found(NamedTuple):
    """What the bundles of a folder say."""

    rows: list[Row]
    short: list[str]
    """Bars that fall short, libraries and checkpoints that are missing among them."""


def read_rows(folder: Path, *, quick: bool) -> Found:
    """The rows of every part, in order."""
    from headrace._published import read_published

    tasks = TASKS[:1] if quick else TASKS
    bundles: dict[str, Any] = _bundles(folder)
    rows: list[Row] = []
    short: list[str] = []
    for task in tasks:
        rows += _speed(task, bundles, short)
    for library in LIBRARIES:
        rows += _learning(library, bundles, short)
    for library in LIBRARIES:
        rows += _overhead(library, bundles, short)
    for name, entry in read_published().items():
        if not quick or entry["task"] == tasks[0]:
            rows += _play(name, bundles, short)
    return Found(rows, short)


def _bundles(folder: Path) -> dict[str, Any]:
    """Part and name → bundle."""
    from headrace.bench import read_bundle
    from headrace.bench._bundle_files import bundle_paths
    from headrace.errors import DataError

    try:
        paths = bundle_paths(folder)
    except DataError:
        return {}  # nothing measured yet: every row will be missing, and the bars say so
    return {str(path.parent.relative_to(folder)): read_bundle(path) for path in paths}


def _missing(section: str, case: str, library: str, short: list[str]) -> list[Row]:
    short.append(f"{section} of {case} with {library}: expected a bundle, got none; run --part {section}")
    return [Row(section, case, library, "not measured", "")]


def _speed(task: str, bundles: dict[str, Any], short: list[str]) -> list[Row]:
    rows: list[Row] = []
    first = bundles.get(f"speed/{task}-{LIBRARIES[0]}")
    for library in LIBRARIES:
        bundle = bundles.get(f"speed/{task}-{library}")
        if bundle is None:
            rows += _missing("speed", task, library, short)
            continue
        collect, learn = _collection_fps(bundle), bundle.extra["learning_fps"]
        text = (
            f"collect {statistics.median(collect):,.0f}, learn {statistics.median(learn):,.0f} frames/s, "
            f"{bundle.extra['peak_memory_mb']:,.0f} MB"
        )
        ratio = ""
        if first is not None:
            pairs = zip(_frame_times(first), _frame_times(bundle), strict=True)
            ratio = f"{statistics.median(a / b for a, b in pairs):.2f} of {LIBRARIES[0]}"
        rows.append(Row("speed", f"{task}, {bundle.runtime.frames:,} frames", library, text, ratio))
    return rows


def _collection_fps(bundle: Any) -> list[float]:
    """Frames per second of each iteration."""
    return [bundle.runtime.steps_per_iteration / seconds for seconds in bundle.runtime.collection_time_s.samples]


def _frame_times(bundle: Any) -> list[float]:
    """Seconds a frame, collecting and learning together, of each iteration."""
    learn = bundle.extra["learning_fps"]
    return [1 / one + 1 / other for one, other in zip(_collection_fps(bundle), learn, strict=True)]


def _learning(library: str, bundles: dict[str, Any], short: list[str]) -> list[Row]:
    runs = [bundle for name, bundle in sorted(bundles.items()) if name.startswith(f"learning/{library}-seed")]
    if not runs:
        return _missing("learning", "cartpole", library, short)
    import numpy as np

    from headrace.statistics import bootstrap_interval

    final = bootstrap_interval(np.array([run.extra["final_return"] for run in runs]))
    count = runs[0].runtime.iterations_completed
    text = f"return {final.value:.0f} [{final.low:.0f}, {final.high:.0f}] after {count} iterations"
    reached = [run.extra["seconds_to_threshold"] for run in runs if run.extra["seconds_to_threshold"] is not None]
    when = f"0 of {len(runs)} seeds reached it"
    if reached:
        took = bootstrap_interval(np.array(reached))
        when = f"{took.value:.1f} s [{took.low:.1f}, {took.high:.1f}], {len(reached)} of {len(runs)} seeds"
    return [Row("learning", f"cartpole to {runs[0].extra['threshold']:.0f}", library, text, when)]


def _overhead(library: str, bundles: dict[str, Any], short: list[str]) -> list[Row]:
    bundle = bundles.get(f"overhead/{library}")
    if bundle is None:
        return _missing("overhead", "do nothing", library, short)
    size = bundle.extra["pairs_per_round"]
    native, ours = (
        [statistics.median(values[i : i + size]) for i in range(0, len(values), size)]
        for values in (bundle.extra["native_collection_fps"], _collection_fps(bundle))
    )
    ratio = statistics.median(a / b for a, b in zip(native, ours, strict=True))
    if ratio > BAR:
        short.append(f"overhead of {library}: expected ≤ {BAR:.2f}× its own loop, got {ratio:.3f}×")
    step = bundle.run.num_envs / statistics.median(native) * 1e6
    return [Row("overhead", "do nothing", library, f"native {step:,.0f} µs/step", f"{ratio:.3f}×")]


def _play(name: str, bundles: dict[str, Any], short: list[str]) -> list[Row]:
    bundle = bundles.get(f"play/{name}")
    if bundle is None:
        return _missing("play", name, "its library", short)
    play, bare = bundle.extra["play_fps"], bundle.extra["bare_fps"]
    share = statistics.median(a / b for a, b in zip(play, bare, strict=True))
    reward = f", return {bundle.reward.mean:,.0f} of {bundle.reward.n} episodes" if bundle.reward else ""
    if bundle.success_rate is not None:
        reward += f", {bundle.success_rate.rate:.0%} succeed"
    text = f"{statistics.median(play):,.0f} frames/s{reward}"
    case = f"{name}, {bundle.run.num_envs} environments"
    return [Row("play", case, bundle.checkpoint.library, text, f"{share:.2f} of env.step")]


# --- output -------------------------------------------------------------------------------------------------------


def print_table(found: Found) -> None:
    """One table for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="RL libraries")
    for column, justify in zip(Row._fields, ("left", "left", "left", "right", "right"), strict=True):
        table.add_column(column, justify=justify)  # pyright: ignore[reportArgumentType]  # two words that it takes
    for row in found.rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 170).print(table)
