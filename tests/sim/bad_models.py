"""Models that a camera may meet and should not stumble over; run as a program, it draws them (with bounds checks)."""

from __future__ import annotations

import sys

import mujoco
import numpy as np

from headrace.sim import CameraSpec, NativeCamera
from headrace.sim.camera.camera import PoseReader

KINDS = ("rgb", "gray", "depth", "segmentation", "normals")


def bad_model(seed: int) -> tuple[mujoco.MjModel, np.ndarray]:
    """A random model of odd parts, and float64 (4, nq) positions, some of them far away or not numbers."""
    rng = np.random.default_rng(seed)
    spec = mujoco.MjSpec()
    spec.stat.extent, spec.stat.center = 2.0, [0, 0, 0.5]
    spec.visual.map.znear, spec.visual.map.zfar = 0.005, 20.0
    side = int(rng.choice([2, 7, 64]))
    kinds, mark = mujoco.mjtTexture, int(mujoco.mjtMark.mjMARK_RANDOM)
    for name, kind in (("flat", kinds.mjTEXTURE_2D), ("cube", kinds.mjTEXTURE_CUBE)):
        builtin = int(rng.choice([mujoco.mjtBuiltin.mjBUILTIN_CHECKER, mujoco.mjtBuiltin.mjBUILTIN_GRADIENT]))
        colors = {"rgb1": rng.random(3), "rgb2": rng.random(3), "markrgb": rng.random(3), "mark": mark, "random": 0.3}
        spec.add_texture(name=name, type=kind, builtin=builtin, width=side, height=side, nchannel=3, **colors)
        material = spec.add_material(name=name, texrepeat=rng.choice([0.1, 1, 50], 2), texuniform=bool(rng.integers(2)))
        material.textures[mujoco.mjtTextureRole.mjTEXROLE_RGB] = name
    spec.add_material(name="untextured", specular=1.0, shininess=1.0)
    for k in range(3):
        vertices, faces = _odd_mesh(rng)
        mesh = spec.add_mesh(name=f"mesh_{k}", uservert=vertices.ravel(), userface=faces.ravel())
        mesh.inertia = mujoco.mjtMeshInertia.mjMESH_INERTIA_SHELL
        if rng.integers(2):
            coordinates = rng.normal(size=(len(vertices), 2)) * rng.choice([1, 1e30])
            mesh.usertexcoord, mesh.userfacetexcoord = coordinates.ravel(), faces.ravel()
        mesh.scale = rng.choice([-1.0, 1.0], 3)
    size = int(rng.integers(2, 6))
    spec.add_hfield(
        name="field",
        nrow=size,
        ncol=size,
        size=[0.5, 0.5, 0.2, 0.05],
        userdata=rng.random(size * size) * rng.integers(2),
    )
    spec.worldbody.add_light(type=mujoco.mjtLightType.mjLIGHT_DIRECTIONAL, pos=[0, 0, 3], dir=[0, 0.1, -1])
    spec.worldbody.add_light(type=mujoco.mjtLightType.mjLIGHT_SPOT, pos=[0, 0, 0.3], dir=[0, 0, -1])
    types = mujoco.mjtGeom
    materials = ["flat", "cube", "untextured", ""]
    for k in range(8):
        body = spec.worldbody.add_body(pos=rng.normal(size=3) * 0.4)
        if k < 4:
            body.add_freejoint()
            body.explicitinertial, body.mass, body.inertia = True, 1.0, [1, 1, 1]
        kind = [types.mjGEOM_MESH] * 3 + [types.mjGEOM_SPHERE, types.mjGEOM_CAPSULE, types.mjGEOM_ELLIPSOID]
        kind = [*kind, types.mjGEOM_CYLINDER, types.mjGEOM_BOX][k]
        material = materials[rng.integers(4)]
        rgba = [*rng.random(3), rng.choice([0.0, 0.3, 1.0])]
        shape = {"meshname": f"mesh_{k}"} if k < 3 else {"size": 10.0 ** rng.uniform(-6, 0, 3)}
        # what is only looked at may be flat: MuJoCo makes no convex hull of it
        body.add_geom(type=kind, material=material, rgba=rgba, contype=0, conaffinity=0, **shape)
        body.add_site(pos=rng.normal(size=3) * 0.1, size=[0.02, 0.02, 0.02], rgba=rgba)
    spec.worldbody.add_geom(type=types.mjGEOM_HFIELD, hfieldname="field", material=materials[rng.integers(4)])
    spec.worldbody.add_geom(type=types.mjGEOM_PLANE, size=[0, 0, 0.1], material=materials[rng.integers(4)])
    inside = spec.bodies[1]
    inside.add_camera(name="inside", fovy=float(rng.uniform(1, 170)))
    projection = (
        mujoco.mjtProjection.mjPROJ_ORTHOGRAPHIC if rng.integers(2) else mujoco.mjtProjection.mjPROJ_PERSPECTIVE
    )
    spec.worldbody.add_camera(name="outside", pos=[0, -1.5, 1], fovy=60.0, proj=projection)
    model = spec.compile()
    qpos = np.tile(model.qpos0, (4, 1))
    qpos += rng.normal(size=qpos.shape) * 0.3
    qpos[2, 0], qpos[3, 7] = rng.choice([np.nan, np.inf, 1e30, 1e-30]), 1e6
    return model, qpos


def _odd_mesh(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Vertices and faces: a solid body, and faces that are slivers, points, doubled or turned inside out."""
    count = int(rng.integers(5, 40))
    vertices = rng.normal(size=(count, 3)) * 10.0 ** rng.uniform(-3, 0)
    vertices[1] = vertices[0]
    vertices[2] = vertices[0] + 1e-9
    faces = rng.integers(0, count, (60, 3)).astype(np.int32)
    tetrahedron = np.array([[0, 3, 4], [0, 4, 2], [0, 2, 3], [3, 2, 4]], np.int32)
    faces = np.concatenate([tetrahedron, faces, [[0, 1, 2], [3, 3, 4], [4, 4, 4]], faces[:3, ::-1]])
    return vertices, faces[(faces[:, 0] != faces[:, 1]) & (faces[:, 1] != faces[:, 2]) & (faces[:, 0] != faces[:, 2])]


def draw_bad_model(seed: int) -> None:
    """Draw every kind with both cameras, and check that what comes is within its range."""
    model, qpos = bad_model(seed)
    poses = PoseReader(model).read(qpos)
    rng = np.random.default_rng(seed)
    width, height = (int(n) for n in rng.choice([1, 2, 3, 17, 40], 2))
    for name in ("inside", "outside"):
        effects = {"shadows": bool(seed % 2), "specular": bool(seed % 3)}
        spec = CameraSpec(name=name, width=width, height=height, data_types=KINDS, **effects)
        frames = NativeCamera(model, spec, threads=1).render(poses)
        again = NativeCamera(model, spec, threads=1, layers=False).render(poses)
        for kind in KINDS:
            assert getattr(frames, kind).tobytes() == getattr(again, kind).tobytes(), (seed, name, kind)
        assert ((frames.depth >= 0) & (frames.depth < np.inf)).all(), (seed, name)
        assert ((frames.segmentation >= -1) & (frames.segmentation < model.ngeom)).all(), (seed, name)
        length = np.linalg.norm(frames.normals, axis=-1)
        # a point a meter away is known to 1e-7 m: on rods of a micrometer that is a tenth of the radius
        assert ((np.abs(length - 1) < 0.3) | (length == 0)).all(), (seed, name)


if __name__ == "__main__":
    for number in range(int(sys.argv[1])):
        draw_bad_model(number)
    print(f"{sys.argv[1]} models drawn")
