"""``headrace train``: train a policy with one of the RL libraries, and write checkpoints and a bundle."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rich.console import Console

from headrace._cli import bench_options as options
from headrace.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from headrace.adapters._settings import LibraryName, PPOSettings
    from headrace.adapters._training import CheckpointKeeper, Iteration
    from headrace.bench import TrainingBuilder
    from headrace.bench._targets import Target
    from headrace.envs import BatchEnv

_LIBRARIES = "headrace, rl_games, rsl_rl, sb3, skrl"


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
    parser.add_argument("--library", default="headrace", help=f"{_LIBRARIES} (default: headrace, our own small PPO)")
    parser.add_argument("--iterations", type=int, default=100, help="rollouts to learn from (default: 100)")
    parser.add_argument("--check-success", action="store_true", help="stop early once the task is solved")
    parser.add_argument(
        "--success-threshold", type=float, default=0.3, help="success rate that counts as solved (default: 0.3)"
    )
    parser.add_argument("--success-window", type=int, default=20, help="iterations it is averaged over (default: 20)")
    parser.add_argument("--ema-alpha", type=float, default=0.1, help="of the smoothed curves (default: 0.1)")
    parser.add_argument("--no-series", action="store_true", help="keep only the final values of the curves")
    parser.add_argument(
        "--ppo",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of PPO, for example steps=24 or learning_rate=3e-4; repeatable",
    )
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="go on from the last checkpoint of that run")
    options.add_output_options(parser)
    parser.set_defaults(handler=_train)


def _train(arguments: argparse.Namespace) -> int:
    from headrace.adapters._settings import DIFFERENCES, plain_settings
    from headrace.bench import Benchmark, SuccessRule, TrainingBuilder, describe_library
    from headrace.bench._targets import import_environments, target_cfg

    target = options.checked_target(arguments, ours_for="train")
    if arguments.iterations < 1:
        raise ConfigError(f"--iterations: expected at least 1, got {arguments.iterations}")
    rule = SuccessRule(threshold=arguments.success_threshold, window=arguments.success_window)
    builder = TrainingBuilder(
        ema_alpha=arguments.ema_alpha, series=not arguments.no_series, rule=rule if arguments.check_success else None
    )
    with options.imports_phase(builder.startup, target):
        library = _checked_library(arguments.library)
        import_environments(target)
    with builder.startup.phase("task_config"):
        overrides = options.overrides_of(arguments)
        cfg = target_cfg(target, overrides)
    settings = _settings(arguments.ppo, arguments.seed)
    settings.minibatch_size(arguments.num_envs)
    if arguments.resume is not None:
        from headrace.adapters._training import resumable

        resumable(arguments.resume, library)
    folder, forms = _output(arguments, target, library)
    builder.library = describe_library(
        library, algorithm="PPO", settings=plain_settings(settings), differences=DIFFERENCES[library]
    )
    described = dataclasses.replace(
        options.run_settings(arguments, options.run_config(arguments, target, overrides)),
        framework=library,
        max_iterations=arguments.iterations,
    )
    with Benchmark(builder, described, output=folder, formatters=forms) as run:
        with builder.startup.phase("env_creation"):
            env = options.made_env(arguments, target, cfg, overrides)
        with closing(env):
            _learn(cast("BatchEnv", env), builder, arguments, library, settings, folder, overrides)
        if builder.stop_reason is not None:
            run.complete(builder.stop_reason)
    options.show_bundle(run.bundle, run.paths)
    return 0


def _learn(
    env: BatchEnv,
    builder: TrainingBuilder,
    arguments: argparse.Namespace,
    library: LibraryName,
    settings: PPOSettings,
    folder: Path,
    overrides: dict[str, object],
) -> None:
    from headrace.adapters._library import make_learner
    from headrace.adapters._torch_state import library_run
    from headrace.adapters._training import CheckpointKeeper, resume, train

    if arguments.check_success and env.task.success_measure is None:
        raise ConfigError(f"--check-success: expected a task with a success measure, got {arguments.task!r}")
    frames = settings.steps * env.num_envs
    with library_run(seed=arguments.seed):
        learner = make_learner(library, env, settings)
        with closing(learner):
            first = 0 if arguments.resume is None else resume(learner, arguments.resume)
            keeper = CheckpointKeeper(folder, learner, arguments.task, overrides)
            with options.progress_bar(f"training with {library}", arguments.iterations) as update:

                def after(done: Iteration) -> bool:
                    _note(builder, keeper)
                    update(done.number - first)
                    return builder.iteration(
                        frames=frames,
                        collection_s=done.times.collect,
                        learning_s=done.times.learn,
                        rewards=done.finished.returns,
                        lengths=done.finished.lengths,
                        successes=done.finished.success if done.finished.returns else None,
                    )

                builder.begin()
                try:
                    train(learner, keeper, arguments.iterations, after, first=first)
                finally:
                    _note(builder, keeper)
                builder.end()


def _note(builder: TrainingBuilder, keeper: CheckpointKeeper) -> None:
    """Let the bundle name the newest checkpoint."""
    from headrace.bench import CheckpointInfo

    kept = keeper.kept
    if kept is not None:
        builder.checkpoint = CheckpointInfo(
            path=str(kept.last),
            source="saved",
            library=kept.library,
            task=kept.task,
            iteration=kept.iteration,
            score=kept.score,
        )


def _checked_library(name: str) -> LibraryName:
    from headrace.adapters._library import require_library
    from headrace.adapters._settings import checked_library

    library = checked_library(name)
    require_library(library)
    return library


def _settings(words: Sequence[str], seed: int) -> PPOSettings:
    from headrace.adapters._settings import PPOSettings
    from headrace.envs._overrides import parse_assignments

    given = parse_assignments(list(words))
    known = {field.name for field in dataclasses.fields(PPOSettings)} - {"seed"}
    for name in given:
        if name not in known:
            raise UnknownNameError("PPO setting", name, known)
    try:
        return PPOSettings(**{"seed": seed, **given})  # pyright: ignore[reportArgumentType]  # checked when it is made
    except TypeError as error:
        raise ConfigError(f"--ppo: {error}") from error


def _output(arguments: argparse.Namespace, target: Target, library: str) -> tuple[Path, tuple[str, ...]]:
    from headrace.adapters._training import INDEX

    folder, forms = options.checked_output(arguments, target, "training", framework=library)
    if (folder / INDEX).exists():
        raise ConfigError(f"--output: {str(folder)!r} holds another training; choose another folder")
    Console(stderr=True).print(f"checkpoints go to {folder / 'checkpoints'}", highlight=False, soft_wrap=True)
    return folder, forms
