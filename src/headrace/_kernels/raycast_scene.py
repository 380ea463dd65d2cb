"""What stays the same between frames of a scene, as flat arrays that kernels read."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

F32: TypeAlias = NDArray[np.float32]
F64: TypeAlias = NDArray[np.float64]
I32: TypeAlias = NDArray[np.int32]
U8: TypeAlias = NDArray[np.uint8]
U64: TypeAlias = NDArray[np.uint64]

# MuJoCo's mjtGeom numbers
PLANE, HFIELD, SPHERE, CAPSULE, ELLIPSOID, CYLINDER, BOX, MESH = 0, 1, 2, 3, 4, 5, 6, 7

SPOT, DIRECTIONAL = 0, 1
TEXTURE_2D, TEXTURE_CUBE = 0, 1


class RaycastScene(NamedTuple):
    """G visible geoms, L lights (the headlight first where it is on), T textures with all their mip levels."""

    geom_ids: I32
    """(G,): each geom's id in the model."""
    geom_types: I32
    """(G,): mjtGeom."""
    geom_sizes: F64
    """(G, 3) as in the model."""
    geom_emission: F32
    """(G,)."""
    geom_texture: I32
    """(G,): texture, or -1."""
    geom_texture_scale: F32
    """(G, 5): from local coordinates in meters to texture coordinates (2D) or to the cube's direction: three factors,
    then the 2D texture's coordinates at the origin."""
    light_source: I32
    """(L,): the light's number in the model, or -1 for the headlight."""
    light_types: I32
    """(L,): SPOT or DIRECTIONAL."""
    light_ambient: F32
    """(L, 3)."""
    light_shape: F32
    """(L, 5): cosine of the cutoff, exponent, constant, linear and quadratic attenuation."""
    global_ambient: np.float32
    texels: U64
    """Flat: rows of each face of each level of each texture; red, green << 21, blue << 42."""
    levels: I32
    """(T, levels, 3): first texel, width, height. Textures with fewer levels repeat their last."""
    texture_kinds: I32
    """(T,): TEXTURE_2D or TEXTURE_CUBE."""
    sky: np.int32
    """Texture of the sky, or -1 for black."""
    haze: F32
    """(5,): red, green, blue, inner and outer radius in which infinite planes fade to the haze color."""


class RaycastFrame(NamedTuple):
    """The frustum at depth 1 and the size of a picture."""

    width: int
    height: int
    left: float
    right: float
    bottom: float
    top: float
    near: float
    far: float
