"""From an MjModel to the flat tables that the camera's kernels read."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
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
from headrace.sim.camera.camera import CameraSpec, base_colors, camera_id, new_view
from headrace.sim.mujoco_api import Model, mujoco


@dataclass(frozen=True, slots=True)
class SceneLook:
    """What surfaces, lights and the lens are like in some rows: those of the model, or of model fields of their own."""

    scene: RenderScene
    frame: RenderFrame
    textures: RenderTextures | None
    wraps: I32 | None
    """(G,): how a geom that is no plane wears a 2D texture, 0 for not; None where none does."""
    rgba: F32
    """(G, 4)."""
    tint: F32
    """(G, 4): textures of one color, folded into the geom's color."""
    materials: F32
    """(M, 4): colors of materials."""
    still: F64
    """(8,): hash of all of it that a static layer depends on."""


@dataclass(frozen=True, slots=True)
class SceneTables:
    """The fixed tables of a model, and the values that rows may replace."""

    scene: RenderScene
    triangles: RenderTriangles | None
    textures: RenderTextures | None
    sizes: F64
    """(1, G, 3) as in the model."""
    look: SceneLook
    """Of the model itself."""
    shown: list[_Shown]
    used: list[int]
    """Textures that are loaded, by their number in the model."""
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


def _list_shown(model: Model, spec: CameraSpec) -> list[_Shown]:
    """Return what cameras show, that which never moves first."""
    found: list[_Shown] = []
    for kind, count, start in (("geom", model.ngeom, 0), ("site", model.nsite, model.ngeom)):
        rgba = base_colors(model, kind)[0]
        for k in range(count):
            if getattr(model, f"{kind}_group")[k] not in (spec.groups if kind == "geom" else spec.shown_sites):
                continue
            shown = _Shown(
                kind=int(getattr(model, f"{kind}_type")[k]),
                size=np.array(getattr(model, f"{kind}_size")[k], np.float64),
                rgba=rgba[k],
                material=int(getattr(model, f"{kind}_matid")[k]),
                static=model.body_weldid[getattr(model, f"{kind}_bodyid")[k]] == 0,
                geom=k if kind == "geom" else -1,
                pose=start + k,
                data=int(model.geom_dataid[k]) if kind == "geom" and _is_shape(model.geom_type[k]) else -1,
            )
            found.append(shown)
    if spec.reflections:
        # MuJoCo has one mirror, the first plane or box that reflects; it shows what moves
        for k, shown in enumerate(found):
            reflects = shown.material >= 0 and model.mat_reflectance[shown.material] > 0
            if shown.kind in (PLANE, BOX) and reflects and shown.rgba[3] >= OPAQUE:
                found[k] = replace(shown, static=False, reflectance=float(model.mat_reflectance[shown.material]))
                break
    return sorted(found, key=lambda shown: not shown.static)


def _as_shown(raw: Any, part: Part) -> _Shown:
    """Return one slot of a part, without a pose of its own."""
    # a flex wears its material's texture only with coordinates of its own
    bare = part.owner[0] == int(mujoco.mjtObj.mjOBJ_FLEX) and raw.flex_texcoordadr[part.owner[1]] < 0
    material = -1 if bare else part.material
    return _Shown(part.kind, np.zeros(3), part.rgba, material, False, -1, raw.ngeom + raw.nsite, -1)


def build_tables(model: Model, spec: CameraSpec, *, every_texture: bool = False) -> SceneTables:
    """Collect the geoms and sites that a camera shows, with materials, textures and lights.

    ``every_texture`` loads those, too, that no geom of the model itself wears.
    """
    refuse_missing(model, spec)
    shown, parts = _list_shown(model, spec), list_parts(model)
    first_part = len(shown)
    shown += [_as_shown(model, part) for part in parts for _ in range(part.count)]
    count = len(shown)
    sky = _sky(model)
    worn = range(model.ntex) if every_texture else _worn_textures(model, shown)
    used = list(dict.fromkeys([*(number for number in worn if number >= 0), *(() if sky is None else (sky,))]))
    textures = load_textures(model, used)
    wanted = {k: (s.kind == HFIELD, s.data) for k, s in enumerate(shown) if s.data >= 0}
    order = list(dict.fromkeys(wanted.values()))
    shapes = load_shapes(model, order)
    shape_ids, boxes = np.full(count, -1, np.int32), np.zeros((count, 6))
    kinds = np.array([s.kind for s in shown], np.int32)
    triangles, of_part = add_room(shapes.triangles, model, parts), 0
    for k, s in enumerate(shown):
        if not _is_shape(s.kind):
            continue
        shape_ids[k] = shapes.slots[order.index(wanted[k])] if k in wanted else -1
        if k >= first_part:
            shape_ids[k], of_part = len(shapes.boxes) + of_part, of_part + 1
        if shape_ids[k] < 0:
            kinds[k] = -1
        else:
            boxes[k] = shapes.boxes[shape_ids[k]] if k < first_part else 0
    lights = _lights(model)
    faces = np.zeros((0, 4), np.int32) if triangles is None else triangles.ranges
    most_faces = int((faces[:, 3] - faces[:, 2]).max(initial=1))
    face_bits = int(most_faces - 1).bit_length()
    if count << face_bits > 2**31 - 1:
        raise ConfigError(
            f"camera: {count} visible geoms with up to {most_faces} faces are more than the native renderer numbers; "
            'simplify the largest mesh, or use renderer="gl"'
        )
    casters = lights.casters if spec.shadows else ()
    lights.lighting.maps[list(casters)] = np.arange(len(casters))
    scene = RenderScene(
        geom_types=kinds,
        geom_ids=np.array([s.geom for s in shown], np.int32),
        geom_shapes=shape_ids,
        geom_emission=np.zeros(count, np.float32),
        geom_gloss=np.zeros((count, 2), np.float32),
        light_source=lights.source,
        lighting=lights.lighting,
        # OpenGL's scene gets some light where the model has none at all
        global_ambient=0.0 if len(lights.source) else 0.3,
        face_bits=face_bits,
    )
    mirror = next((k for k, s in enumerate(shown) if s.reflectance > 0), -1)
    frame = build_frame(model, spec)
    sky_slot = -1 if sky is None else textures.slots[used.index(sky)]
    worn_tables = _texture_tables(model, shown, textures, sky_slot, not frame.perspective)
    blank = np.ones((count, 4), np.float32)
    static = sum(s.static for s in shown)
    tables = SceneTables(
        scene=scene,
        triangles=triangles,
        textures=worn_tables if len(textures.kinds) else None,
        sizes=np.array([s.size for s in shown], np.float64).reshape(1, -1, 3),
        look=SceneLook(scene, frame, None, None, blank, blank, model.mat_rgba, np.zeros(8)),
        shown=shown,
        used=used,
        poses=np.array([s.pose for s in shown[:first_part]], np.int32),
        diffuse=lights.diffuse[None],
        static=static,
        lights_move=lights.move,
        casters=casters,
        mirror=mirror,
        reflectance=shown[mirror].reflectance if mirror >= 0 else 0.0,
        parts=parts,
        first_part=first_part,
        boxes=boxes,
        shared=(shapes, textures),
    )
    return replace(tables, look=build_look(model, tables, frame))


class _Overlay:
    """A model with other values in some of its fields."""

    def __init__(self, model: Model, fields: Mapping[str, NDArray[Any]]) -> None:
        self._model, self._fields = model, fields

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._model, name)
        return self._fields[name].astype(own.dtype) if name in self._fields else own


def build_look(
    model: Model, tables: SceneTables, frame: RenderFrame, fields: Mapping[str, NDArray[Any]] | None = None
) -> SceneLook:
    """Return what a scene looks like with the model's own materials and lights, or those of ``fields``."""
    raw: Any = _Overlay(model, fields or {})
    scene, static = tables.scene, tables.static
    shown = [replace(s, material=int(raw.geom_matid[s.geom])) if s.geom >= 0 else s for s in tables.shown]
    count, triangles, textures = len(shown), tables.triangles, tables.shared[1]
    repeats, texture = np.zeros((count, 4), np.float32), np.full(count, -1, np.int32)
    tint, emission, gloss = np.ones((count, 4), np.float32), np.zeros(count, np.float32), np.zeros((count, 2))
    for k, (s, number) in enumerate(zip(shown, _worn_textures(raw, shown), strict=True)):
        # OpenGL's material of a geom without one, as mjv_updateScene sets it
        gloss[k] = 0.5, 0.5 * 128
        if s.material < 0 or scene.geom_types[k] < 0:
            continue
        emission[k] = raw.mat_emission[s.material]
        gloss[k] = raw.mat_specular[s.material], raw.mat_shininess[s.material] * 128
        if number < 0:
            continue
        texture[k] = textures.slots[tables.used.index(number)]
        if texture[k] < 0:
            tint[k, :3] = textures.colors[tables.used.index(number)]
            continue
        shape = scene.geom_shapes[k]
        bare = triangles is not None and shape >= 0 and triangles.first_texcoord[shape] < 0
        repeats[k] = *raw.mat_texrepeat[s.material], raw.mat_texuniform[s.material], bare
    colors = np.concatenate([base_colors(raw, "geom")[0], base_colors(raw, "site")[0]])
    rgba = [s.rgba if s.pose == len(colors) else colors[s.pose] for s in shown]
    lighting = _lights(raw).lighting._replace(maps=scene.lighting.maps)
    scene = scene._replace(geom_emission=emission, geom_gloss=gloss.astype(np.float32), lighting=lighting)
    worn, wraps = tables.textures, None
    if worn is not None:
        worn = worn._replace(of_geom=texture, repeats=repeats)
        flat = (texture >= 0) & (worn.kinds[texture] == TEXTURE_2D) & (scene.geom_types != PLANE)
        wraps = np.where(flat, np.where(scene.geom_shapes < 0, WRAPS_PRIMITIVE, WRAPS_SHAPE), 0).astype(np.int32)
    still = [part[:static] for part in (emission, scene.geom_gloss, texture, repeats, tint)]
    still += [np.array(frame, np.float64), *lighting]
    digest = hashlib.sha256(b"".join(part.tobytes() for part in still)).digest()
    return SceneLook(
        scene=scene,
        frame=frame,
        textures=worn,
        wraps=wraps if wraps is not None and wraps.any() else None,
        rgba=np.array(rgba, np.float32).reshape(-1, 4),
        tint=tint,
        materials=np.array(raw.mat_rgba, np.float32),
        still=np.frombuffer(digest, np.int32).astype(np.float64),
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


def _texture_tables(raw: Any, shown: list[_Shown], textures: TextureSet, sky: int, flat: bool) -> RenderTextures:
    """Textures that no geom wears yet, with scratch for pictures without pixels."""
    # in the order of the model, as MuJoCo looks for it
    infinite = [(s.pose, k) for k, s in enumerate(shown) if s.kind == PLANE and s.size[0] <= 0 and s.size[1] <= 0]
    haze = [*raw.vis.rgba.haze[:3], max(float(raw.vis.map.haze), 1e-6), 0.7 * raw.vis.map.zfar * raw.stat.extent]
    return RenderTextures(
        of_geom=np.full(len(shown), -1, np.int32),
        repeats=np.zeros((len(shown), 4), np.float32),
        texels=textures.texels,
        levels=textures.levels,
        kinds=textures.kinds,
        sky=sky,
        haze=np.array(haze, np.float32),
        haze_plane=min(infinite)[1] if sky >= 0 and infinite and not flat else -1,
        corners=np.empty((8, 0), np.int32),
        packed=np.empty((2, 0), np.uint64),
    )


def build_frame(model: Model, spec: CameraSpec, stage: tuple[Any, Any] | None = None) -> RenderFrame:
    """Return the frustum of a camera, as MuJoCo computes it for a picture of this shape."""
    data, scene = stage or _stage(model)
    mujoco.mjv_updateCamera(model, data, new_view(model, camera_id(model, spec.name)), scene)
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


def _stage(model: Model) -> tuple[Any, Any]:
    data = mujoco.MjData(model)
    mujoco.mj_fwdPosition(model, data)
    return data, mujoco.MjvScene(model, maxgeom=1)


def build_row_frame(model: Model, spec: CameraSpec, fields: Mapping[str, NDArray[Any]]) -> RenderFrame:
    """Return the frustum of a camera whose field of view or intrinsics are those of ``fields``."""
    number, raw = camera_id(model, spec.name), _Overlay(model, fields)
    lens = [tuple(np.ravel(getattr(raw, name)[number]).tolist()) for name in _LENS]
    view = (model.stat.extent, model.vis.map.znear, model.vis.map.zfar)
    return _lens_frame(spec.width, spec.height, view, *lens)


_LENS = ("cam_fovy", "cam_intrinsic", "cam_sensorsize", "cam_projection")
_LENS_LOCK = threading.Lock()


@lru_cache(4096)
def _lens_frame(width: int, height: int, view: tuple[float, ...], *lens: tuple[float, ...]) -> RenderFrame:
    with _LENS_LOCK:
        model, stage = _lens_model()
        model.stat.extent, model.vis.map.znear, model.vis.map.zfar = view
        for name, values in zip(_LENS, lens, strict=True):
            getattr(model, name)[:] = values
        return build_frame(model, CameraSpec(name="lens", width=width, height=height), stage)


@cache
def _lens_model() -> tuple[Model, tuple[Any, Any]]:
    """Return a model of one camera alone: MuJoCo computes its frustum as for a model that has its numbers."""
    model = mujoco.MjModel.from_xml_string('<mujoco><worldbody><camera name="lens"/></worldbody></mujoco>')
    return model, _stage(model)


def camera_moves(model: Model, name: str) -> bool:
    """Return whether a camera may be elsewhere in another state."""
    number = camera_id(model, name)
    return number >= 0 and _moves(
        model, model.cam_mode[number], model.cam_bodyid[number], model.cam_targetbodyid[number]
    )


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


def build_light_frame(model: Model, frame: RenderFrame) -> RenderFrame:
    """Return what a directional light sees: MuJoCo's square around it, in a resolution that suits the picture."""
    half = float(model.vis.map.shadowclip * model.stat.extent)
    side = min(max(256, 4 * max(frame.width, frame.height)), 2048)
    return frame._replace(
        width=side, height=side, left=-half, right=half, bottom=-half, top=half, perspective=0.0, light=True
    )
