"""Cameras: what one is asked for, what it is given and what it gives.

A camera is a pure function of :class:`ScenePoses`, which a :class:`PoseReader` makes from joint positions: a few
numbers per row that can be kept and drawn later to the same bits.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigError, DtypeError, ShapeError, UnknownNameError
from headrace.sim._mujoco_api import Model, mujoco, new_batch, setconst_inputs

DataType: TypeAlias = Literal["rgb", "gray", "depth", "segmentation", "normals"]
FRAME_KINDS: dict[str, tuple[tuple[int, ...], Any]] = {
    "rgb": ((3,), np.uint8),
    "gray": ((), np.uint8),
    "depth": ((), np.float32),
    "segmentation": ((), np.int32),
    "normals": ((3,), np.float32),
}
"""Kind of image → axes after height and width, dtype."""
_MOST_PIXELS = 32766
_GROUPS = 6  # MuJoCo's mjNGROUP
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
_BODIES_PER_THREAD = 2048
"""About a millisecond of kinematics."""

F64: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CameraSpec:
    """A camera of the model and what to take with it."""

    name: str
    """Name of the camera in the MJCF."""
    width: int
    """Pixels."""
    height: int
    """Pixels."""
    data_types: tuple[DataType, ...] = ("rgb",)
    shadows: bool = False
    """Native renderer: shadows of directional lights that cast them. OpenGL draws them always."""
    specular: bool = False
    """Native renderer: highlights. OpenGL draws them always."""
    groups: tuple[int, ...] = (0, 1, 2)
    """Groups of geoms and sites that are shown, 0 to 5. Models keep shapes that only collide in one of their own."""

    def __post_init__(self) -> None:
        for side, pixels in (("width", self.width), ("height", self.height)):
            if not 1 <= pixels <= _MOST_PIXELS:
                raise ConfigError(
                    f"CameraSpec.{side}: expected at least 1 pixel and at most {_MOST_PIXELS}, got {pixels}"
                )
        if not self.groups or not set(self.groups) <= set(range(_GROUPS)):
            raise ConfigError(f"CameraSpec.groups: expected some of the numbers 0 to 5, got {self.groups}")
        if not self.data_types or len(set(self.data_types)) != len(self.data_types):
            raise ConfigError(
                f"CameraSpec.data_types: expected some of {tuple(FRAME_KINDS)}, once each, got {self.data_types}"
            )
        for kind in self.data_types:
            if kind not in FRAME_KINDS:
                raise UnknownNameError("image kind", kind, FRAME_KINDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class CameraFrames:
    """Pictures of n rows; what the camera was not asked for is None. The receiver owns the arrays."""

    rgb: NDArray[np.uint8] | None = None
    """(n, height, width, 3)."""
    gray: NDArray[np.uint8] | None = None
    """(n, height, width)."""
    depth: NDArray[np.float32] | None = None
    """(n, height, width): meters along the optical axis; the far plane where nothing is."""
    segmentation: NDArray[np.int32] | None = None
    """(n, height, width): geom ids, -1 where nothing is or a site."""
    normals: NDArray[np.float32] | None = None
    """(n, height, width, 3): unit normals of the surfaces in the world; zero where nothing is."""

    @classmethod
    def empty(cls, spec: CameraSpec, rows: int) -> CameraFrames:
        """Uninitialized memory for ``rows`` frames of a camera."""
        arrays: dict[str, Any] = {}
        for kind in spec.data_types:
            axes, dtype = FRAME_KINDS[kind]
            arrays[kind] = np.empty((rows, spec.height, spec.width, *axes), dtype)
        return cls(**arrays)

    def rows(self, index: slice) -> CameraFrames:
        """Some rows: views."""
        arrays: dict[str, Any] = {}
        for kind in FRAME_KINDS:
            array = getattr(self, kind)
            arrays[kind] = None if array is None else array[index]
        return CameraFrames(**arrays)


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
        for field in fields(self):
            name, array = field.name, getattr(self, field.name)
            if array is None:
                continue
            if array.dtype != np.float64:
                raise DtypeError(f"poses.{name}: expected float64, got {array.dtype}")
            if len(array) != len(self.state):
                raise ShapeError(f"poses.{name}: expected {len(self.state)} rows, as in state, got {len(array)}")

    def __len__(self) -> int:
        return len(self.state)

    def rows(self, index: NDArray[np.int64] | slice) -> ScenePoses:
        """Some rows: views for a slice, copies for an index array."""
        picked: dict[str, Any] = {}
        for field in fields(self):
            array = getattr(self, field.name)
            picked[field.name] = None if array is None else array[index]
        return ScenePoses(**picked)


class Camera(Protocol):
    """Something that draws rows of poses. A frame depends on its own row alone."""

    spec: CameraSpec

    def render(self, poses: ScenePoses, out: CameraFrames | None = None) -> CameraFrames:
        """Draw each row; into ``out`` where given (it is returned), else into fresh memory."""
        ...

    def close(self) -> None:
        """Release graphics resources. Rendering afterwards is an error."""
        ...


def frames_for(spec: CameraSpec, rows: int, out: CameraFrames | None) -> CameraFrames:
    """Check ``out`` against a camera, or make fresh memory."""
    if out is None:
        return CameraFrames.empty(spec, rows)
    shape = (rows, spec.height, spec.width)
    for name in spec.data_types:
        axes, dtype = FRAME_KINDS[name]
        size, array = (*shape, *axes), getattr(out, name)
        if array is None or array.shape != size:
            got = "nothing" if array is None else array.shape
            raise ShapeError(f"out.{name}: expected {size}, got {got}; use CameraFrames.empty(spec, rows)")
        if array.dtype != dtype:
            raise DtypeError(f"out.{name}: expected {np.dtype(dtype)}, got {array.dtype}")
        if not array.flags.c_contiguous:
            raise ShapeError(f"out.{name}: expected contiguous memory; pass a whole array or a slice of its rows")
    return out


def refuse_kinds(spec: CameraSpec, renderer: str, kinds: tuple[str, ...]) -> None:
    """A kind that a renderer has not is an error before anything starts."""
    for kind in spec.data_types:
        if kind in kinds:
            raise ConfigError(
                f"camera {spec.name!r}: the {renderer} renderer has no {kind} images; use the native renderer for them"
            )


def camera_id(model: Model, name: str) -> int:
    """The number of a named camera."""
    names = [model.camera(i).name for i in range(model.ncam)]
    if name not in names:
        raise UnknownNameError("camera", name, names)
    return names.index(name)


_DEFAULT_RGBA = np.array([0.5, 0.5, 0.5, 1], np.float32)


def base_colors(model: Model, kind: str = "geom") -> F64:
    """(geoms or sites of the model, 4): the color of each, its material's where it has none of its own."""
    raw: Any = model
    own, material = getattr(raw, f"{kind}_rgba"), getattr(raw, f"{kind}_matid")
    rgba = np.array(own, np.float64).reshape(-1, 4)
    for k in range(len(rgba)):
        if material[k] >= 0 and np.array_equal(own[k], _DEFAULT_RGBA):
            rgba[k] = raw.mat_rgba[material[k]]
    return rgba


def base_diffuse(model: Model) -> F64:
    """(1 + lights of the model, 3): the diffuse light of the headlight and of each light."""
    raw: Any = model
    return np.concatenate([raw.vis.headlight.diffuse[None], raw.light_diffuse.reshape(-1, 3)]).astype(np.float64)


def check_poses(whose: str, model: Model, poses: ScenePoses) -> None:
    """Poses must come from the model that they are used with; colors of their own are welcome."""
    raw: Any = model
    expected = (raw.nq + 7 * raw.nmocap, raw.ngeom, raw.nsite, raw.ncam, raw.nlight)
    places = poses.geom_pos.shape[1], poses.site_pos.shape[1], poses.camera_pos.shape[1], poses.light_pos.shape[1]
    got = (poses.state.shape[1], *places)
    if got != expected:
        raise ShapeError(
            f"{whose}: expected poses of the model that it was made for, with {expected} numbers of state, geoms, "
            f"sites, cameras and lights, got {got}; read them with a PoseReader of that model"
        )


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
        self._reserve(1)

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
        if n > self._capacity:
            self._reserve(n)
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
