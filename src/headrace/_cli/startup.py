"""``headrace startup``: where the time before the first step goes, as a bundle."""

from __future__ import annotations

import argparse

from headrace._cli.options import add_options, add_run_options, arguments_of
from headrace._cli.printing import progress_bar, show_bundle
from headrace._jobs.runtime import startup

HELP = "profile what happens before the first step, as a bundle"
DESCRIPTION = (
    "Start TASK in fresh processes and profile each phase: python_imports, task_config, env_creation and "
    "first_step (reset included). Writes startup.json with the functions that cost most, a call tree, and the "
    "same times without the profiler."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_run_options(parser, startup)
    add_options(parser, startup, "top_n", "whitelist FILE.yaml")


def handle(arguments: argparse.Namespace) -> int:
    """Profile and print."""
    result = startup(**arguments_of(arguments, startup), progress=progress_bar)
    show_bundle(result.bundle, result.paths)
    return 0
