"""Plots as text: lines and icicles as SVG, bars as HTML. Everything is drawn here; the page only hides and shows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from headrace.bench.schema import ProfileNode

_WIDTH, _HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 14, 12, 46
_TIME_AXIS = 26
_NEWLINE = "\n"  # between run ids, which may have spaces
COLORS = 8
"""Series take the colors --c0 … --c7 of the style sheet in turn; every further round has other dashes and dots."""
_DASHES = ("", "7 4", "2 3", "10 3 2 3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line with its band and dots. Coordinates are data; ``runs`` are the ids of the runs that it shows."""

    name: str
    line: Sequence[tuple[float, float]]
    runs: Sequence[str]
    band: Sequence[tuple[float, float, float]] = ()
    """x, low, high."""
    dots: Sequence[tuple[float, float, str]] = ()
    """x, y, what it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One horizontal bar of parts."""

    name: str
    run: str
    parts: Sequence[tuple[str, float]]
    shown: str
    """The figure beside the bar."""


@dataclass(slots=True)
class _Scale:
    low: float
    high: float
    start: float
    end: float
    log: bool = False
    ticks: list[float] = field(default_factory=list[float])

    def __call__(self, value: float) -> float:
        low, high, at = (
            (math.log2(v) for v in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        )
        share = 0.5 if high == low else (at - low) / (high - low)
        return self.start + share * (self.end - self.start)


def line_plot(series: Sequence[Series], *, x: str, y: str, label: str, log_x: bool = False, log_y: bool = False) -> str:
    """Lines over two labeled axes; ``label`` says in words what is to be seen. A linear y axis has 0 on it."""
    xs = [p[0] for s in series for p in (*s.line, *s.dots)]
    ys = [p[1] for s in series for p in (*s.line, *s.dots)] + [v for s in series for b in s.band for v in b[1:]]
    across = _x_scale(xs, log_x)
    up = _y_scale(ys, log_y)
    parts = [
        _axes(across, up, x, f"{y}, log scale" if log_y else y),
        *(_drawn(s, i, across, up) for i, s in enumerate(series)),
    ]
    return _plot(_HEIGHT, label, [f"<title>{escape(label)}</title>", *parts]) + _legend(series)


def bars(rows: Sequence[Bar], *, legend: bool = True) -> str:
    """Bars one under the other, all on one scale."""
    longest = max((sum(value for _, value in row.parts) for row in rows), default=0.0) or 1.0
    names = list(dict.fromkeys(name for row in rows for name, _ in row.parts))
    lines: list[str] = []
    for row in rows:
        pieces = "".join(
            f'<i style="width:{100 * value / longest:.2f}%;background:var(--c{names.index(name) % COLORS})" '
            f'title="{escape(name)}: {value:.4g}"></i>'
            for name, value in row.parts
            if value > 0
        )
        lines.append(
            f'<li data-run="{escape(row.run)}"><span class="name">{escape(row.name)}</span>'
            f'<span class="track">{pieces}</span><span class="value">{escape(row.shown)}</span></li>'
        )
    keys = "".join(f'<li><b style="background:var(--c{i % COLORS})"></b>{escape(n)}</li>' for i, n in enumerate(names))
    shown = f'<ul class="legend">{keys}</ul>' if legend else ""
    return f'<ul class="bars">{"".join(lines)}</ul>{shown}'


def icicle(root: ProfileNode, *, label: str) -> str:
    """Return a call tree from the top: the width of a function is its share of the time, with seconds below."""
    height = 22
    depth = _depth(root)
    cells: list[str] = []
    whole = max(root.cum_time_s, 1e-9)

    def draw(node: ProfileNode, left: float, level: int) -> None:
        width = _WIDTH * node.cum_time_s / whole
        name = escape(node.name)
        title = f"{name}: {node.cum_time_s:.3f} s, of which itself {node.own_time_s:.3f} s"
        fits = max(0, int(width / 6.6) - 1)
        text = name if len(node.name) <= fits else escape(node.name[: fits - 1]) + "…" if fits > 3 else ""
        cells.append(
            f'<g><title>{title}</title><rect x="{left:.1f}" y="{level * height}" width="{max(width - 0.6, 0.4):.1f}" '
            f'height="{height - 1}" class="cell c{level % 3}"/>'
            f'<text x="{left + 4:.1f}" y="{level * height + 15}" class="on">{text}</text></g>'
        )
        for child in sorted(node.children, key=lambda n: -n.cum_time_s):
            draw(child, left, level + 1)
            left += _WIDTH * child.cum_time_s / whole

    draw(root, 0.0, 0)
    cells.append(_time_axis(whole, depth * height))
    return _plot(depth * height + _TIME_AXIS, label, cells)


def _plot(height: int, label: str, parts: Sequence[str]) -> str:
    name = f'aria-label="{escape(label)}"'
    picture = f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" {name}>{"".join(parts)}</svg>'
    return f'<div class="plot" tabindex="0" role="group" {name}>{picture}</div>'


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers from low to high."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten, from the last that is at most low to the first that is at least high."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    first = max(i for i, step in enumerate(steps) if step <= low * (1 + 1e-9))
    last = min(i for i, step in enumerate(steps) if step >= high * (1 - 1e-9))
    return steps[first : last + 1]


def spans_decades(values: Sequence[float]) -> bool:
    """Whether a linear axis would press most of the values against 0."""
    return min(values) > 0 and max(values) >= 10 * min(values)


def short(value: float) -> str:
    """Return a number for an axis: 1,024, 15k, 2M, 0.05."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.4g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _x_scale(xs: Sequence[float], log: bool) -> _Scale:
    low, high = min(xs), max(xs)
    ends = _LEFT + 6, _WIDTH - _RIGHT - 6
    if not log:
        return _Scale(low, high, *ends, ticks=nice_ticks(low, high, 6))
    powers = range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)
    step = max(1, len(powers) // 8)
    return _Scale(2.0 ** powers[0], 2.0 ** powers[-1], *ends, log=True, ticks=[2.0**p for p in powers[::step]])


def _y_scale(ys: Sequence[float], log: bool) -> _Scale:
    ends = _HEIGHT - _BOTTOM, _TOP
    if log:
        ticks = log_ticks(min(ys), max(ys))
        # powers of ten alone where 1, 2, 5 would be too many lines
        few = ticks if len(ticks) <= 9 else [tick for tick in ticks if math.log10(tick) % 1 < 1e-9]
        return _Scale(ticks[0], ticks[-1], *ends, log=True, ticks=few)
    bottom, top = min(0.0, *ys), max(ys)
    return _Scale(bottom, top if top > bottom else bottom + 1, *ends, ticks=nice_ticks(bottom, top))


def _time_axis(whole: float, top: float) -> str:
    """Seconds along the bottom of an icicle."""
    parts: list[str] = []
    for tick in nice_ticks(0.0, whole, 6):
        at = _WIDTH * tick / whole
        side = "" if at < 20 else " end" if at > _WIDTH - 20 else " mid"
        parts.append(
            f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{top + 6}"/>'
            f'<text class="tick{side}" x="{at:.1f}" y="{top + 20}">{short(tick)} s</text>'
        )
    return "".join(parts)


def _axes(across: _Scale, up: _Scale, x: str, y: str) -> str:
    parts = [
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{up(tick):.1f}" y2="{up(tick):.1f}"/>'
        f'<text class="tick end" x="{_LEFT - 6}" y="{up(tick) + 4:.1f}">{short(tick)}</text>'
        for tick in up.ticks
    ]
    below = _HEIGHT - _BOTTOM + 18
    parts += [f'<text class="tick mid" x="{across(t):.1f}" y="{below}">{short(t)}</text>' for t in across.ticks]
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    parts.append(f'<text class="axis mid" x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT - 6}">{escape(x)}</text>')
    parts.append(f'<text class="axis mid" transform="translate(14 {middle}) rotate(-90)">{escape(y)}</text>')
    return "".join(parts)


def _drawn(series: Series, number: int, across: _Scale, up: _Scale) -> str:
    def placed(points: Iterable[tuple[float, float]]) -> str:
        return " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)

    parts: list[str] = []
    if series.band:
        edge = [(x, high) for x, _, high in series.band] + [(x, low) for x, low, _ in reversed(series.band)]
        parts.append(f'<polygon points="{placed(edge)}" fill="var(--c{number % COLORS})" opacity="0.18"/>')
    parts.append(f'<polyline points="{placed(series.line)}" fill="none" {_line_style(number)}/>')
    parts += [_dot(across(x), up(y), number, escape(what)) for x, y, what in series.dots]
    runs = escape(_NEWLINE.join(series.runs))
    return f'<g data-runs="{runs}">{"".join(parts)}</g>'


def _line_style(number: int) -> str:
    dash = _DASHES[number // COLORS % len(_DASHES)]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'stroke="var(--c{number % COLORS})" stroke-width="2"{dashes}'


def _dot(x: float, y: float, number: int, title: str) -> str:
    """Draw a circle in the first round of colors, then a square, a diamond and a ring."""
    color, shape = f"var(--c{number % COLORS})", number // COLORS % len(_DASHES)
    inner = f"<title>{title}</title>" if title else ""
    if shape in (0, 3):
        paint = f'fill="{color}"' if shape == 0 else f'fill="none" stroke="{color}" stroke-width="2"'
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" {paint}>{inner}</circle>'
    turned = f' transform="rotate(45 {x:.1f} {y:.1f})"' if shape == 2 else ""
    place = f'x="{x - 3.2:.1f}" y="{y - 3.2:.1f}" width="6.4" height="6.4" fill="{color}"{turned}'
    return f"<rect {place}>{inner}</rect>"


def _legend(series: Sequence[Series]) -> str:
    keys = "".join(
        f'<li data-runs="{escape(_NEWLINE.join(s.runs))}">'
        f'<svg class="key" viewBox="0 0 28 12" aria-hidden="true"><line x1="1" x2="27" y1="6" y2="6" {_line_style(i)}/>'
        f"{_dot(14, 6, i, '')}</svg>{escape(s.name)}</li>"
        for i, s in enumerate(series)
    )
    return f'<ul class="legend">{keys}</ul>'


def _depth(node: ProfileNode) -> int:
    return 1 + max((_depth(child) for child in node.children), default=0)
