"""The rates of benchmarks/chunking.py as bars, drawn by hand: an SVG needs no library."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Protocol

BAR, GAP, LABEL, WIDTH = 16, 5, 330, 460
COLORS = {"restated": "#b0b7c3", "Greedy": "#0b6e99", "other": "#7fb8d3"}


class Shown(Protocol):
    """What a bar shows."""

    setting: str
    num_envs: int
    scheduler: str
    rate: float


def bars_svg(rows: Sequence[Shown]) -> str:
    """A group of bars per setting and number of environments, each to its own scale."""
    groups: dict[tuple[str, int], list[Shown]] = {}
    for row in rows:
        groups.setdefault((row.setting, row.num_envs), []).append(row)
    parts, top = [], 10
    for (setting, num_envs), members in groups.items():
        top += 22
        parts.append(_text(8, top, f"{setting}, N = {num_envs}", "bold"))
        top += 8
        most = max(row.rate for row in members)
        for row in members:
            length = WIDTH * row.rate / most
            kind = "restated" if "restated" in row.scheduler or "every step" in row.scheduler else "other"
            color = COLORS["Greedy" if "Greedy" in row.scheduler else kind]
            parts.append(_text(LABEL - 8, top + BAR - 4, row.scheduler, "normal", "end"))
            parts.append(f'<rect x="{LABEL}" y="{top}" width="{length:.1f}" height="{BAR}" fill="{color}"/>')
            parts.append(_text(LABEL + length + 6, top + BAR - 4, f"{row.rate:,.0f}", "normal"))
            top += BAR + GAP
    size = f'width="{LABEL + WIDTH + 90}" height="{top + 30}"'
    caption = _text(8, top + 20, "useful env-steps per second; each group has its own scale", "normal")
    paper = '<rect width="100%" height="100%" fill="white"/>'
    body = "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', paper, *parts, caption, "</svg>"])
    return body + "\n"


def _text(x: float, y: float, words: str, weight: str, anchor: str = "start") -> str:
    font = f'font-family="sans-serif" font-size="12" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {font}>{escape(words)}</text>'
