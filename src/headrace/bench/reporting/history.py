"""A metric over the commits at which it was measured, and where it changed.

Plots as SVG in the text of the page: lines over two axes, and values of several sides on one scale.
"""

from __future__ import annotations

import fnmatch
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

import numpy as np

from headrace.bench.figures import Metric, metrics
from headrace.bench.schema import Bundle

_WIDTH, _HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 14, 12, 46
_STRIP_WIDTH, _STRIP_HEIGHT = 180, 13
_MOST_DOTS = 200
COLORS = 8
"""Series take the colors --c0 … --c7 of the style sheet in turn; every further round has other dashes."""
_DASHES = ("", "7 4", "2 3", "10 3 2 3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line with its band and dots. Coordinates are data."""

    name: str
    line: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()
    """x, low, high."""
    dots: Sequence[tuple[float, float, str]] = ()
    """x, y, what it is."""


@dataclass(frozen=True, slots=True)
class _Scale:
    start: float
    end: float
    ticks: Sequence[float]
    low: float
    high: float

    def __call__(self, value: float) -> float:
        share = 0.5 if self.high == self.low else (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def line_plot(
    series: Sequence[Series],
    *,
    x: str,
    y: str,
    label: str,
    x_names: Sequence[str] = (),
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Return lines over two labeled axes. The y axis has 0 on it, but where there are ``x_names``.

    Args:
        series: the lines.
        x: what the axis below is.
        y: what the axis on the left is.
        label: says in words what is to be seen.
        x_names: of x = 0, 1, 2, … instead of numbers.
        marks: vertical lines, (x, what they mean).
    """
    xs = [p[0] for s in series for p in (*s.line, *s.dots)]
    ys = [p[1] for s in series for p in (*s.line, *s.dots)] + [v for s in series for b in s.band for v in b[1:]]
    across = _x_scale(xs, len(x_names))
    up = _y_scale(ys, zero=not x_names)
    below = _HEIGHT - _BOTTOM + 18
    names = {float(i): name for i, name in enumerate(x_names)}
    parts = [f"<title>{escape(label)}</title>"]
    parts += [
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{up(tick):.1f}" y2="{up(tick):.1f}"/>'
        f'<text class="tick end" x="{_LEFT - 6}" y="{up(tick) + 4:.1f}">{short(tick)}</text>'
        for tick in up.ticks
    ]
    parts += [
        f'<text class="tick mid" x="{across(t):.1f}" y="{below}">{escape(names.get(t, short(t)))}</text>'
        for t in across.ticks
    ]
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    parts.append(f'<text class="axis mid" x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT - 6}">{escape(x)}</text>')
    parts.append(f'<text class="axis mid" transform="translate(14 {middle}) rotate(-90)">{escape(y)}</text>')
    parts += [
        f'<line class="mark" x1="{across(at):.1f}" x2="{across(at):.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}">'
        f"<title>{escape(what)}</title></line>"
        for at, what in marks
    ]
    parts += [_draw(s, i, across, up) for i, s in enumerate(series)]
    name = f'aria-label="{escape(label)}"'
    picture = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" {name}>{"".join(parts)}</svg>'
    keys = "".join(
        f'<li><svg class="key" viewBox="0 0 28 12" aria-hidden="true">'
        f'<line x1="1" x2="27" y1="6" y2="6" {_line_style(i)}/></svg>{escape(s.name)}</li>'
        for i, s in enumerate(series)
    )
    return f'<div class="plot" tabindex="0" role="group" {name}>{picture}</div><ul class="legend">{keys}</ul>'


def strips(sides: Sequence[Sequence[float]], label: str, within: tuple[float, float] | None = None) -> str:
    """Return the values of each side as dots in a row of its own, with its median, all on one scale.

    Args:
        sides: values; of many, evenly spaced quantiles are drawn.
        label: what a screen reader says.
        within: ends of the scale; None for the smallest and largest value.
    """
    pooled = [value for side in sides for value in side]
    low, high = within or (min(pooled, default=0.0), max(pooled, default=0.0))
    scale = _Scale(5, _STRIP_WIDTH - 5, (), low, high)
    parts: list[str] = []
    for number, side in enumerate(sides):
        y, color = _STRIP_HEIGHT * (number + 0.5), f"var(--c{number % COLORS})"
        shown = side if len(side) <= _MOST_DOTS else np.quantile(side, np.linspace(0, 1, _MOST_DOTS)).tolist()
        parts += [f'<circle cx="{scale(v):.1f}" cy="{y}" r="2.6" fill="{color}" opacity="0.45"/>' for v in shown]
        if side:
            at = scale(float(np.median(side)))
            parts.append(f'<rect x="{at - 1.2:.1f}" y="{y - 5.5}" width="2.4" height="11" fill="{color}"/>')
    height = _STRIP_HEIGHT * len(sides)
    return (
        f'<svg class="strips" viewBox="0 0 {_STRIP_WIDTH} {height}" width="{_STRIP_WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers from low to high."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """Return a number for an axis: 1,024, 15k, 2M, 0.05."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.4g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _x_scale(xs: Sequence[float], names: int) -> _Scale:
    low, high, ends = min(xs), max(xs), (_LEFT + 6, _WIDTH - _RIGHT - 6)
    if names:
        return _Scale(*ends, [float(i) for i in range(0, names, -(-names // 8))], 0.0, max(names - 1.0, 1e-9))
    return _Scale(*ends, nice_ticks(low, high, 6), low, high)


def _y_scale(ys: Sequence[float], *, zero: bool) -> _Scale:
    ends = _HEIGHT - _BOTTOM, _TOP
    bottom, top = min(*([0.0] if zero else []), *ys, max(ys)), max(ys)
    top = top if top > bottom else bottom + 1
    return _Scale(*ends, nice_ticks(bottom, top), bottom, top)


def _draw(series: Series, number: int, across: _Scale, up: _Scale) -> str:
    def place_labels(points: Iterable[tuple[float, float]]) -> str:
        return " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)

    parts: list[str] = []
    color = f"var(--c{number % COLORS})"
    if series.band:
        edge = [(x, high) for x, _, high in series.band] + [(x, low) for x, low, _ in reversed(series.band)]
        parts.append(f'<polygon points="{place_labels(edge)}" fill="{color}" opacity="0.18"/>')
    parts.append(f'<polyline points="{place_labels(series.line)}" fill="none" {_line_style(number)}/>')
    parts += [
        f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="3.5" fill="{color}"><title>{escape(what)}</title></circle>'
        for x, y, what in series.dots
    ]
    return f"<g>{''.join(parts)}</g>"


def _line_style(number: int) -> str:
    dash = _DASHES[number // COLORS % len(_DASHES)]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'stroke="var(--c{number % COLORS})" stroke-width="2"{dashes}'


USUAL = ("runtime.total_fps", "runtime.cpu_s_per_kframe", "train.reward_final_ema", "play.reward", "play.success_rate")
"""Metrics that are drawn where none is named."""
_DRAWS = 1_999


class History(NamedTuple):
    """One metric of runs that differ in nothing but their commit."""

    what: str
    """Kind, task and circumstances of the runs."""
    metric: Metric
    commits: list[str]
    """In the order in which they were first measured."""
    values: list[list[float]]
    """Of the runs of each commit."""
    changes: list[tuple[int, float]]
    """Index of the first commit that differs from those before it, and the change of the median as a share."""


def histories(bundles: Sequence[Bundle], patterns: Sequence[str], *, alpha: float, min_effect: float) -> list[History]:
    """Return the metrics that were measured at two commits or more.

    Args:
        bundles: of completed runs, with the commit of their project.
        patterns: of metrics.
        alpha: chance that a history without changes is given one.
        min_effect: smallest change that matters.
    """
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    first: dict[tuple[str, str], Metric] = {}
    for bundle in sorted(bundles, key=lambda bundle: bundle.run.start_time_utc):
        run, commit = bundle.run, bundle.versions.git_commit
        if commit is None or run.status != "completed":
            continue
        parts = (bundle.kind, run.task, run.framework, f"{run.num_envs} environments", bundle.hardware.cpu_name)
        what = ", ".join(filter(None, parts))
        for metric in metrics(bundle):
            if any(fnmatch.fnmatchcase(metric.path, pattern) for pattern in patterns or USUAL):
                key = (what, metric.path)
                first.setdefault(key, metric)
                commits = found.setdefault(key, {})
                commits.setdefault(commit + ("+" if bundle.versions.git_dirty else ""), []).append(metric.value)
    made: list[History] = []
    for (what, path), commits in found.items():
        if len(commits) > 1:
            values = list(commits.values())
            changes = change_points(values, alpha=alpha, min_effect=min_effect)
            made.append(History(what, first[what, path], list(commits), values, changes))
    return made


def change_points(
    groups: Sequence[Sequence[float]], *, alpha: float = 0.01, min_effect: float = 0.05, first: int = 0
) -> list[tuple[int, float]]:
    """Return where values change: the group that begins a new level, and the change of the median as a share.

    The groups are cut where two levels explain the values best. The cut stands if values in random order can rarely be
    cut as well, and both sides are then cut again: binary segmentation with a permutation test.
    """
    values = np.concatenate([np.asarray(group, dtype=np.float64) for group in groups])
    edges = np.cumsum([len(group) for group in groups])[:-1]
    if not len(edges) or not values.std():
        return []
    scores = _cut_scores(values[None], edges)[0]
    best = int(scores.argmax())
    shuffled = np.random.default_rng(0).permuted(np.tile(values, (_DRAWS, 1)), axis=1)
    p = (1 + int((_cut_scores(shuffled, edges).max(axis=1) >= scores[best] - 1e-12).sum())) / (_DRAWS + 1)
    before, after = (statistics.median(part) for part in np.split(values, [edges[best]]))
    change = (after - before) / abs(before) if before else float("inf")
    if p >= alpha or abs(change) < min_effect:
        return []
    cut = best + 1
    rest = {"alpha": alpha, "min_effect": min_effect}
    return [
        *change_points(groups[:cut], **rest, first=first),
        (first + cut, change),
        *change_points(groups[cut:], **rest, first=first + cut),
    ]


def _cut_scores(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return how far apart the means of (rows, n) values are on both sides of each edge, in their standard errors."""
    count = values.shape[1]
    left = values.cumsum(axis=1)[:, edges - 1]
    difference = left / edges - (values.sum(axis=1, keepdims=True) - left) / (count - edges)
    return np.abs(difference) * np.sqrt(edges * (count - edges) / count)
