"""Everything that a task made of terms is written with: the task, its parts, and ready-made terms.

Ready-made terms are small frozen records that are functions of rows. Their fields are parameters with a path, for
example ``terminations.fallen.high`` of a :class:`JointOutOfRange`. Joints, bodies and sites are given by name.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace._device import constant
from headrace.envs._action_terms import ActionTerm, Choice, Effort, LogUniform, PositionTarget, Randomization, Uniform
from headrace.envs.task import Rows
from headrace.envs.term_task import (
    ACTION,
    PREVIOUS_ACTION,
    AddedCamera,
    IntervalEvent,
    ObservationTerm,
    Ramp,
    ResetEvent,
    RewardTerm,
    SuccessTerm,
    level_memory,
)
from headrace.errors import ConfigError
from headrace.sim.mujoco_api import object_id, position_columns, velocity_columns

__all__ = ["ActionL2", "ActionRateL2", "ActionTerm", "AddedCamera", "Alive", "BodiesNear", "BodyBelow", "BodyPosition"]
__all__ += ["Choice", "Distance", "Effort", "IntervalEvent", "JointOutOfRange", "JointPositionL2", "JointPositions"]
__all__ += ["JointVelocities", "JointVelocityL2", "LastAction", "LogUniform", "ObservationTerm", "PositionTarget"]
__all__ += ["PushJoints", "Ramp", "Randomization", "ResetEvent", "ResetJoints", "RewardTerm", "SuccessTerm", "Time"]
__all__ += ["Uniform", "Upright", "level_memory"]

# --- what can be observed ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class JointPositions:
    """Positions of joints, (n, k)."""

    joints: tuple[str, ...] | None = None
    """Names, in the order of the columns; None for the whole of ``qpos``."""

    def __call__(self, rows: Rows) -> Tensor:
        """See :data:`headrace.envs.term_task.RowFunction`."""
        return _columns(rows, "qpos", None if self.joints is None else position_columns(rows.model, self.joints))


@dataclass(frozen=True, kw_only=True)
class JointVelocities:
    """Velocities of joints, (n, k)."""

    joints: tuple[str, ...] | None = None
    """Names, in the order of the columns; None for the whole of ``qvel``."""

    def __call__(self, rows: Rows) -> Tensor:
        """See :data:`headrace.envs.term_task.RowFunction`."""
        return _columns(rows, "qvel", None if self.joints is None else velocity_columns(rows.model, self.joints))


@dataclass(frozen=True, kw_only=True)
class BodyPosition:
    """Where a body is in the world, (n, 3)."""

    body: str

    def __call__(self, rows: Rows) -> Tensor:
        """See :data:`headrace.envs.term_task.RowFunction`."""
        return rows.get("xpos", object_id(rows.model, "body", self.body))


@dataclass(frozen=True, kw_only=True)
class LastAction:
    """The action of the step just taken, as the policy gave it, (n, A); zero at the start of an episode."""

    def __call__(self, rows: Rows) -> Tensor:
        """See :data:`headrace.envs.term_task.RowFunction`."""
        return rows.recall(ACTION)


@dataclass(frozen=True, kw_only=True)
class Time:
    """Simulated seconds since the start of the episode, (n,)."""

    def __call__(self, rows: Rows) -> Tensor:
        """See :data:`headrace.envs.term_task.RowFunction`."""
        return rows.get("time")


# --- what can be paid for ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Alive:
    """One in every step, (n,)."""

    def __call__(self, rows: Rows) -> Tensor:
        """See :data:`headrace.envs.term_task.RowFunction`."""
        return torch.ones(len(rows), dtype=torch.float64, device=rows.device)


@dataclass(frozen=True, kw_only=True)
class Upright:
    """How far a body's z axis points up, (n,): 1 upright, 0 lying, -1 upside down."""

    body: str

    def __call__(self, rows: Rows) -> Tensor:
        """See :data:`headrace.envs.term_task.RowFunction`."""
        return rows.get("xmat", object_id(rows.model, "body", self.body))[:, 8]


@dataclass(frozen=True, kw_only=True)
class JointPositionL2:
    """Squared distance of joints from a position, (n,)."""

    joints: tuple[str, ...]
    target: float | tuple[float, ...] = 0.0
    """One position for all joints, or one for each."""

    def __post_init__(self) -> None:
        if isinstance(self.target, tuple):
            _check_per_joint("JointPositionL2.target", self.joints, self.target)

    def __call__(self, rows: Rows) -> Tensor:
        """See :data:`headrace.envs.term_task.RowFunction`."""
        target = constant(self.target, torch.float64, rows.device) if isinstance(self.target, tuple) else self.target
        return _squares(_columns(rows, "qpos", position_columns(rows.model, self.joints)) - target)


@dataclass(frozen=True, kw_only=True)
class JointVelocityL2:
    """Sum of the squared velocities of joints, (n,)."""

    joints: tuple[str, ...] | None = None

    def __call__(self, rows: Rows) -> Tensor:
        """See :data:`headrace.envs.term_task.RowFunction`."""
        return _squares(JointVelocities(joints=self.joints)(rows))


@dataclass(frozen=True, kw_only=True)
class Distance:
    """How far two bodies are from each other, (n,)."""

    first: str
    second: str

    def __call__(self, rows: Rows) -> Tensor:
        """See :data:`headrace.envs.term_task.RowFunction`."""
        return torch.linalg.vector_norm(
            BodyPosition(body=self.first)(rows) - BodyPosition(body=self.second)(rows), dim=1
        )


@dataclass(frozen=True, kw_only=True)
class ActionL2:
    """Sum of the squared actions, (n,)."""

    def __call__(self, rows: Rows) -> Tensor:
        """See :data:`headrace.envs.term_task.RowFunction`."""
        return _squares(rows.recall(ACTION))


@dataclass(frozen=True, kw_only=True)
class ActionRateL2:
    """Sum of the squared changes of the actions from the step before, (n,)."""

    def __call__(self, rows: Rows) -> Tensor:
        """See :data:`headrace.envs.term_task.RowFunction`."""
        return _squares(rows.recall(ACTION) - rows.recall(PREVIOUS_ACTION))


# --- what can end an episode, or be its success -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class JointOutOfRange:
    """A joint is below ``low`` or above ``high``, bool (n,)."""

    joint: str
    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ConfigError(f"JointOutOfRange: expected low ≤ high, got {self.low} and {self.high}")

    def __call__(self, rows: Rows) -> Tensor:
        """See :data:`headrace.envs.term_task.RowCondition`."""
        position = rows.get("qpos")[:, position_columns(rows.model, (self.joint,))[0]]
        return (position < self.low) | (position > self.high)


@dataclass(frozen=True, kw_only=True)
class BodyBelow:
    """A body is lower than ``height``, bool (n,)."""

    body: str
    height: float

    def __call__(self, rows: Rows) -> Tensor:
        """See :data:`headrace.envs.term_task.RowCondition`."""
        return BodyPosition(body=self.body)(rows)[:, 2] < self.height


@dataclass(frozen=True, kw_only=True)
class BodiesNear:
    """Two bodies are nearer than ``distance``, bool (n,)."""

    first: str
    second: str
    distance: float

    def __call__(self, rows: Rows) -> Tensor:
        """See :data:`headrace.envs.term_task.RowCondition`."""
        return Distance(first=self.first, second=self.second)(rows) < self.distance


# --- what can happen ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ResetJoints:
    """Hinges and slides somewhere around a pose, moving a little. Uniform, one draw per number."""

    joints: tuple[str, ...]
    positions: tuple[float, ...]
    """Per joint: the largest distance from its position in ``around``."""
    velocities: tuple[float, ...]
    """Per joint: the largest velocity."""
    around: tuple[float, ...] | None = None
    """Per joint: its position in the middle; None for the model's own (``qpos0``)."""

    def __post_init__(self) -> None:
        _check_per_joint("ResetJoints.positions", self.joints, self.positions)
        _check_per_joint("ResetJoints.velocities", self.joints, self.velocities)
        if self.around is not None:
            _check_per_joint("ResetJoints.around", self.joints, self.around)

    def __call__(self, rows: Rows, stream: str) -> None:
        """See :data:`headrace.envs.term_task.RowChange`."""
        count = len(self.joints)
        drawn = rows.uniform(stream, 2 * count, low=-1.0, high=1.0, draw=rows.steps * 2 * count)
        columns = position_columns(rows.model, self.joints)
        middle = tuple(rows.model.qpos0[list(columns)].tolist()) if self.around is None else self.around
        nominal = constant(middle, torch.float64, rows.device)
        _write(rows, "qpos", columns, nominal + _scale(drawn[:, :count], self.positions))
        _write(rows, "qvel", velocity_columns(rows.model, self.joints), _scale(drawn[:, count:], self.velocities))


@dataclass(frozen=True, kw_only=True)
class PushJoints:
    """A sudden change of velocity, uniform up to a size per joint. For interval events."""

    joints: tuple[str, ...]
    velocities: tuple[float, ...]
    """Per joint: the largest change, in either direction."""

    def __post_init__(self) -> None:
        _check_per_joint("PushJoints.velocities", self.joints, self.velocities)

    def __call__(self, rows: Rows, stream: str) -> None:
        """See :data:`headrace.envs.term_task.RowChange`."""
        count = len(self.joints)
        drawn = rows.uniform(stream, count, low=-1.0, high=1.0, draw=rows.steps * count)
        columns = velocity_columns(rows.model, self.joints)
        _write(rows, "qvel", columns, _columns(rows, "qvel", columns) + _scale(drawn, self.velocities))


def _columns(rows: Rows, field: str, columns: tuple[int, ...] | None) -> Tensor:
    values = rows.get(field)
    if columns is None:
        return values
    # neighbors are a view, several times cheaper than a gather
    first = columns[0] if columns else 0
    if columns == tuple(range(first, first + len(columns))):
        return values[:, first : first + len(columns)]
    return values[:, list(columns)]


def _squares(values: Tensor) -> Tensor:
    return (values * values).sum(dim=1)


def _scale(drawn: Tensor, sizes: tuple[float, ...]) -> Tensor:
    return drawn * constant(sizes, torch.float64, drawn.device)


def _write(rows: Rows, field: str, columns: tuple[int, ...], values: Tensor) -> None:
    where = constant(columns, torch.int64, values.device)
    rows.set(field, rows.get(field).index_copy(1, where, values))


def _check_per_joint(what: str, joints: tuple[str, ...], sizes: tuple[float, ...]) -> None:
    if len(sizes) != len(joints):
        raise ConfigError(f"{what}: expected one number for each of the joints {joints}, got {sizes}")
