"""What a store is told before it allocates: arrays, observation leaves, the whole description and its JSON form."""

from __future__ import annotations

import math
from collections.abc import Mapping
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

    def to_json(self) -> Json:
        """The JSON form; :meth:`from_json` reads it back."""
        return {"shape": list(self.shape), "dtype": str(self.dtype).removeprefix("torch.")}

    @classmethod
    def from_json(cls, data: Json) -> ArraySpec:
        """Read the JSON form."""
        if not isinstance(data, dict) or not isinstance(shape := data.get("shape"), list):
            raise DataError(f"manifest: expected an array description with shape and dtype, got {data!r}")
        dtype = getattr(torch, str(data.get("dtype")), None)
        if not isinstance(dtype, torch.dtype):
            raise DataError(f"manifest: expected the name of a torch dtype, got {data.get('dtype')!r}")
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

    def window(self, frames: int) -> Window:
        """Layout of a block in which ``frames`` frames are merged along the stacking axis."""
        found = self._windows.get(frames)
        if found is None:
            found = self._windows[frames] = self._window(frames)
        return found

    @cached_property
    def _windows(self) -> dict[int, Window]:
        return {}

    def _window(self, frames: int) -> Window:
        shape = self.frame.shape
        size = frames * math.prod(shape)
        if self.stack is None:
            return Window(shape, strides(shape), math.prod(shape), size)
        axis = self.stack.axis(len(shape))
        merged = StackSpec(frames=frames, dim=axis, layout=self.stack.layout).stacked_shape(shape)
        stride = strides(merged)
        step = 1 if self.stack.layout == "new_axis" else shape[axis]
        return Window(self.observed.shape, stride, step * stride[axis], size)

    def to_json(self) -> Json:
        """The JSON form; :meth:`from_json` reads it back."""
        stack: Json = None
        if self.stack is not None:
            spec = self.stack
            stack = {"frames": spec.frames, "dim": spec.dim, "layout": spec.layout, "reset": spec.reset}
        return {"name": self.name, "path": list(self.path), "observed": self.observed.to_json(), "stack": stack}

    @classmethod
    def from_json(cls, data: Json) -> Leaf:
        """Read the JSON form."""
        if not isinstance(data, dict):
            raise DataError(f"manifest: expected an observation leaf, got {data!r}")
        stack, path = data.get("stack"), data.get("path")
        if not isinstance(path, list):
            raise DataError(f"manifest: expected the keys of an observation leaf, got {path!r}")
        return cls(
            name=str(data.get("name")),
            path=tuple(map(str, path)),
            observed=ArraySpec.from_json(data.get("observed")),
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

    @property
    def length(self) -> int:
        """Transitions per environment."""
        return self.capacity // self.num_envs

    @property
    def columns(self) -> dict[str, ArraySpec]:
        """What is kept per transition besides frames and rewards: the action and the extras."""
        return {"action": self.action, **self.extras}

    def to_json(self) -> dict[str, Json]:
        """The JSON form; :meth:`from_json` reads it back."""
        return {
            "capacity": self.capacity,
            "num_envs": self.num_envs,
            "leaves": [leaf.to_json() for leaf in self.leaves],
            "action": self.action.to_json(),
            "autoreset": self.autoreset,
            "codec": self.codec,
            "extras": {name: spec.to_json() for name, spec in self.extras.items()},
        }

    @classmethod
    def from_json(cls, data: Json) -> StoreSpec:
        """Read the JSON form; a missing or ill-typed entry is a :class:`DataError`."""
        if not isinstance(data, dict):
            raise DataError(f"manifest: expected a store description, got {data!r}")
        leaves, extras = data.get("leaves"), data.get("extras")
        if not isinstance(leaves, list) or not isinstance(extras, dict):
            raise DataError("manifest: 'leaves' or 'extras' is missing; this is not a replay store")
        try:
            return cls(
                capacity=int(cast("int", data["capacity"])),
                num_envs=int(cast("int", data["num_envs"])),
                leaves=tuple(Leaf.from_json(leaf) for leaf in leaves),
                action=ArraySpec.from_json(data["action"]),
                autoreset=cast("Autoreset", data["autoreset"]),
                codec=cast("Codec | None", data["codec"]),
                extras={name: ArraySpec.from_json(spec) for name, spec in extras.items()},
            )
        except KeyError as error:
            raise DataError(f"manifest: entry {error} is missing; this is not a replay store") from error


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

    def to_json(self) -> Json:
        """The JSON form; :meth:`from_json` reads it back."""
        return {"sampler": self.sampler, "n_step": self.n_step, "gamma": self.gamma, "seed": self.seed}

    @classmethod
    def from_json(cls, data: Json) -> ViewSpec:
        """Read the JSON form."""
        if not isinstance(data, dict) or not isinstance(sampler := data.get("sampler"), dict):
            raise DataError(f"manifest: expected a sampler and its settings, got {data!r}")
        n_step, gamma, seed = (cast("float", data.get(name, 0)) for name in ("n_step", "gamma", "seed"))
        return cls(sampler=sampler, n_step=int(n_step), gamma=float(gamma), seed=int(seed))


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Elements between neighbors along each axis of a contiguous array."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def array_spec(space: SpaceLike, what: str) -> ArraySpec:
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


def observation_leaves(space: SpaceLike, stack: Mapping[str, StackSpec] | StackSpec | None) -> tuple[Leaf, ...]:
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
        flat[leaf.name] = (array_spec(leaf.value, f"observation {leaf.name!r}" if leaf.name else "observation"), path)
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
