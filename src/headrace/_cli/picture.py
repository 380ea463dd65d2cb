"""``headrace picture``: what a camera of a task sees, in a file."""

from __future__ import annotations

import argparse

from headrace._cli.options import add_options, add_task, arguments_of
from headrace._cli.printing import say
from headrace._jobs.picture import picture

HELP = "draw what a camera of a task sees: rgb, gray, depth, segmentation, normals"
DESCRIPTION = (
    "Draw the first episode of TASK as one of its model's cameras sees it. A .png is for people: in depth near "
    "is bright, in segmentation each geom has a color, nothing is black. A .npy has the camera's own values."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_task(parser)
    add_options(parser, picture, "camera NAME", "kind", "renderer")
    add_options(parser, picture, "output", short="-o", required=True)
    add_options(parser, picture, "width", "height", "num_steps", "seed", "overrides")


def handle(arguments: argparse.Namespace) -> int:
    """Draw, and say where it is."""
    result = picture(**arguments_of(arguments, picture))
    shape = " × ".join(map(str, result.values.shape))
    say(f"{result.path}  ({arguments.kind}, {shape})")
    return 0
