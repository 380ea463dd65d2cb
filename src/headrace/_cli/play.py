"""``headrace play``: roll a trained policy out and say what it achieved and what it cost."""

from __future__ import annotations

import argparse

from rich.console import Console

from headrace._cli import bench_options as options
from headrace._cli.options import add_option, values


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]  # argparse has no public name for it
    """Add the sub-command."""
    parser = commands.add_parser(
        "play",
        help="play a trained policy and measure what it achieves",
        description=(
            "Play TASK with a checkpoint and write play.json: reward, length and success of completed episodes, per "
            "environment, and what they cost. Without --policy the newest training in runs/ is played, or else the "
            "checkpoint that we publish for the task."
        ),
    )
    options.add_target_options(parser)
    parser.add_argument(
        "--policy",
        metavar="WHICH",
        help="a file, a URI, latest, best, published, a TorchScript or ONNX file, or module:name of a function of the "
        "observation groups (default: latest, else published)",
    )
    add_option(parser, "--library", otherwise="checkpoints of any")
    amount = parser.add_mutually_exclusive_group()
    add_option(amount, "--episodes", otherwise="one per environment")
    add_option(amount, "--num-steps", otherwise="play --episodes instead")
    add_option(parser, "--warmup-steps", default=10)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--deterministic", action="store_true", default=True, help="the policy's mean action (default)")
    how.add_argument("--stochastic", dest="deterministic", action="store_false", help="sample actions")
    add_option(parser, "--video")
    add_option(parser, "--renderer", default="native")
    parser.add_argument(
        "--trust-checkpoint",
        action="store_true",
        help="load a file that holds more than weights, which can execute arbitrary code; load only files you trust",
    )
    options.add_output_options(parser)
    parser.set_defaults(handler=_play)


def _play(arguments: argparse.Namespace) -> int:
    from headrace._jobs.play import play

    steps, episodes = arguments.num_steps, arguments.episodes
    total = steps or episodes or arguments.num_envs or options.USUAL_ENVS
    console = Console(stderr=True)
    with options.progress_bar("episodes" if steps is None else "playing", total) as update:
        result = play(
            **options.environment_of(arguments),
            **options.output_of(arguments),
            **values(arguments, "policy", "library", "episodes", "num_steps", "warmup_steps", "deterministic"),
            **values(arguments, "trust_checkpoint", "video", "renderer"),
            on_note=lambda note: console.print(note, style="yellow", highlight=False, soft_wrap=True),
            on_progress=update,
        )
    options.show_bundle(result.bundle, result.paths)
    return 0
