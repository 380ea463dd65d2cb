"""``headrace demo``: the whole story, with real parts, and real files."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from headrace.bench.story import demo, warm_up
from headrace.cli.records import Command


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Evaluate the shipped chunk policy under three schedulers, and write films and report.html."""

    output: str = "outputs/demo"
    quick: bool = False
    """Fewer episodes, to see what it shows."""


def _demo(given: DemoOptions) -> int:
    console, begin = Console(), time.perf_counter()
    output = _free_folder(Path(given.output))
    # the first line comes before anything heavy, also where the output is a file
    console.print(
        f"headrace demo, into {output}; the first run on a machine compiles for about a minute", soft_wrap=True
    )
    warm_up()
    result = demo(output, quick=given.quick, show=console.print)
    console.print(f"\nOpen [bold]{result.page}[/]; the film is {result.film}.", soft_wrap=True)
    console.print(
        f"Next: headrace view ant, the lessons in docs/tutorials/, examples/. ({time.perf_counter() - begin:.0f} s)"
    )
    return 0


def _free_folder(wanted: Path) -> Path:
    """Return the directory, or the first of ``wanted-2``, ``wanted-3``, … that does not exist: nothing is
    overwritten."""
    folder, number = wanted, 1
    while folder.exists():
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    return folder


COMMANDS = {"demo": Command(DemoOptions, _demo)}
