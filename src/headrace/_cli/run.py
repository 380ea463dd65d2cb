"""``headrace run``: step a task, with a progress bar and the rates it reached."""

from __future__ import annotations

import argparse
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from headrace._cli.actions import Policy, action_source
from headrace._cli.options import add_option
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.envs import BatchEnv
    from headrace.recording import EpisodeRecorder
    from headrace.types import Obs


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]  # argparse has no public name for it
    """Add the sub-command."""
    parser = commands.add_parser(
        "run",
        help="step a task and see its rates",
        description=(
            "Step TASK with random, zero or your own actions and print env-steps per second, where the time went and "
            "how the episodes ended. With --suspend-fraction F that share of the environments is frozen, at no cost."
        ),
    )
    parser.add_argument("task", metavar="TASK", help="a name from 'headrace tasks'")
    add_option(parser, "--num-envs", default=64)
    add_option(parser, "--num-steps", default=300)
    add_option(parser, "--seed", default=0)
    add_option(parser, "--threads", otherwise="all cores")
    parser.add_argument(
        "--policy",
        default="random",
        help="random, zero, or module:name of a function of the observation groups (default: random)",
    )
    parser.add_argument(
        "--suspend-fraction", type=float, default=0.0, help="share of environments to suspend, 0 to 1 (default: 0)"
    )
    add_option(parser, "--set")
    parser.add_argument(
        "--frame-stack", type=int, metavar="K", help="frames in an observation of a camera task, oldest first"
    )
    parser.add_argument(
        "--record",
        metavar="DIRECTORY",
        help="record every finished episode (observations, actions, rewards, flags, physics states); see 'record'",
    )
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    from headrace.envs import make
    from headrace.envs._overrides import parse_assignments

    if not 0.0 <= arguments.suspend_fraction <= 1.0:
        raise ConfigError(f"--suspend-fraction: expected a share from 0 to 1, got {arguments.suspend_fraction}")
    if arguments.num_steps < 1:
        raise ConfigError(f"--num-steps: expected at least 1, got {arguments.num_steps}")
    overrides = parse_assignments(arguments.set) | _frame_stack(arguments.task, arguments.frame_stack)
    env = make(arguments.task, arguments.num_envs, seed=arguments.seed, threads=arguments.threads, overrides=overrides)
    policy = action_source(arguments.policy, env, arguments.seed)
    suspended = round(arguments.suspend_fraction * env.num_envs)
    with _recording(env, arguments.record) as kept:
        obs, _ = env.reset()
        env.suspend(range(suspended))
        env.timer.clear()  # what is measured begins here, without the first reset
        report = _stepped(env, policy, obs, arguments.num_steps)
    env.close()
    table = _table(arguments.task, env, suspended, report)
    if kept is not None:
        table.add_row("episodes recorded", f"{kept.committed:,} in {arguments.record}")
        table.add_row("unfinished ones, given up", f"{kept.report.abandoned:,}")
    Console().print(table)
    return 0


def _frame_stack(task: str, frames: int | None) -> dict[str, object]:
    """What sets the frame stack of a camera task, whether it is written as a class or as a table."""
    from headrace.envs._registry import task_cfg
    from headrace.envs._terms import TermTaskCfg

    if frames is None:
        return {}
    cfg = task_cfg(task)
    if isinstance(cfg, TermTaskCfg):
        paths = [f"pictures.{name}.frames" for name in cfg.pictures]
    else:
        paths = ["frame_stack"] if hasattr(cfg, "frame_stack") else []
    if not paths:
        raise ConfigError(f"--frame-stack: expected a task seen by a camera, got {task!r}; try cartpole-camera")
    return dict.fromkeys(paths, frames)


@contextmanager
def _recording(env: BatchEnv, directory: str | None) -> Generator[EpisodeRecorder | None]:
    """A recorder attached to ``env`` for the length of a block, or None where nobody asked for one."""
    if directory is None:
        yield None
        return
    from headrace.recording import DatasetInfo, EpisodeRecorder, RecorderCfg

    cfg = RecorderCfg(fields=("obs", "actions", "rewards", "flags", "states"))
    with EpisodeRecorder(directory, cfg, DatasetInfo.of(env)) as recorder:
        env.attach(recorder)
        yield recorder


def _stepped(env: BatchEnv, policy: Policy, obs: Obs, steps: int) -> dict[str, float]:
    """Step and count: seconds, episodes, their returns, lengths and successes."""
    total: dict[str, float] = {"steps": float(steps), "seconds": 0.0}
    total.update(episodes=0.0, returns=0.0, lengths=0.0, successes=0.0)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("stepping", total=steps)
        for _ in range(steps):
            actions = policy(obs)
            begin = time.perf_counter()
            obs, _, _, _, info = env.step(actions)
            total["seconds"] += time.perf_counter() - begin
            if "ends" in info:
                ends = info["ends"]
                total["episodes"] += len(ends)
                total["returns"] += float(ends.returns.sum())
                total["lengths"] += float(ends.lengths.sum())
                total["successes"] += 0.0 if ends.success is None else float(ends.success.sum())
            progress.advance(bar)
    return total


def _table(task: str, env: BatchEnv, suspended: int, report: dict[str, float]) -> Table:
    acting = env.num_envs - suspended
    table = Table(title=f"{task}: {acting} of {env.num_envs} environments acting", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    seconds, episodes = report["seconds"], report["episodes"]
    table.add_row("env-steps per second", f"{acting * report['steps'] / seconds:,.0f}")
    table.add_row("milliseconds per step of the batch", f"{seconds / report['steps'] * 1e3:.2f}")
    for stage, spent in env.timer.seconds().items():
        table.add_row(f"  in {stage}", f"{spent / seconds:.0%}")
    table.add_row("episodes finished", f"{episodes:,.0f}")
    if episodes:
        table.add_row("mean return", f"{report['returns'] / episodes:,.2f}")
        table.add_row("mean length", f"{report['lengths'] / episodes:,.1f}")
        if env.task.success_measure is not None:
            table.add_row("success rate", f"{report['successes'] / episodes:.1%}")
    table.add_row("simulations that diverged", f"{env.divergences:,}")
    table.add_row("a suspended environment costs", env.sim.suspension_cost)
    return table
