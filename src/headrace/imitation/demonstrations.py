"""Demonstrations: successful episodes end to end, from an expert in this process or from a recorded dataset.

An expert's successful episodes, recorded in this process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from headrace import rng
from headrace.envs.batch_env import BatchEnv
from headrace.errors import ConfigError, DataError, UnknownNameError
from headrace.imitation.experts import Expert
from headrace.policies.act import PolicyInputs
from headrace.recording.dataset import Episode, EpisodeDataset
from headrace.recording.export.lerobot_dataset import LeRobotDataset, LeRobotEpisode, is_lerobot
from headrace.recording.fields import Array, is_image

_WAVES_WITHOUT_SUCCESS = 10


def record_demonstrations(
    env: BatchEnv,
    expert: Expert,
    count: int,
    *,
    seed: int,
    noise: float = 0.3,
    progress: Callable[[int], None] | None = None,
) -> Demonstrations:
    """Play episodes 0, 1, 2, … with an expert and keep the first ``count`` that succeed.

    Which episodes are kept depends on their ids, not on how soon they end.

    Args:
        env: made with ``autoreset="disabled"``: an episode that has ended costs nothing while the others finish.
        expert: see :func:`headrace.imitation.experts.expert_for`.
        count: demonstrations wanted.
        seed: of the episodes and of the disturbance.
        noise: spread of the disturbance of the played actions, in actions' own units. A learner that has seen how the
            expert recovers does not drift away from it.
        progress: called with how many demonstrations there are after each wave of episodes.
    """
    if env.autoreset != "disabled":
        raise ConfigError(f'record_demonstrations: expected autoreset="disabled", got {env.autoreset!r}')
    if count < 1:
        raise ConfigError(f"record_demonstrations: expected at least 1 demonstration, got {count}")
    if not isinstance(env.single_action_space, spaces.Box):
        raise ConfigError(f"record_demonstrations: expected continuous actions, got {env.single_action_space}")
    kept: list[tuple[int, Tensor, Tensor]] = []
    wave = 0
    while len(kept) < count:
        first = wave * env.num_envs
        kept.extend(_wave(env, expert, torch.arange(first, first + env.num_envs), seed, noise))
        wave += 1
        if not kept and wave == _WAVES_WITHOUT_SUCCESS:
            raise ConfigError(f"record_demonstrations: no success in {wave * env.num_envs} episodes; check the expert")
        if progress is not None:
            progress(min(len(kept), count))
    kept = kept[:count]
    lengths = [len(actions) for _, _, actions in kept]
    return Demonstrations(
        obs=torch.cat([obs for _, obs, _ in kept]),
        actions=torch.cat([actions for _, _, actions in kept]),
        left=torch.cat([torch.arange(length, 0, -1) for length in lengths]),
        episode_ids=torch.tensor([episode for episode, _, _ in kept]),
        attempted=kept[-1][0] + 1,
    )


def _wave(env: BatchEnv, expert: Expert, ids: Tensor, seed: int, noise: float) -> list[tuple[int, Tensor, Tensor]]:
    """Yield (id, observations, wanted actions) of episodes that succeed, one in every slot, in the order of ids."""
    obs, _ = env.reset(seed=seed, options={"episode_ids": ids})
    space = cast("spaces.Box", env.single_action_space)
    low, high = torch.as_tensor(space.low), torch.as_tensor(space.high)
    seen: list[Tensor] = []
    wanted: list[Tensor] = []
    length = torch.zeros(len(ids), dtype=torch.int64)
    while bool(env.active.any()):
        action = expert(obs)
        seen.append(obs["policy"].clone())
        wanted.append(action)
        size = action.shape[1]
        disturbance = rng.normal(seed, ids, "demonstration noise", size, draw=len(seen) * size).to(action.dtype)
        # what the expert itself wants may lie beyond the declared bounds
        obs, _, _, _, info = env.step((action + noise * disturbance).clamp(low.minimum(action), high.maximum(action)))
        if "ends" in info:
            ends = info["ends"]
            if ends.success is None:
                raise ConfigError("record_demonstrations: expected a task that measures success")
            length[ends.env_ids] = torch.where(ends.success, ends.lengths, 0)
    every_obs, every_action = torch.stack(seen, 1), torch.stack(wanted, 1)
    return [
        (int(ids[slot]), every_obs[slot, :steps].clone(), every_action[slot, :steps].clone())
        for slot, steps in enumerate(length.tolist())
        if steps
    ]


_OBS = "obs/"
_CRITIC = "critic"
Kept = Literal["all", "succeeded"]


ReadEpisode: TypeAlias = Episode | LeRobotEpisode
"""An episode on disk, of our own format or of LeRobot's."""


class EpisodeImages:
    """Images that stay on disk: a row is read when a batch asks for it.

    Args:
        episodes: end to end.
        name: path of the array, such as ``obs/camera``.
        shape: of one image.
    """

    def __init__(self, episodes: Sequence[ReadEpisode], name: str, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self._episodes = episodes
        self._name = name
        self._ends = np.cumsum([episode.meta.length for episode in episodes])

    def rows(self, index: Tensor) -> Tensor:
        """Images of steps ``index`` (n,)."""
        steps = index.numpy()
        which = np.searchsorted(self._ends, steps, side="right")
        images: list[Array] = []
        for step, number in zip(steps.tolist(), which.tolist(), strict=True):
            episode = self._episodes[number]
            row = step - (int(self._ends[number]) - episode.meta.length)
            images.append(episode.read(self._name, row, row + 1))
        return torch.from_numpy(np.concatenate(images))


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """Episodes to learn from, end to end, M steps in all; the holder of the record owns the tensors."""

    obs: Tensor
    """float32 (M, obs_dim): the vectors of the observation, joined in the order of :attr:`vectors`."""
    actions: Tensor
    """float32 (M, A): what the expert wanted in each state, not the disturbed action that was played."""
    left: Tensor
    """int64 (M,): steps to the end of the episode, this one included."""
    episode_ids: Tensor
    """int64 (E,): the episodes that are in here, in their order."""
    attempted: int
    """Episodes that there were to choose from."""
    vectors: tuple[str, ...] = ("policy",)
    """Observation groups in :attr:`obs`."""
    images: Mapping[str, EpisodeImages] = field(default_factory=dict[str, EpisodeImages])
    """Observation groups that are images."""
    instructions: tuple[str, ...] = ()
    """What there is to follow; empty where every episode has the same."""
    instruction_of: Tensor | None = None
    """int64 (M,): index into :attr:`instructions`."""

    def chunks(self, index: Tensor, horizon: int) -> tuple[Tensor, Tensor]:
        """Return the next ``horizon`` actions from steps ``index`` (n,), and which of them are before the episode's
        end.

        Returns:
            float32 (n, horizon, A), and bool (n, horizon); rows beyond the end hold any values.
        """
        ahead = torch.arange(horizon)
        inside = ahead < self.left[index][:, None]
        return self.actions[(index[:, None] + ahead).clamp(max=len(self.actions) - 1)], inside

    def inputs(self, index: Tensor) -> PolicyInputs:
        """Return what a policy reads in steps ``index`` (n,)."""
        images = tuple(images.rows(index) for images in self.images.values())
        said = None if self.instruction_of is None else self.instruction_of[index]
        return PolicyInputs(self.obs[index], images, said)

    def split(self, share: float, seed: int) -> tuple[Tensor, Tensor]:
        """Return the steps of the episodes to learn from, and of those held out, int64 each.

        Args:
            share: of the episodes, held out: at least one where it is above 0, and never all.
            seed: decides which.
        """
        starts = torch.cat((torch.tensor([0]), (self.left == 1).nonzero().squeeze(1)[:-1] + 1))
        lengths = self.left[starts]
        count = len(starts)
        held = 0 if share <= 0 else min(max(1, round(share * count)), count - 1)
        order = rng.uniform(seed, torch.arange(count), "held-out episodes", 1).squeeze(1).argsort(stable=True)
        chosen = torch.zeros(count, dtype=torch.bool)
        chosen[order[:held]] = True
        mask = chosen.repeat_interleave(lengths)
        return (~mask).nonzero().squeeze(1), mask.nonzero().squeeze(1)

    def fingerprint(self) -> str:
        """SHA-256 of the numbers, and of the names and shapes of images: whether a training may go on with it."""
        digest = hashlib.sha256()
        for tensor in (self.obs, self.actions, self.left, self.episode_ids):
            digest.update(tensor.contiguous().numpy().tobytes())
        said = {name: images.shape for name, images in self.images.items()}
        digest.update(repr((self.vectors, said, self.instructions)).encode())
        return digest.hexdigest()


def load_demonstrations(
    path: str | Path, *, groups: Sequence[str] | None = None, keep: Kept | None = None
) -> Demonstrations:
    """Read a dataset that :class:`headrace.recording.EpisodeRecorder` wrote, or one in LeRobot's layout (version 3).

    Vectors are read at once; images stay on disk until a batch asks for them.

    Args:
        path: the directory.
        groups: observation groups to learn from; None for all but ``critic``.
        keep: ``succeeded`` for successful episodes only, ``all`` for all; None for the successful ones where the
            dataset says which they are.
    """
    place = Path(path)
    if not place.is_dir():
        raise ConfigError(f"dataset (--dataset): expected a directory, got {place}: there is none")
    dataset = LeRobotDataset(place) if is_lerobot(place) else EpisodeDataset(place)
    found: list[ReadEpisode] = list(dataset)
    episodes = _choose_episodes(found, keep, place)
    names, images = _groups(episodes[0], groups, place)
    vectors = [_join_groups(episode, names) for episode in episodes]
    actions = [_actions(episode) for episode in episodes]
    for episode, seen, done in zip(episodes, vectors, actions, strict=True):
        same = _groups(episode, [*names, *images], place)[1] == images and seen.shape[1] == vectors[0].shape[1]
        if not same or done.shape[1] != actions[0].shape[1]:
            raise DataError(
                f"{place}: episode {episode.meta.episode_id} has other shapes than episode "
                f"{episodes[0].meta.episode_id}; learn from episodes of one environment"
            )
        if not (np.isfinite(seen).all() and np.isfinite(done).all()):
            raise DataError(
                f"{place}: episode {episode.meta.episode_id} has numbers that are not finite; leave it out "
                "('headrace record verify' lists such episodes)"
            )
    lengths = [episode.meta.length for episode in episodes]
    texts = tuple(sorted({episode.meta.instruction for episode in episodes}))
    several = len(texts) > 1
    said = torch.tensor([texts.index(episode.meta.instruction) for episode in episodes])
    return Demonstrations(
        obs=torch.from_numpy(np.concatenate(vectors)),
        actions=torch.from_numpy(np.concatenate(actions)),
        left=torch.cat([torch.arange(length, 0, -1) for length in lengths]),
        episode_ids=torch.tensor([episode.meta.episode_id for episode in episodes]),
        attempted=len(found),
        vectors=tuple(names),
        images={name: EpisodeImages(episodes, f"{_OBS}{name}", shape) for name, shape in images.items()},
        instructions=texts if several else (),
        instruction_of=said.repeat_interleave(torch.tensor(lengths)) if several else None,
    )


def _choose_episodes(found: list[ReadEpisode], keep: Kept | None, place: Path) -> list[ReadEpisode]:
    if keep not in (None, "all", "succeeded"):
        raise UnknownNameError("choice of episodes", str(keep), ("all", "succeeded"))
    known = all(episode.meta.success is not None for episode in found)
    if keep == "succeeded" and not known:
        raise ConfigError(f"keep: expected a dataset that says which episodes succeeded, got {place}; use keep='all'")
    chosen = [episode for episode in found if keep == "all" or not known or episode.meta.success]
    if not chosen:
        hint = "none of them succeeded; use keep='all' (--keep all) to learn from all" if found else "record some"
        raise DataError(f"{place}: expected episodes to learn from, got none of {len(found)}; {hint}")
    return chosen


def _groups(
    episode: ReadEpisode, wanted: Sequence[str] | None, place: Path
) -> tuple[list[str], dict[str, tuple[int, ...]]]:
    """Vector groups, and image groups with their shapes."""
    there = [name.removeprefix(_OBS) for name in episode.names if name.startswith(_OBS)]
    for name in wanted or ():
        if name not in there:
            raise UnknownNameError(f"observation group of {place}:", name, there)
    chosen = [name for name in there if name != _CRITIC] if wanted is None else list(dict.fromkeys(wanted))
    if not chosen:
        raise DataError(f"{place}: expected recorded observations, got {episode.names}; record 'obs' and cameras")
    fields = {name: episode.field(f"{_OBS}{name}") for name in chosen}
    images = {name: found.shape for name, found in fields.items() if is_image(found.shape)}
    deep = [name for name, shape in images.items() if len(shape) > 3]
    if deep:
        raise ConfigError(
            f"{place}: {deep[0]} has rows of shape {images[deep[0]]}; expected images (H, W, C), with stacked frames "
            "as channels"
        )
    return [name for name in chosen if name not in images], images


def _join_groups(episode: ReadEpisode, names: Sequence[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Vector groups before each step, (T, obs_dim)."""
    length = episode.meta.length
    parts = [episode.read(f"{_OBS}{name}", 0, length).reshape(length, -1).astype(np.float32) for name in names]
    return np.concatenate(parts, axis=1) if parts else np.zeros((length, 0), np.float32)


def _actions(episode: ReadEpisode) -> np.ndarray[Any, np.dtype[np.float32]]:
    if "actions" not in episode.names:
        raise DataError(f"episode {episode.meta.episode_id}: no actions were recorded; add 'actions' to the fields")
    found = episode.read("actions")
    if found.dtype.kind != "f" or found.ndim != 2:
        raise ConfigError(
            f"actions: expected real numbers (T, A), got {found.dtype} of shape {found.shape}; the chunk policy plans "
            "continuous actions only"
        )
    return found.astype(np.float32)
