"""``headrace startup``: where the time before the first step goes, as a bundle."""

from __future__ import annotations

import argparse
from pathlib import Path

from headrace._cli import bench_options as options
from headrace._cli.options import values


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]  # argparse has no public name for it
    """Add the sub-command."""
    parser = commands.add_parser(
        "startup",
        help="profile what happens before the first step, as a bundle",
        description=(
            "Start TASK in fresh processes and profile each phase: python_imports, task_config, env_creation and "
            "first_step (reset included). Writes startup.json with the functions that cost most, a call tree, and the "
            "same times without the profiler."
        ),
    )
    options.add_target_options(parser)
    parser.add_argument("--top-n", type=int, default=20, help="functions to keep of each phase (default: 20)")
    parser.add_argument(
        "--whitelist",
        type=Path,
        metavar="FILE.yaml",
        help="'phase: [patterns]' lines: keep the functions that match (fnmatch, 'module:function') instead of the "
        "top; a pattern that matches nothing is an error",
    )
    options.add_output_options(parser)
    parser.set_defaults(handler=_startup)


def _startup(arguments: argparse.Namespace) -> int:
    from headrace._jobs.runtime import startup

    result = startup(
        **options.environment_of(arguments),
        **options.output_of(arguments),
        **values(arguments, "top_n", "whitelist"),
        progress=options.progress_bar,
    )
    options.show_bundle(result.bundle, result.paths)
    return 0
