"""``headrace picture``: what a camera of a task sees, in a file."""

from __future__ import annotations

import argparse

from rich.console import Console

from headrace._cli.options import add_option, add_task, values


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]  # argparse has no public name for it
    """Add the sub-command."""
    parser = commands.add_parser(
        "picture",
        help="draw what a camera of a task sees: rgb, gray, depth, segmentation, normals",
        description=(
            "Draw the first episode of TASK as one of its model's cameras sees it. A .png is for people: in depth near "
            "is bright, in segmentation each geom has a color, nothing is black. A .npy has the camera's own values."
        ),
    )
    add_task(parser)
    parser.add_argument("--camera", metavar="NAME", help="camera of the model (default: its first)")
    parser.add_argument("--kind", default="rgb", help="rgb, gray, depth, segmentation or normals (default: rgb)")
    add_option(parser, "--renderer", default="native")
    add_option(parser, "--output", short="-o", required=True)
    parser.add_argument("--width", type=int, default=640, metavar="N", help="pixels from left to right (default: 640)")
    parser.add_argument("--height", type=int, default=480, metavar="N", help="pixels from top to bottom (default: 480)")
    add_option(parser, "--num-steps", default=0)
    add_option(parser, "--seed", otherwise="0, or the recipe's")
    add_option(parser, "--set")
    parser.set_defaults(handler=_picture)


def _picture(arguments: argparse.Namespace) -> int:
    from headrace._jobs.picture import picture

    names = ("camera", "kind", "renderer", "output", "width", "height", "num_steps", "seed", "overrides")
    result = picture(arguments.task, **values(arguments, *names))
    shape = " × ".join(map(str, result.values.shape))
    Console().print(f"{result.path}  ({arguments.kind}, {shape})", soft_wrap=True, highlight=False)
    return 0
