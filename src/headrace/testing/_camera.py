"""``check_camera``: a model of your own drawn by the native camera and by MuJoCo, and where the two differ."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headrace.sim import CameraSpec, NativeCamera
from headrace.sim.camera.camera import FREE, CameraFrames, PoseReader, refuse_kinds
from headrace.sim.camera.names import make_camera
from headrace.sim.mujoco_api import Model, mujoco

_KINDS = ("rgb", "depth", "segmentation")
_NEAR = 8
"""Of 255: the largest difference of colors that counts as equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CameraCheck:
    """How the native pictures of one camera differ from MuJoCo's, both without antialiasing and shadows."""

    camera: str
    segmentation: float
    """Share of pixels that show another geom, edges aside."""
    depth: float
    """Share of pixels that show the same geom at another depth, by more than 0.5 %, edges aside."""
    rgb: float
    """Share of pixels whose color differs by more than 8 of 255 in some channel."""
    mean_color: float
    """Mean difference of colors, of 255."""
    causes: tuple[str, ...]
    """What makes them differ, the largest share first; and what MuJoCo's full picture shows besides."""

    @property
    def agrees(self) -> bool:
        """Whether the pictures are alike: geoms and depths in all but 0.2 % of pixels, colors in 95 %, mean 2."""
        return max(self.segmentation, self.depth) <= 0.002 and self.rgb <= 0.05 and self.mean_color <= 2

    def __str__(self) -> str:
        shares = ", ".join(f"{name} {getattr(self, name):.2%}" for name in ("segmentation", "depth", "rgb"))
        lines = [f"camera {self.camera!r}: pixels that differ: {shares}; mean color {self.mean_color:.2f} of 255"]
        return "\n".join([*lines, *(f"  {cause}" for cause in self.causes)])


def check_camera(
    model: Model,
    *,
    camera: str | None = None,
    width: int = 128,
    height: int = 128,
    qpos: NDArray[np.float64] | None = None,
    groups: tuple[int, ...] = (0, 1, 2),
    backend: Literal["egl", "osmesa"] = "egl",
) -> list[CameraCheck]:
    """Draw a model with the native camera and with MuJoCo's renderer, and compare.

    Args:
        model: any; it is not changed.
        camera: one of its cameras, or ``free``; None for all, the free one where it has none.
        width: pixels.
        height: pixels.
        qpos: (nq,); the model's where None.
        groups: of geoms and sites.
        backend: what gives OpenGL a context.

    Returns:
        One result per camera.
    """
    names = [model.camera(k).name for k in range(model.ncam)] or [FREE] if camera is None else [camera]
    found: list[CameraCheck] = []
    for name in names:
        spec = CameraSpec(
            name=name, width=width, height=height, data_types=_KINDS, groups=groups, specular=True, reflections=True,
            missing="skip",
        )  # fmt: skip
        refuse_kinds(spec, "gl", ("normals",))
        found.append(_check(model, spec, model.qpos0 if qpos is None else qpos, backend))
    return found


def _check(model: Model, spec: CameraSpec, qpos: NDArray[np.float64], backend: Literal["egl", "osmesa"]) -> CameraCheck:
    plain: Any = _refine_model(model, _without_samples, _without_shadows)
    poses = PoseReader(plain).read(np.array(qpos, np.float64)[None])

    def draw(drawn: Any) -> CameraFrames:
        with closing(make_camera("gl", drawn, spec, backend=backend)) as gl:
            return gl.render(poses)

    theirs, ours = draw(plain), NativeCamera(plain, spec).render(poses)
    their_ids, our_ids = _first(theirs, "segmentation"), _first(ours, "segmentation")
    inside = _inside(their_ids) & _inside(our_ids)
    other = inside & (their_ids != our_ids)
    same = inside & (their_ids == our_ids) & (their_ids >= 0)
    deep = same & (np.abs(_first(ours, "depth") / _first(theirs, "depth") - 1) > 5e-3)
    error = np.abs(_first(ours, "rgb").astype(int) - _first(theirs, "rgb"))
    wrong = error.max(-1) > _NEAR
    causes = _geoms(plain, their_ids, our_ids, wrong)
    for what, change in (
        ("antialiasing", _without_shadows),
        ("shadows (the native camera has those of directional lights: shadows=True)", _without_samples),
    ):
        full = _first(draw(_refine_model(model, change)), "rgb").astype(int)
        share = (np.abs(full - _first(theirs, "rgb")).max(-1) > _NEAR).mean()
        if share > 0:
            causes.append(f"MuJoCo's full picture differs in {share:.2%} of pixels by {what}")
    if (plain.sensor_type == int(mujoco.mjtSensor.mjSENS_RANGEFINDER)).any():
        causes.append("rays of rangefinders are drawn by MuJoCo alone")
    return CameraCheck(
        camera=spec.name,
        segmentation=float(other.mean()),
        depth=float(deep.mean()),
        rgb=float(wrong.mean()),
        mean_color=float(error.mean()),
        causes=tuple(causes),
    )


def _geoms(model: Any, theirs: NDArray[Any], ours: NDArray[Any], wrong: NDArray[np.bool_]) -> list[str]:
    """Name the three geoms with most pixels that differ, and why they may."""
    edges = wrong & ~(_inside(theirs) & _inside(ours))
    causes = list[tuple[float, str]]()
    if edges.any():
        causes.append((float(edges.mean()), "edges, which fall on the other side of a pixel's center"))
    for geom in np.unique(theirs[wrong & ~edges]).tolist():
        share = float((wrong & ~edges & (theirs == geom)).mean())
        if geom < 0:
            causes.append((share, "what is no geom: sky, sites, tendons, skins, flexes"))
            continue
        kind = int(model.geom_type[geom])
        name = model.geom(geom).name or f"number {geom}"
        triangles = kind in (int(mujoco.mjtGeom.mjGEOM_MESH), int(mujoco.mjtGeom.mjGEOM_HFIELD))
        why = (
            "large triangles are lit at their corners by OpenGL, at each pixel here"
            if triangles
            else "light or texture"
        )
        causes.append((share, f"geom {name}: {why}"))
    return [f"{share:.2%} of pixels: {why}" for share, why in sorted(causes, reverse=True)[:4]]


def _refine_model(model: Model, *changes: Callable[[Any], None]) -> Any:
    """Return a copy whose curved geoms have many sides, so that their depth is not that of a polygon."""
    copied: Any = copy.copy(model)
    copied.vis.quality.numslices = copied.vis.quality.numstacks = 64
    for change in changes:
        change(copied)
    return copied


def _without_samples(model: Any) -> None:
    model.vis.quality.offsamples = 0


def _without_shadows(model: Any) -> None:
    model.light_castshadow[:] = 0


def _first(frames: CameraFrames, kind: str) -> NDArray[Any]:
    return getattr(frames, kind)[0]


def _inside(ids: NDArray[Any]) -> NDArray[np.bool_]:
    """Pixels whose eight neighbors show the same geom."""
    padded = np.pad(ids, 1, mode="edge")
    same = np.ones(ids.shape, np.bool_)
    for dy in range(3):
        for dx in range(3):
            same &= padded[dy : dy + ids.shape[0], dx : dx + ids.shape[1]] == ids
    return same
