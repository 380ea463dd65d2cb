"""From an MjModel to the flat tables that the ray caster reads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace._kernels.raycast_scene import (
    BOX,
    CAPSULE,
    CYLINDER,
    DIRECTIONAL,
    ELLIPSOID,
    F32,
    F64,
    HFIELD,
    I32,
    PLANE,
    SPHERE,
    SPOT,
    TEXTURE_2D,
    TEXTURE_CUBE,
    RaycastFrame,
    RaycastScene,
)
from headrace.errors import ConfigError
from headrace.sim._camera import CameraSpec, camera_id
from headrace.sim._mujoco_api import Model, mujoco

_DEFAULT_RGBA = np.array([0.5, 0.5, 0.5, 1], np.float32)
_RGB_ROLE = int(mujoco.mjtTextureRole.mjTEXROLE_RGB)
_POINT = int(mujoco.mjtLightType.mjLIGHT_POINT)
SHOWN_GROUPS = 3  # MuJoCo shows geoms of groups 0, 1 and 2 unless told otherwise


@dataclass(frozen=True, slots=True)
class SceneTables:
    """The fixed tables of a model, and the colors that rows may replace."""

    scene: RaycastScene
    rgba: F32
    """(1, G, 4): the model's colors of the visible geoms."""
    tint: F32
    """(G, 4): textures of one color and the mean of a mesh's, folded into the geom's color."""
    slots: I32
    """(geoms of the model,): place among the visible ones, or -1."""
    diffuse: F32
    """(1, L, 3): the model's lights in use, the headlight first where it is on."""


def visible_geoms(model: Model) -> I32:
    """Ids of the geoms that cameras show: groups 0–2."""
    raw: Any = model
    return np.flatnonzero(raw.geom_group < SHOWN_GROUPS).astype(np.int32)


def base_colors(model: Model) -> F64:
    """(geoms of the model, 4): the color of each geom, its material's where it has none of its own."""
    raw: Any = model
    rgba = np.array(raw.geom_rgba, np.float64)
    for g in range(raw.ngeom):
        if raw.geom_matid[g] >= 0 and np.array_equal(raw.geom_rgba[g], _DEFAULT_RGBA):
            rgba[g] = raw.mat_rgba[raw.geom_matid[g]]
    return rgba


def base_diffuse(model: Model) -> F64:
    """(1 + lights of the model, 3): the diffuse light of the headlight and of each light."""
    raw: Any = model
    return np.concatenate([raw.vis.headlight.diffuse[None], raw.light_diffuse.reshape(-1, 3)]).astype(np.float64)


def build_tables(model: Model) -> SceneTables:
    """Collect geoms, materials, textures and lights."""
    raw: Any = model
    geoms = visible_geoms(model)
    textures = _Textures(raw)
    scale = np.zeros((len(geoms), 5), np.float32)
    texture = np.full(len(geoms), -1, np.int32)
    tint = np.ones((len(geoms), 4), np.float32)
    emission = np.zeros(len(geoms), np.float32)
    rgba = base_colors(model)[geoms].astype(np.float32)
    for k, g in enumerate(geoms):
        material = int(raw.geom_matid[g])
        if material < 0:
            continue
        emission[k] = raw.mat_emission[material]
        number = int(raw.mat_texid[material, _RGB_ROLE])
        if number < 0:
            continue
        primitive = raw.geom_type[g] <= BOX and raw.geom_type[g] != HFIELD
        color = textures.flat_color(number) if primitive else textures.mean_color(number)
        if color is not None:
            tint[k, :3] = color
            continue
        texture[k] = textures.add(number)
        scale[k] = _texture_scale(raw, int(g), material, textures.kinds[texture[k]])
    sky = [i for i in range(raw.ntex) if raw.tex_type[i] == int(mujoco.mjtTexture.mjTEXTURE_SKYBOX)]
    sky_texture = textures.add(sky[0]) if sky else -1
    lights = _lights(raw)
    scene = RaycastScene(
        geom_ids=geoms,
        geom_types=raw.geom_type[geoms].astype(np.int32),
        geom_sizes=np.ascontiguousarray(raw.geom_size[geoms], np.float64),
        geom_emission=emission,
        geom_texture=texture,
        geom_texture_scale=scale,
        light_source=lights.source,
        light_types=lights.types,
        light_ambient=lights.ambient,
        light_shape=lights.shape,
        # OpenGL's scene gets some light where the model has none at all
        global_ambient=np.float32(0 if len(lights.source) else 0.3),
        texels=textures.texels(),
        levels=textures.levels(),
        texture_kinds=np.array(textures.kinds, np.int32).reshape(-1),
        sky=np.int32(sky_texture),
        haze=_haze(raw),
    )
    slots = np.full(raw.ngeom, -1, np.int32)
    slots[geoms] = np.arange(len(geoms))
    return SceneTables(scene=scene, rgba=rgba[None], tint=tint, slots=slots, diffuse=lights.diffuse[None])


def build_frame(model: Model, spec: CameraSpec) -> RaycastFrame:
    """The frustum of a camera at depth 1, as MuJoCo computes it for a picture of this shape."""
    raw: Any = model
    number = camera_id(model, spec.name)
    if raw.cam_projection[number] != 0:
        raise ConfigError(
            f"camera {spec.name!r}: the native camera draws perspective only, got an orthographic camera; use GLCamera"
        )
    scene = mujoco.MjvScene(raw, maxgeom=1)
    view = mujoco.MjvCamera()
    view.type = mujoco.mjtCamera.mjCAMERA_FIXED
    view.fixedcamid = number
    data = mujoco.MjData(raw)
    mujoco.mj_fwdPosition(raw, data)
    mujoco.mjv_updateCamera(raw, data, view, scene)
    cam = scene.camera[0]
    near, far = float(cam.frustum_near), float(cam.frustum_far)
    top, bottom, center = cam.frustum_top / near, cam.frustum_bottom / near, cam.frustum_center / near
    half = cam.frustum_width / near if cam.frustum_width else 0.5 * (top - bottom) * spec.width / spec.height
    return RaycastFrame(
        width=spec.width,
        height=spec.height,
        left=float(center - half),
        right=float(center + half),
        bottom=float(bottom),
        top=float(top),
        near=near,
        far=far,
    )


def _texture_scale(raw: Any, g: int, material: int, kind: int) -> F32:
    """From local meters to texture coordinates; see ``RaycastScene.geom_texture_scale``."""
    geom_type = int(raw.geom_type[g])
    size = np.array(raw.geom_size[g], np.float64)
    if geom_type == SPHERE:
        size[:] = size[0]
    elif geom_type in (CAPSULE, CYLINDER):
        size[:] = size[0], size[0], size[1]
    elif geom_type == PLANE:
        size[2] = 1
    elif geom_type not in (ELLIPSOID, int(mujoco.mjtGeom.mjGEOM_BOX)):
        size[:] = 1
    # an infinite plane repeats per meter
    unit = np.where(size > 0, size, 1.0)
    uniform = bool(raw.mat_texuniform[material])
    if kind == TEXTURE_CUBE:
        factors = np.ones(3) if uniform else 1 / unit
        return np.array([*factors, 0, 0], np.float32)
    repeat = np.array([*raw.mat_texrepeat[material], 0.0])
    factors = 0.5 * repeat * (1.0 if uniform else 1 / unit)
    # the texture starts at the corner of a finite plane and half a repeat from the origin of an infinite one
    start = np.where(size > 0, factors * size, -0.5)
    return np.array([*factors, start[0], start[1]], np.float32)


def _haze(raw: Any) -> F32:
    """Infinite planes fade over the outer part of the sky's cylinder, which ends at 0.7 of the far plane."""
    outer = 0.7 * raw.vis.map.zfar * raw.stat.extent
    inner = (1 - raw.vis.map.haze) * outer
    return np.array([*raw.vis.rgba.haze[:3], inner, max(outer, inner + 1e-6)], np.float32)


@dataclass(frozen=True, slots=True)
class _Lights:
    source: I32
    types: I32
    ambient: F32
    diffuse: F32
    shape: F32


def _lights(raw: Any) -> _Lights:
    source: list[int] = []
    types: list[int] = []
    ambient: list[NDArray[np.float32]] = []
    diffuse: list[NDArray[np.float32]] = []
    shape: list[tuple[float, ...]] = []
    if raw.vis.headlight.active:
        source.append(-1)
        types.append(DIRECTIONAL)
        ambient.append(raw.vis.headlight.ambient)
        diffuse.append(raw.vis.headlight.diffuse)
        shape.append((-1, 0, 1, 0, 0))
    for i in range(raw.nlight):
        if not raw.light_active[i]:
            continue
        directional = raw.light_type[i] == int(mujoco.mjtLightType.mjLIGHT_DIRECTIONAL)
        everywhere = raw.light_type[i] == _POINT or raw.light_cutoff[i] >= 180
        source.append(i)
        types.append(DIRECTIONAL if directional else SPOT)
        ambient.append(raw.light_ambient[i])
        diffuse.append(raw.light_diffuse[i])
        cone = -1.0 if everywhere else math.cos(math.radians(raw.light_cutoff[i]))
        shape.append((cone, float(raw.light_exponent[i]), *map(float, raw.light_attenuation[i])))
    return _Lights(
        source=np.array(source, np.int32),
        types=np.array(types, np.int32),
        ambient=np.array(ambient, np.float32).reshape(-1, 3),
        diffuse=np.array(diffuse, np.float32).reshape(-1, 3),
        shape=np.array(shape, np.float32).reshape(-1, 5),
    )


class _Textures:
    """The textures in use, each as a pyramid of ever smaller levels."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._numbers: dict[int, int] = {}
        self._pyramids: list[list[NDArray[np.uint8]]] = []
        self.kinds: list[int] = []

    def _faces(self, number: int) -> NDArray[np.uint8]:
        """(faces, height, width, 3): 1 face for a 2D texture, 6 for a cube."""
        raw = self._raw
        height, width, channels = raw.tex_height[number], raw.tex_width[number], raw.tex_nchannel[number]
        if raw.tex_adr[number] < 0:
            data = mujoco.mj_loadTexture(raw, number)[0].reshape(height, width, channels)
        else:
            start = raw.tex_adr[number]
            data = raw.tex_data[start : start + height * width * channels].reshape(height, width, channels)
        data = np.repeat(data, 3, axis=2) if channels == 1 else data[:, :, :3]
        if raw.tex_type[number] == int(mujoco.mjtTexture.mjTEXTURE_2D):
            return data[None]
        if height == width:
            return np.broadcast_to(data, (6, *data.shape))
        return data.reshape(6, width, width, 3)

    def flat_color(self, number: int) -> F32 | None:
        """The color of a texture that has only one."""
        faces = self._faces(number)
        first = faces[0, 0, 0]
        return first.astype(np.float32) / np.float32(255) if bool((faces == first).all()) else None

    def mean_color(self, number: int) -> F32:
        """What a texture looks like from far away."""
        return (self._faces(number).reshape(-1, 3).mean(0) / 255).astype(np.float32)

    def add(self, number: int) -> int:
        """Include a texture of the model; its number in the tables."""
        if number not in self._numbers:
            self._numbers[number] = len(self._pyramids)
            faces = self._faces(number)
            self._pyramids.append(_pyramid(faces))
            self.kinds.append(TEXTURE_2D if len(faces) == 1 else TEXTURE_CUBE)
        return self._numbers[number]

    def texels(self) -> NDArray[np.uint64]:
        """All levels of all textures, flat, one number a texel."""
        flat = [level.reshape(-1, 3) for pyramid in self._pyramids for level in pyramid]
        rgb = np.concatenate(flat).astype(np.uint64) if flat else np.zeros((1, 3), np.uint64)
        return rgb[:, 0] | rgb[:, 1] << np.uint64(21) | rgb[:, 2] << np.uint64(42)

    def levels(self) -> I32:
        """(T, levels, 3): first texel, width, height."""
        most = max((len(pyramid) for pyramid in self._pyramids), default=1)
        table = np.zeros((len(self._pyramids), most, 3), np.int32)
        start = 0
        for t, pyramid in enumerate(self._pyramids):
            for k, level in enumerate(pyramid):
                table[t, k:] = start, level.shape[2], level.shape[1]
                start += level.size // 3
        return table


def _pyramid(faces: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    """Halve a texture (faces, height, width, 3) until one texel is left.

    A texel of the coarse level is read at its center from the fine one: the mean of two where the size is even, and no
    shift where it is odd.
    """
    levels = [np.ascontiguousarray(faces)]
    fine: F64 = faces.astype(np.float64)
    while fine.shape[1] > 1 or fine.shape[2] > 1:
        for axis in (1, 2):
            size = fine.shape[axis]
            if size > 1:
                at = (np.arange(size // 2) + 0.5) * (size / (size // 2)) - 0.5
                low = np.floor(at).astype(np.int64)
                weight = (at - low).reshape((-1, *([1] * (3 - axis))))
                fine = np.take(fine, low, axis) * (1 - weight) + np.take(fine, low + 1, axis) * weight
        levels.append(np.ascontiguousarray(np.round(fine).astype(np.uint8)))
    return levels
