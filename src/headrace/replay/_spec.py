"""What a store is told before it allocates: arrays, observation leaves, the whole description; and its size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from headrace._leaves import leaves as nested_leaves
from headrace.errors import CapacityError, ConfigError
from headrace.types import StackSpec

if TYPE_CHECKING:
    from gymnasium import Space

_LARGEST = 1 << 44
"""Elements; more is no store of this world."""
Autoreset: TypeAlias = Literal["same_step", "disabled"]
Codec: TypeAlias = Literal["lz4", "zstd"]
Discount: TypeAlias = float | tuple[float, ...]
"""γ of all environments, or of each."""


class _ByName:
    """How a record that is read from JSON gets its dtypes: by their names."""

    def __get_pydantic_core_schema__(self, *_: object) -> object:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(_find_dtype)


def _find_dtype(name: object) -> torch.dtype:
    found = getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"expected the name of a torch dtype, got {name!r}")
    return found


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Shape and dtype of one array of one environment, without the batch axis."""

    shape: tuple[int, ...]
    dtype: Annotated[torch.dtype, _ByName()]

    @property
    def nbytes(self) -> int:
        """Bytes of one such array."""
        return math.prod(self.shape) * self.dtype.itemsize


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
class LeafSpec:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpec:
    """Everything that fixes the layout of a replay buffer; written to its manifest."""

    capacity: int
    num_envs: int
    leaves: tuple[LeafSpec, ...]
    action: ArraySpec
    autoreset: Autoreset
    codec: Codec | None
    extras: dict[str, ArraySpec]

    def __post_init__(self) -> None:
        if self.num_envs < 1:
            raise ConfigError(f"num_envs: expected at least 1, got {self.num_envs}")
        if self.capacity < self.num_envs or self.capacity % self.num_envs:
            near = max(self.length, 1) * self.num_envs
            raise ConfigError(
                f"capacity: expected a positive multiple of num_envs ({self.num_envs}), as each environment has a ring "
                f"of its own, got {self.capacity}; use for example {near}"
            )
        if self.autoreset not in ("same_step", "disabled"):
            raise ConfigError(f"autoreset: expected 'same_step' or 'disabled', got {self.autoreset!r}")

    def check(self) -> None:
        """Refuse what no buffer that was made has, for a description that was read from a file."""
        shapes = [leaf.frame.shape for leaf in self.leaves]
        shapes += [spec.shape for spec in (self.action, *self.extras.values())]
        sizes = [self.capacity, *(math.prod(shape) for shape in shapes)]
        if (
            not self.leaves
            or min(sizes) < 1
            or max(sizes) > _LARGEST
            or any(min(shape, default=0) < 0 for shape in shapes)
        ):
            raise ConfigError(f"expected observations and sizes that fit a machine, got {self}")

    @property
    def length(self) -> int:
        """Transitions per environment."""
        return self.capacity // self.num_envs

    @property
    def slots(self) -> int:
        """Slots of a ring: history, transitions, the frame after the newest, and one for a write in progress."""
        return self.length + max(leaf.frames for leaf in self.leaves) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewSpec:
    """How one sampler reads a store; written to its manifest."""

    sampler: dict[str, Any]
    n_step: int
    gamma: Discount
    seed: int

    def __post_init__(self) -> None:
        if self.n_step < 1:
            raise ConfigError(f"n_step: expected at least 1, got {self.n_step}")
        if not all(0.0 <= each <= 1.0 for each in np.atleast_1d(self.gamma).tolist()):
            raise ConfigError(f"gamma: expected a discount between 0 and 1, got {self.gamma}")

    def check(self, num_envs: int) -> None:
        """Refuse discounts of other environments than the store's."""
        if isinstance(self.gamma, tuple) and len(self.gamma) != num_envs:
            raise ConfigError(
                f"gamma: expected one number, or one for each of {num_envs} environments, got {len(self.gamma)}"
            )


def _array_spec(space: SpaceLike, what: str) -> ArraySpec:
    """Return the one array of a space that is not a dict."""
    found = space if isinstance(space, ArraySpec) else None
    if not isinstance(space, ArraySpec | Mapping):
        shape, dtype = space.shape, space.dtype
        if shape is not None and dtype is not None and np.dtype(dtype).kind in "biuf":
            found = ArraySpec(tuple(int(size) for size in shape), torch.from_numpy(np.empty(0, dtype)).dtype)
    if found is None:
        raise ConfigError(
            f"{what}: expected a Box, Discrete, MultiDiscrete or MultiBinary space or an ArraySpec, got {space!r}"
        )
    if not found.nbytes:
        raise ConfigError(f"{what}: expected at least one element, got shape {found.shape}")
    return found


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
    """Return a store of these spaces; arguments as in :class:`~headrace.replay.ReplayBuffer`."""
    return StoreSpec(
        capacity=capacity,
        num_envs=num_envs,
        leaves=_observation_leaves(observation, stack),
        action=_array_spec(action, "action"),
        autoreset=autoreset,
        codec=codec,
        extras={name: _array_spec(space, f"extras[{name!r}]") for name, space in (extras or {}).items()},
    )


def _observation_leaves(space: SpaceLike, stack: Mapping[str, StackSpec] | StackSpec | None) -> tuple[LeafSpec, ...]:
    """Return the arrays of an observation space, in order, with their stacks.

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
    return tuple(
        LeafSpec(name=name, path=path, observed=spec, stack=specs.get(name)) for name, (spec, path) in flat.items()
    )


BOOKKEEPING_BYTES = 1 + 4 * 4 + 4
"""Per slot: flags, four int32 fields, the reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreEstimate:
    """Bytes of a full buffer; indices of samplers other than uniform (4 to 10 bytes per transition) are not counted."""

    nbytes: int
    frame_bytes: int
    """The rings: every frame once."""
    side_bytes: int
    """True last frames of the episodes stored."""
    other_bytes: int
    """Actions, rewards, flags and trajectory bookkeeping."""
    bytes_per_transition: float
    stored_twice_nbytes: int
    """What the same transitions take in a buffer that stores ``obs`` and ``next_obs`` with their stacks."""


def estimate(
    capacity: int,
    num_envs: int,
    observation: SpaceLike,
    action: SpaceLike,
    *,
    stack: Mapping[str, StackSpec] | StackSpec | None = None,
    episode_length: float = 100.0,
) -> StoreEstimate:
    """Return what ``ReplayBuffer(capacity, num_envs, observation, action, stack=stack)`` takes when it is full.

    Args:
        capacity: transitions, over all environments.
        num_envs: environments.
        observation: one environment's observation space, stacked as the environment gives it.
        action: one environment's action space.
        stack: how stacked observations are made of frames.
        episode_length: mean transitions per episode: each end costs one more frame.
    """
    return estimate_store(store_spec(capacity, num_envs, observation, action, stack), episode_length)


def estimate_store(spec: StoreSpec, episode_length: float = 100.0) -> StoreEstimate:
    """:func:`estimate` for spaces that were read already."""
    capacity, num_envs, leaves, action = spec.capacity, spec.num_envs, spec.leaves, spec.action
    slots = num_envs * spec.slots
    frame = sum(leaf.frame.nbytes for leaf in leaves)
    frame_bytes = slots * frame
    side_bytes = round(capacity / episode_length) * frame
    # beside what every slot takes: the heads of the environments, and the count of draws
    other = slots * (action.nbytes + BOOKKEEPING_BYTES) + 16 * num_envs + 8
    total = frame_bytes + side_bytes + other
    observed = sum(leaf.observed.nbytes for leaf in leaves)
    return StoreEstimate(
        nbytes=total,
        frame_bytes=frame_bytes,
        side_bytes=side_bytes,
        other_bytes=other,
        bytes_per_transition=total / capacity,
        stored_twice_nbytes=capacity * (2 * observed + action.nbytes + 4 + 2),
    )


def refuse_unless_fits(needed: StoreEstimate, available: int, where: str) -> None:
    """Raise :class:`CapacityError` where a full buffer would not fit."""
    if needed.nbytes > available:
        raise CapacityError(
            f"replay: a full buffer takes {_gib(needed.nbytes)} ({needed.bytes_per_transition:,.0f} bytes per "
            f"transition), but {where} has {_gib(available)} free; lower capacity, "
            "keep it on disk with directory=…, or use codec=…"
        )


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:,.2f} GiB"
