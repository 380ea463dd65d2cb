# ruff: noqa: E501  (MJCF reads better unwrapped)
"""Forty random scenes: meshes (inward, mirrored, thin, degenerate), textures, height fields, primitives, odd cameras."""

from __future__ import annotations

import numpy as np

COUNT = 40
WIDTH, HEIGHT = 48, 40
_KINDS = ("sphere", "capsule", "ellipsoid", "cylinder", "box", "mesh", "mesh", "mesh")


def _text(values: object) -> str:
    return " ".join(f"{value:.5f}" for value in np.ravel(np.asarray(values, float)))


def _mesh(name: str, rng: np.random.Generator, style: int) -> str:
    """A ball of random bumps, with texture coordinates, mirrored, turned inside out, thin, or with a degenerate face."""
    rings, sides = 5, 8
    points = [(0.0, 0.0, 1.0)]
    for ring in range(1, rings):
        for side in range(sides):
            a, b = np.pi * ring / rings, 2 * np.pi * side / sides
            points.append((np.sin(a) * np.cos(b), np.sin(a) * np.sin(b), np.cos(a)))
    points.append((0.0, 0.0, -1.0))
    vertices = np.array(points) * (0.8 + 0.4 * rng.random((len(points), 1))) * rng.uniform(0.15, 0.35, 3)
    faces = [(0, 1 + k, 1 + (k + 1) % sides) for k in range(sides)]
    for ring in range(rings - 2):
        for k in range(sides):
            a, b = 1 + ring * sides + k, 1 + ring * sides + (k + 1) % sides
            faces += [(a, a + sides, b + sides), (a, b + sides, b)]
    last, first = len(points) - 1, 1 + (rings - 2) * sides
    faces += [(last, first + (k + 1) % sides, first + k) for k in range(sides)]
    index = np.array(faces)
    if style == 1:
        vertices[:, 2] *= 0.02
    if style == 2:
        index = np.concatenate([index, [[3, 3, 9]]])
    scale = ' scale="-1 1 1"' if style == 3 else ""
    shell = ' inertia="shell"' if style in (1, 4) else ""
    if style == 4:
        index = index[: len(index) // 2, ::-1]
    uv = f' texcoord="{_text(rng.random((len(points), 2)) * 2)}"' if style == 5 else ""
    face = " ".join(str(k) for k in index.ravel())
    return f'<mesh name="{name}"{scale}{shell}{uv} vertex="{_text(vertices)}" face="{face}"/>'


def scene(number: int) -> str:
    """MJCF of one scene; its camera is called ``eye``."""
    rng = np.random.default_rng(number)
    meshes = "".join(_mesh(f"m{k}", rng, (number + k) % 6) for k in range(3))
    hill = number % 4 == 0
    assets = f"""
      <texture name="t" type="2d" builtin="checker" rgb1="{_text(rng.random(3))}" rgb2="0.9 0.9 0.8" width="32" height="32"/>
      <texture name="c" type="cube" builtin="gradient" rgb1="{_text(rng.random(3))}" rgb2="0.2 0.2 0.3" width="16" height="96"/>
      <texture type="skybox" builtin="gradient" rgb1="0.4 0.6 0.8" rgb2="0.1 0.1 0.2" width="32" height="192"/>
      <material name="t" texture="t" texrepeat="2 3" specular="0"/><material name="c" texture="c" specular="0"/>
      <material name="dull" specular="0"/>{meshes}"""
    if hill:
        heights = rng.random((5, 6))
        assets += f'<hfield name="h" nrow="5" ncol="6" size="1.5 1.2 0.4 0.1" elevation="{_text(heights)}"/>'
    geoms = ""
    for k in range(6):
        kind = _KINDS[rng.integers(len(_KINDS))]
        shape = f'mesh="m{rng.integers(3)}"' if kind == "mesh" else f'size="{_text(rng.uniform(0.1, 0.3, 3))}"'
        skin = ("dull", "dull", "t", "c")[rng.integers(4)]
        rgba = [*rng.uniform(0.2, 1, 3), 1.0]
        pose = f'pos="{_text([*rng.uniform(-0.9, 0.9, 2), rng.uniform(0.3, 0.9)])}" euler="{_text(rng.uniform(-180, 180, 3))}"'
        geoms += f'<geom name="g{k}" type="{kind}" {shape} {pose} rgba="{_text(rgba)}" material="{skin}"/>'
    # two boxes that touch, face to face
    geoms += '<geom type="box" size="0.1 0.1 0.1" pos="-0.1 0.9 0.2" rgba="1 0 0 1" material="dull"/>'
    geoms += '<geom type="box" size="0.1 0.1 0.1" pos="0.1 0.9 0.2" rgba="0 0 1 1" material="dull"/>'
    floor = '<geom type="hfield" hfield="h" material="dull" rgba="0.4 0.6 0.4 1"/>' if hill else ""
    if not hill:
        floor = f'<geom type="plane" size="{"0 0 1" if number % 3 else "2 2 1"}" material="t"/>'
    # every fifth camera is so close that geoms reach across its near plane
    distance = 0.5 if number % 5 == 0 else 2.4
    turn = rng.uniform(0, 2 * np.pi)
    eye = [distance * np.cos(turn), distance * np.sin(turn), 0.6 + rng.uniform(0.1, 0.8)]
    lens = 'projection="orthographic" fovy="2.5"' if number % 10 == 7 else f'fovy="{rng.uniform(35, 80):.3f}"'
    return f"""<mujoco><statistic extent="2" center="0 0 0.5"/><visual><map znear="0.05" zfar="20"/></visual>
    <asset>{assets}</asset><worldbody>
    <light directional="true" diffuse="0.6 0.6 0.5" dir="{_text(rng.uniform(-0.6, 0.6, 2))} -1" castshadow="false"/>
    <body name="aim" pos="0 0 0.5"/>{floor}{geoms}
    <camera name="eye" mode="targetbody" target="aim" pos="{_text(eye)}" {lens}/>
    </worldbody></mujoco>"""
