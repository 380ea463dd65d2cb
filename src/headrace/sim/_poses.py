"""Where everything is that a camera shows: poses from joint positions, and from rows that were kept of a simulation.

:class:`ScenePoses` are all that a frame depends on. :class:`PoseReader` makes them from joint positions, and
:class:`SceneState` from rows of numbers, taken from a simulation, that can be kept in a ring and drawn later.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.errors import ConfigError, DtypeError, ShapeError, UnknownNameError
from headrace.sim._camera import F64, base_colors, base_diffuse
from headrace.sim._mujoco_api import Model, mujoco, new_batch, setconst_inputs
from headrace.sim._simulation import Simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenePoses:
    """Everything that n frames depend on: float64 (n, …), in the world's coordinates."""

    state: F64
    """(n, S): qpos, mocap positions, mocap quaternions."""
    geom_pos: F64
    """(n, geoms, 3)."""
    geom_mat: F64
    """(n, geoms, 9)."""
    site_pos: F64
    """(n, sites, 3)."""
    site_mat: F64
    """(n, sites, 9)."""
    camera_pos: F64
    """(n, cameras, 3)."""
    camera_mat: F64
    """(n, cameras, 9): columns are right, up and backward."""
    light_pos: F64
    """(n, lights, 3)."""
    light_dir: F64
    """(n, lights, 3): the direction in which each light shines."""
    geom_size: F64 | None = None
    """(n, geoms, 3); None where the model's sizes hold."""
    geom_rgba: F64 | None = None
    """(n, geoms, 4); None where the model's colors and lights hold."""
    light_diffuse: F64 | None = None
    """(n, 1 + lights, 3), the headlight first; given with ``geom_rgba``."""

    def __post_init__(self) -> None:
        for name, array in self._given().items():
            if array.dtype != np.float64:
                raise DtypeError(f"poses.{name}: expected float64, got {array.dtype}")
            if len(array) != len(self.state):
                raise ShapeError(f"poses.{name}: expected {len(self.state)} rows, as in state, got {len(array)}")

    def __len__(self) -> int:
        return len(self.state)

    def rows(self, index: NDArray[np.int64] | slice) -> ScenePoses:
        """Some rows: views for a slice, copies for an index array."""
        return ScenePoses(**{name: array[index] for name, array in self._given().items()})

    def _given(self) -> dict[str, F64]:
        arrays: dict[str, F64 | None] = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: array for name, array in arrays.items() if array is not None}


_DERIVED = {
    "geom_pos": "geom_xpos",
    "geom_mat": "geom_xmat",
    "site_pos": "site_xpos",
    "site_mat": "site_xmat",
    "camera_pos": "cam_xpos",
    "camera_mat": "cam_xmat",
    "light_pos": "light_xpos",
    "light_dir": "light_xdir",
}
"""Part of poses → field of MjData."""
_STATE = ("qpos", "mocap_pos", "mocap_quat")
_KINEMATIC = (
    *("body_pos", "body_quat", "body_ipos", "body_iquat", "jnt_pos", "jnt_axis", "qpos0", "geom_pos", "geom_quat"),
    *("site_pos", "site_quat", "cam_pos", "cam_quat", "light_pos", "light_dir"),
)
"""Model fields that say where things are."""
PICTURE_FIELDS = (*_KINEMATIC, "geom_size", "geom_rgba", "light_diffuse")
"""Model fields whose values per row poses can carry."""
_SEEN = ("geom_", "site_", "cam_", "light_", "mat_", "tex_", "mesh_", "hfield_", "skin_", "vis.", "stat.")
"""Model fields that begin so may change a picture."""
_UNSEEN = (
    *("geom_friction", "geom_margin", "geom_gap", "geom_solref", "geom_solimp", "geom_solmix", "geom_contype"),
    *("geom_conaffinity", "geom_condim", "geom_priority", "geom_fluid", "geom_user", "geom_rbound", "geom_aabb"),
    *("site_user", "cam_user"),
)
"""Those of them that do not."""

_BODIES_PER_THREAD = 2048
"""About a millisecond of kinematics."""


class PoseReader:
    """Turns joint positions into :class:`ScenePoses`, for any number of rows.

    Runs MuJoCo's kinematics on rows of its own, so the physics that the positions came from is not touched. Model
    fields that differ between rows (a body moved by randomization) are given by name.
    """

    def __init__(self, model: Model, *, threads: int = 1) -> None:
        if threads < 1:
            raise ConfigError(f"threads: expected at least 1, got {threads}")
        self.model = model
        self._threads = threads
        # where things are does not depend on contacts, forces or sensors: leave them out
        bits = mujoco.mjtDisableBit
        self._kinematic: Any = copy.copy(model)
        for bit in (bits.mjDSBL_CONSTRAINT, bits.mjDSBL_CONTACT, bits.mjDSBL_ACTUATION, bits.mjDSBL_SENSOR):
            self._kinematic.opt.disableflags |= int(bit)
        self._positions_only = int(mujoco.mjtStage.mjSTAGE_POS)
        is_mocap = self._kinematic.body_mocapid >= 0
        self._mocap = self._kinematic.body_pos[is_mocap], self._kinematic.body_quat[is_mocap]
        self._capacity = 0

    def read(
        self,
        qpos: F64,
        mocap_pos: F64 | None = None,
        mocap_quat: F64 | None = None,
        *,
        fields: Mapping[str, F64] | None = None,
    ) -> ScenePoses:
        """Poses of n rows, fresh memory.

        Args:
            qpos: float64 (n, nq).
            mocap_pos: float64 (n, nmocap, 3); the model's where None.
            mocap_quat: float64 (n, nmocap, 4); the model's where None.
            fields: model fields of ``PICTURE_FIELDS`` that differ between rows, float64 (n, …).
        """
        if qpos.ndim != 2 or qpos.shape[1] != self.model.nq:
            raise ShapeError(f"qpos: expected (rows, {self.model.nq}), got {qpos.shape}")
        n, fields = len(qpos), fields or {}
        for name in fields:
            if name not in PICTURE_FIELDS:
                raise UnknownNameError("model field of a picture", name, PICTURE_FIELDS)
        self._reserve(max(n, 1))
        places, turns = self._mocap
        given = (qpos, places if mocap_pos is None else mocap_pos, turns if mocap_quat is None else mocap_quat)
        for target, values in zip(self._state, given, strict=True):
            target[:n] = values
        if n:
            if fields or self._expanded:
                self._place_fields(n, fields)
            self._batch.forward(np.arange(n, dtype=np.int32), stage=self._positions_only)
        parts: dict[str, F64] = {name: field[:n].copy() for name, field in self._derived.items()}
        if "geom_size" in fields:
            parts["geom_size"] = np.array(fields["geom_size"], np.float64)
        if "geom_rgba" in fields or "light_diffuse" in fields:
            parts["geom_rgba"], parts["light_diffuse"] = self._looks(n, fields)
        state = np.concatenate([target[:n].reshape(n, math.prod(target.shape[1:])) for target in self._state], axis=1)
        return ScenePoses(state=state, **parts)

    def _reserve(self, rows: int) -> None:
        if rows <= self._capacity:
            return
        # few bodies are placed sooner than a second thread wakes up, while the camera's threads still hold the cores
        threads = min(self._threads, 1 + rows * self._kinematic.nbody // _BODIES_PER_THREAD)
        self._batch = new_batch(self._kinematic, rows, threads)
        self._capacity = rows
        self._expanded: dict[str, Any] = {}
        self._state = [self._batch.bind(name) for name in _STATE]
        self._derived = {part: self._batch.bind(name) for part, name in _DERIVED.items()}

    def _place_fields(self, n: int, given: Mapping[str, F64]) -> None:
        """Write the model fields that say where things are; those of an earlier call that are not given are nominal."""
        names = [name for name in _KINEMATIC if name in given or name in self._expanded]
        for name in names:
            if name not in self._expanded:
                self._expanded[name] = self._batch.expand(name)
            target = self._expanded[name]
            target[:n] = given[name].reshape(target[:n].shape) if name in given else getattr(self._kinematic, name)
        if setconst_inputs().intersection(names):
            self._batch.set_const(np.arange(n, dtype=np.int32))

    def _looks(self, n: int, given: Mapping[str, F64]) -> tuple[F64, F64]:
        """Colors (n, geoms, 4) and lights (n, 1 + lights, 3), the model's where they are not given."""
        rgba = np.repeat(base_colors(self.model)[None], n, 0)
        diffuse = np.repeat(base_diffuse(self.model)[None], n, 0)
        if "geom_rgba" in given:
            own = np.asarray(given["geom_rgba"], np.float64)
            # a geom whose color is still the model's keeps its material's
            nominal = (own == np.asarray(self._kinematic.geom_rgba, np.float64)).all(-1, keepdims=True)
            rgba = np.where(nominal, rgba, own)
        if "light_diffuse" in given:
            diffuse[:, 1:] = given["light_diffuse"]
        return rgba, diffuse


class SceneState:
    """Reads rows from a simulation: qpos, mocap poses, and the model fields that have a value per environment.

    A model field that changes what is seen and that cameras cannot draw per environment is an error, never a picture of
    the nominal model.
    """

    def __init__(self, sim: Simulation, *, threads: int = 1) -> None:
        self._sim = sim
        self._reader = PoseReader(sim.model, threads=threads)
        model: Any = sim.model
        self._positions = {"qpos": (model.nq,), "mocap_pos": (model.nmocap, 3), "mocap_quat": (model.nmocap, 4)}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.columns: dict[str, slice] = {}
        """Name of a quantity → its columns in a row."""
        self.width = 0
        """Numbers in a row."""
        self.refresh()

    def refresh(self) -> bool:
        """Notice model fields that got a value per environment; whether there are new ones."""
        expanded = self._sim.expanded
        for name in expanded:
            if name.startswith(_SEEN) and not name.startswith(_UNSEEN) and name not in PICTURE_FIELDS:
                raise ConfigError(
                    f"camera: {name!r} differs between environments, and pictures cannot show that; randomize one of "
                    f"{', '.join(PICTURE_FIELDS)}, or the looks of the camera"
                )
        shapes = self._positions | {
            name: np.shape(getattr(self._sim.model, name)) for name in PICTURE_FIELDS if name in expanded
        }
        if shapes == self._shapes:
            return False
        self._shapes, self.columns, self.width = shapes, {}, 0
        for name, shape in shapes.items():
            self.columns[name] = slice(self.width, self.width + math.prod(shape))
            self.width = self.columns[name].stop
        return True

    @property
    def has_fields(self) -> bool:
        """Whether rows hold more than positions."""
        return len(self._shapes) > len(self._positions)

    def take(self, ids: Tensor | None) -> Tensor:
        """Rows of the environments ``ids`` (n,), or of all: float64 (n, width), fresh, where the simulation is."""
        sim = self._sim
        rows = sim.num_envs if ids is None else len(ids)
        parts: list[Tensor] = [torch.empty((rows, 0), dtype=torch.float64, device=sim.device)]
        for name, shape in self._shapes.items():
            if math.prod(shape):
                part = sim.field(name) if name in self._positions else sim.expanded[name]
                parts.append((part if ids is None else part.index_select(0, ids)).flatten(1))
        if sim.device.type == "cpu":
            return torch.from_numpy(np.concatenate([part.numpy() for part in parts], axis=1, dtype=np.float64))
        return torch.cat([part.to(torch.float64) for part in parts], dim=1)

    def widen(self, rows: F64, before: Mapping[str, slice]) -> F64:
        """Rows (…, width) that were taken when the columns were ``before``: what was not there yet was nominal."""
        wide = np.empty((*rows.shape[:-1], self.width))
        for name, columns in self.columns.items():
            known = name in before
            wide[..., columns] = rows[..., before[name]] if known else np.ravel(getattr(self._sim.model, name))
        return wide

    def positions(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Joint positions (n, nq), mocap positions (n, m, 3) and quaternions (n, m, 4) of rows (n, width): views."""
        qpos, places, turns = (rows[:, self.columns[name]] for name in _STATE)
        return qpos, places.unflatten(1, self._shapes["mocap_pos"]), turns.unflatten(1, self._shapes["mocap_quat"])

    def poses(self, rows: F64) -> ScenePoses:
        """The poses of rows (n, width)."""
        parts = {name: rows[:, self.columns[name]].reshape(len(rows), *shape) for name, shape in self._shapes.items()}
        qpos, places, turns = parts.pop("qpos"), parts.pop("mocap_pos"), parts.pop("mocap_quat")
        return self._reader.read(qpos, places, turns, fields=parts)
