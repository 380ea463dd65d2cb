"""The page: sections, filters, style and script in one file that needs no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files

from headrace.bench._comparison import Comparison
from headrace.bench._schema import Bundle, Hardware
from headrace.bench.report import _sections as sections
from headrace.errors import DataError

_EMPTY = {
    "throughput": "No run here has a throughput. Make some with: headrace runtime TASK --num-envs N",
    "learning": "No training here. Make one with: headrace train TASK --library rsl_rl",
    "split": "No run here says where its time went.",
    "memory": "No run here has its memory measured.",
    "startup": "No start-up here. Profile one with: headrace startup TASK",
    "verdicts": "Nothing was compared. Compare two sides with: headrace report A B",
}


def report_page(
    bundles: Sequence[Bundle],
    comparisons: Sequence[Comparison] = (),
    *,
    names: tuple[str, str] = ("A", "B"),
    title: str = "headrace report",
    notes: Sequence[str] = (),
    sides: Mapping[str, str] | None = None,
) -> str:
    """The HTML of a report.

    Args:
        bundles: the runs, in the order in which they are listed.
        comparisons: verdicts to show.
        names: of the two sides of the comparisons.
        title: of the page.
        notes: what else to say at the top, such as files that could not be read.
        sides: run id → the side of the comparison that it is on.
    """
    if not bundles:
        raise DataError("report: expected at least one bundle, got none")
    bundles = [_on_side(bundle, (sides or {}).get(bundle.run.run_id)) for bundle in bundles]
    resources = files("headrace.bench.report")
    style, script = (resources.joinpath(name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    parts = [
        _section("runs", "Runs", _filters(bundles) + sections.runs_table(bundles)),
        _section("throughput", "Throughput", sections.throughput(bundles)),
        _section("learning", "Learning curves", sections.learning_curves(bundles)),
        _section("split", "Where the time went", sections.time_split(bundles)),
        _section("memory", "Peak memory", sections.memory(bundles)),
        _section("startup", "Start-up", sections.startup(bundles)),
        _section("verdicts", "Comparison", sections.verdicts(comparisons, names)),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body>"
        f"<header><h1>{escape(title)}</h1>{_facts(bundles)}{_listed(notes)}{_contents()}</header>"
        f"<main>{''.join(parts)}</main><script>{script}</script></body></html>\n"
    )


def _on_side(bundle: Bundle, side: str | None) -> Bundle:
    """The run under the name of its side, by which lines and rows are told apart."""
    if side is None or bundle.run.label is not None:
        return bundle
    return bundle.model_copy(update={"run": bundle.run.model_copy(update={"label": side})})


def _listed(notes: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<ul class="notes">{items}</ul>' if notes else ""


def _section(name: str, title: str, body: str | None) -> str:
    content = body or f'<p class="empty">{escape(_EMPTY[name])}</p>'
    return f'<section id="{name}" aria-labelledby="{name}-h"><h2 id="{name}-h">{title}</h2>{content}</section>'


def _contents() -> str:
    links = (
        *(("runs", "Runs"), ("throughput", "Throughput"), ("learning", "Learning"), ("split", "Time")),
        *(("memory", "Memory"), ("startup", "Start-up"), ("verdicts", "Comparison")),
    )
    return f'<nav aria-label="sections">{"".join(f"<a href=#{n}>{t}</a>" for n, t in links)}</nav>'


def _facts(bundles: Sequence[Bundle]) -> str:
    machines = {_machine(bundle.hardware) for bundle in bundles}
    ended = max(bundle.run.end_time_utc for bundle in bundles)
    plural = "" if len(bundles) == 1 else "s"
    unfinished = sum(bundle.run.status != "completed" for bundle in bundles)
    note = f"; {unfinished} did not complete" if unfinished else ""
    where = escape(" · ".join(sorted(machines)))
    last = f"; the last ended {escape(ended)}" if ended else ""
    return f"<p>{len(bundles)} run{plural} on {where}{last}{note}.</p>"


def _machine(hardware: Hardware) -> str:
    cores = hardware.cpu_usable or hardware.cpu_count
    parts = [hardware.cpu_name or "an unknown machine", f"{cores} cores" if cores else ""]
    parts += [f"{hardware.ram_gb:.0f} GB" if hardware.ram_gb else "", *(gpu.name for gpu in hardware.gpu_devices)]
    return ", ".join(filter(None, parts))


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
