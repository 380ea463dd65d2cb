"""Work with episodes that an EpisodeRecorder wrote.

headrace record info runs/ant                            what is in it
headrace record verify runs/ant                          are all files whole
headrace record replay runs/ant --episode 12             does the same physics come out
headrace record merge runs/a runs/b -o runs/ab           one dataset of several
headrace record export runs/ant demos.hdf5 --to robomimic
headrace record export runs/ant ant_lerobot --to lerobot --fps 20
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.console import Console
from rich.markup import escape

from headrace.cli.printing import progress_bar, say
from headrace.cli.records import Command, Positional, Repeated
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.types import StackSpec

Dataset = Annotated[Path, Positional("DATASET")]


def _names(texts: Sequence[str]) -> Mapping[str, str]:
    """Return names by field from ``FIELD=NAME`` texts."""
    return dict(_pairs(texts, "--camera-name FIELD=NAME"))


def _stacks(texts: Sequence[str]) -> Mapping[str, StackSpec]:
    """Return stacks by field from ``FIELD=FRAMES`` texts."""
    from headrace.types import StackSpec

    found: dict[str, StackSpec] = {}
    for name, frames in _pairs(texts, "--stack FIELD=FRAMES"):
        if not (frames.isascii() and frames.isdecimal()):
            raise ConfigError(f"--stack: expected a number of frames, got {frames!r}")
        found[name] = StackSpec(frames=int(frames), dim=-1)
    return found


def _pairs(texts: Sequence[str], form: str) -> list[tuple[str, str]]:
    pairs = [text.partition("=") for text in texts]
    for text, (name, sign, value) in zip(texts, pairs, strict=True):
        if not (name and sign and value):
            raise ConfigError(f"expected {form}, got {text!r}")
    return [(name, value) for name, _, value in pairs]


@dataclass(frozen=True, kw_only=True)
class RecordExportOptions:
    """Assemble a robomimic/Isaac Lab HDF5 file, a LeRobot v3.0 directory or a Minari directory from committed episodes.
    An export that was interrupted goes on where it was; the target appears when it is whole. A Minari directory is
    named like its dataset id, for example ant-v0."""

    dataset: Dataset
    """Directory that an EpisodeRecorder wrote."""
    target: Annotated[Path, Positional("TARGET")]
    """File or directory to make; must not exist, unless --append."""
    to: Literal["robomimic", "lerobot", "minari"]
    """The format."""
    only: Literal["all", "succeeded", "failed", "failed_apart"] = "all"
    """Which episodes; failed_apart makes a second dataset of the failed ones."""
    min_length: int = 0
    """Leave out shorter episodes."""
    fps: float | None = None
    """Steps per second, in place of the rate of the dataset (LeRobot)."""
    cameras: Annotated[Mapping[str, str] | None, Repeated(_names)] = None
    """Name of a camera in LeRobot, such as obs/policy=front (default: the observation group)."""
    stacks: Annotated[Mapping[str, Any] | None, Repeated(_stacks)] = None
    """Frames that an image field stacks along its channels, where the dataset does not say (LeRobot)."""
    append: bool = False
    """Add the episodes that the target does not have (LeRobot)."""


def _export(given: RecordExportOptions) -> int:
    from headrace.recording.export.exporting import export_dataset

    with progress_bar(f"to {given.to}", None) as update:
        made = export_dataset(
            *(given.dataset, given.target, given.to),
            only=given.only,
            min_length=given.min_length,
            fps=given.fps,
            append=given.append,
            cameras=given.cameras or {},
            stacks=given.stacks or {},
            progress=update,
        )
    for path in made:
        say(f"wrote {path}")
    return 0


@dataclass(frozen=True, kw_only=True)
class RecordMergeOptions:
    """Check every file, then link (or copy) the episodes of all datasets into a new one. Datasets of different
    environments, other fields, and an episode that is there twice with different content are refused."""

    datasets: Annotated[Sequence[Path], Positional("DATASET")]
    """Directories of EpisodeRecorders."""
    output: str


def _merge(given: RecordMergeOptions) -> int:
    from headrace.recording import merge_datasets
    from headrace.recording.dataset import EpisodeDataset

    path = merge_datasets(given.datasets, given.output)
    say(f"wrote {path}: {len(EpisodeDataset(path))} episodes of {len(given.datasets)} datasets")
    return 0


@dataclass(frozen=True, kw_only=True)
class RecordVerifyOptions:
    """Check a recorded dataset, or an export of it (robomimic file, LeRobot or Minari directory). Prints every problem;
    the exit code is 1 if there is one."""

    dataset: Dataset
    """Directory or .hdf5 file."""


def _verify(given: RecordVerifyOptions) -> int:
    from headrace.recording import verify_dataset

    verdict = verify_dataset(given.dataset)
    console = Console()
    for problem in verdict.problems:
        console.print(f"[red]✗[/] {escape(problem)}", highlight=False, soft_wrap=True)
    count = len(verdict.problems)
    judgment = "[green]all is well[/]" if not count else f"[red]{count} problem{'s' if count > 1 else ''}[/]"
    console.print(f"{verdict.kind}: {verdict.episodes} episodes, {verdict.steps} steps: {judgment}", highlight=False)
    return 1 if count else 0


@dataclass(frozen=True, kw_only=True)
class RecordInfoOptions:
    """Print where a recorded dataset comes from, its episodes and what they are made of."""

    dataset: Dataset
    """Directory that an EpisodeRecorder wrote."""
    limit: int = 20
    """Episodes in the table."""
    sheet: Path | None = None
    """Write a contact sheet of frames to this file."""
    camera: str | None = None
    """Array for the sheet, such as obs/camera (default: the first with images)."""


def _info(given: RecordInfoOptions) -> int:
    from headrace.recording.dataset import EpisodeDataset
    from headrace.recording.show import contact_sheet, episode_table, field_table

    dataset = EpisodeDataset(given.dataset)
    console = Console()
    for name, value in asdict(dataset.info).items():
        if name not in ("spaces", "stacks") and value:
            say(f"{name}: {value}")
    console.print(episode_table(dataset, limit=given.limit))
    if len(dataset):
        console.print(field_table(dataset[0]))
    if given.sheet is not None:
        say(f"wrote {contact_sheet(dataset, given.sheet, camera=given.camera)}")
    return 0


@dataclass(frozen=True, kw_only=True)
class RecordReplayOptions:
    """Make the environment that was recorded, start the episode from its seed and id, and run its actions. Prints that
    every number was equal to the last bit, or where the first one differs (exit code 1)."""

    dataset: Dataset
    """Directory that an EpisodeRecorder wrote."""
    episode: int | None = None
    """Episode id (default: all of them)."""
    seed: int | None = None
    """Seed of episodes and of everything else that is random (default: that of the recording; needed where an id has
    several)."""
    task: str | None = None
    """module:NAME, gym:module:ID or a recipe file, where the dataset names a module or an interpreter of yours
    (default: the dataset's task)."""


def _replay(given: RecordReplayOptions) -> int:
    from headrace.recording.dataset import EpisodeDataset
    from headrace.recording.playback import replay_dataset

    dataset = EpisodeDataset(given.dataset)
    episodes = None if given.episode is None else [dataset.find(given.episode, given.seed)]
    console = Console()
    count = differ = steps = 0
    compared: tuple[str, ...] = ()
    for episode, result in replay_dataset(dataset, episodes, task=given.task):
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


COMMANDS = {
    "export": Command(RecordExportOptions, _export),
    "verify": Command(RecordVerifyOptions, _verify),
    "info": Command(RecordInfoOptions, _info),
    "replay": Command(RecordReplayOptions, _replay),
    "merge": Command(RecordMergeOptions, _merge),
}
