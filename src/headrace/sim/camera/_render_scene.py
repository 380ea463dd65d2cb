"""What the camera's kernels read and write, as named tuples of flat arrays.

A chunk of n rows goes through the stages together: place (geoms and lights relative to the camera), cast (the nearest
surface of each pixel: exact rays for primitives, a rasterizer for triangles), paint (colors), and copies of what else
was asked for. All stages share a depth buffer ``z`` float32 (n, H, W), the far plane where nothing is, and ``ids``
int32 (n, H, W): the visible geom's slot << face_bits | its face, or -1.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace._kernels.compiled import helper

F32: TypeAlias = NDArray[np.float32]
F64: TypeAlias = NDArray[np.float64]
I32: TypeAlias = NDArray[np.int32]
U32: TypeAlias = NDArray[np.uint32]
U8: TypeAlias = NDArray[np.uint8]
U64: TypeAlias = NDArray[np.uint64]

# MuJoCo's mjtGeom numbers
PLANE, HFIELD, SPHERE, CAPSULE, ELLIPSOID, CYLINDER, BOX, MESH = 0, 1, 2, 3, 4, 5, 6, 7

SPOT, DIRECTIONAL = 0, 1
TEXTURE_2D, TEXTURE_CUBE = 0, 1
WRAPS_PRIMITIVE, WRAPS_SHAPE = 1, 2

OPAQUE = np.float32(0.995)
"""A geom below this alpha is blended, as in MuJoCo's renderer."""


class RenderLighting(NamedTuple):
    """L lights, the headlight first where it is on."""

    types: I32
    """(L,): SPOT or DIRECTIONAL."""
    ambient: F32
    """(L, 3)."""
    specular: F32
    """(L, 3)."""
    shape: F32
    """(L, 5): cosine of the cutoff, exponent, constant, linear and quadratic attenuation."""
    maps: I32
    """(L,): shadow map of each light, or -1."""


class RenderScene(NamedTuple):
    """G visible geoms and sites, those that never move first, and the lights."""

    geom_types: I32
    """(G,): mjtGeom."""
    geom_ids: I32
    """(G,): each geom's id in the model; -1 for sites."""
    geom_shapes: I32
    """(G,): shape in :class:`RenderTriangles`, or -1 for primitives."""
    geom_emission: F32
    """(G,)."""
    geom_gloss: F32
    """(G, 2): specular reflectance and shininess exponent."""
    light_source: I32
    """(L,): the light's number in the model, or -1 for the headlight."""
    lighting: RenderLighting
    global_ambient: float
    face_bits: int
    """How many low bits of an id number the face."""


class RenderTextures(NamedTuple):
    """T textures with all their mip levels, and which geoms have them."""

    of_geom: I32
    """(G,): texture, or -1."""
    repeats: F32
    """(G, 4): repeats in u and v, 1 if they are per meter instead of per geom, 1 if a shape has no coordinates."""
    texels: U32
    """As in ``TextureSet``, levels and kinds likewise."""
    levels: I32
    kinds: I32
    """(T,): TEXTURE_2D or TEXTURE_CUBE."""
    sky: int
    """Texture of the sky, or -1 for black."""
    haze: F32
    """(5,): red, green, blue, the part of the sky's radius over which the plane fades, and that radius."""
    haze_plane: int
    """The first infinite plane, which fades into haze, or -1."""
    corners: I32
    """(8, W): scratch of the thread that paints."""
    packed: U64
    """(2, W): scratch, likewise."""


class RenderTriangles(NamedTuple):
    """S shapes (meshes and height fields), each once however many geoms show it."""

    ranges: I32
    """(S, 4): first and past-the-last vertex, first and past-the-last face."""
    vertices: F32
    """(3, vertices)."""
    corners: U32
    """(3, faces): vertices of each face, counted within the shape; counterclockwise from outside."""
    planes: F32
    """(4, faces): unit normal n and d with n·p = d."""
    normals: F32
    """(faces, 17): two affine functions (a, b, c, d) of a point that give the weights of the second and third corner;
    the first corner's normal, and what the other two differ from it."""
    texcoords: F32
    """(faces with texture coordinates, 6): (u, v) of the first corner, then differences of the other two."""
    first_texcoord: I32
    """(S,): row of the shape's first face in ``texcoords``, or -1."""


class RenderFrame(NamedTuple):
    """The frustum at depth 1 (perspective) or in meters (orthographic), and the size of a picture."""

    width: int
    height: int
    left: float
    right: float
    bottom: float
    top: float
    near: float
    far: float
    perspective: float
    """1 for perspective, 0 for orthographic."""
    light: bool = False
    """Whether it is what a light sees: planes count from both sides."""


class RenderRows(NamedTuple):
    """What differs between the n rows of a chunk."""

    geom_pos: F64
    """(n, G, 3)."""
    geom_mat: F64
    """(n, G, 9)."""
    sizes: F64
    """(n or 1, G, 3): one row serves all."""
    camera_pos: F64
    """(n, 3)."""
    camera_mat: F64
    """(n, 9)."""
    light_pos: F64
    """(n, lights of the model, 3)."""
    light_dir: F64
    """(n, lights of the model, 3)."""
    rgba: F32
    """(n or 1, G, 4): one row serves all."""
    diffuse: F32
    """(n or 1, L, 3): one row serves all."""
    look: I32
    """(n,): which of the call's looks."""
    soft: F64
    """(n, numbers): fields of MjData that tendons, skins and flexes follow from."""


class RenderPlaces(NamedTuple):
    """A chunk of rows relative to their cameras."""

    rays: F64
    """(n, G, 27): in the geom's frame, the ray of pixel (0, 0) and its steps in x and y: origin, direction (scaled to
    depth 1), moment (origin × direction)."""
    centers: F64
    """(n, G, 3): of the geom in camera coordinates (x right, y up, depth forward)."""
    axes: F32
    """(n, G, 9): each geom's axes in camera coordinates (x right, y up, z backward)."""
    bounds: I32
    """(n, G, 4): first and past-the-last column, first and past-the-last line; empty where nothing can be seen."""
    clipped: I32
    """(n, G): whether a shape reaches across the near plane."""
    lights: F32
    """(n, L, 6): the unit vector to a directional light, or position and direction of a spot light."""
    ambient: F32
    """(n, 3): the light that falls everywhere alike."""
    alpha: F32
    """(n, G)."""
    distance: F64
    """(n, G): what transparent geoms are sorted by."""
    order: I32
    """(n, G): transparent geoms from near to far."""
    transparent: I32
    """(n,): how many."""


class ShadowMaps(NamedTuple):
    """Depth seen from each light that casts shadows."""

    depth: F32
    """(maps, at least n, R, R)."""
    basis: F32
    """(at least n, maps, 12): rows right, up and along of the light in camera coordinates, then its position."""
    half: np.float32
    """Half the width of a map in meters."""


class RenderScratch(NamedTuple):
    """Memory that a thread uses for one line or one geom at a time."""

    line: F32
    """(24,): the ray of a line, see ``line_ray``."""
    work: F32
    """(11 + shadow maps, W), see :mod:`render_stages`."""
    xs: F32
    """(W,): 0, 1, 2, …"""
    vertices: F32
    """(3, most vertices of a shape): column, line and 1/depth (depth if orthographic)."""
    pixels: U32
    """(most vertices,): the first column and line at or after each vertex, 16 bits each."""
    faces: U32
    """(most faces,)."""
    nears: F32
    """(W,): the depth of the near plane."""


@helper
def dot(a: Any, b: Any, c: Any, x: Any, y: Any, z: Any) -> Any:
    """Return the inner product of (a, b, c) and (x, y, z)."""
    return a * x + b * y + c * z


@helper
def along(o: Any, p: Any, d: Any, s: Any, x: Any, t: Any) -> Any:
    """Return a coordinate of the point at depth t in column x: its origin, the origin's step, its direction, that's
    step."""
    return o + x * p + t * (d + x * s)


@helper
def line_ray(ray: F64, y: int, out: F32) -> None:
    """Write the ray of line y at column 0 and its steps in x: origin, direction, moment; then steps in y of two."""
    for a in range(3):
        out[a] = ray[a] + y * ray[6 + a]
        out[3 + a] = ray[3 + a]
        out[6 + a] = ray[9 + a] + y * ray[15 + a]
        out[9 + a] = ray[12 + a]
        out[12 + a] = ray[18 + a] + y * ray[24 + a]
        out[15 + a] = ray[21 + a]
        out[18 + a] = ray[6 + a]
        out[21 + a] = ray[15 + a]


@helper
def is_ball(kind: int) -> bool:
    """Return whether a geom's ray is given in coordinates divided by its size."""
    return (kind == SPHERE) | (kind == ELLIPSOID)
