"""The exchange: one row per environment of everything that crosses between an environment and the bridge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from headrace._leaves import Leaf, Path, leaves
from headrace.bridges import child
from headrace.bridges.child import arrays_over
from headrace.errors import ConfigError

Array: TypeAlias = NDArray[Any]

_ALIGNMENT = 64
_LEAF_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObsGroup:
    """One observation group, and where it is found in what an environment returns."""

    name: str
    """``policy`` where the observation is one array; keys joined with ``/`` elsewhere."""
    path: Path
    """Keys and indices from the root of the observation; empty where it is one array."""
    shape: tuple[int, ...]
    """Of one environment's row."""
    dtype: np.dtype[Any]
    """As handed out: floats become float32, everything else stays what it is."""

    def of(self, obs: object) -> object:
        """Return this group's part of a whole observation (of one environment or of a batch)."""
        for key in self.path:
            obs = cast("Mapping[str | int, object]", obs)[key]
        return obs

    def is_of(self, keys: frozenset[str]) -> bool:
        """Return whether it belongs to one of some keys of the whole observation."""
        return bool(self.path) and self.path[0] in keys


def group_leaves(space: spaces.Space[Any]) -> tuple[ObsGroup, ...]:
    """Return the observation groups of one environment's observation space.

    The keys of a ``Dict`` are the groups; any other space is the group ``policy``. Deeper keys and the indices of a
    ``Tuple`` are joined with ``/``.
    """
    found = tuple(_leaf(leaf) for leaf in _number_leaves(space))
    if not found:
        raise ConfigError(f"observation space: expected at least one group of numbers, got {space}")
    return found


def group_space(space: spaces.Space[Any]) -> spaces.Dict:
    """Return the observation space as a ``Dict`` of groups, with the dtypes that the bridge hands out."""
    groups: dict[str, spaces.Space[Any]] = {}
    for name, _, part in _number_leaves(space):
        if isinstance(part, spaces.Box) and np.dtype(part.dtype).kind == "f":
            # a bound of float64 that float32 does not have is no bound
            with np.errstate(over="ignore"):
                part = spaces.Box(part.low.astype(np.float32), part.high.astype(np.float32), dtype=np.float32)
        groups[name] = part
    return spaces.Dict(groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeLayout:
    """What an exchange holds; picklable, so that a worker lays the same exchange over shared memory."""

    num_envs: int
    leaves: tuple[ObsGroup, ...]
    action_shape: tuple[int, ...]
    action_dtype: np.dtype[Any]

    def fields(self) -> Iterator[tuple[str, tuple[int, ...], np.dtype[Any]]]:
        """Name, shape and dtype of every array of the exchange."""
        n = self.num_envs
        for leaf in self.leaves:
            yield f"obs:{leaf.name}", (n, *leaf.shape), leaf.dtype
        yield "actions", (n, *self.action_shape), self.action_dtype
        yield "reward", (n,), np.dtype(np.float64)
        yield "terminated", (n,), np.dtype(np.bool_)
        yield "truncated", (n,), np.dtype(np.bool_)
        yield "success", (n,), np.dtype(np.int8)

    def places(self) -> Iterator[tuple[str, tuple[int, ...], np.dtype[Any], int]]:
        """Yield every array of the exchange with the offset, in bytes, at which it lies."""
        offset = 0
        for name, shape, dtype in self.fields():
            yield name, shape, dtype, offset
            offset += _pad(shape, dtype)

    @property
    def nbytes(self) -> int:
        """Bytes that an exchange needs."""
        return sum(_pad(shape, dtype) for _, shape, dtype in self.fields())


class Exchange:
    """Arrays (N, …) over one block of memory, which the maker of the exchange owns. Row i is environment i's own."""

    def __init__(self, layout: ExchangeLayout, memory: memoryview | None = None) -> None:
        """Lay an exchange over ``memory`` (at least ``layout.nbytes``), or over fresh memory."""
        self.layout = layout
        block = memoryview(bytearray(layout.nbytes)) if memory is None else memory
        self.arrays: dict[str, Array] = arrays_over(block, layout.places())
        """By the names of :meth:`ExchangeLayout.fields`. Rows of ``actions`` are valid during a step, for environments
        that act; ``success`` is 1 or 0 where the environment said so at an episode's end, else ``NO_SUCCESS_MEASURE``.
        """


def _number_leaves(space: spaces.Space[Any]) -> list[Leaf]:
    # texts are instructions: env.instructions() has them
    return [leaf for leaf in leaves(space, root="policy") if not isinstance(leaf.value, spaces.Text)]


def _leaf(leaf: Leaf) -> ObsGroup:
    if not isinstance(leaf.value, _LEAF_SPACES):
        raise ConfigError(
            "observation space: expected Box, Discrete, MultiDiscrete, MultiBinary, Text, or a Dict or Tuple of these, "
            f"got {leaf.value}; wrap the environment with one of gymnasium.wrappers that converts it"
        )
    dtype = np.dtype(leaf.value.dtype)
    return ObsGroup(
        name=leaf.name,
        path=leaf.path,
        shape=tuple(leaf.value.shape or ()),
        dtype=np.dtype(np.float32) if dtype.kind == "f" else dtype,
    )


def _pad(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


ActionSpace: TypeAlias = "spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary"


def as_action_space(space: spaces.Space[Any]) -> ActionSpace:
    """Return the space, once it is known to be one whose actions are an array."""
    if isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        return space
    raise ConfigError(
        f"action space: expected Box, Discrete, MultiDiscrete or MultiBinary, got {space}; "
        "wrap the environment with gymnasium.wrappers.TransformAction"
    )


def exchange_layout(num_envs: int, observations: spaces.Space[Any], actions: spaces.Space[Any]) -> ExchangeLayout:
    """Return what an exchange of environments with these spaces holds."""
    action_space = as_action_space(actions)
    return ExchangeLayout(
        num_envs=num_envs,
        leaves=group_leaves(observations),
        action_shape=tuple(action_space.shape or ()),
        action_dtype=np.dtype(action_space.dtype),
    )


def idle_action(space: ActionSpace) -> Array:
    """Return the action of environments that are stepped without one: zeros, or the nearest allowed."""
    return np.array(np.broadcast_to(child.idle_action(child.space_to_json(space)), space.shape or ()), space.dtype)


INSTRUCTION_KEYS = ("instruction", "language_instruction", "task_description", "prompt")
"""Under which an environment's ``info``, or a ``Text`` space of its observation, says what to do; the first wins."""


def instruction_path(space: spaces.Space[Any]) -> Path | None:
    """Return where an observation has its instruction; None where it has no text."""
    paths = [leaf.path for leaf in leaves(space) if isinstance(leaf.value, spaces.Text)]
    if len(paths) <= 1:
        return paths[0] if paths else None
    for name in INSTRUCTION_KEYS:
        found = [path for path in paths if path[-1] == name]
        if len(found) == 1:
            return found[0]
    raise ConfigError(
        f"observation space: expected one Text space, or one with a name of {INSTRUCTION_KEYS}, got texts at {paths}; "
        "rename the one that is the instruction"
    )
