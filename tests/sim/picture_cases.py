# ruff: noqa: E501  (MJCF reads better unwrapped)
"""Small scenes, one for each thing that pictures once got wrong; ``make_picture_references.py`` draws them with OpenGL."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

WIDTH, HEIGHT = 64, 48


@dataclass(frozen=True, kw_only=True)
class Case:
    """A scene with a camera ``eye``, what the native camera is asked for, and the flags that OpenGL gets for it."""

    xml: str
    spec: dict[str, Any] = field(default_factory=dict)
    qpos: tuple[float, ...] = ()
    mean: float = 2.0
    """Largest mean difference of colors, of 255."""
    within: float = 0.95
    """Least part of pixels whose colors differ by at most 8."""


def _scene(assets: str, world: str, visual: str = "", more: str = "") -> str:
    return f"""<mujoco><visual><quality offsamples="0" numslices="64" numstacks="64"/>{visual}</visual>
    <asset>{assets}</asset><worldbody>{world}</worldbody>{more}</mujoco>"""


def _skin() -> str:
    """A tube around two bodies, whose middle follows both."""
    rings, sides = 7, 10
    turn = np.linspace(0, 2 * np.pi, sides, endpoint=False)
    points = [(x, 0.15 * np.cos(a), 0.15 * np.sin(a)) for x in np.linspace(-0.45, 0.45, rings) for a in turn]
    coordinates = [(k / (rings - 1), j / sides) for k in range(rings) for j in range(sides)]
    faces = list[int]()
    for k in range(rings - 1):
        for j in range(sides):
            a, b = k * sides + j, k * sides + (j + 1) % sides
            faces += [a, b, a + sides, b, b + sides, a + sides]
    weight = np.clip([0.5 - x for x, _, _ in points], 0, 1)

    def text(values: object) -> str:
        return " ".join(f"{value:.5g}" for value in np.ravel(np.asarray(values)))

    bones = ""
    for name, x, weights in (("one", -0.3, weight), ("two", 0.3, 1 - weight)):
        ids = np.flatnonzero(weights > 0)
        bones += f'<bone body="{name}" bindpos="{x} 0 0" bindquat="1 0 0 0" vertid="{text(ids)}" vertweight="{text(weights[ids])}"/>'
    return f'<skin name="hide" material="hide" vertex="{text(points)}" texcoord="{text(coordinates)}" face="{text(faces)}" inflate="0.01">{bones}</skin>'


_GRAIN = '<texture name="grain" type="cube" builtin="checker" rgb1="0.9 0.8 0.6" rgb2="0.3 0.2 0.1" width="96" height="576"/><material name="grain" texture="grain" specular="0"/>'
_EYE = '<camera name="eye" pos="0.3 -1.6 0.9" xyaxes="1 0.1 0 -0.05 0.5 0.87" fovy="40"/>'

_LOW = '<camera name="eye" pos="0.3 -1.6 0.4" xyaxes="1 0.1 0 -0.02 0.1 0.97" fovy="40"/>'
_SKY = '<texture type="skybox" builtin="gradient" rgb1="0.3 0.5 0.7" rgb2="0.1 0.1 0.3" width="32" height="192"/>'
_MIRROR = '<texture name="t" type="2d" builtin="checker" rgb1="0.3 0.3 0.4" rgb2="0.2 0.2 0.2" width="32" height="32"/><material name="mirror" texture="t" texrepeat="4 4" reflectance="0.6"/><mesh name="wedge" vertex="0 0 0 0.3 0 0 0 0.3 0 0 0 0.3"/>'
_THINGS = '<geom type="box" size="0.1 0.1 0.15" pos="-0.3 0.1 0.1" rgba="0.9 0.2 0.2 1"/><geom type="sphere" size="0.12" pos="0.1 0.2 0.3" rgba="0.2 0.3 0.9 1"/><geom type="mesh" mesh="wedge" pos="0.3 -0.1 0.2" euler="20 30 40" rgba="0.3 0.9 0.2 1"/><geom type="capsule" size="0.05 0.1" pos="0.1 -0.3 0.25" euler="0 50 0" rgba="0.9 0.9 0.2 0.5"/>'
_QUAD = '<mesh name="quad" vertex="-0.5 -0.5 0 0.5 -0.5 0 0.5 0.5 0 -0.5 0.5 0 0 0 -0.1" texcoord="0 0 1 0 1 1 0 1 0.5 0.5" face="0 1 2 0 2 3 0 4 1 1 4 2 2 4 3 3 4 0"/>'

CASES = {
    "cube_on_a_thin_box": Case(xml=_scene(_GRAIN, f'<geom type="box" size="0.6 0.8 0.025" material="grain"/>{_EYE}')),
    "cube_on_an_ellipsoid": Case(
        xml=_scene(_GRAIN, f'<geom type="ellipsoid" size="0.6 0.4 0.2" material="grain"/>{_EYE}')
    ),
    "srgb_texture": Case(
        xml=_scene(
            '<texture name="t" type="2d" builtin="checker" rgb1="0.8 0.7 0.6" rgb2="0.4 0.3 0.5" width="32" height="32" colorspace="sRGB"/><material name="t" texture="t" specular="0" texrepeat="4 4"/>',
            f'<geom type="plane" size="1 1 0.1" material="t"/>{_EYE}',
        )
    ),
    "mirror_floor": Case(
        xml=_scene(
            _MIRROR,
            f'<light directional="true" dir="0.3 0.2 -1" diffuse="0.5 0.5 0.5" castshadow="false"/><geom type="plane" size="2 2 0.1" material="mirror"/>{_THINGS}{_EYE}',
        ),
        spec={"reflections": True, "specular": True},
    ),
    "mirror_box": Case(
        xml=_scene(
            _MIRROR,
            f'<geom type="box" size="0.5 0.5 0.05" pos="0 0 -0.05" euler="10 0 20" material="mirror"/>{_THINGS}{_EYE}',
        ),
        spec={"reflections": True, "specular": True},
    ),
    "mirror_floor_in_haze": Case(
        xml=_scene(
            _MIRROR + _SKY,
            f'<geom type="plane" size="0 0 0.1" material="mirror"/>{_THINGS}<camera name="eye" pos="0.3 -1.6 0.4" xyaxes="1 0.1 0 -0.02 0.1 0.97" fovy="60"/>',
            '<map zfar="10"/><rgba haze="0.9 0.5 0.3 1"/>',
        ),
        spec={"reflections": True, "specular": True},
    ),
    "haze_above_the_horizon": Case(
        xml=_scene(_SKY, f'<geom type="plane" size="0 0 1" rgba="0.2 0.5 0.3 1"/>{_LOW}', '<map zfar="10"/>'),
        spec={"specular": True},
    ),
    "haze_at_the_default_far_plane": Case(
        xml=_scene(_SKY, f'<geom type="plane" size="0 0 1" rgba="0.2 0.5 0.3 1"/>{_LOW}'), spec={"specular": True}
    ),
    "plane_from_behind_orthographic": Case(
        xml=_scene(
            "",
            '<geom type="plane" size="2 2 0.1" pos="0 0 0.2" rgba="0.8 0.3 0.3 1"/><geom type="sphere" size="0.2" pos="0 1 0.6" rgba="0.2 0.3 0.9 1"/><camera name="eye" pos="0 -1 0.1" xyaxes="1 0 0 0 -0.5 1" projection="orthographic" fovy="1.6"/>',
            '<headlight specular="0 0 0"/>',
        )
    ),
    "cube_on_a_mesh_with_coordinates": Case(
        xml=_scene(_GRAIN + _QUAD, f'<geom type="mesh" mesh="quad" material="grain" rgba="0.4 0.8 0.3 1"/>{_EYE}')
    ),
    "cube_on_a_mesh_with_coordinates_after_a_2d_texture": Case(
        xml=_scene(
            _GRAIN + _QUAD + _MIRROR,
            f'<geom type="box" size="0.2 0.2 0.2" pos="-0.5 0.3 0.1" material="mirror"/><geom type="mesh" mesh="quad" material="grain"/>{_EYE}',
            '<headlight specular="0 0 0"/>',
        )
    ),
    "strings": Case(
        xml=_scene(
            '<texture name="t" type="2d" builtin="checker" rgb1="0.9 0.3 0.4" rgb2="0.2 0.2 0.9" width="32" height="32"/><material name="rope" texture="t" texrepeat="1 4"/>',
            """<body pos="0 0 0.3"><joint name="swing" axis="0 1 0"/><geom name="ball" type="sphere" size="0.12" rgba="0.7 0.7 0.2 1"/><site name="side" pos="0 -0.3 0"/><site name="s" pos="-0.3 -0.1 0"/></body>
            <site name="a" pos="0.5 0 0.5" size="0.02"/><site name="b" pos="-0.5 0 0.2" size="0.02"/><site name="c" pos="-0.4 -0.3 0.5"/><site name="d" pos="0.4 -0.3 0.5"/>
            <site name="slide" pos="0.5 -0.2 0" zaxis="1 0 0"/><body pos="0.3 -0.2 0"><joint axis="0 1 0"/><geom size="0.03"/><site name="crank" pos="0 0 0.1"/></body>"""
            + _EYE,
            '<headlight specular="0 0 0"/>',
            """<tendon><spatial width="0.02" rgba="1 0.2 0.1 1"><site site="a"/><geom geom="ball" sidesite="side"/><site site="b"/></spatial>
            <spatial width="0.03" material="rope"><site site="c"/><site site="s"/><pulley divisor="2"/><site site="s"/><site site="b"/></spatial>
            <spatial width="0.015" rgba="0.2 0.9 0.9 1" limited="true" range="0 1.2"><site site="c"/><site site="d"/></spatial></tendon>
            <actuator><general cranksite="crank" slidersite="slide" cranklength="0.3"/></actuator>""",
        ),
        qpos=(0.4, 0.3),
    ),
    "skin": Case(
        xml=_scene(
            '<texture name="t" type="2d" builtin="checker" rgb1="0.9 0.8 0.4" rgb2="0.2 0.5 0.3" width="32" height="32"/><material name="hide" texture="t" texrepeat="2 2" specular="0"/>',
            f"""<body name="one" pos="-0.3 0 0"><joint axis="1 0 0"/><geom size="0.05" rgba="1 0 0 1"/><body name="two" pos="0.6 0 0"><joint axis="0 1 0"/><geom size="0.05" rgba="0 0 1 1"/></body></body>{_EYE}""",
            "",
            f"<deformable>{_skin()}</deformable>",
        ),
        qpos=(0.7, -0.9),
    ),
    "cloth_rope_and_jelly": Case(
        xml=_scene(
            '<texture name="t" type="2d" builtin="checker" rgb1="0.9 0.3 0.4" rgb2="0.2 0.2 0.9" width="32" height="32"/><material name="weave" texture="t" specular="0"/>',
            """<flexcomp name="cloth" type="grid" count="5 4 1" spacing="0.15 0.15 0.1" dim="2" pos="-0.2 0 0.1" euler="30 20 0" radius="0.01" material="weave"><texcoord/></flexcomp>
            <flexcomp name="rope" type="grid" count="6 1 1" spacing="0.1 0.1 0.1" dim="1" pos="0 -0.5 0.2" radius="0.02" rgba="0.2 0.8 0.3 1"/>
            <flexcomp name="jelly" type="grid" count="3 3 3" spacing="0.1 0.1 0.1" dim="3" pos="0.5 0 0" euler="0 0 30" radius="0.005" rgba="0.3 0.5 0.9 1"/>""".replace(
                "<texcoord/>", ""
            )
            + _EYE,
            '<headlight specular="0 0 0"/>',
        ),
    ),
    "sites_of_other_groups": Case(
        xml=_scene(
            "",
            f'<geom type="box" size="0.2 0.2 0.2" group="0" rgba="1 0 0 1"/><geom type="sphere" pos="0.4 0 0" size="0.2" group="1" rgba="0 1 0 1"/><site pos="-0.4 0 0" size="0.15" group="0" rgba="0 0 1 1"/>{_EYE}',
            '<headlight specular="0 0 0"/>',
        ),
        spec={"groups": (1,), "site_groups": (0,)},
    ),
}
