"""``headrace play``: roll a trained policy out and say what it achieved and what it cost."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rich.console import Console

from headrace._cli import bench_options as options
from headrace._cli.options import add_option
from headrace.errors import ConfigError, require_extra

if TYPE_CHECKING:
    from headrace.adapters._finding import FoundCheckpoint
    from headrace.adapters._learner import InferencePolicy
    from headrace.adapters._policies import PolicyFile
    from headrace.bench import PlayBuilder
    from headrace.envs import BatchEnv


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]  # argparse has no public name for it
    """Add the sub-command."""
    parser = commands.add_parser(
        "play",
        help="play a trained policy and measure what it achieves",
        description=(
            "Play TASK with a checkpoint and write play.json: reward, length and success of completed episodes, per "
            "environment, and what they cost. Without --checkpoint the newest training in runs/ is played, or else the "
            "checkpoint that we publish for the task."
        ),
    )
    options.add_target_options(parser)
    parser.add_argument(
        "--checkpoint",
        metavar="WHICH",
        help="a file, a URI, latest, best, published, a TorchScript or ONNX file, or module:name of a function of the "
        "observation groups (default: latest, else published)",
    )
    add_option(parser, "--library", otherwise="checkpoints of any")
    amount = parser.add_mutually_exclusive_group()
    add_option(amount, "--episodes", otherwise="one per environment")
    add_option(amount, "--num-steps", otherwise="play --episodes instead")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--deterministic", action="store_true", default=True, help="the policy's mean action (default)")
    how.add_argument("--stochastic", dest="deterministic", action="store_false", help="sample actions")
    add_option(parser, "--video")
    parser.add_argument(
        "--trust-checkpoint",
        action="store_true",
        help="load a file that holds more than weights, which can execute arbitrary code; load only files you trust",
    )
    options.add_output_options(parser)
    parser.set_defaults(handler=_play)


def _play(arguments: argparse.Namespace) -> int:
    from headrace.adapters import library
    from headrace.bench import Benchmark, EpisodePlan, PlayBuilder
    from headrace.bench._targets import target_cfg

    target = options.checked_target(arguments, ours_for="play")
    for name in ("episodes", "num_steps"):
        if (given := getattr(arguments, name)) is not None and given < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: expected at least 1, got {given}")
    if arguments.library is not None:
        library(arguments.library)
    if arguments.video is not None:
        require_extra("av", extra="record", purpose="--video")
        if arguments.video.exists():
            raise ConfigError(f"--video: {arguments.video} already exists, and nothing is ever overwritten")
    found, file = _found(arguments)
    overrides = ({} if file is None else file.overrides) | options.overrides_of(arguments)
    cfg = target_cfg(target, overrides)
    assert cfg is not None
    folder, forms = options.checked_output(arguments, target, "play")
    steps = cast("int | None", arguments.num_steps)
    episodes = None if steps is not None else arguments.episodes or arguments.num_envs
    short = steps is not None and steps < cfg.episode_length
    if short:
        Console(stderr=True).print(
            f"--num-steps {steps} is shorter than an episode may be ({cfg.episode_length} steps): only short episodes "
            "can complete, and only completed ones are counted",
            style="yellow",
            soft_wrap=True,
        )
    plan = EpisodePlan(
        kind="episodes" if steps is None else "steps",
        episodes_planned=episodes,
        num_steps=steps,
        first_episode_id=0,
        max_episode_length=cfg.episode_length,
        shorter_than_episode=short,
    )
    builder = PlayBuilder(arguments.num_envs, plan=plan)
    settings = dataclasses.replace(
        options.run_settings(arguments, options.run_config(arguments, target, overrides)),
        framework=None if file is None else file.library,
    )
    with Benchmark(builder, settings, output=folder, formatters=forms) as run:
        with builder.startup.phase("env_creation"):
            env = options.made_env(arguments, target, cfg, overrides)
        with closing(env):
            _rolled(cast("BatchEnv", env), builder, arguments, found, file, episodes)
    options.show_bundle(run.bundle, run.paths)
    return 0


def _found(arguments: argparse.Namespace) -> tuple[FoundCheckpoint | None, PolicyFile | None]:
    """The file to play, checked; nothing for ``module:name``."""
    from headrace.adapters._finding import find_checkpoint
    from headrace.adapters._policies import inspect_file

    wanted = cast("str | None", arguments.checkpoint)
    if wanted is not None and ":" in wanted and "://" not in wanted and not Path(wanted).exists():
        return None, None
    found = find_checkpoint(wanted, arguments.task, library=arguments.library)
    if found.source != "explicit":
        note = f"playing the {found.source} checkpoint of {arguments.task}: {found.path}"
        Console(stderr=True).print(note, highlight=False, soft_wrap=True)
    file = inspect_file(found.path, arguments.task, library=arguments.library, trust=arguments.trust_checkpoint)
    return found, file


def _rolled(
    env: BatchEnv,
    builder: PlayBuilder,
    arguments: argparse.Namespace,
    found: FoundCheckpoint | None,
    file: PolicyFile | None,
    episodes: int | None,
) -> None:
    from headrace.adapters._playing import play_episodes, play_steps
    from headrace.adapters._policies import callable_policy, load_policy
    from headrace.adapters._torch_state import library_run

    with ExitStack() as stack:
        stack.enter_context(library_run(seed=arguments.seed))
        if file is None:
            policy = callable_policy(arguments.checkpoint, env)
        else:
            policy = load_policy(file, env, deterministic=arguments.deterministic, trust=arguments.trust_checkpoint)
        _describe(builder, policy, arguments, found, file)
        if arguments.video is not None:
            _film(env, builder, arguments.video, stack)
        if episodes is None:
            with options.progress_bar("playing", arguments.num_steps) as update:
                play_steps(env, policy, builder.steps, builder.episodes, arguments.num_steps, update)
        else:
            with options.progress_bar("episodes", episodes) as update:
                play_episodes(env, policy, builder.steps, builder.episodes, episodes, update)


def _film(env: BatchEnv, builder: PlayBuilder, path: Path, stack: ExitStack) -> None:
    from headrace.recording import VideoObserver

    observer = stack.enter_context(VideoObserver(path, render=env.render_each, fps=1.0 / env.task.dt))
    env.attach(observer)
    builder.video_path = str(path)


def _describe(
    builder: PlayBuilder,
    policy: InferencePolicy,
    arguments: argparse.Namespace,
    found: FoundCheckpoint | None,
    file: PolicyFile | None,
) -> None:
    from headrace.bench import CheckpointInfo, PolicyDescriptor, describe_library

    if found is None or file is None:
        builder.policy = PolicyDescriptor(
            kind="callable", name=arguments.checkpoint, deterministic=True, recurrent=policy.recurrent
        )
        return
    kind = file.kind if file.kind in ("torchscript", "onnx", "chunk") else "checkpoint"
    builder.policy = PolicyDescriptor(
        kind=kind,
        name=file.path.name,
        deterministic=arguments.deterministic or kind != "checkpoint",
        recurrent=policy.recurrent,
    )
    builder.checkpoint = CheckpointInfo(
        path=str(file.path),
        source=found.source,
        uri=found.uri,
        sha256=hashlib.sha256(file.path.read_bytes()).hexdigest(),
        library=file.library,
        task=None if file.meta is None else file.meta.task,
        iteration=None if file.meta is None else file.meta.iteration,
        score=found.score if file.meta is None else file.meta.score,
    )
    if file.library is not None:
        builder.library = describe_library(file.library, algorithm="PPO")
