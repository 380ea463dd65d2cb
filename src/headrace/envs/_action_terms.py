"""Action terms: what part of an action does to the actuators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace._device import constant
from headrace.envs._model_names import object_id
from headrace.envs._rows import Rows
from headrace.errors import ConfigError
from headrace.sim._mujoco_api import Model

_BY_JOINT = 0
_FIXED_GAIN = 0
_NO_BIAS, _AFFINE_BIAS = 0, 1

Bounds = tuple[NDArray[np.float64], NDArray[np.float64]]


class ActionTerm(Protocol):
    """A few columns of the action and what they do."""

    def prepare(self, model: Model) -> Bounds:
        """Lowest and highest action, float64 (k,) each; called once, it may change the actuators of ``model``."""
        ...

    def apply(self, rows: Rows, actions: Tensor) -> None:
        """Write the controls for the coming step from this term's columns, float64 (n, k)."""
        ...


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Controls as they are: ``ctrl = scale · action + offset``. For motors that is a force or torque."""

    actuators: tuple[str, ...] | None = None
    """Names, in the order of the columns; None for all of the model."""
    scale: float = 1.0
    offset: float = 0.0

    def __post_init__(self) -> None:
        _check_scale("Effort", self.scale)

    def prepare(self, model: Model) -> Bounds:
        """The actions that reach the ends of the actuators' control ranges; infinite where they have none."""
        ids = _actuator_ids(model, self.actuators)
        limited = model.actuator_ctrllimited[ids][:, None]
        controls = np.where(limited, model.actuator_ctrlrange[ids], (-np.inf, np.inf))
        ends = (controls - self.offset) / self.scale
        return ends.min(axis=1), ends.max(axis=1)

    def apply(self, rows: Rows, actions: Tensor) -> None:
        """See :class:`ActionTerm`."""
        _write_controls(rows, self.actuators, _transformed(actions, self.scale, self.offset))


@dataclass(frozen=True, kw_only=True)
class PositionTarget:
    """Targets for joints: ``target = scale · action + offset``, action in [-1, 1].

    With ``kp`` and ``kd`` the actuators, one motor per joint, become servos whose torque on the joint is
    ``kp · (target − position) − kd · velocity`` in every physics step, no stronger than the motor was. Without, the
    model's actuators must be position servos already and keep their gains.
    """

    actuators: tuple[str, ...] | None = None
    """Names, in the order of the columns; None for all of the model."""
    scale: float = 1.0
    """Radians or meters per unit of action."""
    offset: float = 0.0
    kp: float | None = None
    kd: float | None = None

    def __post_init__(self) -> None:
        _check_scale("PositionTarget", self.scale)
        if (self.kp is None) != (self.kd is None):
            raise ConfigError(
                f"PositionTarget: expected kp and kd both, or neither for the model's own gains, got kp={self.kp}, "
                f"kd={self.kd}"
            )

    def prepare(self, model: Model) -> Bounds:
        """-1 to 1; installs the servos."""
        ids = _actuator_ids(model, self.actuators)
        for actuator in ids:
            name = model.actuator(actuator).name
            if int(model.actuator_trntype[actuator]) != _BY_JOINT:
                raise ConfigError(
                    f"PositionTarget: expected actuator {name!r} to drive a joint, got another transmission"
                )
            if self.kp is not None and self.kd is not None:
                _install_servo(model, actuator, self.kp, self.kd)
            elif int(model.actuator_biastype[actuator]) != _AFFINE_BIAS:
                raise ConfigError(
                    f"PositionTarget: expected actuator {name!r} to be a servo, got a motor; give kp and kd"
                )
        return np.full(len(ids), -1.0), np.full(len(ids), 1.0)

    def apply(self, rows: Rows, actions: Tensor) -> None:
        """See :class:`ActionTerm`."""
        _write_controls(rows, self.actuators, _transformed(actions, self.scale, self.offset))


def _install_servo(model: Model, actuator: int, kp: float, kd: float) -> None:
    # the actuator sees its joint through the gear: length = gear · position, joint torque = gear · force
    gear = float(model.actuator_gear[actuator, 0])
    is_motor = (
        int(model.actuator_gaintype[actuator]) == _FIXED_GAIN and int(model.actuator_biastype[actuator]) == _NO_BIAS
    )
    if is_motor and model.actuator_ctrllimited[actuator] and not model.actuator_forcelimited[actuator]:
        gain = float(model.actuator_gainprm[actuator, 0])
        model.actuator_forcerange[actuator] = np.sort(gain * model.actuator_ctrlrange[actuator])
        model.actuator_forcelimited[actuator] = True
    model.actuator_gaintype[actuator] = _FIXED_GAIN
    model.actuator_biastype[actuator] = _AFFINE_BIAS
    model.actuator_gainprm[actuator] = 0.0
    model.actuator_biasprm[actuator] = 0.0
    model.actuator_gainprm[actuator, 0] = kp / gear
    model.actuator_biasprm[actuator, 1:3] = (-kp / gear**2, -kd / gear**2)
    model.actuator_ctrllimited[actuator] = False


def _actuator_ids(model: Model, names: tuple[str, ...] | None) -> list[int]:
    return list(range(model.nu)) if names is None else [object_id(model, "actuator", name) for name in names]


def _transformed(actions: Tensor, scale: float, offset: float) -> Tensor:
    return actions if scale == 1.0 and offset == 0.0 else actions * scale + offset


def _write_controls(rows: Rows, names: tuple[str, ...] | None, values: Tensor) -> None:
    if names is None:
        rows.set("ctrl", values)
        return
    columns = constant(tuple(_actuator_ids(rows.model, names)), torch.int64, values.device)
    rows.set("ctrl", rows.get("ctrl").index_copy(1, columns, values))


def _check_scale(term: str, scale: float) -> None:
    if scale == 0.0:
        raise ConfigError(f"{term}.scale: expected a number other than 0, got 0")
