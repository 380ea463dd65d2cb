"""``headrace runtime``: how fast an environment steps, as a bundle."""

from __future__ import annotations

import argparse

from headrace._cli.options import add_options, add_run_options, arguments_of
from headrace._cli.printing import progress_bar, show_bundle
from headrace._jobs.runtime import runtime

HELP = "measure how fast an environment steps, as a bundle"
DESCRIPTION = (
    "Step TASK with random or zero actions, warm up until the step time is steady, then measure each step: "
    "where its time goes (physics, rendering, task), CPU and memory. Writes runtime.json, also after Ctrl-C or "
    "a crash. Compare such files with 'headrace compare'."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_run_options(parser, runtime)
    add_options(parser, runtime, "num_steps", "warmup_steps", "actions {random,zero}")
    add_options(parser, runtime, "timing {host_return,synchronized}")


def handle(arguments: argparse.Namespace) -> int:
    """Measure and print."""
    result = runtime(**arguments_of(arguments, runtime), progress=progress_bar)
    show_bundle(result.bundle, result.paths)
    return 0
