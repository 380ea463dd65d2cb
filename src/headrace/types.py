"""The records and protocols that cross the boundaries between stages.

Stages of one level never import each other: they meet here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypedDict, runtime_checkable

import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.errors import ConfigError, DeviceError, ShapeError

Obs: TypeAlias = dict[str, Tensor]
"""Named observation groups: ``policy``, ``critic``, camera names, … Each tensor is (rows, …)."""

Ids: TypeAlias = "Tensor | list[int] | range | NDArray[Any]"
"""Environments: a bool mask (N,), or unique int64 indices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeEnds:
    """The episodes that ended in one step, compact: m of them, usually few.

    All tensors are (m,), fresh, on the environment's device; the receiver owns them.
    """

    env_ids: Tensor
    """int64: the slot the episode ran in."""
    episode_ids: Tensor
    """int64: the identity of the episode that ended (not of the one that follows)."""
    returns: Tensor
    """float64: undiscounted sum of rewards."""
    lengths: Tensor
    """int64: environment steps taken."""
    success: Tensor | None
    """bool: the task's success measure at the end; None where the task has no such measure."""
    diverged: Tensor
    """bool: ended because the simulation failed, not because of the task."""

    def __len__(self) -> int:
        return int(self.env_ids.shape[0])

    @classmethod
    def join(cls, parts: Sequence[EpisodeEnds]) -> EpisodeEnds:
        """Return the episodes of several steps of one environment, in order of time; none of none."""
        if not parts:
            none, flags = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool)
            return cls(
                env_ids=none, episode_ids=none, returns=none.double(), lengths=none, success=None, diverged=flags
            )
        success = [part.success for part in parts if part.success is not None]
        return cls(
            success=torch.cat(success) if success else None,
            **{
                name: torch.cat([getattr(part, name) for part in parts])
                for name in ("env_ids", "episode_ids", "returns", "lengths", "diverged")
            },
        )


StepInfo = TypedDict(  # noqa: UP013  (a class would mangle the keys that begin with an underscore)
    "StepInfo",
    {
        "final_obs": Obs,
        "_final_obs": Tensor,
        "episode": dict[str, Tensor],
        "_episode": Tensor,
        "ends": EpisodeEnds,
        "observed": Tensor,
        "log": dict[str, float],
    },
    total=False,
)
"""What ``info`` may hold; a plain dict at run time, as Gymnasium wants.

``final_obs`` with its mask ``_final_obs`` (bool (N,)), ``episode`` (``r`` float64, ``l`` int64, each (N,)) with its
mask ``_episode``, and ``ends`` are there only in steps where an episode ended. ``observed`` (bool (N,)) is there when
``observe=`` was given.
``log`` has scalars that a task reports.
"""


class Step(NamedTuple):
    """One step of a batch of N environments; unpacks as Gymnasium's five.

    The receiver owns every tensor: none is written to by a later step.
    """

    obs: Obs
    """Group name → (N, …). Rows of environments that were not active hold their last observation."""
    reward: Tensor
    """float32 (N,); 0 for suspended environments."""
    terminated: Tensor
    """bool (N,): the task ended the episode; do not bootstrap."""
    truncated: Tensor
    """bool (N,): time limit or divergence; bootstrap from ``info["final_obs"]``."""
    info: StepInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What observers of an environment see of one step: the compact rows that really acted.

    Tensors are borrowed: an observer copies what it keeps. n = rows that acted, out of N environments.
    """

    env_ids: Tensor
    """int64 (n,), ascending."""
    episode_ids: Tensor
    """int64 (n,): the episode in which each row acted."""
    actions: Tensor
    """(N, A) as given by the caller; rows that did not act may be NaN. They answer to the observation of the record
    before: that of the last step in which the row acted, or of its reset."""
    step: Step
    """The result of the step, all N rows; the observation is the true last one where an episode ended."""
    states: Tensor | None
    """float64 (n, S): physics state after the step, before any reset; None unless an observer needs ``states``."""
    processed_actions: Tensor | None = None
    """(n, …): what the task made of the actions before they reached the simulator; None where a task keeps no such
    thing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetRecord:
    """What observers see of new episodes, at ``reset`` and at autoreset. Tensors are borrowed."""

    env_ids: Tensor
    """int64 (m,)."""
    episode_ids: Tensor
    """int64 (m,): the episodes that begin."""
    seed: int
    obs: Obs
    """Group name → (N, …): the first observation, rows ``env_ids`` are new."""
    states: Tensor | None
    """float64 (m, S): initial physics states; None unless an observer asked for ``states``."""
    instructions: tuple[str, ...] = ()
    """One text per episode that begins; none at all where the environment has no instructions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubstepRecord:
    """What observers see of one physics substep, within a step. Tensors are borrowed. n = rows that act in the step."""

    env_ids: Tensor
    """int64 (n,), ascending; the same for all substeps of a step."""
    episode_ids: Tensor
    """int64 (n,)."""
    index: int
    """Which substep of the step, from 0."""
    count: int
    """Substeps of the step (the task's decimation)."""
    states: Tensor
    """float64 (n, S): physics states after the substep."""


Need: TypeAlias = Literal["states", "frames", "substeps"]
"""What an observer wants of an environment."""


class StepObserver(Protocol):
    """Something attached to an environment that sees what active environments do: a recorder, a counter.

    Calls come from the thread that steps the environment. An exception raised here reaches the caller of ``step``.
    """

    @property
    def needs(self) -> frozenset[Need]:
        """``states``: fill the state fields. ``frames``: cameras of every active environment are rendered each step.
        ``substeps``: call :meth:`SubstepObserver.after_substep`, too."""
        ...

    def after_reset(self, record: ResetRecord) -> None:
        """Receive the beginnings of episodes."""
        ...

    def after_step(self, record: StepRecord) -> None:
        """Receive a step. Called before ``after_reset`` of the episodes that follow the ended ones."""
        ...


@runtime_checkable
class SubstepObserver(StepObserver, Protocol):
    """An observer that also sees every physics substep of the environments that act (``"substeps" in needs``).

    Physics is the same to the last bit; a step calls the simulation once per substep instead of once.
    """

    def after_substep(self, record: SubstepRecord) -> None:
        """Receive a physics substep; ``after_step`` follows the last one of a step."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSpec:
    """How the newest K frames of one observation group make a stack, oldest to newest.

    ``dim`` is counted in the shape of one environment's frame, without the batch axis; it may be negative.
    """

    frames: int
    """K, at least 1."""
    dim: int
    """``concat``: the axis along which frames are concatenated: -1 for images with channels last, 0 for channels first.
    ``new_axis``: where the axis of length K is put. It has no default: a wrong axis stacks rows of pixels."""
    layout: Literal["concat", "new_axis"] = "concat"
    reset: Literal["repeat", "zero"] = "repeat"
    """What fills the stack at the start of an episode: the first frame, or zeros."""

    def __post_init__(self) -> None:
        if self.frames < 1:
            raise ConfigError(f"StackSpec.frames: expected at least 1, got {self.frames}")

    def axis(self, frame_rank: int) -> int:
        """Return the axis of ``dim`` in one environment's *stacked* observation, as a non-negative index."""
        rank = frame_rank + (self.layout == "new_axis")
        axis = self.dim + rank if self.dim < 0 else self.dim
        if not 0 <= axis < rank:
            raise ConfigError(
                f"StackSpec.dim: expected an axis of a frame of rank {frame_rank} (the batch axis is not counted), "
                f"got {self.dim}"
            )
        return axis

    def stacked_shape(self, frame_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return shape of one environment's stack, from the shape of one frame."""
        axis = self.axis(len(frame_shape))
        if self.layout == "new_axis":
            return (*frame_shape[:axis], self.frames, *frame_shape[axis:])
        return (*frame_shape[:axis], frame_shape[axis] * self.frames, *frame_shape[axis + 1 :])

    def frame_shape(self, stacked_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return shape of one frame, from the shape of one environment's stack."""
        rank = len(stacked_shape) - (self.layout == "new_axis")
        axis = self.axis(rank)
        size = stacked_shape[axis]
        if self.layout == "new_axis":
            if size != self.frames:
                raise ShapeError(f"stack: expected {self.frames} frames on axis {axis}, got shape {stacked_shape}")
            return (*stacked_shape[:axis], *stacked_shape[axis + 1 :])
        if size % self.frames:
            raise ShapeError(
                f"stack: expected a multiple of {self.frames} frames on axis {axis}, got shape {stacked_shape}"
            )
        return (*stacked_shape[:axis], size // self.frames, *stacked_shape[axis + 1 :])

    def frame(self, stacked: Tensor, index: int) -> Tensor:
        """Return frame ``index`` (0 = oldest, -1 = newest) of a batch of stacks (rows, …), as a view."""
        shape = self.frame_shape(tuple(stacked.shape[1:]))
        axis = self.axis(len(shape)) + 1
        index = index + self.frames if index < 0 else index
        if self.layout == "new_axis":
            return stacked.select(axis, index)
        size = shape[axis - 1]
        return stacked.narrow(axis, index * size, size)

    def newest(self, stacked: Tensor) -> Tensor:
        """Return the newest frame of a batch of stacks (rows, …), as a view."""
        return self.frame(stacked, -1)

    def stack(self, frames: Tensor) -> Tensor:
        """Merge frames (rows, K, …), oldest to newest, into stacks; a view where strides allow, else a copy."""
        axis = self.axis(frames.dim() - 2) + 1
        moved = frames.movedim(1, axis)
        return moved if self.layout == "new_axis" else moved.flatten(axis, axis + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Actions that a policy planned for some environments. The receiver owns the tensors."""

    env_ids: Tensor
    """int64 (n,)."""
    episode_ids: Tensor
    """int64 (n,): a chunk is only ever played in the episode it was planned for."""
    index: Tensor
    """int64 (n,): which chunk of its episode this is, from 0."""
    actions: Tensor
    """(n, horizon, A)."""


StateDict: TypeAlias = Mapping[str, Any]
"""What ``state_dict()`` gives and ``load_state_dict()`` takes: tensors, numbers and nested dicts of them."""


def as_device(device: torch.device | str) -> torch.device:
    """Return a device with its index, so that ``cuda`` and ``cuda:0`` compare equal."""
    resolved = torch.device(device)
    if resolved == torch.device("cuda"):
        if not torch.cuda.is_available():
            raise DeviceError("device: expected one that torch can use, got 'cuda'; torch sees no GPU: use 'cpu'")
        return torch.device("cuda", torch.cuda.current_device())
    return resolved
