"""What a model shows besides geoms and sites: tendons, slider-cranks, skins and flexes, as MuJoCo lays them out.

MuJoCo's abstract visualizer computes them on the CPU, without OpenGL: strings as capsules along their path, skins and
flexes as vertices. Few models have any, so that one row at a time is quick enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigError
from headrace.sim.camera._render_scene import CAPSULE, CYLINDER, F32, F64, I32, MESH, RenderTriangles
from headrace.sim.camera._shapes import fill_faces
from headrace.sim.camera.camera import DEFAULT_RGBA, SOFT_FIELDS, CameraSpec
from headrace.sim.mujoco_api import Model, mujoco

_GROUPS = (0, 1, 2)
"""Groups of tendons, skins and flexes that MuJoCo shows."""


def refuse_missing(model: Model, spec: CameraSpec) -> None:
    """Raise where MuJoCo's picture of a model shows something that the native renderer cannot draw."""
    rays = np.flatnonzero(model.sensor_type == int(mujoco.mjtSensor.mjSENS_RANGEFINDER))
    if len(rays) and spec.missing == "raise":
        names = ", ".join(model.sensor(int(k)).name or f"number {k}" for k in rays)
        raise ConfigError(
            f"camera {spec.name!r}: the native renderer cannot draw the rays of rangefinders ({names}); use "
            'CameraSpec(missing="skip") to leave them out, or renderer="gl"'
        )


def _cranks(raw: Any) -> NDArray[np.bool_]:
    return np.asarray(raw.actuator_trntype == int(mujoco.mjtTrn.mjTRN_SLIDERCRANK))


@dataclass(frozen=True, slots=True)
class Part:
    """Something that takes ``count`` slots of a scene from its first one: capsules or cylinders, or a shape."""

    kind: int
    """mjtGeom of the slots: MESH for skins and flexes."""
    owner: tuple[int, int]
    """mjtObj and id."""
    material: int
    rgba: NDArray[np.float64]
    count: int
    faces: int = 0

    @property
    def wears(self) -> bool:
        """Whether the color is the material's: there is one, and no color of the part's own."""
        return self.material >= 0 and bool((self.rgba.astype(np.float32) == DEFAULT_RGBA).all())


def list_parts(model: Model) -> list[Part]:
    """Return the parts of a model that MuJoCo shows."""
    kinds = mujoco.mjtObj
    parts: list[Part] = []

    def add(kind: int, what: Any, name: str, k: int, count: int, faces: int = 0) -> None:
        if getattr(model, f"{name}_group")[k] in _GROUPS and count:
            material, rgba = (
                int(getattr(model, f"{name}_matid")[k]),
                np.array(getattr(model, f"{name}_rgba")[k], np.float64),
            )
            parts.append(Part(kind, (int(what), k), material, rgba, count, faces))

    for k in range(model.nflex):
        if model.flex_dim[k] == 1:
            add(CYLINDER, kinds.mjOBJ_FLEX, "flex", k, int(model.flex_edgenum[k]))
        else:
            sides = 2 * int(model.flex_elemnum[k]) + 2 * int(model.flex_shellnum[k])
            add(MESH, kinds.mjOBJ_FLEX, "flex", k, 1, sides if model.flex_dim[k] == 2 else int(model.flex_shellnum[k]))
    for k in range(model.nskin):
        add(MESH, kinds.mjOBJ_SKIN, "skin", k, 1, int(model.skin_facenum[k]))
    for k in range(model.ntendon):
        objects = model.wrap_type[model.tendon_adr[k] : model.tendon_adr[k] + model.tendon_num[k]]
        spatial = len(objects) > 0 and (objects != int(mujoco.mjtWrap.mjWRAP_JOINT)).all()
        # a string of two sites may hang; around a geom it has two points more
        most = int(model.vis.quality.numslices) if len(objects) == 2 else 2 * len(objects)
        add(CAPSULE, kinds.mjOBJ_TENDON, "tendon", k, most if spatial else 0)
    for k in np.flatnonzero(_cranks(model)):
        color = np.array(model.vis.rgba.slidercrank, np.float64)
        parts += [Part(kind, (int(kinds.mjOBJ_ACTUATOR), int(k)), -1, color, 1) for kind in (CYLINDER, CAPSULE)]
    return parts


def add_room(triangles: RenderTriangles | None, model: Model, parts: list[Part]) -> RenderTriangles | None:
    """Return a copy of the tables of shapes with room for the parts that are shapes, after those that are there."""
    soft = [part for part in parts if part.kind == MESH]
    if not soft:
        return triangles
    empty = np.zeros
    if triangles is None:
        triangles = RenderTriangles(
            ranges=empty((0, 4), np.int32),
            vertices=empty((3, 0), np.float32),
            corners=empty((3, 0), np.uint32),
            planes=empty((4, 0), np.float32),
            normals=empty((0, 17), np.float32),
            texcoords=empty((0, 6), np.float32),
            first_texcoord=empty(0, np.int32),
        )
    ranges, corners, texcoords, firsts = [triangles.ranges], [triangles.corners], [triangles.texcoords], list[int]()
    vertex, face, texcoord = triangles.vertices.shape[1], triangles.corners.shape[1], len(triangles.texcoords)
    for part in soft:
        count, at = part.faces, None
        index = np.arange(3 * count, dtype=np.uint32).reshape(count, 3)
        if part.owner[0] == int(mujoco.mjtObj.mjOBJ_SKIN):
            k = part.owner[1]
            start, first = int(model.skin_faceadr[k]), int(model.skin_texcoordadr[k])
            index = model.skin_face[start : start + count].astype(np.uint32)
            if first >= 0:
                at = model.skin_texcoord[first : first + model.skin_vertnum[k]][index]
        elif model.flex_texcoordadr[part.owner[1]] >= 0:
            at = empty((count, 3, 2), np.float32)  # laid out with the faces
        vertices = int(index.max(initial=0)) + 1
        ranges.append(np.array([[vertex, vertex + vertices, face, face + count]], np.int32))
        corners.append(index.T)
        firsts.append(-1 if at is None else texcoord)
        if at is not None:
            texcoords.append(_spans(at))
            texcoord += count
        vertex, face = vertex + vertices, face + count

    def grow(table: F32, size: int, axis: int) -> F32:
        shape = list(table.shape)
        shape[axis] = size
        wide = np.zeros(shape, np.float32)
        wide[tuple(slice(0, side) for side in table.shape)] = table
        return wide

    return RenderTriangles(
        ranges=np.concatenate(ranges),
        vertices=grow(triangles.vertices, vertex, 1),
        corners=np.ascontiguousarray(np.concatenate(corners, 1)),
        planes=grow(triangles.planes, face, 1),
        normals=grow(triangles.normals, face, 0),
        texcoords=np.concatenate(texcoords).astype(np.float32),
        first_texcoord=np.concatenate([triangles.first_texcoord, firsts]).astype(np.int32),
    )


def _spans(at: NDArray[Any]) -> F32:
    """Return rows of ``RenderTriangles.texcoords`` from the coordinates (F, 3, 2) of corners."""
    return np.concatenate([at[:, 0], at[:, 1] - at[:, 0], at[:, 2] - at[:, 0]], 1).astype(np.float32)


class SoftParts:
    """Lays out the parts of one row; one per thread.

    Args:
        model: of the scene.
        parts: from :func:`list_parts`.
        first: the slot of the first part.
        triangles: with room for the parts, from :func:`add_room`; written to.
        boxes: (G, 6) of all slots; written to.
    """

    def __init__(
        self, model: Model, parts: list[Part], first: int, triangles: RenderTriangles | None, boxes: F64
    ) -> None:
        self._model: Any = model
        self._parts, self._first, self._triangles, self._boxes = parts, first, triangles, boxes
        self._data: Any = mujoco.MjData(self._model)
        count = 16 + sum(part.count for part in parts)
        self._scene: Any = mujoco.MjvScene(self._model, count)
        self._option: Any = mujoco.MjvOption()
        self._option.geomgroup[:] = self._option.sitegroup[:] = 0
        self._view: Any = mujoco.MjvCamera()
        self._shapes = 0 if triangles is None else len(triangles.ranges) - sum(part.kind == MESH for part in parts)

    def lay_out(self, fields: F64, materials: F32, pos: F64, mat: F64, sizes: F64, rgba: F32) -> None:
        """Write the slots of one row.

        Args:
            fields: ``SOFT_FIELDS`` of the row, one after the other.
            materials: (M, 4): the row's ``mat_rgba``.
            pos: (G, 3), as in ``RenderRows``; mat (G, 9), sizes (G, 3) and rgba (G, 4) likewise.
            mat: see pos.
            sizes: see pos.
            rgba: see pos.
        """
        at = 0
        for name in SOFT_FIELDS:
            target = getattr(self._data, name)
            target[:] = fields[at : at + target.size].reshape(target.shape)
            at += target.size
        scene = self._scene
        everything = int(mujoco.mjtCatBit.mjCAT_ALL)
        mujoco.mjv_updateScene(self._model, self._data, self._option, None, self._view, everything, scene)
        found: dict[tuple[int, int], list[Any]] = {}
        for geom in scene.geoms[: scene.ngeom]:
            found.setdefault((int(geom.objtype), int(geom.objid)), []).append(geom)
        slot, shape = self._first, self._shapes
        for part in self._parts:
            own = slice(slot, slot + part.count)
            pos[own], mat[own], rgba[own, 3] = 0, np.eye(3).ravel(), 0
            geoms = found.get(part.owner, [])
            colors = [materials[part.material] if part.wears else geom.rgba for geom in geoms]
            if part.kind == MESH:
                if geoms:
                    rgba[slot] = colors[0]
                    self._boxes[slot] = self._lay_shape(part, shape)
                shape += 1
            elif part.owner[0] == int(mujoco.mjtObj.mjOBJ_FLEX):
                if geoms:
                    rgba[own] = colors[0]
                    self._lay_edges(part.owner[1], pos[own], mat[own], sizes[own])
            else:
                own_kind = [both for both in zip(geoms, colors, strict=True) if both[0].type == part.kind]
                for k, (geom, color) in enumerate(own_kind):
                    pos[slot + k], mat[slot + k], rgba[slot + k] = geom.pos, geom.mat.ravel(), color
                    sizes[slot + k] = geom.size[0], geom.size[2], 0
            slot += part.count

    def _lay_shape(self, part: Part, shape: int) -> F64:
        """Write the triangles of a skin or flex; return its bounding box."""
        triangles, scene, k = self._triangles, self._scene, part.owner[1]
        assert triangles is not None  # add_room has made it
        v_0, v_1, f_0, f_1 = (int(number) for number in triangles.ranges[shape])
        if part.owner[0] == int(mujoco.mjtObj.mjOBJ_SKIN):
            start = int(scene.skinvertadr[k])
            own = slice(3 * start, 3 * (start + v_1 - v_0))
            vertices, normals = scene.skinvert[own].reshape(-1, 3), scene.skinnormal[own].reshape(-1, 3)
        else:
            start = int(scene.flexfaceadr[k])
            own = slice(9 * start, 9 * (start + f_1 - f_0))
            vertices, normals = scene.flexface[own].reshape(-1, 3), scene.flexnormal[own].reshape(-1, 3)
            at = int(triangles.first_texcoord[shape])
            if at >= 0:
                coordinates = scene.flextexcoord[6 * start : 6 * (start + f_1 - f_0)].reshape(-1, 3, 2)
                triangles.texcoords[at : at + f_1 - f_0] = _spans(coordinates)
        triangles.vertices[:, v_0:v_1] = vertices.T
        corners = triangles.corners[:, f_0:f_1]
        faces = np.ascontiguousarray(normals[corners.T.astype(np.int64)], np.float32)
        fill_faces(
            triangles.vertices[:, v_0:v_1], corners, faces, triangles.planes[:, f_0:f_1], triangles.normals[f_0:f_1]
        )
        low, high = vertices.min(0).astype(np.float64), vertices.max(0).astype(np.float64)
        return np.concatenate([(low + high) / 2, (high - low) / 2])

    def _lay_edges(self, k: int, pos: F64, mat: F64, sizes: F64) -> None:
        """Write the cylinders along the edges of a flex that is a line."""
        raw, scene = self._model, self._scene
        edges: I32 = raw.flex_edge[raw.flex_edgeadr[k] : raw.flex_edgeadr[k] + raw.flex_edgenum[k]]
        points = scene.flexvert.reshape(-1, 3)[int(raw.flex_vertadr[k]) :]
        one, two = points[edges[:, 0]].astype(np.float64), points[edges[:, 1]].astype(np.float64)
        quat, turn = np.empty(4), np.empty(9)
        for e in range(len(edges)):
            along = two[e] - one[e]
            half = 0.5 * float(np.sqrt((along * along).sum()))
            mujoco.mju_quatZ2Vec(quat, along / max(2 * half, 1e-12))
            mujoco.mju_quat2Mat(turn, quat)
            pos[e], mat[e], sizes[e] = (one[e] + two[e]) / 2, turn, (raw.flex_radius[k], half, 0)
