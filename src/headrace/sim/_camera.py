"""Cameras: what one is asked for, what a frame depends on, and what it gives.

A camera is a pure function of :class:`ScenePoses`: a few numbers per row that can be kept in a ring, copied, and drawn
later to the same bits. :class:`PoseReader` makes them from joint positions.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigError, DtypeError, LifecycleError, ShapeError, UnknownNameError
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


@dataclass(frozen=True, slots=True)
class PoseLayout:
    """Where each quantity sits in a row of packed poses."""

    state: int
    """Numbers of state: qpos, mocap positions, mocap quaternions."""
    geoms: int
    sites: int
    cameras: int
    lights: int
    randomized: bool = False
    """Whether rows carry colors and lights of their own."""
    sized: bool = False
    """Whether rows carry sizes of geoms of their own."""

    @property
    def model_sizes(self) -> tuple[int, ...]:
        """What must agree between poses and the model that they are drawn with."""
        return self.state, self.geoms, self.sites, self.cameras, self.lights

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return self.sections["end"].start

    @property
    def sections(self) -> dict[str, slice]:
        """Name of a quantity → its columns."""
        return _sections(self)


@functools.lru_cache(maxsize=64)
def _sections(layout: PoseLayout) -> dict[str, slice]:
    sizes = {
        "state": layout.state,
        # sites right after geoms: cameras show both alike
        "geom_pos": 3 * layout.geoms,
        "site_pos": 3 * layout.sites,
        "geom_mat": 9 * layout.geoms,
        "site_mat": 9 * layout.sites,
        "camera_pos": 3 * layout.cameras,
        "camera_mat": 9 * layout.cameras,
        "light_pos": 3 * layout.lights,
        "light_dir": 3 * layout.lights,
        "geom_rgba": 4 * layout.geoms if layout.randomized else 0,
        "light_diffuse": 3 * (1 + layout.lights) if layout.randomized else 0,
        "geom_size": 3 * layout.geoms if layout.sized else 0,
        "end": 0,
    }
    sections: dict[str, slice] = {}
    start = 0
    for name, size in sizes.items():
        sections[name] = slice(start, start + size)
        start += size
    return sections


@dataclass(frozen=True, slots=True)
class ScenePoses:
    """Everything that n frames depend on, packed: float64 (n, layout.width).

    Keep ``packed`` in a ring and build ``ScenePoses(rows, layout)`` from it later: the same frames come out, to the
    last bit. The properties are views of it.
    """

    packed: F64
    layout: PoseLayout

    def __post_init__(self) -> None:
        if self.packed.dtype != np.float64:
            raise DtypeError(f"poses: expected float64, got {self.packed.dtype}")
        if self.packed.ndim != 2 or self.packed.shape[1] != self.layout.width:
            raise ShapeError(f"poses: expected (rows, {self.layout.width}), got {self.packed.shape}")

    def __len__(self) -> int:
        return self.packed.shape[0]

    def rows(self, index: NDArray[np.int64] | slice) -> ScenePoses:
        """Some rows: a view for a slice, a copy for an index array."""
        return ScenePoses(self.packed[index], self.layout)

    def _part(self, name: str, *shape: int) -> F64:
        return self.packed[:, self.layout.sections[name]].reshape(len(self), *shape)

    @property
    def state(self) -> F64:
        """(n, S): qpos, mocap positions, mocap quaternions."""
        return self._part("state", self.layout.state)

    @property
    def geom_pos(self) -> F64:
        """(n, geoms, 3), world."""
        return self._part("geom_pos", self.layout.geoms, 3)

    @property
    def geom_mat(self) -> F64:
        """(n, geoms, 9), world."""
        return self._part("geom_mat", self.layout.geoms, 9)

    @property
    def shown_pos(self) -> F64:
        """(n, geoms + sites, 3), world."""
        sections = self.layout.sections
        both = slice(sections["geom_pos"].start, sections["site_pos"].stop)
        return self.packed[:, both].reshape(len(self), -1, 3)

    @property
    def shown_mat(self) -> F64:
        """(n, geoms + sites, 9), world."""
        sections = self.layout.sections
        both = slice(sections["geom_mat"].start, sections["site_mat"].stop)
        return self.packed[:, both].reshape(len(self), -1, 9)

    @property
    def geom_size(self) -> F64 | None:
        """(n, geoms, 3), or None where the model's sizes hold."""
        return self._part("geom_size", self.layout.geoms, 3) if self.layout.sized else None

    @property
    def camera_pos(self) -> F64:
        """(n, cameras, 3), world."""
        return self._part("camera_pos", self.layout.cameras, 3)

    @property
    def camera_mat(self) -> F64:
        """(n, cameras, 9), world: columns are right, up and backward."""
        return self._part("camera_mat", self.layout.cameras, 9)

    @property
    def light_pos(self) -> F64:
        """(n, lights, 3), world."""
        return self._part("light_pos", self.layout.lights, 3)

    @property
    def light_dir(self) -> F64:
        """(n, lights, 3), world: the direction in which each light shines."""
        return self._part("light_dir", self.layout.lights, 3)

    @property
    def geom_rgba(self) -> F64 | None:
        """(n, geoms, 4), or None where the model's colors hold."""
        return self._part("geom_rgba", self.layout.geoms, 4) if self.layout.randomized else None

    @property
    def light_diffuse(self) -> F64 | None:
        """(n, 1 + lights, 3), the headlight first; or None where the model's lights hold."""
        return self._part("light_diffuse", 1 + self.layout.lights, 3) if self.layout.randomized else None


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
        shape = (rows, spec.height, spec.width)
        arrays: dict[str, Any] = {}
        for kind in spec.data_types:
            axes, dtype = FRAME_KINDS[kind]
            arrays[kind] = np.empty((*shape, *axes), dtype)
        return cls(**arrays)


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


def pose_layout(model: Model, *, randomized: bool = False) -> PoseLayout:
    """The layout of a model's poses."""
    raw: Any = model
    return PoseLayout(
        state=raw.nq + 7 * raw.nmocap,
        geoms=raw.ngeom,
        sites=raw.nsite,
        cameras=raw.ncam,
        lights=raw.nlight,
        randomized=randomized,
    )


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
"""Part of a row → field of MjData."""

_KINEMATIC = (
    *("body_pos", "body_quat", "body_ipos", "body_iquat", "jnt_pos", "jnt_axis", "qpos0", "geom_pos", "geom_quat"),
    *("site_pos", "site_quat", "cam_pos", "cam_quat", "light_pos", "light_dir"),
)
"""Model fields that say where things are."""
PICTURE_FIELDS = (*_KINEMATIC, "geom_size", "geom_rgba", "light_diffuse")
"""Model fields whose values per row poses can carry."""

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
        self.layout = pose_layout(model)
        self._threads = threads
        # where things are does not depend on contacts, forces or sensors: leave them out
        bits = mujoco.mjtDisableBit
        self._kinematic: Any = copy.copy(model)
        for bit in (bits.mjDSBL_CONSTRAINT, bits.mjDSBL_CONTACT, bits.mjDSBL_ACTUATION, bits.mjDSBL_SENSOR):
            self._kinematic.opt.disableflags |= int(bit)
        self._capacity = 0

    def _reserve(self, rows: int) -> None:
        if rows <= self._capacity:
            return
        # few bodies are placed sooner than a second thread wakes up, while the camera's threads still hold the cores
        threads = min(self._threads, 1 + rows * self._kinematic.nbody // _BODIES_PER_THREAD)
        self._batch = new_batch(self._kinematic, rows, threads)
        self._capacity = rows
        self._expanded: dict[str, Any] = {}
        self._state = [self._batch.bind(name) for name in ("qpos", "mocap_pos", "mocap_quat")]
        self._derived = [
            (self.layout.sections[part], self._batch.bind(name))
            for part, name in _DERIVED.items()
            if self.layout.sections[part].start < self.layout.sections[part].stop
        ]

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
        n, given_fields = qpos.shape[0], dict(fields or {})
        for name in given_fields:
            if name not in PICTURE_FIELDS:
                raise UnknownNameError("model field of a picture", name, PICTURE_FIELDS)
        layout = replace(
            self.layout,
            randomized="geom_rgba" in given_fields or "light_diffuse" in given_fields,
            sized="geom_size" in given_fields,
        )
        self._reserve(n)
        packed = np.empty((n, layout.width))
        if n == 0:
            return ScenePoses(packed, layout)
        self._place_fields(n, given_fields)
        at = 0
        given = (qpos, mocap_pos, mocap_quat)
        nominal = (None, self._nominal("pos"), self._nominal("quat"))
        for target, value, default in zip(self._state, given, nominal, strict=True):
            if target.size == 0:
                continue
            target[:n] = default if value is None else value
            width = target[0].size
            packed[:, at : at + width] = target[:n].reshape(n, width)
            at += width
        self._batch.forward(np.arange(n, dtype=np.int32), stage=int(mujoco.mjtStage.mjSTAGE_POS))
        for section, field in self._derived:
            packed[:, section] = field[:n].reshape(n, -1)
        sections = layout.sections
        if layout.sized:
            packed[:, sections["geom_size"]] = given_fields["geom_size"].reshape(n, -1)
        if layout.randomized:
            rgba, diffuse = base_colors(self.model), base_diffuse(self.model)
            if "geom_rgba" in given_fields:
                own = np.asarray(given_fields["geom_rgba"], np.float64)
                # a geom whose color is still the model's keeps its material's
                rgba = np.where(
                    (own == np.asarray(self._kinematic.geom_rgba, np.float64)).all(-1, keepdims=True), rgba, own
                )
            packed[:, sections["geom_rgba"]] = np.broadcast_to(rgba, (n, *rgba.shape[-2:])).reshape(n, -1)
            packed[:, sections["light_diffuse"]] = diffuse.reshape(1, -1)
            if "light_diffuse" in given_fields:
                packed[:, sections["light_diffuse"].start + 3 : sections["light_diffuse"].stop] = given_fields[
                    "light_diffuse"
                ].reshape(n, -1)
        return ScenePoses(packed, layout)

    def _place_fields(self, n: int, given: dict[str, F64]) -> None:
        """Write the model fields that say where things are; those of an earlier call that are not given are nominal."""
        names = [name for name in _KINEMATIC if name in given or name in self._expanded]
        for name in names:
            if name not in self._expanded:
                self._expanded[name] = self._batch.expand(name)
            target = self._expanded[name]
            target[:n] = given[name].reshape(target[:n].shape) if name in given else getattr(self._kinematic, name)
        if setconst_inputs().intersection(names):
            self._batch.set_const(np.arange(n, dtype=np.int32))

    def _nominal(self, kind: Literal["pos", "quat"]) -> F64:
        values = self._kinematic.body_pos if kind == "pos" else self._kinematic.body_quat
        return values[self._kinematic.body_mocapid >= 0]


def require_layout(camera: CameraSpec, layout: PoseLayout, poses: ScenePoses) -> None:
    """Poses must come from the camera's model; colors of their own are welcome."""
    got = poses.layout
    if got.model_sizes != layout.model_sizes:
        raise LifecycleError(
            f"camera {camera.name!r}: poses have {got.geoms} geoms, {got.sites} sites, {got.cameras} cameras and "
            f"{got.lights} lights, its model has {layout.geoms}, {layout.sites}, {layout.cameras} and {layout.lights}; "
            "read them with a PoseReader of that model"
        )
