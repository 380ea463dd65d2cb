"""``headrace record``: info, verify, replay, merge and export recorded episodes."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from headrace._cli.options import add_repeatable
from headrace._cli.printing import progress_bar, say
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.types import StackSpec

HELP = "info, verify, replay, merge and export recorded episodes"
DESCRIPTION = """\
Work with episodes that an EpisodeRecorder wrote.

  headrace record info runs/ant                            what is in it
  headrace record verify runs/ant                          are all files whole
  headrace record replay runs/ant --episode 12             does the same physics come out
  headrace record merge runs/a runs/b -o runs/ab           one dataset of several
  headrace record export runs/ant demos.hdf5 --to robomimic
  headrace record export runs/ant ant_lerobot --to lerobot --fps 20
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands, each with its own options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    actions = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_export(actions)
    verify = actions.add_parser(
        "verify",
        help="check hashes, lengths, timestamps and video frames",
        description=(
            "Check a recorded dataset, or an export of it (robomimic file, LeRobot or Minari directory). "
            "Prints every problem; the exit code is 1 if there is one."
        ),
    )
    verify.add_argument("dataset", metavar="DATASET", type=Path, help="directory or .hdf5 file")
    verify.set_defaults(handler=_verify)
    show = actions.add_parser(
        "info",
        help="print where a dataset comes from and its episodes; with --sheet also an image of their frames",
        description="Print where a recorded dataset comes from, its episodes and what they are made of.",
    )
    _add_dataset(show)
    show.add_argument("--limit", type=int, default=20, help="episodes in the table (default: 20)")
    show.add_argument("--sheet", type=Path, metavar="FILE.png", help="write a contact sheet of frames to this file")
    show.add_argument("--camera", help="array for the sheet, such as obs/camera (default: the first with images)")
    show.set_defaults(handler=_info)
    replay = actions.add_parser(
        "replay",
        help="run recorded actions again and compare the physics bit for bit",
        description=(
            "Make the environment that was recorded, start the episode from its seed and id, and run its actions. "
            "Says that every number was equal to the last bit, or where the first one differs (exit code 1)."
        ),
    )
    _add_dataset(replay)
    replay.add_argument("--episode", type=int, metavar="ID", help="episode id (default: all of them)")
    replay.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="seed of episodes and of everything else that is random (default: that of the recording; needed where an "
        "id has several)",
    )
    replay.add_argument(
        "--task",
        help="module:NAME, gym:module:ID or a recipe file, where the dataset names a module or an interpreter of yours "
        "(default: the dataset's task)",
    )
    replay.set_defaults(handler=_replay)
    merge = actions.add_parser(
        "merge",
        help="make one dataset of several recordings of the same environment",
        description=(
            "Check every file, then link (or copy) the episodes of all datasets into a new one. Datasets of different "
            "environments, other fields, and an episode that is there twice with different content are refused."
        ),
    )
    merge.add_argument("datasets", metavar="DATASET", type=Path, nargs="+", help="directories of EpisodeRecorders")
    merge.add_argument("--output", "-o", type=str, metavar="PATH", required=True, help="where to write the result")
    merge.set_defaults(handler=_merge)


def _add_export(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]  # argparse has no public name for it
    export = actions.add_parser(
        "export",
        help="write the episodes in a format that people train from",
        description=(
            "Assemble a robomimic/Isaac Lab HDF5 file, a LeRobot v3.0 directory or a Minari directory from committed "
            "episodes. An export that was interrupted goes on where it was; the target appears when it is whole. "
            "A Minari directory is named like its dataset id, for example ant-v0."
        ),
    )
    _add_dataset(export)
    export.add_argument(
        "target", metavar="TARGET", type=Path, help="file or directory to make; must not exist, unless --append"
    )
    export.add_argument("--to", required=True, choices=("robomimic", "lerobot", "minari"), help="the format")
    export.add_argument(
        "--only",
        default="all",
        choices=("all", "succeeded", "failed", "failed_apart"),
        help="which episodes; failed_apart makes a second dataset of the failed ones (default: all)",
    )
    export.add_argument("--min-length", type=int, default=0, help="leave out shorter episodes (default: 0)")
    export.add_argument("--fps", type=float, help="steps per second, in place of what the dataset says (LeRobot)")
    text = "name of a camera in LeRobot, such as obs/policy=front; repeatable (default: the observation group)"
    add_repeatable(export, "--camera-name", "FIELD=NAME", text)
    text = "frames that an image field stacks along its channels, where the dataset does not say (LeRobot)"
    add_repeatable(export, "--stack", "FIELD=FRAMES", text)
    export.add_argument(
        "--append", action="store_true", help="add the episodes that the target does not have (LeRobot)"
    )
    export.set_defaults(handler=_export)


def _add_dataset(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", metavar="DATASET", type=Path, help="directory that an EpisodeRecorder wrote")


def _export(arguments: argparse.Namespace) -> int:
    from headrace.recording import export_dataset

    with progress_bar(f"to {arguments.to}", None) as update:
        made = export_dataset(
            *(arguments.dataset, arguments.target, arguments.to),
            only=arguments.only,
            min_length=arguments.min_length,
            fps=arguments.fps,
            append=arguments.append,
            cameras=dict(_pairs(arguments.camera_name, "--camera-name FIELD=NAME")),
            stacks={name: _stack(frames) for name, frames in _pairs(arguments.stack, "--stack FIELD=FRAMES")},
            progress=update,
        )
    for path in made:
        say(f"wrote {path}")
    return 0


def _pairs(texts: list[str], form: str) -> list[tuple[str, str]]:
    pairs = [text.partition("=") for text in texts]
    for text, (name, sign, value) in zip(texts, pairs, strict=True):
        if not (name and sign and value):
            raise ConfigError(f"expected {form}, got {text!r}")
    return [(name, value) for name, _, value in pairs]


def _stack(frames: str) -> StackSpec:
    from headrace.types import StackSpec

    if not (frames.isascii() and frames.isdecimal()):
        raise ConfigError(f"--stack: expected a number of frames, got {frames!r}")
    return StackSpec(frames=int(frames))


def _merge(arguments: argparse.Namespace) -> int:
    from headrace.recording import EpisodeDataset, merge_datasets

    path = merge_datasets(arguments.datasets, arguments.output)
    say(f"wrote {path}: {len(EpisodeDataset(path))} episodes of {len(arguments.datasets)} datasets")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from headrace.recording import verify_dataset

    verdict = verify_dataset(arguments.dataset)
    console = Console()
    for problem in verdict.problems:
        console.print(f"[red]✗[/] {escape(problem)}", highlight=False, soft_wrap=True)
    count = len(verdict.problems)
    judgment = "[green]all is well[/]" if not count else f"[red]{count} problem{'s' if count > 1 else ''}[/]"
    console.print(f"{verdict.kind}: {verdict.episodes} episodes, {verdict.steps} steps: {judgment}", highlight=False)
    return 1 if count else 0


def _info(arguments: argparse.Namespace) -> int:
    from headrace.recording import EpisodeDataset
    from headrace.recording._show import contact_sheet, episode_table, field_table

    dataset = EpisodeDataset(arguments.dataset)
    console = Console()
    for name, value in asdict(dataset.info).items():
        if name not in ("spaces", "stacks") and value:
            say(f"{name}: {value}")
    console.print(episode_table(dataset, limit=arguments.limit))
    if len(dataset):
        console.print(field_table(dataset[0]))
    if arguments.sheet is not None:
        say(f"wrote {contact_sheet(dataset, arguments.sheet, camera=arguments.camera)}")
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    from headrace.recording import EpisodeDataset
    from headrace.rollout import replay_dataset

    dataset = EpisodeDataset(arguments.dataset)
    episodes = None if arguments.episode is None else [dataset.find(arguments.episode, arguments.seed)]
    console = Console()
    count = differ = steps = 0
    compared: tuple[str, ...] = ()
    for episode, result in replay_dataset(dataset, episodes, task=arguments.task):
        count += 1
        steps += result.steps
        compared = result.compared
        if result.difference is not None:
            differ += 1
            words = f"[red]✗[/] episode {episode.meta.episode_id}: {escape(str(result.difference))}"
            console.print(words, highlight=False, soft_wrap=True)
    names = escape(", ".join(compared))
    if differ:
        console.print(f"{differ} of {count} episodes came out otherwise (compared: {names})", highlight=False)
        return 1
    words = f"[green]bit-exact[/]: {count} episodes, {steps} steps (compared: {names})"
    console.print(words, highlight=False, soft_wrap=True)
    return 0
