"""What a store is told before it allocates: arrays, observation leaves, the whole description and its JSON form."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, cast

import numpy as np
import torch

from headrace._leaves import leaves as nested_leaves
from headrace.errors import ConfigError, DataError
from headrace.types import StackSpec

if TYPE_CHECKING:
    from gymnasium import Space

Autoreset: TypeAlias = Literal["same_step", "disabled"]
Codec: TypeAlias = Literal["lz4", "zstd"]
Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Shape and dtype of one array of one environment, without the batch axis."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one such array."""
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def from_json(cls, data: Json) -> ArraySpec:
        """Read the JSON form."""
        shape, name = _entries(data, "an array", "shape", "dtype")
        dtype = getattr(torch, str(name), None)
        if not isinstance(shape, list) or not isinstance(dtype, torch.dtype):
            raise DataError(f"manifest: expected sizes and the name of a torch dtype, got {shape!r} and {name!r}")
        return cls(tuple(int(cast("int", size)) for size in shape), dtype)


SpaceLike: TypeAlias = "Space[object] | ArraySpec | Mapping[str, SpaceLike]"
"""One environment's observation or action: a Gymnasium space, an ``ArraySpec``, or a dict of either."""


class Window(NamedTuple):
    """Where the observations lie in a block of merged frames of one sample, counted in elements."""

    shape: tuple[int, ...]
    """Of one observation."""
    stride: tuple[int, ...]
    hop: int
    """From one observation to the next."""
    size: int
    """Of the whole block."""


class _Windows(dict[int, Window]):
    """Windows of a leaf by number of frames, each worked out when it is first asked for."""

    def __init__(self, leaf: Leaf) -> None:
        super().__init__()
        self._leaf = leaf

    def __missing__(self, frames: int) -> Window:
        leaf, shape, stack = self._leaf, self._leaf.frame.shape, self._leaf.stack
        size = frames * math.prod(shape)
        if stack is None:
            window = Window(shape, strides(shape), math.prod(shape), size)
        else:
            axis = stack.axis(len(shape))
            merged = StackSpec(frames=frames, dim=axis, layout=stack.layout).stacked_shape(shape)
            stride = strides(merged)
            step = 1 if stack.layout == "new_axis" else shape[axis]
            window = Window(leaf.observed.shape, stride, step * stride[axis], size)
        self[frames] = window
        return window


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One array of the observation, and how its frames stack.

    What every sample asks for is worked out once.
    """

    name: str
    """Keys, joined with ``/``; empty where the whole observation is one array."""
    path: tuple[str, ...]
    """Keys below ``observation`` in a sample."""
    observed: ArraySpec
    """What the environment gives: the stack, where there is one."""
    stack: StackSpec | None

    @cached_property
    def frames(self) -> int:
        """K: frames in one observation."""
        return 1 if self.stack is None else self.stack.frames

    @cached_property
    def frame(self) -> ArraySpec:
        """What is stored: the newest frame."""
        if self.stack is None:
            return self.observed
        return ArraySpec(self.stack.frame_shape(self.observed.shape), self.observed.dtype)

    @cached_property
    def outer(self) -> int:
        """Pieces into which a frame is cut so that stacks need no second pass; 1 where frames lie one after another."""
        if self.stack is None:
            return 1
        shape = self.frame.shape
        return math.prod(shape[: self.stack.axis(len(shape))])

    @cached_property
    def zero_filled(self) -> bool:
        """Whether stacks begin with zeros rather than with their first frame."""
        return self.stack is not None and self.stack.reset == "zero"

    @cached_property
    def windows(self) -> Mapping[int, Window]:
        """Layout of a block in which so many frames are merged along the stacking axis."""
        return _Windows(self)

    @classmethod
    def from_json(cls, data: Json) -> Leaf:
        """Read the JSON form."""
        name, path, observed, stack = _entries(data, "an observation leaf", "name", "path", "observed", "stack")
        if not isinstance(path, list):
            raise DataError(f"manifest: expected the keys of an observation leaf, got {path!r}")
        return cls(
            name=str(name),
            path=tuple(map(str, path)),
            observed=ArraySpec.from_json(observed),
            stack=StackSpec(**cast("dict[str, int]", stack)) if isinstance(stack, dict) else None,  # pyright: ignore[reportArgumentType]  # written by to_json
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpec:
    """Everything that fixes the layout of a replay buffer; written to its manifest."""

    capacity: int
    num_envs: int
    leaves: tuple[Leaf, ...]
    action: ArraySpec
    autoreset: Autoreset
    codec: Codec | None
    extras: dict[str, ArraySpec]

    def __post_init__(self) -> None:
        if self.autoreset not in ("same_step", "disabled"):
            raise ConfigError(f"autoreset: expected 'same_step' or 'disabled', got {self.autoreset!r}")

    @property
    def length(self) -> int:
        """Transitions per environment."""
        return self.capacity // self.num_envs

    @classmethod
    def from_json(cls, data: Json) -> StoreSpec:
        """Read the JSON form; a missing or ill-typed entry is a :class:`DataError`."""
        names = ("capacity", "num_envs", "leaves", "action", "autoreset", "codec", "extras")
        capacity, num_envs, leaves, action, autoreset, codec, extras = _entries(data, "a replay store", *names)
        if not isinstance(leaves, list) or not isinstance(extras, dict):
            raise DataError(f"manifest: expected a list of leaves and named extras, got {leaves!r} and {extras!r}")
        return cls(
            capacity=int(cast("int", capacity)),
            num_envs=int(cast("int", num_envs)),
            leaves=tuple(Leaf.from_json(leaf) for leaf in leaves),
            action=ArraySpec.from_json(action),
            autoreset=cast("Autoreset", autoreset),
            codec=cast("Codec | None", codec),
            extras={name: ArraySpec.from_json(spec) for name, spec in extras.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewSpec:
    """How one sampler reads a store; written to its manifest."""

    sampler: dict[str, Json]
    n_step: int
    gamma: float
    seed: int

    def __post_init__(self) -> None:
        if self.n_step < 1:
            raise ConfigError(f"n_step: expected at least 1, got {self.n_step}")
        if not 0.0 <= self.gamma <= 1.0:
            raise ConfigError(f"gamma: expected a discount between 0 and 1, got {self.gamma}")

    @classmethod
    def from_json(cls, data: Json) -> ViewSpec:
        """Read the JSON form."""
        sampler, *numbers = _entries(data, "a sampler and its settings", "sampler", "n_step", "gamma", "seed")
        if not isinstance(sampler, dict):
            raise DataError(f"manifest: expected a sampler's settings, got {sampler!r}")
        n_step, gamma, seed = (cast("float", number) for number in numbers)
        return cls(sampler=sampler, n_step=int(n_step), gamma=float(gamma), seed=int(seed))


def to_json(value: object) -> Json:
    """A description as JSON: dataclasses by their fields, dtypes by name; ``from_json`` of its class reads it back."""
    if dataclasses.is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: to_json(entry) for name, entry in cast("Mapping[str, object]", value).items()}
    if isinstance(value, (tuple, list)):
        return [to_json(entry) for entry in cast("Sequence[object]", value)]
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else cast("Json", value)


def _entries(data: Json, what: str, *names: str) -> list[Json]:
    """The entries of a description, all there."""
    if not isinstance(data, dict) or not data.keys() >= set(names):
        raise DataError(f"manifest: expected {what} with {', '.join(names)}, got {data!r}")
    return [data[name] for name in names]


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Elements between neighbors along each axis of a contiguous array."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _array_spec(space: SpaceLike, what: str) -> ArraySpec:
    """The one array of a space that is not a dict."""
    if isinstance(space, ArraySpec):
        return space
    if not isinstance(space, Mapping):
        shape, dtype = space.shape, space.dtype
        if shape is not None and dtype is not None and np.dtype(dtype).kind in "biuf":
            return ArraySpec(tuple(int(size) for size in shape), torch.from_numpy(np.empty(0, dtype)).dtype)
    raise ConfigError(
        f"{what}: expected a Box, Discrete, MultiDiscrete or MultiBinary space or an ArraySpec, got {space!r}"
    )


def store_spec(
    capacity: int,
    num_envs: int,
    observation: SpaceLike,
    action: SpaceLike,
    stack: Mapping[str, StackSpec] | StackSpec | None = None,
    extras: Mapping[str, SpaceLike] | None = None,
    autoreset: Autoreset = "same_step",
    codec: Codec | None = None,
) -> StoreSpec:
    """A store of these spaces; arguments as in :class:`~headrace.replay.ReplayBuffer`."""
    return StoreSpec(
        capacity=capacity,
        num_envs=num_envs,
        leaves=_observation_leaves(observation, stack),
        action=_array_spec(action, "action"),
        autoreset=autoreset,
        codec=codec,
        extras={name: _array_spec(space, f"extras[{name!r}]") for name, space in (extras or {}).items()},
    )


def _observation_leaves(space: SpaceLike, stack: Mapping[str, StackSpec] | StackSpec | None) -> tuple[Leaf, ...]:
    """The arrays of an observation space, in order, with their stacks.

    Args:
        space: one environment's observation, stacked as the environment gives it.
        stack: by leaf name (``camera/left`` for nested ones); a bare ``StackSpec`` where the observation is one array.
    """
    flat: dict[str, tuple[ArraySpec, tuple[str, ...]]] = {}
    for leaf in nested_leaves(space):
        path = tuple(key for key in leaf.path if isinstance(key, str))
        if len(path) < len(leaf.path):
            raise ConfigError(f"observation: expected arrays or dicts of arrays, got a tuple in {space!r}")
        flat[leaf.name] = (_array_spec(leaf.value, f"observation {leaf.name!r}" if leaf.name else "observation"), path)
    specs = {"": stack} if isinstance(stack, StackSpec) else dict(stack or {})
    unknown = sorted(set(specs) - set(flat))
    if unknown:
        raise ConfigError(f"stack: no observation named {unknown[0]!r}; the observations are {sorted(flat)}")
    leaves = tuple(
        Leaf(name=name, path=path, observed=spec, stack=specs.get(name)) for name, (spec, path) in flat.items()
    )
    for leaf in leaves:
        if leaf.frame.nbytes == 0:
            raise ConfigError(
                f"observation {leaf.name!r}: expected at least one element, got shape {leaf.observed.shape}"
            )
    return leaves
