"""``headrace imitate``: record an expert, clone it into a chunk policy, and say how good the clone is."""

from __future__ import annotations

import argparse
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from headrace._cli.options import add_option
from headrace._interrupts import exit_code
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.chunking import ChunkPolicy
    from headrace.envs import BatchEnv
    from headrace.rollout._act_policy import ActPolicy
    from headrace.rollout._evaluation import Evaluation
    from headrace.rollout._imitation import Demonstrations
    from headrace.rollout.experts import Expert

_HELD_OUT = 1_000_003


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]  # argparse has no public name for it
    """Add the sub-command."""
    parser = commands.add_parser(
        "imitate",
        help="train a chunk policy on an expert's demonstrations",
        description=(
            "Record successful episodes of TASK's expert, train a small action-chunking transformer on them, save it, "
            "and evaluate it on episodes it has not seen, compared with the same model untrained and with the expert's "
            "mean action."
        ),
    )
    parser.add_argument("task", metavar="TASK", help="a task with an expert, for example pusher-solid")
    parser.add_argument("--demos", type=int, default=2000, help="successful episodes to learn from (default: 2000)")
    parser.add_argument("--updates", type=int, default=8000, help="optimizer steps (default: 8000)")
    add_option(parser, "--output", required=True)
    add_option(parser, "--num-envs", default=128)
    add_option(parser, "--seed", default=0)
    add_option(parser, "--episodes", default=300)
    add_option(parser, "--execute", default=16)
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    from headrace.envs import make
    from headrace.rollout._act_policy import save_policy
    from headrace.rollout.experts import expert_for

    expert = expert_for(arguments.task)
    _check(arguments)
    env = make(arguments.task, arguments.num_envs, autoreset="disabled", final_obs=False)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    # model and rows are small: more threads would only wait for each other
    with _torch_threads(1):
        with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
            demos, policy = _learned(arguments, env, expert, bars)
        digest = save_policy(policy, arguments.output, task=arguments.task)
        results = _evaluated(arguments, env, demos, policy)
    env.close()
    console = Console()
    console.print(_table(arguments.task, demos, results))
    console.print(f"{arguments.output}: {arguments.output.stat().st_size:,} bytes, sha256 {digest}", soft_wrap=True)
    interrupts = [result.interrupt for result in results.values() if result.interrupt is not None]
    return exit_code(interrupts[0]) if interrupts else 0


def _check(arguments: argparse.Namespace) -> None:
    """What would fail only after minutes of work."""
    from headrace.rollout._act_policy import ActCfg

    if arguments.output.is_dir():
        raise ConfigError(f"--output: expected a file to write, got the folder {arguments.output}")
    try:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output: expected a place for a file, got {arguments.output}: {error.strerror}") from error
    if not 1 <= arguments.execute <= ActCfg.horizon:
        raise ConfigError(f"--execute: expected 1 to {ActCfg.horizon} actions of a chunk, got {arguments.execute}")
    for name in ("demos", "updates", "episodes"):
        if getattr(arguments, name) <= 0:
            raise ConfigError(f"--{name}: expected more than 0, got {getattr(arguments, name)}")


@contextmanager
def _torch_threads(count: int) -> Generator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _learned(
    arguments: argparse.Namespace, env: BatchEnv, expert: Expert, bars: Progress
) -> tuple[Demonstrations, ActPolicy]:
    """Record and train, each with its bar."""
    from headrace.rollout._imitation import CloneCfg, clone, record_demonstrations

    recording = bars.add_task("recording", total=arguments.demos)
    demos = record_demonstrations(
        env,
        expert,
        arguments.demos,
        seed=arguments.seed,
        progress=lambda done: bars.update(recording, completed=done),
    )
    training = bars.add_task("training", total=arguments.updates)
    policy = clone(
        demos,
        CloneCfg(updates=arguments.updates, seed=arguments.seed),
        progress=lambda done, loss: bars.update(training, completed=done, description=f"training, loss {loss:.3f}"),
    )
    return demos, policy


def _evaluated(
    arguments: argparse.Namespace, env: BatchEnv, demos: Demonstrations, policy: ActPolicy
) -> dict[str, Evaluation]:
    """The policy and what it must beat, on episodes of another seed than the demonstrations."""
    from headrace.rollout._evaluate import evaluate
    from headrace.rollout._imitation import MeanAction, untrained

    contestants: dict[str, ChunkPolicy] = {
        "trained": policy,
        "untrained": untrained(demos, seed=arguments.seed),
        "mean action": MeanAction(demos.actions.mean(dim=0), policy.horizon),
    }
    seed = arguments.seed + _HELD_OUT
    results: dict[str, Evaluation] = {}
    for name, contestant in contestants.items():
        results[name] = evaluate(env, contestant, episodes=arguments.episodes, execute=arguments.execute, seed=seed)
        if results[name].status == "interrupted":  # Ctrl-C is meant for the command, not for one contestant
            break
    return results


def _table(task: str, demos: Demonstrations, results: dict[str, Evaluation]) -> Table:
    table = Table(title=f"{task}: {len(demos.episode_ids)} demonstrations of {demos.attempted} episodes")
    table.add_column("policy")
    table.add_column("success", justify="right")
    table.add_column("95 % interval", justify="right")
    table.add_column("episodes", justify="right")
    for name, result in results.items():
        rate = result.success_rate
        if rate is not None:
            interval = f"{rate.low:.1%} to {rate.high:.1%}"
            table.add_row(name, f"{rate.value:.1%}", interval, f"{len(result.episodes):,}")
    return table
