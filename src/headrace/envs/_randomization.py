"""Domain randomization: model fields that differ between episodes, drawn from each episode's own stream."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from headrace.envs.task import Rows
from headrace.errors import ConfigError
from headrace.sim.mujoco_api import Kind, Model, object_id, velocity_columns

_KINDS: dict[str, Kind] = {
    "body": "body",
    "geom": "geom",
    "jnt": "joint",
    "site": "site",
    "cam": "camera",
    "actuator": "actuator",
}


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


Distribution: TypeAlias = Uniform | LogUniform


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
            drawn = self.distribution(rows.uniform(stream, len(chosen)))
            new, part = values.clone(), values[:, chosen]
            if self.column is not None:
                part = part[..., self.column]
            drawn = drawn.reshape(*drawn.shape, *(1,) * (part.dim() - 2))
            changed = _OPERATIONS[self.operation](part, drawn)
            if level is not None:
                changed = part + level.reshape(-1, *(1,) * (part.dim() - 1)) * (changed - part)
            if self.column is None:
                new[:, chosen] = changed
            else:
                new[:, chosen, self.column] = changed
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
