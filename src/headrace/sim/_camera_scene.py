"""From an MjModel to the flat tables that the camera's kernels read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace._kernels.render_scene import (
    BOX,
    CAPSULE,
    CYLINDER,
    DIRECTIONAL,
    F32,
    F64,
    HFIELD,
    I32,
    PLANE,
    SPHERE,
    SPOT,
    TEXTURE_CUBE,
    RenderFrame,
    RenderLighting,
    RenderScene,
    RenderTextures,
    RenderTriangles,
)
from headrace.errors import ConfigError
from headrace.sim._camera import CameraSpec, base_colors, camera_id
from headrace.sim._camera_shapes import Shape, build_triangles, shape_of
from headrace.sim._camera_textures import TextureTables
from headrace.sim._mujoco_api import Model, mujoco


@dataclass(frozen=True, slots=True)
class SceneTables:
    """The fixed tables of a model, and the values that rows may replace."""

    scene: RenderScene
    triangles: RenderTriangles | None
    textures: RenderTextures | None
    rgba: F32
    """(1, G, 4): the model's colors of the visible geoms."""
    sizes: F64
    """(1, G, 3) as in the model."""
    tint: F32
    """(G, 4): textures of one color, folded into the geom's color."""
    poses: I32
    """(G,): each one's place among the model's geoms, or that of a site after them."""
    diffuse: F32
    """(1, L, 3): the model's lights in use, the headlight first where it is on."""
    static: int
    """How many geoms, the first ones, never move: they belong to the world."""
    lights_move: bool
    casters: tuple[int, ...]
    """Lights (numbers within the tables) that cast shadows: directional ones whose model says so."""


@dataclass(frozen=True, slots=True)
class _Shown:
    """One visible geom or site."""

    kind: int
    size: NDArray[np.float64]
    rgba: NDArray[np.float64]
    material: int
    static: bool
    geom: int
    """Its id, or -1 for a site."""
    pose: int


def _shown(model: Model, groups: tuple[int, ...]) -> list[_Shown]:
    """What cameras show, that which never moves first."""
    raw: Any = model
    found: list[_Shown] = []
    for kind, count, start in (("geom", raw.ngeom, 0), ("site", raw.nsite, raw.ngeom)):
        rgba = base_colors(model, kind)
        for k in range(count):
            if getattr(raw, f"{kind}_group")[k] not in groups:
                continue
            shown = _Shown(
                kind=int(getattr(raw, f"{kind}_type")[k]),
                size=np.array(getattr(raw, f"{kind}_size")[k], np.float64),
                rgba=rgba[k],
                material=int(getattr(raw, f"{kind}_matid")[k]),
                static=raw.body_weldid[getattr(raw, f"{kind}_bodyid")[k]] == 0,
                geom=k if kind == "geom" else -1,
                pose=start + k,
            )
            found.append(shown)
    return sorted(found, key=lambda shown: not shown.static)


def build_tables(model: Model, groups: tuple[int, ...]) -> SceneTables:
    """Collect geoms and sites of ``groups``, materials, textures and lights."""
    raw: Any = model
    shown = _shown(model, groups)
    count = len(shown)
    textures = TextureTables(raw)
    scale = np.zeros((count, 5), np.float32)
    texture = np.full(count, -1, np.int32)
    tint = np.ones((count, 4), np.float32)
    emission, gloss = np.zeros(count, np.float32), np.zeros((count, 2), np.float32)
    shapes: dict[tuple[bool, int], tuple[int, Shape]] = {}
    shape_ids, boxes = np.full(count, -1, np.int32), np.zeros((count, 6))
    kinds = np.array([s.kind for s in shown], np.int32)
    for k, s in enumerate(shown):
        shape: Shape | None = None
        if s.geom >= 0 and (s.kind == HFIELD or s.kind > BOX):
            key = (s.kind == HFIELD, int(raw.geom_dataid[s.geom]))
            shape = shapes[key][1] if key in shapes else shape_of(raw, s.geom)
            if shape is None:
                kinds[k] = -1
                continue
            shapes.setdefault(key, (len(shapes), shape))
            shape_ids[k], boxes[k] = shapes[key][0], shape.box
        # OpenGL's material of a geom without one, as mjv_updateScene sets it
        gloss[k] = 0.5, 0.5 * 128
        if s.material < 0:
            continue
        emission[k] = raw.mat_emission[s.material]
        gloss[k] = raw.mat_specular[s.material], raw.mat_shininess[s.material] * 128
        number = int(raw.mat_texid[s.material, int(mujoco.mjtTextureRole.mjTEXROLE_RGB)])
        if number < 0:
            continue
        color = textures.flat_color(number)
        if color is not None:
            tint[k, :3] = color
            continue
        texture[k] = textures.add(number)
        has_coordinates = shape is not None and shape.texcoords is not None
        cube = textures.kinds[texture[k]] == TEXTURE_CUBE
        scale[k] = _texture_scale(raw, s, shape is not None, has_coordinates, cube)
    sky = [i for i in range(raw.ntex) if raw.tex_type[i] == int(mujoco.mjtTexture.mjTEXTURE_SKYBOX)]
    sky_texture = textures.add(sky[0]) if sky else -1
    lights = _lights(raw)
    most_faces = max((len(shape.faces) for _, shape in shapes.values()), default=1)
    face_bits = int(most_faces - 1).bit_length()
    if count << face_bits > 2**31 - 1:
        raise ConfigError(
            f"camera: {count} visible geoms with up to {most_faces} faces are more than the native renderer numbers; "
            'simplify the largest mesh, or use renderer="gl"'
        )
    scene = RenderScene(
        geom_types=kinds,
        geom_ids=np.array([s.geom for s in shown], np.int32),
        geom_shapes=shape_ids,
        geom_boxes=boxes,
        geom_emission=emission,
        geom_gloss=gloss,
        light_source=lights.source,
        lighting=lights.lighting,
        # OpenGL's scene gets some light where the model has none at all
        global_ambient=0.0 if len(lights.source) else 0.3,
        face_bits=face_bits,
    )
    return SceneTables(
        scene=scene,
        triangles=build_triangles([shape for _, shape in shapes.values()]),
        textures=textures.build(texture, scale, sky_texture, _haze(raw)),
        rgba=np.array([s.rgba for s in shown], np.float32).reshape(1, -1, 4),
        sizes=np.array([s.size for s in shown], np.float64).reshape(1, -1, 3),
        tint=tint,
        poses=np.array([s.pose for s in shown], np.int32),
        diffuse=lights.diffuse[None],
        static=sum(s.static for s in shown),
        lights_move=lights.move,
        casters=lights.casters,
    )


def build_frame(model: Model, spec: CameraSpec) -> RenderFrame:
    """The frustum of a camera, as MuJoCo computes it for a picture of this shape."""
    raw: Any = model
    scene = mujoco.MjvScene(raw, maxgeom=1)
    view = mujoco.MjvCamera()
    view.type = mujoco.mjtCamera.mjCAMERA_FIXED
    view.fixedcamid = camera_id(model, spec.name)
    data = mujoco.MjData(raw)
    mujoco.mj_fwdPosition(raw, data)
    mujoco.mjv_updateCamera(raw, data, view, scene)
    cam = scene.camera[0]
    near, far = float(cam.frustum_near), float(cam.frustum_far)
    unit = 1.0 if cam.orthographic else near
    top, bottom, center = cam.frustum_top / unit, cam.frustum_bottom / unit, cam.frustum_center / unit
    half = cam.frustum_width / unit if cam.frustum_width else 0.5 * (top - bottom) * spec.width / spec.height
    return RenderFrame(
        width=spec.width,
        height=spec.height,
        left=float(center - half),
        right=float(center + half),
        bottom=float(bottom),
        top=float(top),
        near=near,
        far=far,
        perspective=0.0 if cam.orthographic else 1.0,
    )


def camera_moves(model: Model, name: str) -> bool:
    """Whether a camera may be elsewhere in another state."""
    raw: Any = model
    number = camera_id(model, name)
    return _moves(raw, raw.cam_mode[number], raw.cam_bodyid[number], raw.cam_targetbodyid[number])


def _moves(raw: Any, mode: int, body: int, target: int) -> bool:
    """Whether a camera or light may be elsewhere, or look elsewhere, in another state."""
    aims = int(mujoco.mjtCamLight.mjCAMLIGHT_TARGETBODY), int(mujoco.mjtCamLight.mjCAMLIGHT_TARGETBODYCOM)
    if mode in aims and target >= 0:
        return bool(raw.body_weldid[body] != 0 or raw.body_weldid[target] != 0)
    return bool(mode != int(mujoco.mjtCamLight.mjCAMLIGHT_FIXED) or raw.body_weldid[body] != 0)


def _texture_scale(raw: Any, shown: _Shown, is_shape: bool, has_coordinates: bool, cube: bool) -> F32:
    """From local meters or the surface's own coordinates to the texture's; see ``RenderScene``."""
    size = shown.size.copy()
    if shown.kind == SPHERE:
        size[:] = size[0]
    elif shown.kind in (CAPSULE, CYLINDER):
        size[:] = size[0], size[0], size[1]
    elif shown.kind == PLANE:
        size[2] = 1
    # an infinite plane repeats per meter
    unit = np.where(size > 0, size, 1.0)
    uniform = bool(raw.mat_texuniform[shown.material])
    repeat = np.array([*raw.mat_texrepeat[shown.material], 0.0])
    if cube:
        # meshes are not scaled when they are drawn, so that their coordinates are meters
        factors = unit if is_shape and uniform else np.ones(3) if is_shape or uniform else 1 / unit
        return np.array([*factors, 0, 0], np.float32)
    if shown.kind == PLANE:
        factors = 0.5 * repeat * (1.0 if uniform else 1 / unit)
        # the texture starts at the corner of a finite plane and half a repeat from the origin of an infinite one
        start = np.where(size > 0, factors * size, -0.5)
        return np.array([*factors, start[0], start[1]], np.float32)
    if is_shape and not has_coordinates:
        factors = 0.5 * repeat * (1.0 if uniform else 1 / unit)
        return np.array([*factors, -0.5, -0.5], np.float32)
    factors = np.where(repeat > 0, repeat, 1.0) * (unit if uniform else 1.0)
    return np.array([*factors, 0, 0], np.float32)


def _haze(raw: Any) -> F32:
    """Infinite planes fade over the outer part of the sky's cylinder, which ends at 0.7 of the far plane."""
    outer = 0.7 * raw.vis.map.zfar * raw.stat.extent
    inner = (1 - raw.vis.map.haze) * outer
    return np.array([*raw.vis.rgba.haze[:3], inner, max(outer, inner + 1e-6)], np.float32)


@dataclass(frozen=True, slots=True)
class _Lights:
    source: I32
    lighting: RenderLighting
    diffuse: F32
    move: bool
    casters: tuple[int, ...]


def _lights(raw: Any) -> _Lights:
    source: list[int] = []
    types: list[int] = []
    colors: list[tuple[Any, Any, Any]] = []
    shape: list[tuple[float, ...]] = []
    casters: list[int] = []
    move = False
    if raw.vis.headlight.active:
        head = raw.vis.headlight
        source.append(-1)
        types.append(DIRECTIONAL)
        colors.append((head.ambient, head.diffuse, head.specular))
        shape.append((-1, 0, 1, 0, 0))
    for i in range(raw.nlight):
        if not raw.light_active[i]:
            continue
        directional = raw.light_type[i] == int(mujoco.mjtLightType.mjLIGHT_DIRECTIONAL)
        everywhere = raw.light_type[i] == int(mujoco.mjtLightType.mjLIGHT_POINT) or raw.light_cutoff[i] >= 180
        if directional and raw.light_castshadow[i]:
            casters.append(len(source))
        source.append(i)
        types.append(DIRECTIONAL if directional else SPOT)
        colors.append((raw.light_ambient[i], raw.light_diffuse[i], raw.light_specular[i]))
        cone = -1.0 if everywhere else math.cos(math.radians(raw.light_cutoff[i]))
        shape.append((cone, float(raw.light_exponent[i]), *map(float, raw.light_attenuation[i])))
        move |= _moves(raw, raw.light_mode[i], raw.light_bodyid[i], raw.light_targetbodyid[i])
    ambient, diffuse, specular = np.moveaxis(np.array(colors, np.float32).reshape(-1, 3, 3), 1, 0)
    return _Lights(
        source=np.array(source, np.int32),
        lighting=RenderLighting(
            types=np.array(types, np.int32),
            ambient=np.ascontiguousarray(ambient),
            specular=np.ascontiguousarray(specular),
            shape=np.array(shape, np.float32).reshape(-1, 5),
            maps=np.full(len(source), -1, np.int32),
        ),
        diffuse=np.ascontiguousarray(diffuse),
        move=move,
        casters=tuple(casters),
    )
