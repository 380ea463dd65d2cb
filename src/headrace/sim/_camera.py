"""Cameras: what one is asked for, and what it gives.

A camera is a pure function of :class:`~headrace.sim._poses.ScenePoses`, which follow from a few numbers per row: those
can be kept and drawn later to the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigError, DtypeError, ShapeError, UnknownNameError
from headrace.sim._mujoco_api import Model

if TYPE_CHECKING:
    from headrace.sim._poses import ScenePoses

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
