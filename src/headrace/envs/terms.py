"""Everything that a task made of terms is written with: the task, its parts, and ready-made terms."""

from __future__ import annotations

from headrace.envs._action_terms import ActionTerm, Effort, PositionTarget
from headrace.envs._randomization import LogUniform, Randomization, Uniform
from headrace.envs._term_library import (
    ActionL2,
    ActionRateL2,
    Alive,
    BodiesNear,
    BodyBelow,
    BodyPosition,
    Distance,
    JointOutOfRange,
    JointPositionL2,
    JointPositions,
    JointVelocities,
    JointVelocityL2,
    LastAction,
    PushJoints,
    ResetJoints,
    SitePosition,
    Time,
    Upright,
)
from headrace.envs._term_task import level_memory
from headrace.envs._terms import IntervalEvent, ObservationTerm, Ramp, ResetEvent, RewardTerm, SuccessTerm

__all__ = [
    "ActionL2",
    "ActionRateL2",
    "ActionTerm",
    "Alive",
    "BodiesNear",
    "BodyBelow",
    "BodyPosition",
    "Distance",
    "Effort",
    "IntervalEvent",
    "JointOutOfRange",
    "JointPositionL2",
    "JointPositions",
    "JointVelocities",
    "JointVelocityL2",
    "LastAction",
    "LogUniform",
    "ObservationTerm",
    "PositionTarget",
    "PushJoints",
    "Ramp",
    "Randomization",
    "ResetEvent",
    "ResetJoints",
    "RewardTerm",
    "SitePosition",
    "SuccessTerm",
    "Time",
    "Uniform",
    "Upright",
    "level_memory",
]
