"""A comparison to read: a table for a terminal, Markdown for a pull request."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from headrace.bench._significance import Moments
from headrace.bench._verdicts import MetricComparison
from headrace.bench.comparison import Comparison
from headrace.bench.figures import number

_STYLES = {"improved": "green", "regressed": "bold red", "unchanged": "dim", "inconclusive": "yellow"}
_COLUMNS = ("metric", "A", "B", "change", "95 % interval", "p", "n", "variation", "verdict")


def table(comparison: Comparison, names: tuple[str, str] = ("A", "B")) -> Table:
    """For a terminal of 80 columns: medians over runs with their variation, the change with its interval."""
    found = Table(title=f"{comparison.kind}: {comparison.task}", caption=_tally(comparison), box=box.SIMPLE_HEAD)
    found.add_column("metric", overflow="fold")
    for column in (*names, "change"):
        found.add_column(escape(column), justify="right", overflow="fold")
    found.add_column("verdict")
    for row in comparison.rows:
        path, before, after, change, interval, _, _, _, verdict = cells(row)
        sides = [
            center if spread is None else f"{center}\n[dim]± {spread:.1%}[/]"
            for center, spread in zip((before, after), variations(row), strict=True)
        ]
        style = _STYLES.get(row.verdict or "", "dim")
        shown = change if row.low is None else f"{change}\n[dim]{interval}[/]"
        found.add_row(path.replace(".", ".\n"), *sides, shown, f"[{style}]{verdict}[/]")
    return found


def markdown(comparisons: Sequence[Comparison], names: tuple[str, str] = ("A", "B")) -> str:
    """For a pull request."""
    lines: list[str] = []
    for comparison in comparisons:
        lines += [f"### {comparison.kind}: {comparison.task}", "", _tally(comparison), ""]
        heads = ("metric", *names, *_COLUMNS[3:])
        lines += [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 2)}---|"]
        for row in comparison.rows:
            *shown, verdict = cells(row)
            word = f"**{verdict}**" if row.verdict in ("regressed", "improved") else verdict
            lines.append(f"| {' | '.join((*shown, word))} |".replace("\n", " "))
        lines.append("")
        lines += [f"- {note}" for note in all_notes(comparison)]
        lines.append("")
    return "\n".join(lines)


def all_notes(comparison: Comparison) -> list[str]:
    """Return what belongs below a table: the tests, crashes, remarks, metrics on one side only, why metrics are
    inconclusive."""
    notes = [f"{test}: {_listed(paths, comparison)}" for test, paths in _paths_by(comparison.rows, "test").items()]
    if comparison.failed_after:
        notes.append(_crashes(comparison))
    notes += comparison.notes
    alone = {"A": comparison.only_before, "B": comparison.only_after}
    notes += [f"only {side} has: {', '.join(paths)}" for side, paths in alone.items() if paths]
    open_rows = [row for row in comparison.rows if row.verdict == "inconclusive"]
    reasons = _paths_by(open_rows, "reason")
    return notes + [f"inconclusive: {_listed(paths, comparison)}: {reason}" for reason, paths in reasons.items()]


def cells(row: MetricComparison) -> tuple[str, ...]:
    """Return the texts of a row: metric, both sides, change, interval, p, n, variation, verdict."""
    sample, unit = row.sample, row.sample.metric.unit
    noise = ["–" if spread is None else f"{spread:.1%}" for spread in variations(row)]
    return (
        row.path,
        *(number(value, unit, percent=sample.scale == "points") for value in sample.centers),
        change(row),
        "–" if row.low is None or row.high is None else f"{_effect(row, row.low)} to {_effect(row, row.high)}",
        "–" if row.p is None else f"{row.p:.2g}",
        " / ".join(f"{side.n:,}" for side in sample.moments),
        " / ".join(noise),
        row.verdict or "–",
    )


def change(row: MetricComparison) -> str:
    """Return the effect, on its scale."""
    return "–" if row.effect is None else _effect(row, row.effect)


def variations(row: MetricComparison) -> list[float | None]:
    """Return the standard deviation of each side relative to its mean; None where that has no meaning, as for rates."""
    if row.sample.scale == "points":
        return [None, None]
    sides = [Moments.of(side) for side in (row.sample.before, row.sample.after)]
    return [side.std / abs(side.mean) if side.n > 1 and side.mean else None for side in sides]


def _effect(row: MetricComparison, effect: float) -> str:
    scale = row.sample.scale
    if scale == "points":
        return f"{100 * effect:+.1f} points"
    if scale == "absolute":
        text = number(effect, row.sample.metric.unit)
        return text if text.startswith("-") else f"+{text}"
    return f"{effect:+.1%}" if effect < 1.0 else f"×{1 + effect:.3g}"


def _paths_by(rows: Sequence[MetricComparison], name: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row in rows:
        if text := getattr(row, name):
            found.setdefault(text, []).append(row.path)
    return found


def _listed(paths: Sequence[str], comparison: Comparison) -> str:
    judged = sum(row.verdict is not None for row in comparison.rows)
    return f"all {judged} metrics" if len(paths) == judged > 1 else ", ".join(paths)


def _crashes(comparison: Comparison) -> str:
    return f"{comparison.failed_after} runs of side B crashed, none of side A"


def _tally(comparison: Comparison) -> str:
    words = [
        f"{comparison.count(verdict)} {verdict}"
        for verdict in ("regressed", "improved", "unchanged", "inconclusive")
        if comparison.count(verdict)
    ]
    return (", ".join(words) or "nothing to compare") + f"; {comparison.runs[0]} and {comparison.runs[1]} runs"
