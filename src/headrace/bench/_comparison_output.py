"""A comparison to read: a table for a terminal, Markdown for a pull request, JUnit XML for CI."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from xml.etree import ElementTree

from rich import box
from rich.markup import escape
from rich.table import Table

from headrace.bench._comparison import Comparison, MetricComparison, variation

_STYLES = {"improved": "green", "regressed": "bold red", "unchanged": "dim", "inconclusive": "yellow"}
_COLUMNS = ("metric", "A (median)", "B (median)", "change", "95 % interval", "p", "runs", "variation", "verdict")


def table(comparison: Comparison, names: tuple[str, str] = ("A", "B")) -> Table:
    """For a terminal of 80 columns: medians over runs with their variation, the change with its interval."""
    found = Table(title=f"{comparison.kind}: {comparison.task}", caption=_tally(comparison), box=box.SIMPLE_HEAD)
    found.add_column("metric")
    for column in (*names, "change"):
        found.add_column(escape(column), justify="right")
    found.add_column("verdict")
    for row in comparison.rows:
        path, before, after, change, interval, _, _, _, verdict = _cells(row)
        noise = [variation(side) for side in (row.before, row.after)]
        sides = [
            median if spread is None else f"{median}\n[dim]± {spread:.1%}[/]"
            for median, spread in zip((before, after), noise, strict=True)
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
        heads = ("metric", f"{names[0]} (median)", f"{names[1]} (median)", *_COLUMNS[3:])
        lines += [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 2)}---|"]
        for row in comparison.rows:
            *cells, verdict = _cells(row)
            word = f"**{verdict}**" if row.verdict in ("regressed", "improved") else verdict
            lines.append(f"| {' | '.join((*cells, word))} |".replace("\n", " "))
        lines.append("")
        lines += [f"- {note}" for note in all_notes(comparison)]
        lines.append("")
    return "\n".join(lines)


def junit(comparisons: Sequence[Comparison], *, fail_inconclusive: bool = False) -> str:
    """For CI: a test case per metric; a regression is a failure, an inconclusive metric is skipped."""
    root = ElementTree.Element("testsuites", name="headrace compare")
    for comparison in comparisons:
        name = f"{comparison.kind}.{comparison.task}"
        suite = ElementTree.SubElement(root, "testsuite", name=name)
        failures = skipped = 0
        for row in comparison.rows:
            case = ElementTree.SubElement(suite, "testcase", classname=name, name=row.path)
            told = f"{row.verdict}: {_change(row)} ({row.reason})"
            if row.verdict == "regressed" or (fail_inconclusive and row.verdict == "inconclusive"):
                failures += 1
                ElementTree.SubElement(case, "failure", message=told).text = ", ".join(_cells(row))
            elif row.verdict == "inconclusive":
                skipped += 1
                ElementTree.SubElement(case, "skipped", message=told)
        if comparison.failed_after:
            failures += 1
            case = ElementTree.SubElement(suite, "testcase", classname=name, name="runs complete")
            ElementTree.SubElement(case, "failure", message=_crashes(comparison))
        cases = len(suite)
        suite.set("tests", str(cases))
        suite.set("failures", str(failures))
        suite.set("skipped", str(skipped))
        if all_notes(comparison):
            ElementTree.SubElement(suite, "system-out").text = "\n".join(all_notes(comparison))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def all_notes(comparison: Comparison) -> list[str]:
    """Everything to be said beside the table."""
    notes = list(comparison.notes)
    if comparison.failed_after:
        notes.append(_crashes(comparison))
    if comparison.only_before:
        notes.append(f"only A has: {', '.join(comparison.only_before)}")
    if comparison.only_after:
        notes.append(f"only B has: {', '.join(comparison.only_after)}")
    reasons: dict[str, list[str]] = {}
    for row in comparison.rows:
        if row.verdict == "inconclusive":
            reasons.setdefault(row.reason, []).append(row.path)
    judged = sum(row.verdict is not None for row in comparison.rows)
    for reason, paths in reasons.items():
        # the table has just named them all
        which = f"all {judged} metrics" if len(paths) == judged > 1 else ", ".join(paths)
        notes.append(f"inconclusive: {which}: {reason}")
    return notes


def _crashes(comparison: Comparison) -> str:
    return f"{comparison.failed_after} runs of side B crashed, none of side A"


def _tally(comparison: Comparison) -> str:
    words = [
        f"{comparison.count(verdict)} {verdict}"
        for verdict in ("regressed", "improved", "unchanged", "inconclusive")
        if comparison.count(verdict)
    ]
    runs = {(len(row.before), len(row.after)) for row in comparison.rows}
    counted = "".join(f"; {first} and {second} runs" for first, second in sorted(runs)[-1:])
    return (", ".join(words) or "nothing to compare") + counted


def _cells(row: MetricComparison) -> tuple[str, ...]:
    interval = "–" if row.low is None or row.high is None else f"{row.low:+.1%} to {row.high:+.1%}"
    spreads = [variation(side) for side in (row.before, row.after)]
    noise = "–" if None in spreads else " / ".join(f"{spread:.1%}" for spread in spreads if spread is not None)
    return (
        row.path,
        _number(statistics.median(row.before), row.unit),
        _number(statistics.median(row.after), row.unit),
        _change(row),
        interval,
        "–" if row.p is None else f"{row.p:.2g}",
        f"{len(row.before)} / {len(row.after)}",
        noise,
        row.verdict or "–",
    )


def _change(row: MetricComparison) -> str:
    return "–" if row.effect is None else f"{row.effect:+.1%}"


def _number(value: float, unit: str | None) -> str:
    if unit == "s":
        return f"{value:.3f} s" if abs(value) >= 0.1 else f"{value * 1e3:.3f} ms"
    digits = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return digits if unit is None else f"{digits} {unit}"
