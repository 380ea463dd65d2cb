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
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.errors import ConfigError, DtypeError, ShapeError, UnknownNameError
from headrace.sim.mujoco_api import Model, mujoco, new_batch, setconst_inputs
from headrace.sim.mujoco_sim import Simulation

DataType: TypeAlias = Literal["rgb", "gray", "depth", "segmentation", "normals"]
FRAME_KINDS: dict[str, tuple[tuple[int, ...], Any]] = {
    "rgb": ((3,), np.uint8),
    "gray": ((), np.uint8),
    "depth": ((), np.float32),
    "segmentation": ((), np.int32),
    "normals": ((3,), np.float32),
}
"""Kind of image → axes after height and width, dtype."""
FREE = "free"
"""Name of the camera that no model needs to have."""
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
ROW_LOOKS = (
    *("cam_fovy", "cam_intrinsic", "light_ambient", "light_specular", "light_attenuation", "light_cutoff"),
    *("light_exponent", "mat_rgba", "mat_emission", "mat_specular", "mat_shininess", "mat_texrepeat", "mat_texid"),
    "geom_matid",
)
"""Model fields of lenses, lights and materials."""
PICTURE_FIELDS = (*_KINEMATIC, "geom_size", "geom_rgba", "light_diffuse", *ROW_LOOKS)
"""Model fields whose values per row poses can carry."""
_EYES = ("cam_pos", "cam_quat", "cam_mode", "light_pos", "light_dir", "light_mode")
LOOKS = (
    *(*_EYES, "cam_fovy", "cam_intrinsic", "cam_sensorsize", "cam_projection", "light_type", "light_active"),
    *("light_castshadow", "light_attenuation", "light_cutoff", "light_exponent", "light_ambient", "light_diffuse"),
    *("light_specular", "geom_rgba", "geom_matid", "geom_group", "site_rgba", "site_matid", "site_group", "mat_texid"),
    *(
        "mat_texuniform",
        "mat_texrepeat",
        "mat_emission",
        "mat_specular",
        "mat_shininess",
        "mat_reflectance",
        "mat_rgba",
    ),
)
"""Model fields that change pictures and nothing else: a write to one shows in the next picture."""
_BODIES_PER_THREAD = 2048
"""About a millisecond of kinematics."""

SOFT_FIELDS = (
    *("xpos", "xquat", "xmat", "site_xpos", "site_xmat", "wrap_xpos", "wrap_obj", "ten_wrapadr", "ten_wrapnum"),
    *("ten_length", "flexvert_xpos"),
)
"""Fields of MjData that tendons, skins and flexes follow from."""
_SEEN = ("geom_", "site_", "cam_", "light_", "mat_", "tex_", "mesh_", "hfield_", "skin_", "flex_", "vis.", "stat.")
"""Model fields that begin so may change a picture."""
_UNSEEN = (
    *("geom_friction", "geom_margin", "geom_gap", "geom_solref", "geom_solimp", "geom_solmix", "geom_contype"),
    *("geom_conaffinity", "geom_condim", "geom_priority", "geom_fluid", "geom_user", "geom_rbound", "geom_aabb"),
    *("site_user", "cam_user"),
)
"""Those of them that do not."""

F64: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CameraSpec:
    """A camera of the model and what to take with it."""

    name: str
    """Name of the camera in the MJCF, or ``free``: one that sees the whole model, as MuJoCo's own viewer begins."""
    width: int
    """Pixels."""
    height: int
    """Pixels."""
    data_types: tuple[DataType, ...] = ("rgb",)
    shadows: bool = False
    """Native renderer: shadows of directional lights that cast them. OpenGL draws them always."""
    specular: bool = False
    """Native renderer: highlights. OpenGL draws them always."""
    missing: Literal["raise", "skip"] = "raise"
    """Native renderer: whether what it cannot draw (rays of rangefinders) is an error, or is left out."""
    reflections: bool = False
    """Native renderer: what the first plane or box with ``reflectance`` mirrors. OpenGL draws it always."""
    groups: tuple[int, ...] = (0, 1, 2)
    """Groups of geoms that are shown, 0 to 5. Models keep shapes that only collide in one of their own."""
    site_groups: tuple[int, ...] | None = None
    """Groups of sites that are shown, 0 to 5, () for none; None for those of ``groups``."""

    def __post_init__(self) -> None:
        for side, pixels in (("width", self.width), ("height", self.height)):
            if not 1 <= pixels <= _MOST_PIXELS:
                raise ConfigError(
                    f"CameraSpec.{side}: expected at least 1 pixel and at most {_MOST_PIXELS}, got {pixels}"
                )
        if not self.groups or not set(self.groups) <= set(range(_GROUPS)):
            raise ConfigError(f"CameraSpec.groups: expected some of the numbers 0 to 5, got {self.groups}")
        if not set(self.shown_sites) <= set(range(_GROUPS)):
            raise ConfigError(f"CameraSpec.site_groups: expected numbers from 0 to 5, got {self.site_groups}")
        if not self.data_types or len(set(self.data_types)) != len(self.data_types):
            raise ConfigError(
                f"CameraSpec.data_types: expected some of {tuple(FRAME_KINDS)}, once each, got {self.data_types}"
            )
        if self.missing not in ("raise", "skip"):
            raise ConfigError(f"CameraSpec.missing: expected 'raise' or 'skip', got {self.missing!r}")
        for kind in self.data_types:
            if kind not in FRAME_KINDS:
                raise UnknownNameError("image kind", kind, FRAME_KINDS)

    @property
    def shown_sites(self) -> tuple[int, ...]:
        """Groups of sites that are shown."""
        return self.groups if self.site_groups is None else self.site_groups


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
        """Return some rows: views."""
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
    looks: Mapping[str, NDArray[Any]] | None = None
    """Model fields of ``ROW_LOOKS``, (n, …), that differ between rows; None where the model's hold."""
    soft: Mapping[str, NDArray[Any]] | None = None
    """Fields of MjData, (n, …), that tendons, skins and flexes follow from; None for models without any."""

    def __post_init__(self) -> None:
        for field in fields(self):
            name, array = field.name, getattr(self, field.name)
            if array is None or name in ("soft", "looks"):
                continue
            if array.dtype != np.float64:
                raise DtypeError(f"poses.{name}: expected float64, got {array.dtype}")
            if len(array) != len(self.state):
                raise ShapeError(f"poses.{name}: expected {len(self.state)} rows, as in state, got {len(array)}")

    def __len__(self) -> int:
        return len(self.state)

    def rows(self, index: NDArray[np.int64] | slice) -> ScenePoses:
        """Return some rows: views for a slice, copies for an index array."""
        picked: dict[str, Any] = {}
        for field in fields(self):
            array = getattr(self, field.name)
            if field.name in ("soft", "looks") and array is not None:
                picked[field.name] = {name: values[index] for name, values in array.items()}
            else:
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
    """Refuse a kind that a renderer does not have, before anything starts."""
    for kind in spec.data_types:
        if kind in kinds:
            raise ConfigError(
                f"camera {spec.name!r}: the {renderer} renderer has no {kind} images; use the native renderer for them"
            )


def camera_id(model: Model, name: str) -> int:
    """Return the number of a named camera; -1 for the free one."""
    names = camera_names(model)
    if name not in names:
        raise UnknownNameError("camera", name, names)
    return names.index(name) if name != FREE or model.ncam == len(names) else -1


def camera_names(model: Model) -> list[str]:
    """Return the names of a model's cameras, and of the free one, last, where none of them is called so."""
    names = [str(model.camera(i).name) for i in range(model.ncam)]
    return names if FREE in names else [*names, FREE]


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeView:
    """Where the free camera is, in MuJoCo's terms."""

    lookat: tuple[float, float, float]
    """The point in the middle of the picture, in the world."""
    distance: float
    """Meters to it."""
    azimuth: float
    """Degrees around the vertical."""
    elevation: float
    """Degrees above the horizontal; negative looks down."""

    @classmethod
    def around(cls, model: Model) -> FreeView:
        """Return the view that MuJoCo's own viewer begins with."""
        x, y, z = map(float, model.stat.center)
        visual = model.vis.global_
        angles = {"azimuth": float(visual.azimuth), "elevation": float(visual.elevation)}
        return cls(lookat=(x, y, z), distance=1.5 * float(model.stat.extent), **angles)

    def pose(self) -> tuple[F64, F64]:
        """Return position (3,) and orientation (9,), as in :class:`ScenePoses`."""
        turn, rise = math.radians(self.azimuth), math.radians(self.elevation)
        forward = np.array([math.cos(rise) * math.cos(turn), math.cos(rise) * math.sin(turn), math.sin(rise)])
        up = np.array([-math.sin(rise) * math.cos(turn), -math.sin(rise) * math.sin(turn), math.cos(rise)])
        axes = np.stack([np.cross(forward, up), up, -forward], axis=1)
        return np.array(self.lookat) - self.distance * forward, axes.reshape(9)

    def aim(self, camera: Any) -> None:
        """Set an ``MjvCamera`` to this view."""
        camera.type = mujoco.mjtCamera.mjCAMERA_FREE
        camera.lookat[:] = self.lookat
        camera.distance, camera.azimuth, camera.elevation = self.distance, self.azimuth, self.elevation


def new_view(model: Model, number: int) -> Any:
    """Return the ``MjvCamera`` of a camera by its number; -1 for the free one."""
    view = mujoco.MjvCamera()
    if number < 0:
        FreeView.around(model).aim(view)
    else:
        view.type = mujoco.mjtCamera.mjCAMERA_FIXED
        view.fixedcamid = number
    return view


def has_soft_parts(model: Model) -> bool:
    """Return whether a model shows more than geoms and sites: tendons, skins, flexes or slider-cranks."""
    cranks = model.actuator_trntype == int(mujoco.mjtTrn.mjTRN_SLIDERCRANK)
    return bool(model.nskin or model.nflex or model.nwrap or cranks.any())


class ModelWatch:
    """Notices writes to what a model looks like: colors, materials, groups, cameras, lights and visual settings.

    Physics keeps its own copy of the model, so what has a physical meaning (places and sizes of bodies and geoms) is
    not followed: a picture shows what is simulated.
    """

    def __init__(self, model: Model) -> None:
        self._arrays = [getattr(model, name) for name in LOOKS]
        self._vis, self._stat = model.vis, model.stat
        head, colors = model.vis.headlight, model.vis.rgba
        self._arrays += [head.ambient, head.diffuse, head.specular, colors.haze]
        self._seen = self._read()

    def changed(self) -> bool:
        """Return whether something was written since the last call, or since this was made."""
        now = self._read()
        if now == self._seen:
            return False
        self._seen = now
        return True

    def _read(self) -> tuple[Any, ...]:
        vis = self._vis
        numbers = (vis.map.znear, vis.map.zfar, vis.map.haze, vis.map.shadowclip, vis.headlight.active)
        return (*numbers, self._stat.extent, *[array.tobytes() for array in self._arrays])


DEFAULT_RGBA = np.array([0.5, 0.5, 0.5, 1], np.float32)


def base_colors(model: Model, kind: str = "geom", fields: Mapping[str, NDArray[Any]] | None = None) -> F64:
    """(rows, geoms or sites of the model, 4): the color of each, its material's where it has none of its own.

    One row, or as many as ``fields`` have: model fields (n, …) in place of the model's own.
    """
    names = (f"{kind}_rgba", f"{kind}_matid", "mat_rgba")
    own: dict[str, NDArray[Any]] = {name: getattr(model, name)[None] for name in names}
    given = [{**own, **(fields or {})}[name] for name in names]
    rows = np.arange(max(len(part) for part in given))
    rgba, material, colors = (np.broadcast_to(part, (len(rows), *part.shape[1:])) for part in given)
    if not colors.shape[1]:
        return np.array(rgba, np.float64)
    plain = (material >= 0) & (rgba.astype(np.float32) == DEFAULT_RGBA).all(-1)
    worn = colors[rows[:, None], np.maximum(material, 0).astype(np.int64)]
    return np.where(plain[..., None], worn, rgba).astype(np.float64)


def base_diffuse(model: Model) -> F64:
    """(1 + lights of the model, 3): the diffuse light of the headlight and of each light."""
    return np.concatenate([model.vis.headlight.diffuse[None], model.light_diffuse.reshape(-1, 3)]).astype(np.float64)


def check_poses(whose: str, model: Model, poses: ScenePoses) -> None:
    """Poses must come from the model that they are used with; colors of their own are welcome."""
    expected = (model.nq + 7 * model.nmocap, model.ngeom, model.nsite, model.ncam, model.nlight)
    places = poses.geom_pos.shape[1], poses.site_pos.shape[1], poses.camera_pos.shape[1], poses.light_pos.shape[1]
    got = (poses.state.shape[1], *places)
    if got != expected:
        raise ShapeError(
            f"{whose}: expected poses of the model that it was made for, with {expected} numbers of state, geoms, "
            f"sites, cameras and lights, got {got}; read them with a PoseReader of that model"
        )
    if poses.soft is None and has_soft_parts(model):
        raise ShapeError(f"{whose}: the model has tendons, skins or flexes, and poses.soft is None; use a PoseReader")


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
        self._watch = ModelWatch(model)
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
        moved = self._watch.changed()
        if moved:
            for name in _EYES:
                getattr(self._kinematic, name)[:] = getattr(self.model, name)
        if moved or n > self._capacity:
            self._reserve(max(n, self._capacity))
        places, turns = self._mocap
        given = (qpos, places if mocap_pos is None else mocap_pos, turns if mocap_quat is None else mocap_quat)
        for target, values in zip(self._state, given, strict=True):
            target[:n] = values
        if n:
            if fields or self._expanded:
                self._place_fields(n, fields)
            self._batch.forward(np.arange(n, dtype=np.int32), stage=self._positions_only)
        parts: dict[str, Any] = {name: field[:n].copy() for name, field in self._derived.items()}
        if self._soft:
            parts["soft"] = {name: field[:n].copy() for name, field in self._soft.items()}
        if "geom_size" in fields:
            parts["geom_size"] = np.array(fields["geom_size"], np.float64)
        looks = {name: fields[name] for name in ROW_LOOKS if name in fields}
        if looks:
            parts["looks"] = looks
        if not {"geom_rgba", "geom_matid", "mat_rgba", "light_diffuse"}.isdisjoint(fields):
            parts["geom_rgba"] = np.resize(base_colors(self.model, fields=fields), (n, self.model.ngeom, 4))
            parts["light_diffuse"] = np.repeat(base_diffuse(self.model)[None], n, 0)
            if "light_diffuse" in fields:
                parts["light_diffuse"][:, 1:] = fields["light_diffuse"]
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
        self._soft = {name: self._batch.bind(name) for name in SOFT_FIELDS} if has_soft_parts(self.model) else {}

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


class SceneState:
    """Reads rows from a simulation: qpos, mocap poses, and the model fields that have a value per environment.

    A model field that changes what is seen and that cameras cannot draw per environment is an error, never a picture of
    the nominal model.
    """

    def __init__(self, sim: Simulation, reader: PoseReader, positions: Tensor | None = None) -> None:
        """Read from ``sim``, whose model ``reader`` has; joint positions from ``positions`` (N, nq), which the caller
        writes, if given."""
        self._sim = sim
        self._given = {} if positions is None else {"qpos": positions}
        self._reader = reader
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
        self.has_fields = len(shapes) > len(self._positions)
        """Whether rows hold more than positions."""
        for name, shape in shapes.items():
            self.columns[name] = slice(self.width, self.width + math.prod(shape))
            self.width = self.columns[name].stop
        return True

    def take(self, ids: Tensor | None) -> Tensor:
        """Return rows of the environments ``ids`` (n,), or of all: float64 (n, width), fresh, on its device."""
        sim = self._sim
        rows = sim.num_envs if ids is None else len(ids)
        parts: list[Tensor] = [torch.empty((rows, 0), dtype=torch.float64, device=sim.device)]
        for name, shape in self._shapes.items():
            if math.prod(shape):
                known = name in self._positions
                part = self._given.get(name, sim.field(name)) if known else sim.expanded[name]
                parts.append((part if ids is None else part.index_select(0, ids)).flatten(1))
        if sim.device.type == "cpu":
            return torch.from_numpy(np.concatenate([part.numpy() for part in parts], axis=1, dtype=np.float64))
        return torch.cat([part.to(torch.float64) for part in parts], dim=1)

    def widen(self, rows: NDArray[np.float64], before: Mapping[str, slice]) -> NDArray[np.float64]:
        """Extend rows (…, width) that were taken when the columns were ``before`` with nominal values."""
        wide = np.empty((*rows.shape[:-1], self.width))
        for name, columns in self.columns.items():
            known = name in before
            wide[..., columns] = rows[..., before[name]] if known else np.ravel(getattr(self._sim.model, name))
        return wide

    def positions(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Joint positions (n, nq), mocap positions (n, m, 3) and quaternions (n, m, 4) of rows (n, width): views."""
        qpos, places, turns = (rows[:, self.columns[name]] for name in ("qpos", "mocap_pos", "mocap_quat"))
        return qpos, places.unflatten(1, self._shapes["mocap_pos"]), turns.unflatten(1, self._shapes["mocap_quat"])

    def poses(self, rows: NDArray[np.float64]) -> ScenePoses:
        """Return the poses of rows (n, width)."""
        parts = {name: rows[:, self.columns[name]].reshape(len(rows), *shape) for name, shape in self._shapes.items()}
        qpos, places, turns = parts.pop("qpos"), parts.pop("mocap_pos"), parts.pop("mocap_quat")
        return self._reader.read(qpos, places, turns, fields=parts)
