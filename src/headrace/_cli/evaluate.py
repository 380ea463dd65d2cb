"""``headrace evaluate``: play a plan of episodes with a chunk policy and print what it reached."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from rich.console import Console

from headrace._cli.options import add_options, add_repeatable, add_task, arguments_of, option_of
from headrace._interrupts import exit_code
from headrace._jobs.evaluate import evaluate
from headrace.errors import ConfigError, HeadraceError

if TYPE_CHECKING:
    from headrace.chunking import Batching
    from headrace.rollout import Evaluation
    from headrace.serving import WireMapping

HELP = "play episodes with a policy that plans chunks of actions"
DESCRIPTION = (
    "Play episodes of TASK, each exactly once, with a policy that plans chunks of actions, and print success "
    "rate and reward with intervals, and what the model cost. An environment that waits for its next chunk is "
    "suspended. The table does not depend on --num-envs, --engine or --admission (but for the hold forms) by "
    "one bit, unless --fast is given."
)
_PROMPT = "prompt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_task(parser, more=", or a suite: FILE.toml")
    add_options(parser, evaluate, "policy")
    which = parser.add_mutually_exclusive_group()
    add_options(which, evaluate, "episodes")
    parser.set_defaults(episodes=None)  # a suite has its own: whether it was given must be seen
    which.add_argument(
        "--episode-ids", metavar="FIRST:END", help="play these ids instead of --episodes, for example 100:200"
    )
    add_options(parser, evaluate, "num_envs", "seed", "threads", "execute", "offset", "latency", "horizon")
    add_options(parser, evaluate, "admission RULE", "engine {inline,thread,process}")
    add_batch_options(parser)
    add_options(parser, evaluate, "timeout SECONDS", "ensemble_decay DECAY", "video", "film failures|ID,ID,…")
    add_options(parser, evaluate, "films DIRECTORY", "renderer")
    add_csv(parser)
    add_options(parser, evaluate, "output", "overrides", "journal FILE", "resume", "policy_id", "instruction TEXT")
    add_options(parser, evaluate, "workers K", "ray_address ADDRESS")
    group = parser.add_argument_group("policies of a server (openpi://, gr00t://, roboarena://, vllm-omni://)")
    text = "fill the server's KEY from a group, or a part of it such as policy[0:7]; repeatable"
    add_repeatable(group, "--map", "KEY=GROUP", text)
    group.add_argument(
        "--prompt-key", default=_PROMPT, metavar="KEY", help="name of the instruction in a request (default: prompt)"
    )
    group.add_argument("--resize", metavar="HxW", help="fit images into this size, padded with black")
    add_options(group, evaluate, "connections", "images {raw,png,jpeg}")


def add_batch_options(parser: argparse.ArgumentParser) -> None:
    """In which batches the model runs; also for ``serve``."""
    parser.add_argument(
        "--fast",
        action="store_true",
        help="batches of varying size, without padding rows; the last bits of an answer depend on the rest of its "
        "batch",
    )
    parser.add_argument("--batch-size", type=int, metavar="N", help="rows of every batch in strict mode (default: 16)")


def add_csv(parser: argparse.ArgumentParser) -> None:
    """Where the rows go; also for ``merge``."""
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the per-episode table here")


def handle(arguments: argparse.Namespace) -> int:
    """Evaluate and print."""
    settings = arguments_of(arguments, evaluate)
    settings["batching"] = _batching(arguments.fast, arguments.batch_size)
    settings["mapping"] = _mapping(arguments)
    if arguments.episodes is None:
        del settings["episodes"]
    if arguments.task.endswith(".toml"):
        return _suite(arguments, settings)
    check_table(arguments.csv)
    settings["film"] = _films(arguments.film)
    if arguments.episode_ids is not None:
        settings["episodes"] = _ids(arguments.episode_ids)
    try:
        found = evaluate(arguments.task, **settings)
    except HeadraceError as error:
        if error.finished is not None:
            show(cast("Evaluation", error.finished), arguments.csv)
        raise
    show(found, arguments.csv)
    return _ending(found.interrupt, found.unfinished)


def _suite(arguments: argparse.Namespace, settings: dict[str, Any]) -> int:
    from headrace._jobs.suite import evaluate_suite

    for name in ("episodes", "episode_ids", "seed", "overrides", "instruction", "csv", "video", "film"):
        if getattr(arguments, name) not in (None, []):
            raise ConfigError(f"{option_of(name)}: expected none with a suite, which has its own, or takes none")
        settings.pop(name, None)
    found = evaluate_suite(arguments.task, **settings)
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


def _ids(text: str) -> range:
    first, _, end = text.partition(":")
    if not first.isdigit() or not end.isdigit() or int(first) >= int(end):
        raise ConfigError(f"--episode-ids: expected FIRST:END with FIRST < END, for example 0:500, got {text!r}")
    return range(int(first), int(end))


def _mapping(arguments: argparse.Namespace) -> WireMapping | None:
    """From our groups to a server's keys, where somebody says it."""
    size = _size(arguments.resize)
    if arguments.map:
        from headrace.serving._mapping import parse_mapping

        return parse_mapping(arguments.map, image_size=size, prompt=arguments.prompt_key)
    if size is not None or arguments.prompt_key != _PROMPT:
        raise ConfigError(
            "--resize, --prompt-key: expected --map KEY=GROUP with them; without, groups go by name as they are"
        )
    return None


def _size(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    height, _, width = text.partition("x")
    if not height.isdigit() or not width.isdigit():
        raise ConfigError(f"--resize: expected HEIGHTxWIDTH such as 224x224, got {text!r}")
    return int(height), int(width)


def show(found: Evaluation, table: Path | None) -> None:
    """Print the figures, and write the rows where somebody asked for them."""
    Console().print(found.summary())
    if table is not None:
        found.to_csv(table)


def check_table(path: Path | None) -> None:
    """Refuse a file for the rows that could not be written, before the work."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ConfigError(f"--csv: expected a file in a directory that exists, got {path}")
