"""The page: sections, filters, style and script in one file that needs no network.

The sections of the page, each a figure made of bundles; None where they have nothing for it.
"""

from __future__ import annotations

import base64
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from headrace.bench._verdicts import MetricComparison
from headrace.bench.comparison import Comparison
from headrace.bench.comparison_output import all_notes, cells
from headrace.bench.reporting._plots import Bar, Series, bars, icicle, line_plot, spans_decades
from headrace.bench.schema import Bundle, PlayBundle, RuntimeBundle, Spread, StartupBundle, TrainingBundle, with_label
from headrace.errors import DataError

_NONE = "–"
_POINTS = 200
"""Of a learning curve; longer ones are thinned."""


def html_table(label: str, caption: str, heads: Sequence[str], rows: Iterable[str], *, attributes: str = "") -> str:
    """Return a table that scrolls on its own.

    Args:
        label: what a screen reader calls it; escaped here, as everything but ``rows``.
        caption: above it.
        heads: of the columns.
        rows: ``<tr>`` elements.
        attributes: of the ``<table>``.
    """
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}"><table{attributes}>'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def html_notes(notes: Iterable[str]) -> str:
    """Remarks as a list."""
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<ul class="notes">{items}</ul>'


def html_row(head: str, cells: Iterable[str], *, after: str = "", attributes: str = "") -> str:
    """Return a row with its name in front; ``after`` is the HTML of further cells, ``attributes`` are those of the
    row."""
    return f'<tr{attributes}><th scope="row">{escape(head)}</th>{_cells(cells)}{after}</tr>'


def _cells(texts: Iterable[str]) -> str:
    return "".join(f"<td>{escape(text)}</td>" for text in texts)


def run_name(bundle: Bundle) -> str:
    """Return what a reader calls the run."""
    run = bundle.run
    parts = [run.label or "", run.task, bundle.kind, run.framework or "", f"{run.num_envs} envs", f"seed {run.seed}"]
    return ", ".join(part for part in parts if part)


def evaluations(bundles: Sequence[Bundle]) -> str | None:
    """Return what policies achieved on planned episodes, with intervals, and what that cost."""
    played = [
        bundle
        for bundle in bundles
        if isinstance(bundle, PlayBundle) and bundle.plan is not None and bundle.plan.kind == "episodes"
    ]
    if not played:
        return None
    heads = ("evaluation", "task", "episodes", "success", "mean reward", "model calls", "rows inferred", "images drawn")
    caption = "Every planned episode once; 95 % intervals."
    return html_table("table of evaluations", caption, (*heads, "seconds"), map(_evaluation_row, played))


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


def runs_table(bundles: Sequence[Bundle]) -> str:
    """Every run, a row each."""
    heads = (
        *("run", "side", "kind", "task", "library", "envs", "status", "frames/s", "reward", "success", "peak GB"),
        *("seconds", "commit"),
    )
    caption = "Every run; the filters above choose rows here and lines below."
    return html_table("table of runs", caption, heads, map(_run_row, bundles), attributes=' id="runs-table"')


def _run_row(bundle: Bundle) -> str:
    run, versions = bundle.run, bundle.versions
    fps = reward = success = peak = None
    if not isinstance(bundle, StartupBundle):
        fps, peak = bundle.runtime.total_fps, _peak(bundle)
    if isinstance(bundle, PlayBundle):
        reward = bundle.reward and bundle.reward.mean
    if isinstance(bundle, TrainingBundle):
        reward = bundle.learning.reward and bundle.learning.reward.final_ema
    if isinstance(bundle, (PlayBundle, TrainingBundle)):
        success = bundle.success_rate and bundle.success_rate.rate
    dirty = "+" if versions.git_dirty else ""
    commit = f"{versions.git_commit[:9]}{dirty}" if versions.git_commit else _NONE
    reason = f' title="{escape(run.status_reason)}"' if run.status_reason else ""
    marks = {"run": run.run_id, "kind": bundle.kind, "task": run.task, "library": run.framework or _NONE}
    marks["status"] = run.status
    data = " ".join(f'data-{name}="{escape(value)}"' for name, value in marks.items())
    about = (run.label or _NONE, bundle.kind, run.task, run.framework or _NONE, _figure(run.num_envs, ","))
    numbers = (_figure(fps, ",.0f"), _figure(reward, ",.1f"), _figure(success, ".0%"), _figure(peak, ".2f"))
    after = f'<td><span class="status {run.status}"{reason}>{run.status}</span></td>'
    after += _cells((*numbers, _figure(run.duration_s, ",.1f"), commit))
    return html_row(run.run_id, about, after=after, attributes=f" {data}")


def _peak(bundle: RuntimeBundle | TrainingBundle | PlayBundle) -> float | None:
    memory = bundle.resources.ram_gb
    return memory and (memory.peak or memory.mean)


def throughput(bundles: Sequence[Bundle]) -> str | None:
    """Frames per second against the number of environments, a line per task, kind and library."""
    groups: dict[str, list[tuple[int, float, Bundle]]] = {}
    for bundle in bundles:
        run, fps = bundle.run, None if isinstance(bundle, StartupBundle) else bundle.runtime.total_fps
        if fps and run.num_envs is not None and run.status == "completed":
            key = " ".join(filter(None, (run.task, bundle.kind, run.framework, run.label)))
            groups.setdefault(key, []).append((run.num_envs, fps, bundle))
    series: list[Series] = []
    for name, found in sorted(groups.items()):
        by_envs: dict[int, list[float]] = {}
        for envs, fps, _ in found:
            by_envs.setdefault(envs, []).append(fps)
        line = [(float(envs), statistics.median(values)) for envs, values in sorted(by_envs.items())]
        dots = [(float(envs), fps, f"{run_name(b)}: {fps:,.0f} frames/s") for envs, fps, b in found]
        series.append(Series(name=name, line=line, dots=dots, runs=[b.run.run_id for _, _, b in found]))
    if not series:
        return None
    return line_plot(
        series,
        x="environments",
        y="frames per second",
        label="Throughput against the number of environments",
        log_x=True,
        log_y=spans_decades([fps for found in groups.values() for _, fps, _ in found]),
    )


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
    return Series(name=name + many, line=line, band=band, runs=[run.run.run_id for run in runs])


def time_split(bundles: Sequence[Bundle]) -> str | None:
    """Where the time of a step or of a training went, as shares."""
    rows: list[Bar] = []
    for bundle in bundles:
        parts = _split(bundle)
        whole = sum(value for _, value in parts)
        if whole > 0:
            shares = [(name, value / whole) for name, value in parts]
            shown = ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.005)
            rows.append(_bar(bundle, shares, shown))
    return bars(rows) if rows else None


def _bar(bundle: Bundle, parts: list[tuple[str, float]], shown: str) -> Bar:
    return Bar(name=run_name(bundle), run=bundle.run.run_id, parts=parts, shown=shown)


def _split(bundle: Bundle) -> list[tuple[str, float]]:
    if isinstance(bundle, TrainingBundle) and bundle.time_split_s is not None:
        split = bundle.time_split_s
        return [("collection", split.collection), ("learning", split.learning), ("other", split.other)]
    timing = None if isinstance(bundle, StartupBundle) else bundle.runtime.environment_step_timing
    if timing is None:
        return []
    known = {
        "physics": timing.simulation_step_time_s,
        "rendering": timing.render_step_time_s,
        "task": timing.task_step_time_s,
    }
    parts = [(name, statistic.mean) for name, statistic in known.items() if statistic is not None]
    rest = timing.environment_step_time_s.mean - sum(value for _, value in parts)
    return [*parts, ("rest of step", max(rest, 0.0))]


def memory(bundles: Sequence[Bundle]) -> str | None:
    """Peak resident memory."""
    rows: list[Bar] = []
    for bundle in bundles:
        peak = None if isinstance(bundle, StartupBundle) else _peak(bundle)
        if peak is not None:
            rows.append(_bar(bundle, [("peak", peak)], f"{peak:.2f} GB"))
    return bars(rows, legend=False) if rows else None


def startup(bundles: Sequence[Bundle]) -> str | None:
    """Profiled start-ups as icicles; phases of the other runs as bars."""
    found: list[str] = []
    rows: list[Bar] = []
    for bundle in bundles:
        if isinstance(bundle, StartupBundle):
            body = "".join(
                f"<h4>{escape(name)}: {phase.total_time_s:.2f} s</h4>"
                + (icicle(phase.tree, label=f"{name}: {phase.total_time_s:.2f} s") if phase.tree is not None else "")
                for name, phase in bundle.phases.items()
            )
            found.append(f'<div data-run="{escape(bundle.run.run_id)}"><h3>{escape(run_name(bundle))}</h3>{body}</div>')
        else:
            spent = bundle.runtime.startup_time_s.model_dump()
            parts = [(name.replace("_", " "), float(value)) for name, value in spent.items() if value]
            if parts:
                rows.append(_bar(bundle, parts, f"{sum(value for _, value in parts):.2f} s"))
    if rows:
        found.append(bars(rows))
    return "".join(found) or None


def verdicts(comparisons: Sequence[Comparison], names: tuple[str, str]) -> str | None:
    """Return a table per comparison."""
    tables: list[str] = []
    for comparison in comparisons:
        heads = ("metric", names[0], names[1], "change", "95 % interval", "p", "n", "verdict")
        title = (
            f"{comparison.kind} of {comparison.task}: {names[1]} against {names[0]}; medians of runs, means of episodes"
        )
        shown = html_table(title, title, heads, map(_verdict_row, comparison.rows))
        tables.append(shown + html_notes(all_notes(comparison)))
    return "".join(tables) or None


def _verdict_row(row: MetricComparison) -> str:
    path, *shown, _, _ = cells(row)
    word = row.verdict or "shown only"
    badge = f'<span class="verdict {word.replace(" ", "-")}" title="{escape(row.reason)}">{word}</span>'
    return html_row(path, shown, after=f"<td>{badge}</td>")


def _figure(value: float | None, form: str) -> str:
    """Return a number, or a dash where there is none."""
    return _NONE if value is None else format(value, form)


class Saving(NamedTuple):
    """How much the usual way takes of something, and how much was taken here."""

    what: str
    usual_way: str
    usual: float
    ours: float
    unit: str = ""

    def cells(self) -> tuple[str, str, str, str]:
        """Return the cells of a row: the usual way, what it takes, what was taken here, and the share that was
        saved."""
        share = 1 - self.ours / self.usual
        return self.usual_way, f"{self.usual:,.0f}{self.unit}", f"{self.ours:,.0f}{self.unit}", f"{share:.0%}"


class Film(NamedTuple):
    """An mp4 file, which becomes part of the page."""

    path: Path
    caption: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """The opening of a report."""

    sentences: Sequence[str]
    savings: Sequence[Saving] = ()
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
    """
    if not bundles:
        raise DataError("report: expected at least one bundle, got none")
    # a run without a name gets that of its side, by which lines and rows are told apart
    bundles = [with_label(run, run.run.label or (sides or {}).get(run.run.run_id)) for run in bundles]
    resources = files("headrace.bench.reporting")
    style, script = (resources.joinpath(name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    parts = {
        ("story", "In short"): story and _told(story),
        ("evaluations", "Evaluations"): evaluations(bundles),
        ("runs", "Runs"): _filters(bundles) + runs_table(bundles),
        ("throughput", "Throughput"): throughput(bundles),
        ("learning", "Learning curves"): learning_curves(bundles),
        ("split", "Where the time went"): time_split(bundles),
        ("memory", "Peak memory"): memory(bundles),
        ("startup", "Start-up"): startup(bundles),
        ("verdicts", "Comparison"): verdicts(comparisons, names),
    }
    shown = [(name, heading, body) for (name, heading), body in parts.items() if body]
    links = "".join(f'<a href="#{name}">{heading}</a>' for name, heading, _ in shown)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body>"
        f"<header><h1>{escape(title)}</h1>{_facts(bundles)}{html_notes(notes) if notes else ''}"
        f'<nav aria-label="sections">{links}</nav></header>'
        f"<main>{''.join(_section(*part) for part in shown)}</main><script>{script}</script></body></html>\n"
    )


def _section(name: str, heading: str, body: str) -> str:
    return f'<section id="{name}" aria-labelledby="{name}-h"><h2 id="{name}-h">{heading}</h2>{body}</section>'


def _told(story: Story) -> str:
    said = "".join(f"<p>{escape(sentence)}</p>" for sentence in story.sentences)
    return said + _savings(story.savings) + "".join(_film(film) for film in story.films)


def _savings(savings: Sequence[Saving]) -> str:
    """Return a table of what the usual way takes and what was taken here."""
    if not savings:
        return ""
    rows = (html_row(saving.what, saving.cells()) for saving in savings)
    heads = ("what", "the usual way", "it takes", "here", "saved")
    return html_table("what was saved", "What was saved", heads, rows)


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


def _filters(bundles: Sequence[Bundle]) -> str:
    choices = {
        "kind": {bundle.kind for bundle in bundles},
        "task": {bundle.run.task for bundle in bundles},
        "library": {bundle.run.framework or "–" for bundle in bundles},
        "status": {bundle.run.status for bundle in bundles},
    }
    fields = "".join(
        f'<label>{name}<select data-filter="{name}"><option value="">all</option>'
        + "".join(f'<option value="{escape(value)}">{escape(value)}</option>' for value in sorted(values))
        + "</select></label>"
        for name, values in choices.items()
    )
    return (
        f'<form class="filters" aria-label="filters">{fields}'
        '<label>search<input type="search" data-filter="text"></label>'
        '<button type="reset">show all</button>'
        f'<output role="status" id="count">{len(bundles)} of {len(bundles)} runs</output></form>'
    )
