"""``headrace play``: roll a trained policy out and say what it achieved and what it cost."""

from __future__ import annotations

import argparse

from headrace._cli.options import add_options, add_run_options, arguments_of
from headrace._cli.printing import progress_bar, say, show_bundle
from headrace._jobs.play import play
from headrace._jobs.request import USUAL_ENVS

HELP = "play a trained policy and measure what it achieves"
DESCRIPTION = (
    "Play TASK with a checkpoint and write play.json: reward, length and success of completed episodes, per "
    "environment, and what they cost. Without --policy the newest training in runs/ is played, or else the "
    "checkpoint that we publish for the task."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_run_options(parser, play)
    add_options(parser, play, "policy WHICH", "library")
    add_options(parser.add_mutually_exclusive_group(), play, "episodes", "num_steps")
    add_options(parser, play, "warmup_steps")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--deterministic", action="store_true", default=True, help="the policy's mean action (default)")
    how.add_argument("--stochastic", dest="deterministic", action="store_false", help="sample actions")
    add_options(parser, play, "video", "renderer", "trust_checkpoint")


def handle(arguments: argparse.Namespace) -> int:
    """Play and print."""
    steps = arguments.num_steps
    total = steps or arguments.episodes or arguments.num_envs or USUAL_ENVS
    with progress_bar("episodes" if steps is None else "playing", total) as update:
        result = play(
            **arguments_of(arguments, play),
            on_note=lambda note: say(note, "yellow", stderr=True),
            on_progress=update,
        )
    show_bundle(result.bundle, result.paths)
    return 0
