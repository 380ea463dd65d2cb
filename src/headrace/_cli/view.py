"""``headrace view``: a batch of environments, live in a browser, or one of them in MuJoCo's own window."""

from __future__ import annotations

import argparse

from headrace._cli.options import add_options, add_task, arguments_of
from headrace._cli.printing import say
from headrace._jobs.view import view

HELP = "watch a task live in a browser, or in MuJoCo's own window"
DESCRIPTION = (
    "Step TASK in real time and show all environments, tiled, on a page of this machine. A click on a tile "
    "suspends that environment, another resumes it. Ctrl-C ends."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_task(parser)
    names = ("num_envs", "seed", "policy", "port", "num_steps", "window", "renderer", "overrides")
    add_options(parser, view, *names)


def handle(arguments: argparse.Namespace) -> int:
    """Show until it ends."""
    view(**arguments_of(arguments, view), on_url=lambda url: say(f"{url}  (Ctrl-C ends)"))
    return 0
