"""Names of a model's joints, bodies and actuators as the columns and indices of its arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

from headrace.errors import ConfigError
from headrace.sim._mujoco_api import Model, Named

Kind = Literal["body", "joint", "geom", "site", "camera", "actuator"]

# MuJoCo's joint types in order: free, ball, slide, hinge
_POSITIONS = (7, 4, 1, 1)
_VELOCITIES = (6, 3, 1, 1)


def object_id(model: Model, kind: Kind, name: str) -> int:
    """The index of a named object; an unknown name raises an error that lists the model's names."""
    lookup: Callable[[str], Named] = getattr(model, kind)
    try:
        return lookup(name).id
    except KeyError as error:
        raise ConfigError(
            f"{kind} {name!r}: expected one of the model's, got none of that name; {error.args[0]}"
        ) from error


# terms ask for the same few columns in every step; a model in use is alive anyway, and a dropped one is soon pushed out
@functools.lru_cache(maxsize=256)
def position_columns(model: Model, joints: tuple[str, ...]) -> tuple[int, ...]:
    """The columns of ``qpos`` that belong to the joints, in their order; one for a hinge or slide, 7 for a free one."""
    return _columns(model, joints, "jnt_qposadr", _POSITIONS)


@functools.lru_cache(maxsize=256)
def velocity_columns(model: Model, joints: tuple[str, ...]) -> tuple[int, ...]:
    """The columns of ``qvel`` (and of every ``dof_`` field) that belong to the joints, in their order."""
    return _columns(model, joints, "jnt_dofadr", _VELOCITIES)


def _columns(model: Model, joints: tuple[str, ...], address: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    columns: list[int] = []
    for joint in (object_id(model, "joint", name) for name in joints):
        first = int(getattr(model, address)[joint])
        columns.extend(range(first, first + sizes[int(model.jnt_type[joint])]))
    return tuple(columns)
