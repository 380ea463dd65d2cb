"""A replay buffer of recorded episodes: ours, LeRobot's (version 3), or robomimic's HDF5.

Every frame is stored once, whatever the format has: robomimic stores observations and next observations.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace._leaves import nest
from headrace.errors import ConfigError, DataError, UnknownNameError
from headrace.files import parsing
from headrace.recording.dataset import Episode, EpisodeDataset
from headrace.recording.export.hdf5 import open_hdf5, plain_arrays
from headrace.recording.export.lerobot_dataset import LeRobotDataset, LeRobotEpisode, is_lerobot
from headrace.recording.fields import Array
from headrace.replay import ArraySpec, ReplayBuffer
from headrace.types import StackSpec

if TYPE_CHECKING:
    import h5py

_OBS = "obs/"
_STEPS = 256
"""Of an episode that are in memory at a time."""


class RobomimicEpisode:
    """One demonstration of an HDF5 file; the caller owns the arrays that it reads."""

    def __init__(self, group: h5py.Group, where: str) -> None:
        self._arrays = dict(plain_arrays(group, where))
        self.where = where
        if "actions" not in self._arrays:
            raise DataError(f"{where}: expected actions, got {sorted(self._arrays)}")
        self.names = [name for name in self._arrays if not name.startswith("next_")]
        self.length = len(self._arrays["actions"])

    def rows(self, name: str) -> int:
        """Return how many rows :meth:`read` gives of an array."""
        return len(self._arrays[name]) + (f"next_{name}" in self._arrays)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Array:
        """Return rows ``start:stop`` of one array; observations have a last row more where the file has it."""
        rows: Array = self._arrays[name][start:stop]
        following = self._arrays.get(f"next_{name}")
        if following is not None and (stop is None or stop > len(self._arrays[name])):
            rows = np.concatenate([rows, following[-1:]])
        return rows


class _Piece(NamedTuple):
    """What an episode has: T transitions, and where they end."""

    episode: Episode | LeRobotEpisode | RobomimicEpisode
    number: int
    steps: int
    """Transitions whose next observation is known, or not needed."""
    rows: int
    """Observations: T + 1, or T where the last transition needs no next observation."""
    terminated: Array


@contextmanager
def _episodes(path: Path) -> Generator[Iterable[Episode | LeRobotEpisode | RobomimicEpisode]]:
    if path.suffix in (".hdf5", ".h5"):
        with open_hdf5(path, "r") as file:
            data: Any = file.get("data")
            if data is None:
                raise DataError(f"{path}: expected a group 'data', as robomimic writes it, got {list(file)}")
            names = sorted(map(str, data), key=lambda name: (len(name), name))
            yield (RobomimicEpisode(data[name], f"{path}: data/{name}") for name in names)
    else:
        yield LeRobotDataset(path) if is_lerobot(path) else EpisodeDataset(path)


def _measure(episode: Episode | LeRobotEpisode | RobomimicEpisode, number: int, groups: Sequence[str]) -> _Piece:
    """Find out how many transitions an episode has."""
    if isinstance(episode, Episode):
        episode.check()
    if isinstance(episode, RobomimicEpisode):
        steps, rows = episode.length, min(episode.rows(f"{_OBS}{name}") for name in groups)
    else:
        steps = episode.meta.length
        rows = steps + isinstance(episode, Episode)
    terminated = np.zeros(steps, np.bool_)
    if given := next((name for name in ("terminated", "dones") if name in episode.names), None):
        flags = episode.read(given).reshape(-1)
        terminated = flags == 1
        if not ((flags == 0) | terminated).all():
            raise DataError(f"episode {number}: {given}: expected 0 or 1, got other values; it is damaged")
    elif not isinstance(episode, RobomimicEpisode):
        terminated[-1:] = bool(episode.meta.success)
    if rows < steps or len(terminated) != steps:
        raise DataError(f"episode {number}: expected {steps} observations and flags, got {rows} and {len(terminated)}")
    if steps and rows == steps and not terminated[-1]:
        steps -= 1  # what followed its last action is not known, and a target would read it
    return _Piece(episode, number, steps, min(rows, steps + 1), terminated[:steps])


def fill_from_dataset(
    path: str | Path, *, groups: Sequence[str] | None, stack: Mapping[str, StackSpec] | None, reward: float | None,
    capacity: int | None, settings: Mapping[str, Any],
) -> ReplayBuffer:  # fmt: skip
    """Return a buffer with the episodes of a dataset; see :meth:`headrace.replay.ReplayBuffer.from_dataset`."""
    place, stacks = Path(path), dict(stack or {})
    with parsing(place), _episodes(place) as found:
        episodes = list(found)
        if not episodes:
            raise DataError(f"{place}: expected episodes, got none")
        first = episodes[0]
        there = [name.removeprefix(_OBS) for name in first.names if name.startswith(_OBS)]
        for name in (*(groups or ()), *stacks):
            if name not in there:
                raise UnknownNameError(f"observation of {place}:", name, there)
        rows = {name: first.read(f"{_OBS}{name}", 0, 1) for name in (groups or there)}
        chosen = [name for name, row in rows.items() if row.size]
        if not chosen:
            raise DataError(f"{place}: expected observations, got {first.names}")
        if reward is None and "rewards" not in first.names:
            raise ConfigError(f"{place}: it has no rewards; say what each step gets, for example reward=0.0")
        recorded = _find_stacks(place, chosen)
        if both := sorted(recorded.keys() & stacks.keys()):
            raise ConfigError(f"stack: {both[0]!r} was recorded as a stack of frames already; leave it out")
        specs = {name: _spec(rows[name], stacks.get(name)) for name in chosen}
        pieces = [_measure(episode, number, chosen) for number, episode in enumerate(episodes)]
        total = sum(piece.steps for piece in pieces)
        action = _spec(first.read("actions", 0, 1), None)
        every = {**recorded, **stacks}
        buffer = ReplayBuffer(capacity or max(total, 1), 1, nest(specs), action, stack=every, **settings)
        for piece in pieces:
            for begin in range(0, piece.steps, _STEPS):
                buffer.extend(_batch(piece, specs, stacks, reward, begin, min(begin + _STEPS, piece.steps)))
    return buffer


def _find_stacks(place: Path, chosen: Sequence[str]) -> dict[str, StackSpec]:
    """Return observations that were recorded as stacks of frames."""
    if not place.is_dir() or is_lerobot(place):
        return {}
    info = EpisodeDataset(place).info
    return {name: spec for name in chosen if (spec := info.stack(f"{_OBS}{name}")) is not None}


def _spec(row: Array, stack: StackSpec | None) -> ArraySpec:
    shape = row.shape[1:] if stack is None else stack.stacked_shape(row.shape[1:])
    return ArraySpec(tuple(shape), torch.from_numpy(np.empty(0, row.dtype)).dtype)


def _batch(
    piece: _Piece, specs: Mapping[str, ArraySpec], stacks: Mapping[str, StackSpec], reward: float | None,
    begin: int, end: int,
) -> Any:  # fmt: skip
    """Return transitions ``begin`` to ``end`` of an episode as a batch (1, T)."""
    from tensordict import TensorDict

    here: dict[str, Tensor] = {}
    there: dict[str, Tensor] = {}
    for name, spec in specs.items():
        observed = _observations(piece, name, stacks.get(name), begin, end + 1)
        if observed.shape[1:] != spec.shape or observed.dtype != spec.dtype:
            raise DataError(
                f"episode {piece.number}: expected obs/{name} of {spec.shape} {spec.dtype}, got "
                f"{tuple(observed.shape[1:])} {observed.dtype}"
            )
        here[name], there[name] = observed[None, :-1], observed[None, 1:]
    steps, read = end - begin, piece.episode.read
    rewards = np.full(steps, reward) if reward is not None else read("rewards", begin, end).reshape(steps)
    if (np.abs(rewards.astype(np.float64)) > np.finfo(np.float32).max).any():
        raise DataError(
            f"episode {piece.number}: expected rewards that float32 can hold, got {np.abs(rewards).max():g}"
        )
    terminated = torch.from_numpy(piece.terminated[begin:end].copy())
    done = terminated.clone()
    done[-1] |= end == piece.steps
    return TensorDict(
        {
            "observation": nest(here),
            "action": torch.from_numpy(np.ascontiguousarray(read("actions", begin, end)))[None],
            "next": {
                "observation": nest(there),
                "reward": torch.from_numpy(rewards.astype(np.float32))[None],
                "done": done[None],
                "terminated": terminated[None],
            },
        },
        batch_size=(1, steps),
    )


def _observations(piece: _Piece, name: str, stack: StackSpec | None, begin: int, end: int) -> Tensor:
    """Return observations ``begin`` to ``end``, stacked if asked for; a last one that is not needed is repeated."""
    older = 0 if stack is None else min(stack.frames - 1, begin)
    rows = piece.episode.read(f"{_OBS}{name}", begin - older, min(end, piece.rows))
    frames = torch.from_numpy(np.ascontiguousarray(rows))
    if len(frames) < end - begin + older:
        frames = torch.cat([frames, frames[-1:]])
    if stack is None:
        return frames
    at = torch.arange(older, len(frames))[:, None] + torch.arange(1 - stack.frames, 1)
    stacked = frames[at.clamp(min=0)]
    if stack.reset == "zero":
        stacked[at < 0] = 0
    return stack.stack(stacked).contiguous()
