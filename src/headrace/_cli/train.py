"""``headrace train``: train a policy with one of the RL libraries, and write checkpoints and a bundle."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from headrace._cli.options import add_options, add_repeatable, add_run_options, arguments_of
from headrace._cli.printing import progress_bar, say, show_bundle
from headrace._jobs.train import train
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.adapters._training import Iteration

HELP = "train a policy with an RL library, or with our own learner"
DESCRIPTION = (
    "Train PPO on TASK with the same network, batch, epochs and learning rate whatever the library. Writes "
    "checkpoints (last, best) and training.json with the learning curves, also after Ctrl-C or a crash. "
    "'headrace play TASK' then finds the newest of them."
)
_RULE = {"threshold": "--success-threshold", "window": "--success-window", "kind": "--success-rule"}
"""Fields of ``SuccessRule``, each with its option."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_run_options(parser, train)
    add_options(parser, train, "library", "iterations")
    parser.add_argument("--check-success", action="store_true", help="stop early once the task is solved")
    parser.add_argument(
        _RULE["threshold"], dest="threshold", type=float, help="success rate that counts as solved (default: 0.3)"
    )
    parser.add_argument(
        _RULE["window"], dest="window", type=int, help="iterations that the success rate is averaged over (default: 20)"
    )
    parser.add_argument(
        _RULE["kind"],
        dest="kind",
        choices=("mean", "each"),
        help="mean: over all episodes of the window; each: in every iteration of it, Isaac Lab's rule (default: mean)",
    )
    add_options(parser, train, "ema_alpha")
    parser.add_argument(
        "--no-series", dest="series", action="store_false", help="keep only the final values of the curves"
    )
    text = "a setting of PPO, for example steps=24 or learning_rate=3e-4; repeatable"
    add_repeatable(parser, "--ppo", "NAME=VALUE", text)
    add_options(parser, train, "video", "video_interval", "renderer", "resume_from DIRECTORY")


def handle(arguments: argparse.Namespace) -> int:
    """Train and print."""
    from headrace.bench import SuccessRule
    from headrace.envs._overrides import parse_assignments

    rule = {name: getattr(arguments, name) for name in _RULE if getattr(arguments, name) is not None}
    for name in () if arguments.check_success else rule:
        raise ConfigError(f"{_RULE[name]}: expected --check-success with it, which stops early")
    first: int | None = None
    with progress_bar(f"training with {arguments.library}", arguments.iterations) as update:

        def after(done: Iteration) -> None:
            nonlocal first
            first = done.number - 1 if first is None else first
            update(done.number - first)

        result = train(
            **arguments_of(arguments, train),
            settings=parse_assignments(arguments.ppo, "--ppo"),
            stop=SuccessRule(**rule) if arguments.check_success else None,
            on_begin=lambda directory: say(f"checkpoints go to {directory / 'checkpoints'}", stderr=True),
            on_iteration=after,
        )
    show_bundle(result.bundle, result.paths)
    return 0
