"""The page: sections, filters, style and script in one file that needs no network."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from headrace.bench._comparison import Comparison
from headrace.bench.reporting import _sections as sections
from headrace.bench.schema import Bundle, with_label
from headrace.errors import DataError


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
        ("evaluations", "Evaluations"): sections.evaluations(bundles),
        ("runs", "Runs"): _filters(bundles) + sections.runs_table(bundles),
        ("throughput", "Throughput"): sections.throughput(bundles),
        ("learning", "Learning curves"): sections.learning_curves(bundles),
        ("split", "Where the time went"): sections.time_split(bundles),
        ("memory", "Peak memory"): sections.memory(bundles),
        ("startup", "Start-up"): sections.startup(bundles),
        ("verdicts", "Comparison"): sections.verdicts(comparisons, names),
    }
    shown = [(name, heading, body) for (name, heading), body in parts.items() if body]
    links = "".join(f'<a href="#{name}">{heading}</a>' for name, heading, _ in shown)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body>"
        f"<header><h1>{escape(title)}</h1>{_facts(bundles)}{sections.html_notes(notes) if notes else ''}"
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
    rows = (sections.html_row(saving.what, saving.cells()) for saving in savings)
    heads = ("what", "the usual way", "it takes", "here", "saved")
    return sections.html_table("what was saved", "What was saved", heads, rows)


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
