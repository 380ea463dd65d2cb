"""Playing a recorded episode again, and proving that the same physics comes out."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from headrace._leaves import flatten
from headrace.envs.recipe import AnyEnv, EnvRecipe, check_told, is_recipe_file
from headrace.envs.registry import make
from headrace.envs.task import Task
from headrace.errors import ConfigError, DataError
from headrace.recording._store import DatasetInfo
from headrace.recording.dataset import Episode, EpisodeDataset
from headrace.recording.fields import Array, as_array, is_image
from headrace.types import Obs, ResetRecord, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first number that came out otherwise."""

    step: int
    """0 is the beginning, before any action; t is after the t-th."""
    field: str
    index: tuple[int, ...]
    recorded: float
    replayed: float

    def __str__(self) -> str:
        place = f"{self.field}{list(self.index)}" if self.index else self.field
        when = "at the beginning" if self.step == 0 else f"after step {self.step}"
        return f"{place} {when}: recorded {self.recorded!r}, replayed {self.replayed!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a replay showed."""

    steps: int
    """Steps replayed; fewer than the episode's if it differed or ended early."""
    compared: tuple[str, ...]
    """Fields compared, bit for bit."""
    difference: Difference | None
    ended_at: int | None
    """The step in which the replayed episode ended."""

    @property
    def exact(self) -> bool:
        """Whether everything compared was equal to the last bit."""
        return self.difference is None


class _Witness:
    """Keeps what one environment does, as the recorder saw it."""

    def __init__(self, needs: frozenset[Literal["states", "frames"]]) -> None:
        self.needs = needs
        self.first: ResetRecord | None = None
        self.last: StepRecord | None = None

    def after_reset(self, record: ResetRecord) -> None:
        if self.first is None:
            self.first = record

    def after_step(self, record: StepRecord) -> None:
        self.last = record


def make_replay_env(info: DatasetInfo, task: str | Task | EnvRecipe | None = None) -> AnyEnv:
    """Return an environment like the one that was recorded, with one slot.

    Args:
        info: of the dataset.
        task: where the dataset names none, or one that is not registered under its name here: a name, a task, a recipe
            or the name of a recipe file. Needed, too, where the dataset names a module that is not imported yet, or
            another interpreter.
    """
    if isinstance(task, Task):
        return make(task, 1, autoreset="disabled")
    if isinstance(task, str) and is_recipe_file(task):
        task = EnvRecipe.load(task)
    if not isinstance(task, EnvRecipe):
        said = {"source": "", **info.recipe}
        if task is not None:
            said |= {"source": task}
            said.pop("python", None)
        if not said["source"]:
            raise ConfigError(
                "replay: the dataset does not name its task; record with DatasetInfo.of(env), or pass task (--task)"
            )
        if task is None:
            check_told(info.source, "replay: the dataset", "--task")
        task = EnvRecipe.from_json(said)
    return task.make(num_envs=1, autoreset="disabled", episode_stride=None, workers=None)


def replay_dataset(
    dataset: EpisodeDataset, episodes: Iterable[Episode] | None = None, *, task: str | Task | EnvRecipe | None = None
) -> Generator[tuple[Episode, Replay]]:
    """Replay recorded episodes, one after the other, in an environment of their own: each with what it showed.

    Args:
        dataset: where they are recorded.
        episodes: some of it; None for all.
        task: as for :func:`make_replay_env`.
    """
    with closing(make_replay_env(dataset.info, task)) as env:
        for episode in dataset if episodes is None else episodes:
            yield episode, replay_episode(episode, env)


def replay_episode(episode: Episode, env: AnyEnv) -> Replay:
    """Run a recorded episode's actions from its beginning and compare every step with what was recorded.

    States, observations, images, rewards, flags and the instruction are compared where the episode has them, to the
    last bit. It stops at the first difference.

    Args:
        episode: with ``actions``.
        env: of the same task, with one slot.
    """
    if env.num_envs != 1:
        raise ConfigError(f"replay: expected an environment with one slot, got {env.num_envs}; use make_replay_env")
    if "actions" not in episode.names:
        raise DataError("replay: the episode has no actions; record them")
    names = sorted(set(episode.names) - {"actions", "processed_actions", "substeps"})
    recorded = _Recorded(episode, names)
    actions = torch.from_numpy(episode.read("actions")).to(env.device)
    witness = _Witness(recorded.needs)
    env.attach(witness)
    try:
        env.reset(seed=episode.meta.seed, options={"episode_ids": torch.tensor([episode.meta.episode_id])})
        assert witness.first is not None
        told = witness.first.instructions[0] if witness.first.instructions else ""
        if told != episode.meta.instruction:
            raise DataError(
                f"replay: the instruction was {episode.meta.instruction!r} in the episode and is {told!r} in the "
                "environment; make it as it was recorded"
            )
        difference = _compare(0, recorded, _read_shown(witness.first.obs, witness.first.states), row=0)
        steps, ended_at = 0, None
        while difference is None and ended_at is None and steps < episode.meta.length:
            env.step(actions[steps : steps + 1])
            steps += 1
            record = witness.last
            assert record is not None
            step = record.step
            difference = _compare(steps, recorded, _read_shown(step.obs, record.states), row=steps)
            taken = {"rewards": step.reward, "terminated": step.terminated, "truncated": step.truncated}
            difference = difference or _compare(steps, recorded, taken, row=steps - 1)
            if bool(step.terminated[0] | step.truncated[0]):
                ended_at = steps
    finally:
        env.detach(witness)
    if difference is None and ended_at != episode.meta.length:
        difference = Difference(
            step=steps, field="length", index=(), recorded=episode.meta.length, replayed=ended_at or float("inf")
        )
    return Replay(steps=steps, compared=tuple(names), difference=difference, ended_at=ended_at)


class _Recorded:
    """The rows of an episode. Images are read when their step comes: an episode of them may not fit into memory."""

    def __init__(self, episode: Episode, names: list[str]) -> None:
        self._episode = episode
        self.names = names
        images = [name for name in names if name.startswith("obs/") and is_image(episode.field(name).shape)]
        self._small = {name: episode.read(name) for name in names if name not in images}
        needs: set[Literal["states", "frames"]] = set()
        if "states" in names:
            needs.add("states")
        if images:
            needs.add("frames")
        self.needs = frozenset(needs)

    def row(self, name: str, row: int) -> Array:
        return self._small[name][row] if name in self._small else self._episode.read(name, row, row + 1)[0]


def _read_shown(obs: Obs, states: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
    return {**flatten(obs, "obs"), "states": states}


def _compare(
    step: int, recorded: _Recorded, replayed: Mapping[str, torch.Tensor | None], row: int
) -> Difference | None:
    for name, values in replayed.items():
        if values is None or name not in recorded.names:
            continue
        wanted, got = recorded.row(name, row), as_array(values, name)[0]
        if got.dtype != wanted.dtype or got.shape != wanted.shape:
            raise DataError(
                f"replay: {name} is {wanted.dtype}{wanted.shape} in the episode and {got.dtype}{got.shape} in the "
                "environment; make it as it was recorded"
            )
        unequal = np.frombuffer(wanted.tobytes(), np.uint8) != np.frombuffer(got.tobytes(), np.uint8)
        if unequal.any():
            place = int(np.flatnonzero(unequal)[0]) // wanted.dtype.itemsize
            index = tuple(int(axis) for axis in np.unravel_index(place, wanted.shape)) if wanted.shape else ()
            return Difference(
                step=step,
                field=name,
                index=index,
                recorded=wanted.reshape(-1)[place].item(),
                replayed=got.reshape(-1)[place].item(),
            )
    return None
