"""From an MjModel to the flat tables that the camera's kernels read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigError
from headrace.sim.camera._render_scene import (
    BOX,
    DIRECTIONAL,
    F32,
    F64,
    HFIELD,
    I32,
    OPAQUE,
    PLANE,
    SPOT,
    TEXTURE_2D,
    WRAPS_PRIMITIVE,
    WRAPS_SHAPE,
    RenderFrame,
    RenderLighting,
    RenderScene,
    RenderTextures,
    RenderTriangles,
)
from headrace.sim.camera._shapes import ShapeSet, load_shapes
from headrace.sim.camera._soft import Part, add_room, list_parts, refuse_missing
from headrace.sim.camera._textures import TextureSet, load_textures
from headrace.sim.camera.camera import CameraSpec, base_colors, camera_id
from headrace.sim.mujoco_api import Model, mujoco


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
    mirror: int
    """The geom that shows reflections, or -1."""
    reflectance: float
    parts: list[Part]
    """What takes the last slots: tendons, skins and flexes."""
    first_part: int
    boxes: F64
    """(G, 6): center and half sizes of a shape's bounding box in the geom's frame."""
    shared: tuple[ShapeSet, TextureSet]
    """What other cameras of the same scene use, too: kept so long as one of them is."""


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
    data: int
    """Number of its mesh or height field, or -1."""
    reflectance: float = 0.0
    """Above zero for the mirror."""


def _is_shape(kind: int) -> bool:
    """Return whether a kind of geom is drawn as triangles."""
    return kind == HFIELD or kind > BOX


def _shown(model: Model, spec: CameraSpec) -> list[_Shown]:
    """Return what cameras show, that which never moves first."""
    raw: Any = model
    found: list[_Shown] = []
    for kind, count, start in (("geom", raw.ngeom, 0), ("site", raw.nsite, raw.ngeom)):
        rgba = base_colors(model, kind)
        for k in range(count):
            if getattr(raw, f"{kind}_group")[k] not in (spec.groups if kind == "geom" else spec.shown_sites):
                continue
            shown = _Shown(
                kind=int(getattr(raw, f"{kind}_type")[k]),
                size=np.array(getattr(raw, f"{kind}_size")[k], np.float64),
                rgba=rgba[k],
                material=int(getattr(raw, f"{kind}_matid")[k]),
                static=raw.body_weldid[getattr(raw, f"{kind}_bodyid")[k]] == 0,
                geom=k if kind == "geom" else -1,
                pose=start + k,
                data=int(raw.geom_dataid[k]) if kind == "geom" and _is_shape(raw.geom_type[k]) else -1,
            )
            found.append(shown)
    if spec.reflections:
        # MuJoCo has one mirror, the first plane or box that reflects; it shows what moves
        for k, shown in enumerate(found):
            reflects = shown.material >= 0 and raw.mat_reflectance[shown.material] > 0
            if shown.kind in (PLANE, BOX) and reflects and shown.rgba[3] >= OPAQUE:
                found[k] = replace(shown, static=False, reflectance=float(raw.mat_reflectance[shown.material]))
                break
    return sorted(found, key=lambda shown: not shown.static)


def _as_shown(raw: Any, part: Part) -> _Shown:
    """Return one slot of a part, without a pose of its own."""
    # a flex wears its material's texture only with coordinates of its own
    bare = part.owner[0] == int(mujoco.mjtObj.mjOBJ_FLEX) and raw.flex_texcoordadr[part.owner[1]] < 0
    material = -1 if bare else part.material
    return _Shown(part.kind, np.zeros(3), part.rgba, material, False, -1, raw.ngeom + raw.nsite, -1)


def build_tables(model: Model, spec: CameraSpec) -> SceneTables:
    """Collect the geoms and sites that a camera shows, with materials, textures and lights."""
    raw: Any = model
    refuse_missing(model, spec)
    shown, parts = _shown(model, spec), list_parts(model)
    first_part = len(shown)
    shown += [_as_shown(raw, part) for part in parts for _ in range(part.count)]
    count = len(shown)
    sky = _sky(raw)
    worn = _worn_textures(raw, shown)
    used = list(dict.fromkeys([*(number for number in worn if number >= 0), *(() if sky is None else (sky,))]))
    textures = load_textures(raw, used)
    slot_of = dict(zip(used, textures.slots, strict=True))
    sky_slot = -1 if sky is None else slot_of[sky]
    flat = raw.cam_projection[camera_id(model, spec.name)] == int(mujoco.mjtProjection.mjPROJ_ORTHOGRAPHIC)
    repeats = np.zeros((count, 4), np.float32)
    texture = np.full(count, -1, np.int32)
    tint = np.ones((count, 4), np.float32)
    emission, gloss = np.zeros(count, np.float32), np.zeros((count, 2), np.float32)
    wanted = {k: (s.kind == HFIELD, s.data) for k, s in enumerate(shown) if s.data >= 0}
    order = list(dict.fromkeys(wanted.values()))
    shapes = load_shapes(raw, order)
    shape_ids, boxes = np.full(count, -1, np.int32), np.zeros((count, 6))
    kinds = np.array([s.kind for s in shown], np.int32)
    triangles, of_part = add_room(shapes.triangles, model, parts), 0
    for k, s in enumerate(shown):
        if _is_shape(s.kind):
            shape_ids[k] = shapes.slots[order.index(wanted[k])] if k in wanted else -1
            if k >= first_part:
                shape_ids[k], of_part = len(shapes.boxes) + of_part, of_part + 1
            if shape_ids[k] < 0:
                kinds[k] = -1
                continue
            boxes[k] = shapes.boxes[shape_ids[k]] if k < first_part else 0
        # OpenGL's material of a geom without one, as mjv_updateScene sets it
        gloss[k] = 0.5, 0.5 * 128
        if s.material < 0:
            continue
        emission[k] = raw.mat_emission[s.material]
        gloss[k] = raw.mat_specular[s.material], raw.mat_shininess[s.material] * 128
        number = worn[k]
        if number < 0:
            continue
        texture[k] = slot_of[number]
        if texture[k] < 0:
            tint[k, :3] = textures.colors[used.index(number)]
            continue
        bare = triangles is not None and shape_ids[k] >= 0 and triangles.first_texcoord[shape_ids[k]] < 0
        repeats[k] = *raw.mat_texrepeat[s.material], raw.mat_texuniform[s.material], bare
    lights = _lights(raw)
    faces = np.zeros((0, 4), np.int32) if triangles is None else triangles.ranges
    most_faces = int((faces[:, 3] - faces[:, 2]).max(initial=1))
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
        geom_emission=emission,
        geom_gloss=gloss,
        light_source=lights.source,
        lighting=lights.lighting,
        # OpenGL's scene gets some light where the model has none at all
        global_ambient=0.0 if len(lights.source) else 0.3,
        face_bits=face_bits,
    )
    mirror = next((k for k, s in enumerate(shown) if s.reflectance > 0), -1)
    return SceneTables(
        scene=scene,
        triangles=triangles,
        textures=None
        if not len(textures.kinds)
        else _texture_tables(raw, shown, textures, texture, repeats, sky_slot, flat),
        rgba=np.array([s.rgba for s in shown], np.float32).reshape(1, -1, 4),
        sizes=np.array([s.size for s in shown], np.float64).reshape(1, -1, 3),
        tint=tint,
        poses=np.array([s.pose for s in shown[:first_part]], np.int32),
        diffuse=lights.diffuse[None],
        static=sum(s.static for s in shown),
        lights_move=lights.move,
        casters=lights.casters,
        mirror=mirror,
        reflectance=shown[mirror].reflectance if mirror >= 0 else 0.0,
        parts=parts,
        first_part=first_part,
        boxes=boxes,
        shared=(shapes, textures),
    )


def _sky(raw: Any) -> int | None:
    """Return the texture of the sky."""
    found = np.flatnonzero(raw.tex_type == int(mujoco.mjtTexture.mjTEXTURE_SKYBOX))
    return int(found[0]) if len(found) else None


def _worn_textures(raw: Any, shown: list[_Shown]) -> list[int]:
    """Return the texture of each geom's color, or -1.

    A mesh with texture coordinates cannot wear a cube: OpenGL refuses to bind it as a 2D texture, and draws with the
    2D texture that was bound last, the one of the geom before it, or with none.
    """
    role, flat = int(mujoco.mjtTextureRole.mjTEXROLE_RGB), raw.tex_type == int(mujoco.mjtTexture.mjTEXTURE_2D)
    worn = [int(raw.mat_texid[s.material, role]) if s.material >= 0 else -1 for s in shown]
    order = sorted(range(len(shown)), key=lambda k: shown[k].pose)
    bound = [worn[k] for k in order if worn[k] >= 0 and flat[worn[k]]] or [-1, *np.flatnonzero(flat).tolist()]
    last = int(bound[-1])
    for k in order:
        s, number = shown[k], worn[k]
        if number >= 0 and flat[number]:
            last = number
        elif number >= 0 and s.data >= 0 and s.kind != HFIELD and raw.mesh_texcoordadr[s.data] >= 0:
            worn[k] = last
    return worn


def _texture_tables(
    raw: Any, shown: list[_Shown], textures: TextureSet, of_geom: I32, repeats: F32, sky: int, flat: bool
) -> RenderTextures:
    """Textures with scratch for pictures without pixels."""
    # in the order of the model, as MuJoCo looks for it
    infinite = [(s.pose, k) for k, s in enumerate(shown) if s.kind == PLANE and s.size[0] <= 0 and s.size[1] <= 0]
    haze = [*raw.vis.rgba.haze[:3], max(float(raw.vis.map.haze), 1e-6), 0.7 * raw.vis.map.zfar * raw.stat.extent]
    return RenderTextures(
        of_geom=of_geom,
        repeats=repeats,
        texels=textures.texels,
        levels=textures.levels,
        kinds=textures.kinds,
        sky=sky,
        haze=np.array(haze, np.float32),
        haze_plane=min(infinite)[1] if sky >= 0 and infinite and not flat else -1,
        corners=np.empty((8, 0), np.int32),
        packed=np.empty((2, 0), np.uint64),
    )


def build_frame(model: Model, spec: CameraSpec) -> RenderFrame:
    """Return the frustum of a camera, as MuJoCo computes it for a picture of this shape."""
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
    """Return whether a camera may be elsewhere in another state."""
    raw: Any = model
    number = camera_id(model, name)
    return _moves(raw, raw.cam_mode[number], raw.cam_bodyid[number], raw.cam_targetbodyid[number])


def _moves(raw: Any, mode: int, body: int, target: int) -> bool:
    """Return whether a camera or light may be elsewhere, or look elsewhere, in another state."""
    aims = int(mujoco.mjtCamLight.mjCAMLIGHT_TARGETBODY), int(mujoco.mjtCamLight.mjCAMLIGHT_TARGETBODYCOM)
    if mode in aims and target >= 0:
        return bool(raw.body_weldid[body] != 0 or raw.body_weldid[target] != 0)
    return bool(mode != int(mujoco.mjtCamLight.mjCAMLIGHT_FIXED) or raw.body_weldid[body] != 0)


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


def find_wraps(tables: SceneTables) -> I32 | None:
    """(G,): how a geom that is no plane wears a 2D texture, 0 for not; None where none does."""
    textures, scene = tables.textures, tables.scene
    if textures is None:
        return None
    flat = (textures.of_geom >= 0) & (textures.kinds[textures.of_geom] == TEXTURE_2D) & (scene.geom_types != PLANE)
    wraps = np.where(flat, np.where(scene.geom_shapes < 0, WRAPS_PRIMITIVE, WRAPS_SHAPE), 0).astype(np.int32)
    return wraps if wraps.any() else None


def build_light_frame(model: Model, frame: RenderFrame) -> RenderFrame:
    """Return what a directional light sees: MuJoCo's square around it, in a resolution that suits the picture."""
    raw: Any = model
    half = float(raw.vis.map.shadowclip * raw.stat.extent)
    side = min(max(256, 4 * max(frame.width, frame.height)), 2048)
    return frame._replace(
        width=side, height=side, left=-half, right=half, bottom=-half, top=half, perspective=0.0, light=True
    )
