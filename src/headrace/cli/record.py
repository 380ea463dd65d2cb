"""Record episodes, and work with what was recorded.

headrace record pusher-solid --expert -o runs/expert     50 episodes of a task's scripted expert, or --policy P
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
from typing import Annotated, Any, Literal, cast

from rich.console import Console
from rich.markup import escape

from headrace._interrupts import exit_code
from headrace._progress import progress_bar, say
from headrace.cli.records import Command, Only, Positional, keywords
from headrace.envs.recipe import EnvKeywords, EnvRecipe
from headrace.errors import ConfigError

Dataset = Annotated[Path, Positional("DATASET")]


@dataclass(frozen=True, kw_only=True)
class RecordEpisodesOptions:
    """Play episodes of TASK, each exactly once, and record them as a dataset, those of its scripted expert or of a
    policy. 'headrace record TASK' is the same."""

    task: Annotated[str, Positional("TASK")]
    env: Annotated[EnvKeywords, Only("num_envs", "seed", "overrides", "threads")]
    expert: bool = False
    """Play the scripted expert of the task."""
    policy: str | None = None
    """As for 'headrace evaluate' (default: the one that ships for the task)."""
    episodes: int = 50
    only: Literal["all", "succeeded"] = "all"
    """Which episodes."""
    output: str


def _episodes(given: RecordEpisodesOptions) -> int:
    from headrace.evaluation.evaluating import NUM_ENVS, evaluate, open_recorded
    from headrace.imitation.experts import expert_for
    from headrace.recording.dataset import EpisodeDataset

    if given.expert and given.policy is not None:
        raise ConfigError("--expert, --policy: expected one of them, got both")
    recipe = EnvRecipe.of(given.task, NUM_ENVS, **given.env)
    policy = expert_for(recipe.source) if given.expert else given.policy
    with open_recorded(recipe, policy, given.output, given.only) as env:
        found = evaluate(env, policy, episodes=given.episodes)
    Console().print(found.summary())
    say(f"wrote {given.output}: {len(EpisodeDataset(given.output))} episodes")
    return 0 if found.interrupt is None else exit_code(found.interrupt)


@dataclass(frozen=True, kw_only=True)
class RecordExportOptions:
    """Assemble a robomimic/Isaac Lab HDF5 file, a LeRobot v3.0 directory or a Minari directory from committed episodes.
    The target appears when it is whole. A Minari directory is named like its dataset id, for example ant-v0."""

    dataset: Dataset
    """Directory that an EpisodeRecorder wrote."""
    target: Annotated[Path, Positional("TARGET")]
    """File or directory to make; must not exist."""
    to: Literal["robomimic", "lerobot", "minari"]
    """The format."""
    only: Literal["all", "succeeded", "failed"] = "all"
    """Which episodes."""
    min_length: int = 0
    """Leave out shorter episodes."""
    fps: float | None = None
    """Steps per second, in place of the rate of the dataset (LeRobot)."""
    cameras: Mapping[str, object] | None = None
    """Name of a camera in LeRobot, such as obs/policy=front (default: the observation group)."""
    stacks: Mapping[str, object] | None = None
    """Number of frames that an image field stacks along its channels, where the dataset does not say (LeRobot)."""


def _export(given: RecordExportOptions) -> int:
    from headrace.recording.export.exporting import export_dataset
    from headrace.types import StackSpec

    counts = given.stacks or {}
    for field, frames in counts.items():
        if type(frames) is not int:
            raise ConfigError(f"--stack {field}: expected a number of frames, got {frames!r}")
    for field, name in (given.cameras or {}).items():
        if not (isinstance(name, str) and name):
            raise ConfigError(f"--camera-name {field}: expected a name, got {name!r}")
    stacks = {field: StackSpec(frames=cast("int", frames), dim=-1) for field, frames in counts.items()}
    with progress_bar(f"to {given.to}", None) as update:
        cameras = {field: str(name) for field, name in (given.cameras or {}).items()}
        settings: dict[str, Any] = keywords(given) | {"cameras": cameras, "stacks": stacks, "progress": update}
        made = export_dataset(settings.pop("dataset"), **settings)
    say(f"wrote {made}")
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


def _info(given: RecordInfoOptions) -> int:
    from headrace.recording.dataset import EpisodeDataset
    from headrace.recording.show import episode_table, field_table

    dataset = EpisodeDataset(given.dataset)
    console = Console()
    for name, value in asdict(dataset.info).items():
        if name not in ("spaces", "stacks") and value:
            say(f"{name}: {value}")
    console.print(episode_table(dataset, limit=given.limit))
    if len(dataset):
        console.print(field_table(dataset[0]))
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
    "episodes": Command(RecordEpisodesOptions, _episodes),
    "export": Command(RecordExportOptions, _export),
    "verify": Command(RecordVerifyOptions, _verify),
    "info": Command(RecordInfoOptions, _info),
    "replay": Command(RecordReplayOptions, _replay),
    "merge": Command(RecordMergeOptions, _merge),
}
