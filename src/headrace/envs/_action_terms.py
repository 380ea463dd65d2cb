"""Action terms: what part of an action does to the actuators.

Domain randomization: model fields that differ between episodes, drawn from each episode's own stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace._device import constant
from headrace.envs.task import Rows
from headrace.errors import ConfigError
from headrace.sim.mujoco_api import Kind, Model, object_id, velocity_columns

_BY_JOINT = 0
_FIXED_GAIN = 0
_NO_BIAS, _AFFINE_BIAS = 0, 1

Bounds = tuple[NDArray[np.float64], NDArray[np.float64]]
PerActuator = float | tuple[float, ...]
"""One number for all actuators of a term, or one for each."""


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
    scale: PerActuator = 1.0
    """One number, or one per actuator; so is ``offset``."""
    offset: PerActuator = 0.0

    def __post_init__(self) -> None:
        _check_numbers("Effort", scale=self.scale, offset=self.offset)

    def prepare(self, model: Model) -> Bounds:
        """Return the actions that reach the ends of the actuators' control ranges; infinite where they have none."""
        ids = _actuator_ids(model, self.actuators)
        limited = model.actuator_ctrllimited[ids][:, None]
        controls = np.where(limited, model.actuator_ctrlrange[ids], (-np.inf, np.inf))
        scale = _for_each(model, ids, "Effort.scale", self.scale)
        ends = (controls - _for_each(model, ids, "Effort.offset", self.offset)[:, None]) / scale[:, None]
        return ends.min(axis=1), ends.max(axis=1)

    def apply(self, rows: Rows, actions: Tensor) -> None:
        """See :class:`ActionTerm`."""
        _write_controls(rows, self.actuators, _transform(actions, self.scale, self.offset))


@dataclass(frozen=True, kw_only=True)
class PositionTarget:
    """Targets for joints: ``target = scale · action + offset``, action in [-1, 1].

    With ``kp`` and ``kd`` the actuators, one motor per joint, become servos whose torque on the joint is
    ``kp · (target − position) − kd · velocity`` in every physics step, no stronger than the motor was. Without, the
    model's actuators must be position servos already and keep their gains.
    """

    actuators: tuple[str, ...] | None = None
    """Names, in the order of the columns; None for all of the model."""
    scale: PerActuator = 1.0
    """Radians or meters per unit of action; one number, or one per actuator. So are the others."""
    offset: PerActuator = 0.0
    """The target of action 0, such as the pose that the robot starts in."""
    relative: bool = False
    """Whether targets are distances from where the joints are when the step begins (delta joint positions)."""
    kp: PerActuator | None = None
    kd: PerActuator | None = None

    def __post_init__(self) -> None:
        _check_numbers("PositionTarget", scale=self.scale, offset=self.offset, kp=self.kp, kd=self.kd)
        if (self.kp is None) != (self.kd is None):
            raise ConfigError(
                f"PositionTarget: expected kp and kd both, or neither for the model's own gains, got kp={self.kp}, "
                f"kd={self.kd}"
            )

    def prepare(self, model: Model) -> Bounds:
        """-1 to 1; installs the servos."""
        ids = _actuator_ids(model, self.actuators)
        gains = None
        if self.kp is not None and self.kd is not None:
            kp, kd = (_for_each(model, ids, f"PositionTarget.{name}", getattr(self, name)) for name in ("kp", "kd"))
            gains = np.stack((kp, kd), axis=1)
        for name in ("scale", "offset"):
            _for_each(model, ids, f"PositionTarget.{name}", getattr(self, name))
        for place, actuator in enumerate(ids):
            name = model.actuator(actuator).name
            if int(model.actuator_trntype[actuator]) != _BY_JOINT:
                raise ConfigError(
                    f"PositionTarget: expected actuator {name!r} to drive a joint, got another transmission"
                )
            if gains is not None:
                _install_servo(model, actuator, *gains[place].tolist())
            elif int(model.actuator_biastype[actuator]) != _AFFINE_BIAS:
                raise ConfigError(
                    f"PositionTarget: expected actuator {name!r} to be a servo, got a motor; give kp and kd"
                )
            elif self.relative and model.actuator_gear[actuator, 0] != 1.0:
                raise ConfigError(
                    f"PositionTarget: expected gear 1 of actuator {name!r} with relative=True, got "
                    f"{model.actuator_gear[actuator, 0]:g}; give kp and kd"
                )
        return np.full(len(ids), -1.0), np.full(len(ids), 1.0)

    def apply(self, rows: Rows, actions: Tensor) -> None:
        """See :class:`ActionTerm`."""
        targets = _transform(actions, self.scale, self.offset)
        if self.relative:
            model = rows.model
            joints = model.actuator_trnid[_actuator_ids(model, self.actuators), 0]
            columns = constant(tuple(model.jnt_qposadr[joints].tolist()), torch.int64, actions.device)
            targets = targets + rows.get("qpos").index_select(1, columns)
        _write_controls(rows, self.actuators, targets)


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


def _transform(actions: Tensor, scale: PerActuator, offset: PerActuator) -> Tensor:
    if scale == 1.0 and offset == 0.0:
        return actions
    return actions * _factor(scale, actions.device) + _factor(offset, actions.device)


def _factor(numbers: PerActuator, device: torch.device) -> float | Tensor:
    return constant(numbers, torch.float64, device) if isinstance(numbers, tuple) else numbers


def _for_each(model: Model, ids: list[int], setting: str, numbers: PerActuator) -> NDArray[np.float64]:
    """Return a number for each actuator, float64 (k,)."""
    if isinstance(numbers, tuple) and len(numbers) != len(ids):
        names = ", ".join(model.actuator(actuator).name for actuator in ids)
        raise ConfigError(
            f"{setting}: expected one number, or {len(ids)}, one per actuator ({names}), got {len(numbers)}"
        )
    return np.broadcast_to(np.asarray(numbers, dtype=np.float64), (len(ids),))


def _write_controls(rows: Rows, names: tuple[str, ...] | None, values: Tensor) -> None:
    if names is None:
        rows.set("ctrl", values)
        return
    columns = constant(tuple(_actuator_ids(rows.model, names)), torch.int64, values.device)
    rows.set("ctrl", rows.get("ctrl").index_copy(1, columns, values))


def _check_numbers(term: str, **settings: PerActuator | None) -> None:
    for name, numbers in settings.items():
        each: tuple[object, ...] = numbers if isinstance(numbers, tuple) else (numbers,)
        is_number = all(isinstance(number, int | float) and math.isfinite(number) for number in each)
        if numbers is not None and not is_number:
            raise ConfigError(f"{term}.{name}: expected a number, or a tuple with one per actuator, got {numbers!r}")
        if name == "scale" and 0.0 in each:
            raise ConfigError(f"{term}.scale: expected numbers other than 0, got {numbers!r}")


_KINDS: dict[str, Kind] = {
    "body": "body",
    "geom": "geom",
    "jnt": "joint",
    "site": "site",
    "cam": "camera",
    "light": "light",
    "mat": "material",
    "actuator": "actuator",
}
_CHOSEN: dict[str, Kind] = {"geom_matid": "material", "mat_texid": "texture"}
"""Fields that hold numbers of named things."""


@dataclass(frozen=True, kw_only=True)
class Uniform:
    """Every value between ``low`` and ``high`` is as likely as any other."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ConfigError(f"Uniform: expected low ≤ high, got {self.low} and {self.high}")

    def __call__(self, unit: Tensor) -> Tensor:
        """Return uniform numbers in [0, 1) as draws."""
        return unit * (self.high - self.low) + self.low


@dataclass(frozen=True, kw_only=True)
class LogUniform:
    """Every ratio is as likely as any other: half as much comes up as often as twice as much."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0.0 < self.low <= self.high:
            raise ConfigError(f"LogUniform: expected 0 < low ≤ high, got {self.low} and {self.high}")

    def __call__(self, unit: Tensor) -> Tensor:
        """Return uniform numbers in [0, 1) as draws."""
        low = math.log(self.low)
        return torch.exp(unit * (math.log(self.high) - low) + low)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Each of some values is as likely as any other."""

    values: tuple[float | str, ...]
    """Numbers; for ``geom_matid`` names of materials, for ``mat_texid`` (column 1) of textures."""

    def __post_init__(self) -> None:
        if not self.values:
            raise ConfigError("Choice.values: expected at least one, got ()")

    def number(self, model: Model, field: str) -> Choice:
        """Return the same with numbers in place of names."""
        kind = _CHOSEN.get(field)
        if kind is None and any(isinstance(value, str) for value in self.values):
            raise ConfigError(f"Choice.values: expected numbers for {field!r}, got {self.values}")
        ids = [object_id(model, kind, name) if kind and isinstance(name, str) else name for name in self.values]
        return Choice(values=tuple(ids))

    def __call__(self, unit: Tensor) -> Tensor:
        """Return uniform numbers in [0, 1) as draws."""
        return constant(cast("tuple[float, ...]", self.values), torch.float64, unit.device)[
            (unit * len(self.values)).long()
        ]


Distribution: TypeAlias = Uniform | LogUniform | Choice


@dataclass(frozen=True, kw_only=True)
class Randomization:
    """Some model fields of some objects, new for each episode.

    One number is drawn per object and serves all ``fields``: ``fields=("body_mass", "body_inertia")`` with ``scale``
    makes a body heavier as a denser one would be.
    """

    fields: tuple[str, ...]
    """Names as in MjModel: ``geom_friction``, ``body_mass``, ``dof_damping``, ``opt.gravity``, …"""
    distribution: Distribution
    operation: Literal["scale", "add", "set"] = "scale"
    """What the drawn number does to the model's own value."""
    objects: tuple[str, ...] | None = None
    """Names of the bodies, geoms, … whose fields these are (joints for ``jnt_`` and ``dof_`` fields); None for all."""
    column: int | None = None
    """For fields with several numbers per object: only this one, for example 0 for the sliding friction."""
    curriculum: str | None = None
    """Name of a curriculum term: at level 0 nothing is changed, at level 1 the whole range is used."""

    def __post_init__(self) -> None:
        if not self.fields:
            raise ConfigError('Randomization.fields: expected at least one, for example ("body_mass",)')
        if self.operation not in ("scale", "add", "set"):
            raise ConfigError(f"Randomization.operation: expected scale, add or set, got {self.operation!r}")
        if self.objects is not None and not self.objects:
            raise ConfigError("Randomization.objects: expected names, or None for all, got ()")

    def apply(self, rows: Rows, stream: str, level: Tensor | None) -> None:
        """Write the rows' own model fields; at reset, when they are the model's.

        Args:
            rows: the episodes that begin.
            stream: where the numbers are drawn.
            level: float64 (n,) in [0, 1], or None for the whole range.
        """
        for field in self.fields:
            nominal = rows.get_model(field)
            # an option is one object, whose numbers (gravity has three) are columns
            values = nominal.reshape(len(rows), 1, -1) if field.startswith("opt.") else nominal
            chosen = _object_indices(rows.model, field, self.objects, values.shape[1])
            draws = self.distribution
            draws = draws.number(rows.model, field) if isinstance(draws, Choice) else draws
            drawn = draws(rows.uniform(stream, len(chosen)))
            new, part = values.clone(), values[:, chosen]
            if self.column is not None:
                part = part[..., self.column]
            drawn = drawn.reshape(*drawn.shape, *(1,) * (part.dim() - 2))
            changed = _OPERATIONS[self.operation](part, drawn)
            if level is not None:
                changed = part + level.reshape(-1, *(1,) * (part.dim() - 1)) * (changed - part)
            if self.column is None:
                new[:, chosen] = changed.to(new.dtype)
            else:
                new[:, chosen, self.column] = changed.to(new.dtype)
            rows.set_model(field, new.reshape(nominal.shape))


_OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "scale": lambda own, drawn: own * drawn,
    "add": lambda own, drawn: own + drawn,
    "set": lambda own, drawn: drawn.expand_as(own),
}


def _object_indices(model: Model, field: str, names: tuple[str, ...] | None, count: int) -> list[int]:
    """Return where the named objects are on the second axis of ``field``."""
    if names is None:
        return list(range(count))
    prefix = field.partition("_")[0]
    if prefix == "dof":
        return list(velocity_columns(model, names))
    if prefix not in _KINDS:
        raise ConfigError(
            f"Randomization of {field!r}: expected a field of {', '.join((*_KINDS, 'dof'))} where objects are named, "
            "got another; leave objects out"
        )
    return [object_id(model, _KINDS[prefix], name) for name in names]
