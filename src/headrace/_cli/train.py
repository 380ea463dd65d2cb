"""``headrace train``: train a policy with one of the RL libraries, and write checkpoints and a bundle."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from headrace._cli import bench_options as options
from headrace._cli.options import add_option, values
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.adapters._training import Iteration
    from headrace.bench import SuccessRule


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]  # argparse has no public name for it
    """Add the sub-command."""
    parser = commands.add_parser(
        "train",
        help="train a policy with rsl_rl, rl_games, skrl, stable-baselines3 or our own learner",
        description=(
            "Train PPO on TASK with the same network, batch, epochs and learning rate whatever the library. Writes "
            "checkpoints (last, best) and training.json with the learning curves, also after Ctrl-C or a crash. "
            "'headrace play TASK' then finds the newest of them."
        ),
    )
    options.add_target_options(parser)
    add_option(parser, "--library", default="headrace", otherwise="headrace, our own small PPO")
    parser.add_argument("--iterations", type=int, default=100, help="rollouts to collect and learn from (default: 100)")
    parser.add_argument("--check-success", action="store_true", help="stop early once the task is solved")
    parser.add_argument("--success-threshold", type=float, help="success rate that counts as solved (default: 0.3)")
    parser.add_argument(
        "--success-window", type=int, help="iterations that the success rate is averaged over (default: 20)"
    )
    parser.add_argument(
        "--success-rule",
        choices=("mean", "each"),
        help="mean: over all episodes of the window; each: in every iteration of it, Isaac Lab's rule (default: mean)",
    )
    parser.add_argument(
        "--ema-alpha", type=float, default=0.1, help="weight of the newest value in the smoothed curves (default: 0.1)"
    )
    parser.add_argument("--no-series", action="store_true", help="keep only the final values of the curves")
    parser.add_argument(
        "--ppo",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of PPO, for example steps=24 or learning_rate=3e-4; repeatable",
    )
    add_option(parser, "--video")
    parser.add_argument(
        "--video-interval",
        type=int,
        default=50,
        metavar="N",
        help="film the first and every N-th iteration (default: 50); filming takes time, which is in the figures",
    )
    add_option(parser, "--renderer", default="native")
    parser.add_argument(
        "--resume-from", type=Path, metavar="DIRECTORY", help="continue from the last checkpoint of that run"
    )
    options.add_output_options(parser)
    parser.set_defaults(handler=_train)


def _train(arguments: argparse.Namespace) -> int:
    from headrace._jobs.train import train
    from headrace.envs._overrides import parse_assignments

    rule = _success_rule(arguments)
    first: int | None = None
    with options.progress_bar(f"training with {arguments.library}", arguments.iterations) as update:

        def after(done: Iteration) -> None:
            nonlocal first
            first = done.number - 1 if first is None else first
            update(done.number - first)

        result = train(
            **options.environment_of(arguments),
            **options.output_of(arguments),
            **values(arguments, "library", "iterations", "resume_from", "ema_alpha"),
            **values(arguments, "video", "video_interval", "renderer"),
            settings=parse_assignments(arguments.ppo),
            stop=rule,
            series=not arguments.no_series,
            on_begin=_say_where,
            on_iteration=after,
        )
    options.show_bundle(result.bundle, result.paths)
    return 0


def _success_rule(arguments: argparse.Namespace) -> SuccessRule | None:
    """When to stop early; None for never."""
    from headrace.bench import SuccessRule

    options_of = {"threshold": "success_threshold", "window": "success_window", "kind": "success_rule"}
    said = {name: getattr(arguments, option) for name, option in options_of.items()}
    said = {name: value for name, value in said.items() if value is not None}
    if arguments.check_success:
        return SuccessRule(**said)
    for name in said:
        raise ConfigError(
            f"--{options_of[name].replace('_', '-')}: expected --check-success with it, which stops early"
        )
    return None


def _say_where(directory: Path) -> None:
    Console(stderr=True).print(f"checkpoints go to {directory / 'checkpoints'}", highlight=False, soft_wrap=True)
