"""``headrace evaluate``: play a plan of episodes with a chunk policy and print what it reached."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from rich.console import Console

from headrace._cli.options import add_option, add_task, values
from headrace._cli.remote_policy import add_remote_options, remote_of
from headrace._interrupts import exit_code
from headrace.errors import ConfigError, HeadraceError

if TYPE_CHECKING:
    from headrace.chunking import Batching
    from headrace.rollout import Evaluation

_RULES = "greedy, immediate, periodic:K[:hold], synchronized[:hold], threshold:N, whole-batch-on-any, or module:name"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]  # argparse has no public name for it
    """Add the sub-command."""
    parser = commands.add_parser(
        "evaluate",
        help="play episodes with a policy that plans chunks of actions",
        description=(
            "Play episodes of TASK, each exactly once, with a policy that plans chunks of actions, and print success "
            "rate and reward with intervals, and what the model cost. An environment that waits for its next chunk is "
            "suspended. The table does not depend on --num-envs, --engine or --admission (but for the hold forms) by "
            "one bit, unless --fast is given."
        ),
    )
    add_task(parser, more=", or a suite: FILE.toml")
    parser.add_argument(
        "--policy",
        help="a checkpoint of 'headrace imitate' or 'headrace train', or a training's directory; module:name of a "
        "policy object, class or function; lerobot:DIR; the address of a server: openpi://HOST:8000, gr00t://HOST:5555 "
        "(default: the policy that we ship for TASK)",
    )
    which = parser.add_mutually_exclusive_group()
    add_option(which, "--episodes", otherwise="100")
    which.add_argument(
        "--episode-ids", metavar="FIRST:END", help="play these ids instead of --episodes, for example 100:200"
    )
    add_option(parser, "--num-envs", otherwise="16, or the recipe's")
    add_option(parser, "--seed", otherwise="0, or the recipe's or suite's")
    add_option(parser, "--threads", otherwise="all cores")
    add_option(parser, "--execute", otherwise="the policy's horizon")
    parser.add_argument("--offset", type=int, default=0, help="first row of a chunk that is played (default: 0)")
    parser.add_argument("--latency", type=int, default=0, help="simulated latency in steps (default: 0)")
    add_option(parser, "--horizon", otherwise="what the policy says")
    parser.add_argument("--admission", default="greedy", metavar="RULE", help=f"{_RULES} (default: greedy)")
    parser.add_argument(
        "--engine", default="inline", choices=("inline", "thread", "process"), help="where the model runs"
    )
    add_option(parser, "--fast")
    add_option(parser, "--batch-size", otherwise="16")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="of one call of the model (default: none)")
    parser.add_argument(
        "--ensemble", type=float, metavar="DECAY", help="temporal ensembling as in ACT; executes one action per chunk"
    )
    add_option(parser, "--video")
    parser.add_argument(
        "--film",
        metavar="failures|ID,ID,…",
        help="play these episodes again afterwards, bit for bit, and film each into --films",
    )
    parser.add_argument(
        "--films",
        type=Path,
        default=Path("films"),
        metavar="DIRECTORY",
        help="directory for the films of --film (default: films)",
    )
    add_option(parser, "--renderer", default="native")
    add_option(parser, "--csv")
    add_option(parser, "--output", otherwise="nowhere")
    add_option(parser, "--set")
    parser.add_argument("--journal", type=Path, metavar="FILE", help="append every finished episode here at once")
    add_option(parser, "--resume")
    parser.add_argument(
        "--policy-id",
        help="what --journal and --output call the policy (default: a hash of its weights, settings and code)",
    )
    parser.add_argument("--instruction", metavar="TEXT", help="what the policy is told (default: the task's own text)")
    parser.add_argument(
        "--workers",
        type=int,
        metavar="K",
        help="play in K processes over Ray, each with --num-envs environments (default: in this process)",
    )
    parser.add_argument(
        "--ray-address", metavar="ADDRESS", help="of a Ray cluster, or auto (default: this machine, for this command)"
    )
    add_remote_options(parser)
    parser.set_defaults(handler=_evaluate)


def _evaluate(arguments: argparse.Namespace) -> int:
    from headrace._jobs.evaluate import evaluate

    played = ("num_envs", "threads", "execute", "offset", "latency", "horizon", "admission", "engine", "timeout")
    kept = ("journal", "resume", "policy_id", "workers", "ray_address", "output")
    settings = values(arguments, *played, *kept) | remote_of(arguments)
    settings["batching"] = _batching(arguments.fast, arguments.batch_size)
    settings["ensemble_decay"] = arguments.ensemble
    if arguments.task.endswith(".toml"):
        return _suite(arguments, settings)
    check_table(arguments.csv)
    try:
        found = evaluate(
            arguments.task,
            arguments.policy,
            episodes=_episodes(arguments),
            film=_films(arguments.film),
            **values(arguments, "seed", "overrides", "instruction", "video", "films", "renderer"),
            **settings,
        )
    except HeadraceError as error:
        if error.finished is not None:
            show(cast("Evaluation", error.finished), arguments.csv)
        raise
    show(found, arguments.csv)
    return _ending(found.interrupt, found.unfinished)


def _suite(arguments: argparse.Namespace, settings: dict[str, Any]) -> int:
    from headrace._jobs.suite import evaluate_suite

    for name in ("episodes", "episode_ids", "seed", "set", "instruction", "csv", "video", "film"):
        if getattr(arguments, name) not in (None, []):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option}: expected none with a suite, which has its own, or takes none")
    found = evaluate_suite(arguments.task, arguments.policy, **settings)
    Console().print(found.summary())
    return _ending(found.interrupt, found.unfinished)


def _ending(interrupt: KeyboardInterrupt | None, unfinished: int) -> int:
    """The exit code."""
    if interrupt is not None:
        return exit_code(interrupt)
    return 1 if unfinished else 0


def _films(text: str | None) -> Literal["failures"] | list[int] | None:
    if text is None or text == "failures":
        return text
    words = text.split(",")
    if not all(word.isdigit() for word in words):
        raise ConfigError(f"--film: expected 'failures' or ids such as 3,17, got {text!r}")
    return [int(word) for word in words]


def _batching(fast: bool, size: int | None) -> Batching | Literal["fast"] | None:
    from headrace.chunking import Batching

    if fast and size is not None:
        raise ConfigError("--batch-size: expected no --fast with it, whose batches have any size")
    return "fast" if fast else None if size is None else Batching(size=size)


def _episodes(arguments: argparse.Namespace) -> int | range:
    if arguments.episode_ids is not None:
        return _ids(arguments.episode_ids)
    return 100 if arguments.episodes is None else arguments.episodes


def _ids(text: str) -> range:
    first, _, end = text.partition(":")
    if not first.isdigit() or not end.isdigit() or int(first) >= int(end):
        raise ConfigError(f"--episode-ids: expected FIRST:END with FIRST < END, for example 0:500, got {text!r}")
    return range(int(first), int(end))


def show(found: Evaluation, table: Path | None) -> None:
    """Print the figures, and write the rows where somebody asked for them."""
    Console().print(found.summary())
    if table is not None:
        found.to_csv(table)


def check_table(path: Path | None) -> None:
    """Refuse a file for the rows that could not be written, before the work."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ConfigError(f"--csv: expected a file in a directory that exists, got {path}")
