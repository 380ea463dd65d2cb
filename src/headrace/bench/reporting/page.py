"""The page: the verdicts first, then a row per side, then plots; one file without a script that needs no network.

Each section is made of bundles; it is None where they have nothing for it.
"""

from __future__ import annotations

import base64
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np

from headrace.bench.comparing import all_notes, cells, change
from headrace.bench.comparison import Comparison, MetricComparison, Verdict
from headrace.bench.figures import Metric, metrics, number
from headrace.bench.reporting.history import History, Series, line_plot, strips
from headrace.bench.schema import Bundle, PlayBundle, Spread, StartupBundle, TrainingBundle, with_label
from headrace.errors import DataError
from headrace.statistics import Interval, paired_interval, wilson_interval

_NONE = "–"
_POINTS = 200
"""Of a learning curve; longer ones are thinned."""


def html_table(label: str, caption: str, heads: Sequence[str], rows: Iterable[str]) -> str:
    """Return a table that scrolls on its own.

    Args:
        label: what a screen reader calls it; escaped here, as everything but ``rows``.
        caption: above it.
        heads: of the columns.
        rows: ``<tr>`` elements.
    """
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def html_notes(notes: Iterable[str]) -> str:
    """Remarks as a list."""
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<ul class="notes">{items}</ul>'


def html_row(head: str, cells: Iterable[str], *, after: str = "") -> str:
    """Return a row with its name in front; ``after`` is the HTML of further cells."""
    return f'<tr><th scope="row">{escape(head)}</th>{_cells(cells)}{after}</tr>'


def _cells(texts: Iterable[str]) -> str:
    return "".join(f"<td>{escape(text)}</td>" for text in texts)


def evaluations(bundles: Sequence[Bundle]) -> str | None:
    """Return what policies achieved on planned episodes, with intervals, and what that cost."""
    played = [
        bundle
        for bundle in bundles
        if isinstance(bundle, PlayBundle) and bundle.plan is not None and bundle.plan.kind == "episodes"
    ]
    if not played:
        return None
    by_task, above = task_table(played), ""
    if by_task is not None:
        label = "Success by task; after the first column with the paired difference from it. 95 % intervals."
        above = html_table(
            "table of tasks", label, ("task", *by_task.columns), (html_row(*row) for row in by_task.rows)
        )
    heads = ("evaluation", "task", "episodes", "success", "mean reward", "model calls", "rows inferred", "images drawn")
    caption = "Every planned episode once; 95 % intervals."
    return above + html_table("table of evaluations", caption, (*heads, "seconds"), map(_evaluation_row, played))


def _evaluation_row(bundle: PlayBundle) -> str:
    run, plan, episodes = bundle.run, bundle.plan, bundle.runtime.episodes
    known = cast("Mapping[str, int]", bundle.extra.get("counters") or {})
    rate, reward = bundle.success_rate, bundle.reward
    done = episodes.completed if episodes is not None else None
    unfinished = plan is not None and done != plan.episodes_planned
    shown = (
        *(run.task, _figure(done, ",") + (f" of {plan.episodes_planned:,}" if plan and plan.episodes_planned else "")),
        _NONE if rate is None or unfinished else _with_interval(rate.rate, rate.interval, ".0%"),
        _NONE if reward is None or unfinished else _with_interval(reward.mean, reward.interval, ",.1f"),
        *(_figure(known.get(name), ",") for name in ("model_calls", "rows_inferred", "frames_drawn")),
        _figure(run.duration_s, ",.1f"),
    )
    return html_row(run.label or run.run_id, shown)


def _with_interval(value: float, interval: Spread | None, form: str) -> str:
    around = "" if interval is None else f" [{interval.low:{form}}, {interval.high:{form}}]"
    return f"{value:{form}}{around}"


Figures: TypeAlias = Mapping[str, Metric]
"""The metrics of a run by path."""
_MAIN = {"play.reward": "return", "train.reward_final_ema": "return", "runtime.total_fps": "throughput"}


class _Side(NamedTuple):
    """Runs that have everything in common but their seed."""

    label: str
    kind: str
    task: str
    library: str
    envs: str


def sides_table(bundles: Sequence[Bundle]) -> str:
    """Return a row per side: how its runs are distributed in their main figure, on one scale with like runs."""
    sides: dict[_Side, list[Bundle]] = {}
    for bundle in bundles:
        run = bundle.run
        key = _Side(run.label or _NONE, bundle.kind, run.task, run.framework or _NONE, _figure(run.num_envs, ","))
        sides.setdefault(key, []).append(bundle)
    measured = {key: [{metric.path: metric for metric in metrics(run)} for run in runs] for key, runs in sides.items()}
    figures = {key: _main_figures(runs, measured[key]) for key, runs in sides.items()}
    rows: list[str] = []
    for key, runs in sides.items():
        name, unit, values = figures[key]
        alike = [v for other, found in figures.items() if other[1:3] == key[1:3] for v in found[2]]
        picture, middle, ends = _NONE, _NONE, _NONE
        if values:
            middle = number(statistics.median(values), unit)
            ends = f"{number(min(values), unit)} to {number(max(values), unit)}" if len(values) > 1 else _NONE
            picture = strips([values], f"{name}: {middle}", (min(alike), max(alike)))
        rates = _pick(measured[key], "play.success_rate", "train.success_rate")
        memory = _pick(measured[key], "runtime.ram_gb_peak")
        success, peak = (_figure(statistics.median(v) if v else None, f) for v, f in ((rates, ".0%"), (memory, ".2f")))
        failed = sum(run.run.status != "completed" for run in runs)
        count = f"{len(runs)}" + (f", {failed} not completed" if failed else "")
        cells = f"<td>{picture}</td>{_cells((middle, ends, name, count, success, peak, *key[1:]))}"
        rows.append(html_row(key.label if key.label != _NONE else key.task, (), after=cells))
    heads = ("side", "its runs", "median", "lowest to highest", "figure", "runs", "success", "peak GB")
    caption = "Every dot is a run; the bar is their median."
    return html_table("table of sides", caption, (*heads, *_Side._fields[1:]), rows)


def _main_figures(runs: Sequence[Bundle], found: Sequence[Figures]) -> tuple[str, str | None, list[float]]:
    """Return the name, the unit and the values of what matters most about completed runs of one kind."""
    done = [figures for run, figures in zip(runs, found, strict=True) if run.run.status == "completed"]
    if isinstance(runs[0], StartupBundle):
        spent = [[m.value for m in one.values() if not m.name.endswith("_unprofiled")] for one in done]
        return "start-up, profiled", "s", [sum(values) for values in spent]
    for path, name in _MAIN.items():
        if values := _pick(done, path):
            return name, "frames/s" if name == "throughput" else None, values
    return "throughput", "frames/s", []


def _pick(found: Sequence[Figures], *paths: str) -> list[float]:
    return [figures[path].value for figures in found for path in paths if path in figures]


def runs_table(bundles: Sequence[Bundle]) -> str:
    """Every run, a row each, folded away."""
    heads = ("run", "side", "kind", "status", "frames/s", "seconds", "seed", "commit")
    table = html_table("table of runs", "Every run.", heads, map(_run_row, bundles))
    return f"<details><summary>{len(bundles)} runs</summary>{table}</details>"


def _run_row(bundle: Bundle) -> str:
    run, versions = bundle.run, bundle.versions
    fps = None if isinstance(bundle, StartupBundle) else bundle.runtime.total_fps
    dirty = "+" if versions.git_dirty else ""
    commit = f"{versions.git_commit[:9]}{dirty}" if versions.git_commit else _NONE
    reason = f' title="{escape(run.status_reason)}"' if run.status_reason else ""
    after = f'<td><span class="status {run.status}"{reason}>{run.status}</span></td>'
    after += _cells((_figure(fps, ",.0f"), _figure(run.duration_s, ",.1f"), str(run.seed), commit))
    return html_row(run.run_id, (run.label or _NONE, bundle.kind), after=after)


def history_plots(found: Sequence[History]) -> str | None:
    """Return a plot per metric over the commits, with the commits at which it changed."""
    plots: list[str] = []
    for what, metric, commits, values, changes in found:
        unit = metric.unit or ""
        label = f"{metric.path} of {what}"
        said = [f"{change:+.1%} at {commits[at][:9]}" for at, change in changes]
        line = [(float(i), statistics.median(group)) for i, group in enumerate(values)]
        dots = [(float(i), v, f"{commits[i][:9]}: {number(v, unit)}") for i, group in enumerate(values) for v in group]
        plot = line_plot(
            [Series(name="median of the runs of a commit", line=line, dots=dots)],
            x="commit, in the order of its first run",
            y=f"{metric.name} {unit}".strip(),
            label=label,
            x_names=[commit[:7] for commit in commits],
            marks=[(at - 0.5, words) for (at, _), words in zip(changes, said, strict=True)],
        )
        plots.append(f"<h3>{escape(label)}</h3><p>{escape('; '.join(said) or 'no change point')}</p>{plot}")
    return "".join(plots) or None


def learning_curves(bundles: Sequence[Bundle]) -> str | None:
    """Return over frames: the median of the seeds, and a band from the lowest to the highest."""
    tasks: dict[str, dict[str, list[TrainingBundle]]] = {}
    for bundle in bundles:
        if isinstance(bundle, TrainingBundle) and _curve(bundle):
            name = " ".join(filter(None, (bundle.run.framework or "training", bundle.run.label)))
            tasks.setdefault(bundle.run.task, {}).setdefault(name, []).append(bundle)
    plots: list[str] = []
    for task, groups in sorted(tasks.items()):
        series = [_learning_series(name, runs) for name, runs in sorted(groups.items())]
        plot = line_plot(series, x="frames", y="return (moving average)", label=f"Learning curves of {task}")
        plots.append(f"<h3>{escape(task)}</h3>{plot}")
    return "".join(plots) or None


def _curve(bundle: TrainingBundle) -> list[tuple[float, float]]:
    reward, frames = bundle.learning.reward, bundle.learning.frames
    if reward is None or not frames:
        return []
    values = reward.series_ema or reward.series_per_iter or []
    points = [(float(x), y) for x, y in zip(frames, values, strict=False) if y is not None]
    step = max(1, len(points) // _POINTS)
    return points[::step] + (points[-1:] if points and (len(points) - 1) % step else [])


def _learning_series(name: str, runs: Sequence[TrainingBundle]) -> Series:
    curves = [_curve(run) for run in runs]
    ends = min(curve[-1][0] for curve in curves)
    start = max(curve[0][0] for curve in curves)
    grid = [x for x, _ in curves[0] if start <= x <= ends] or [curves[0][0][0]]
    rows = np.array([np.interp(grid, [x for x, _ in curve], [y for _, y in curve]) for curve in curves])
    line = list(zip(grid, np.median(rows, axis=0).tolist(), strict=True))
    edges = zip(grid, rows.min(axis=0).tolist(), rows.max(axis=0).tolist(), strict=True)
    band = list(edges) if len(runs) > 1 else []
    many = f" ({len(runs)} runs)" if len(runs) > 1 else ""
    return Series(name=name + many, line=line, band=band)


_ORDER: tuple[Verdict, ...] = ("regressed", "improved", "inconclusive", "unchanged")


def verdicts(comparisons: Sequence[Comparison], names: tuple[str, str]) -> str | None:
    """Return the answer of each comparison in a line, and its table, what changed first; notes are folded away."""
    parts: list[str] = []
    for comparison in comparisons:
        badges: list[str] = []
        for word in _ORDER:
            rows = [row for row in comparison.rows if row.verdict == word]
            changes = ": " + ", ".join(f"{row.path} {change(row)}" for row in rows) if word in _ORDER[:2] else ""
            badges += [f'<li class="{word}">{len(rows)} {word}{escape(changes)}</li>'] if rows else []
        title = f"{comparison.kind} of {comparison.task}, {names[1]} against {names[0]}"
        parts.append(
            f'<h3>{escape(title)}</h3><ul class="answer">{"".join(badges) or "<li>nothing to judge</li>"}</ul>'
        )
        heads = ("metric", "verdict", "change", f"{names[0]} above {names[1]}", "95 % interval", *names, "p", "n")
        caption = "Every dot is a run, or an episode; the bars are medians. All values of a row are on one scale."
        ranks: list[Verdict | None] = [*_ORDER, None]
        ordered = sorted(comparison.rows, key=lambda row: ranks.index(row.verdict))
        table = html_table(title, caption, heads, (_verdict_row(row, names) for row in ordered))
        notes = f"<details><summary>how this was judged</summary>{html_notes(all_notes(comparison))}</details>"
        parts.append(table + notes)
    return "".join(parts) or None


def _verdict_row(row: MetricComparison, names: tuple[str, str]) -> str:
    path, before, after, effect, interval, p, n, _, _ = cells(row)
    word = row.verdict or "shown only"
    badge = f'<span class="verdict {word.replace(" ", "-")}" title="{escape(row.reason)}">{word}</span>'
    picture = strips((row.sample.before, row.sample.after), f"{names[0]} {before}, {names[1]} {after}")
    rest = _cells((interval, before, after, p, n))
    return html_row(path, (), after=f"<td>{badge}</td>{_cells((effect,))}<td>{picture}</td>{rest}")


def _figure(value: float | None, form: str) -> str:
    """Return a number, or a dash where there is none."""
    return _NONE if value is None else format(value, form)


class Film(NamedTuple):
    """An mp4 file, which becomes part of the page."""

    path: Path
    caption: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """The opening of a report."""

    sentences: Sequence[str]
    films: Sequence[Film] = ()


def report_page(
    bundles: Sequence[Bundle],
    comparisons: Sequence[Comparison] = (),
    *,
    names: tuple[str, str] = ("A", "B"),
    title: str = "headrace report",
    notes: Sequence[str] = (),
    sides: Mapping[str, str] | None = None,
    story: Story | None = None,
    history: Sequence[History] = (),
) -> str:
    """Return the HTML of a report. A section that these runs have nothing for is left out.

    Args:
        bundles: the runs, in the order in which they are listed.
        comparisons: verdicts to show.
        names: of the two sides of the comparisons.
        title: of the page.
        notes: what else to say at the top, such as files that could not be read.
        sides: run id → the side of the comparison that it is on.
        story: what the page begins with.
        history: metrics over commits.
    """
    if not bundles:
        raise DataError("report: expected at least one bundle, got none")
    # a run without a name gets that of its side, by which lines and rows are distinguished
    bundles = [with_label(run, run.run.label or (sides or {}).get(run.run.run_id)) for run in bundles]
    style = files("headrace.bench.reporting").joinpath("report.css").read_text(encoding="utf-8")
    parts = {
        ("story", "In short"): story and _tell(story),
        ("verdicts", "Comparison"): verdicts(comparisons, names),
        ("history", "History"): history_plots(history),
        ("evaluations", "Evaluations"): evaluations(bundles),
        ("sides", "Sides"): sides_table(bundles),
        ("learning", "Learning curves"): learning_curves(bundles),
        ("runs", "Runs"): runs_table(bundles),
    }
    shown = [(name, heading, body) for (name, heading), body in parts.items() if body]
    links = "".join(f'<a href="#{name}">{heading}</a>' for name, heading, _ in shown)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body>"
        f"<header><h1>{escape(title)}</h1>{_facts(bundles)}{html_notes(notes) if notes else ''}"
        f'<nav aria-label="sections">{links}</nav></header>'
        f"<main>{''.join(_section(*part) for part in shown)}</main></body></html>\n"
    )


def _section(name: str, heading: str, body: str) -> str:
    return f'<section id="{name}" aria-labelledby="{name}-h"><h2 id="{name}-h">{heading}</h2>{body}</section>'


def _tell(story: Story) -> str:
    said = "".join(f"<p>{escape(sentence)}</p>" for sentence in story.sentences)
    return said + "".join(_film(film) for film in story.films)


def _film(film: Film) -> str:
    """Return the film itself, in the page."""
    coded = base64.b64encode(film.path.read_bytes()).decode("ascii")
    return (
        '<figure><video controls muted loop playsinline preload="metadata" '
        f'src="data:video/mp4;base64,{coded}"></video>'
        f"<figcaption>{escape(film.caption)}</figcaption></figure>"
    )


def _facts(bundles: Sequence[Bundle]) -> str:
    machines: set[str] = set()
    for machine in (bundle.hardware for bundle in bundles):
        cores = machine.cpu_usable or machine.cpu_count
        parts = [machine.cpu_name or "an unknown machine", f"{cores} cores" if cores else ""]
        parts += [f"{machine.ram_gb:.0f} GB" if machine.ram_gb else "", *(gpu.name for gpu in machine.gpu_devices)]
        machines.add(", ".join(filter(None, parts)))
    ended = max(bundle.run.end_time_utc for bundle in bundles)
    plural = "" if len(bundles) == 1 else "s"
    unfinished = sum(bundle.run.status != "completed" for bundle in bundles)
    note = f"; {unfinished} did not complete" if unfinished else ""
    # an evaluation keeps the processor alone, which is then that of a machine that another run describes whole
    whole = sorted(name for name in machines if not any(other.startswith(f"{name}, ") for other in machines))
    where = escape(" · ".join(whole))
    last = f"; the last ended {escape(ended)}" if ended else ""
    return f"<p>{len(bundles)} run{plural} on {where}{last}{note}.</p>"


Outcomes = Mapping[Any, bool]
"""Seed and id of an episode → whether it succeeded."""
_WIDEST = 48


class TaskTable(NamedTuple):
    """Rows of a table, as texts."""

    columns: list[str]
    rows: list[tuple[str, list[str]]]
    """Task → a cell per column; the last row is of all tasks that every column has."""


def task_table(played: Sequence[PlayBundle]) -> TaskTable | None:
    """Return success by task and column, from the second column on with the paired difference from the first.

    A column is a policy, with the settings in which evaluations of the same task and seed differ. None without two
    tasks or two columns, and where an evaluation is not complete or measures no success.
    """
    varying = _varying(played)
    cells: dict[str, dict[str, dict[Any, bool]]] = {}
    for bundle in played:
        rows = bundle.per_episode
        if bundle.run.status != "completed" or rows is None or rows.successes is None:
            return None
        known = {(bundle.run.seed, i): bool(won) for i, won in zip(rows.episode_ids, rows.successes, strict=True)}
        cells.setdefault(_column(bundle, varying), {}).setdefault(bundle.run.task, {}).update(known)
    tasks = list(dict.fromkeys(bundle.run.task for bundle in played))
    if max(len(tasks), len(cells)) < 2:
        return None
    first = next(iter(cells.values()))
    shared = [task for task in tasks if all(task in found for found in cells.values())]
    rows = [(t, [_cell(found.get(t), first.get(t), found is first) for found in cells.values()]) for t in tasks]
    pooled = [{(task, key): won for task in shared for key, won in found[task].items()} for found in cells.values()]
    total = [_cell(found, pooled[0], number == 0) for number, found in enumerate(pooled)]
    return TaskTable(list(cells), [*rows, (f"all of {len(shared)} tasks", total)] if shared else rows)


def _varying(played: Sequence[PlayBundle]) -> list[str]:
    """Return the settings in which evaluations of one task by one policy, with one seed, differ."""
    groups: dict[tuple[object, ...], list[Mapping[str, object]]] = {}
    for bundle in played:
        key = (bundle.run.task, bundle.run.seed, bundle.policy and bundle.policy.name)
        groups.setdefault(key, []).append(bundle.run.config.overrides)
    names = {name for group in groups.values() for settings in group for name in settings}
    return sorted(
        name
        for name in names
        if any(len({json.dumps(settings.get(name)) for settings in group}) > 1 for group in groups.values())
    )


def _column(bundle: PlayBundle, varying: Sequence[str]) -> str:
    name, settings = "" if bundle.policy is None else str(bundle.policy.name), bundle.run.config.overrides
    said = [f"{key}={json.dumps(settings[key])}" for key in varying if key in settings]
    return " ".join([name if len(name) <= _WIDEST else f"{name[:_WIDEST]}…", *said])


def _cell(found: Outcomes | None, before: Outcomes | None, alone: bool) -> str:
    if not found:
        return "–"
    rate = _percent(wilson_interval(sum(found.values()), len(found)), "")
    pairs = [(before[key], won) for key, won in found.items() if key in before] if before and not alone else []
    if not pairs:
        return rate
    kinds = ((True, True), (True, False), (False, True), (False, False))
    return f"{rate}; {_percent(paired_interval(*(pairs.count(kind) for kind in kinds)), '+')} over {len(pairs)} pairs"


def _percent(found: Interval, sign: str) -> str:
    return f"{found.value:{sign}.0%} [{found.low:{sign}.0%}, {found.high:{sign}.0%}]"
