"""``headrace view``: a batch of environments, live in a browser, or one of them in MuJoCo's own window."""

from __future__ import annotations

import argparse

from rich.console import Console

from headrace._cli.options import add_option, add_task, values


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]  # argparse has no public name for it
    """Add the sub-command."""
    parser = commands.add_parser(
        "view",
        help="watch a task live in a browser, or in MuJoCo's own window",
        description=(
            "Step TASK in real time and show all environments, tiled, on a page of this machine. A click on a tile "
            "suspends that environment, another resumes it. Ctrl-C ends."
        ),
    )
    add_task(parser)
    add_option(parser, "--num-envs", otherwise="9, or the recipe's")
    add_option(parser, "--seed", otherwise="0, or the recipe's")
    parser.add_argument(
        "--policy",
        default="random",
        help="random, zero, module:name of a function of the observation groups, a checkpoint of 'headrace train', its "
        "run's directory, or latest (default: random)",
    )
    add_option(parser, "--port", default=8765)
    add_option(parser, "--num-steps", otherwise="run until Ctrl-C")
    parser.add_argument("--window", action="store_true", help="environment 0 in MuJoCo's viewer; needs a display")
    add_option(parser, "--renderer", default="native")
    add_option(parser, "--set")
    parser.set_defaults(handler=_view)


def _view(arguments: argparse.Namespace) -> int:
    from headrace._jobs.view import view

    names = ("policy", "num_steps", "port", "window", "renderer", "num_envs", "seed", "overrides")
    view(
        arguments.task,
        **values(arguments, *names),
        on_url=lambda url: Console().print(f"{url}  (Ctrl-C ends)", soft_wrap=True, highlight=False),
    )
    return 0
