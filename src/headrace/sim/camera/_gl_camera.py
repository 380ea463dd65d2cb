"""MuJoCo's own pictures, shadows and reflections included, through OpenGL off screen."""

from __future__ import annotations

import atexit
import copy
import importlib
import weakref
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigError, LifecycleError
from headrace.sim.camera._render_light import to_gray
from headrace.sim.camera.camera import (
    LOOKS,
    ROW_LOOKS,
    CameraFrames,
    CameraSpec,
    FreeView,
    ModelWatch,
    ScenePoses,
    base_diffuse,
    camera_id,
    check_poses,
    frames_for,
    new_view,
    refuse_kinds,
)
from headrace.sim.mujoco_api import Model, mujoco

_PACKAGES = {"egl": "libegl1 libegl-mesa0 libgl1-mesa-dri", "osmesa": "libosmesa6"}


class GLCamera:
    """A :class:`~headrace.sim.camera.camera.Camera` over MuJoCo's renderer, one picture after the other.

    Owns an OpenGL context. Rows with colors and lights of their own are drawn with them. What is not a geom (sites,
    tendons, skins) is in the picture as in MuJoCo's, and -1 in the segmentation.
    """

    def __init__(self, model: Model, spec: CameraSpec, *, backend: Literal["egl", "osmesa"] = "egl") -> None:
        refuse_kinds(spec, "gl", ("normals",))
        self.spec = spec
        self.model = model
        self._camera = camera_id(model, spec.name)
        self._watch = ModelWatch(model)
        # a copy of its own: the picture must fit the off-screen buffer, and rows may change colors
        self._drawn: Any = copy.copy(model)
        visual = self._drawn.vis.global_
        visual.offwidth, visual.offheight = max(visual.offwidth, spec.width), max(visual.offheight, spec.height)
        self._data: Any = mujoco.MjData(self._drawn)
        self._scene: Any = mujoco.MjvScene(self._drawn, maxgeom=10_000)
        self._option: Any = mujoco.MjvOption()
        for shown, groups in ((self._option.geomgroup, spec.groups), (self._option.sitegroup, spec.shown_sites)):
            shown[:] = [group in groups for group in range(len(shown))]
        self._view = new_view(model, self._camera)
        self.free = FreeView.around(model) if self._camera < 0 else None
        self._rect: Any = mujoco.MjrRect(0, 0, spec.width, spec.height)
        self._gl = _context(backend, spec.width, spec.height)
        self._gl.make_current()
        self._mjr: Any = mujoco.MjrContext(self._drawn, int(mujoco.mjtFontScale.mjFONTSCALE_100))
        mujoco.mjr_setBuffer(int(mujoco.mjtFramebuffer.mjFB_OFFSCREEN), self._mjr)
        self._mjr.readDepthMap = mujoco.mjtDepthMap.mjDEPTH_ZEROFAR
        self._free = weakref.finalize(self, _free, self._gl, self._mjr)
        # at exit MuJoCo ends its connection to EGL; what is registered after that runs before it
        self._free.atexit = False
        atexit.register(self._free)

    def render(self, poses: ScenePoses, out: CameraFrames | None = None) -> CameraFrames:
        """See :meth:`Camera.render`."""
        if not self._free.alive:
            raise LifecycleError(f"camera {self.spec.name!r} is closed; make a new one")
        check_poses(f"camera {self.spec.name!r}", self.model, poses)
        frames = frames_for(self.spec, len(poses), out)
        if self._watch.changed():
            for name in LOOKS:
                getattr(self._drawn, name)[:] = getattr(self.model, name)
            for name in ("ambient", "specular"):
                getattr(self._drawn.vis.headlight, name)[:] = getattr(self.model.vis.headlight, name)
        if self.free is not None:
            self.free.aim(self._view)
        self._gl.make_current()
        for i in range(len(poses)):
            self._pose(poses, i)
            flags = self._scene.flags
            if frames.rgb is not None or frames.gray is not None:
                flags[mujoco.mjtRndFlag.mjRND_SEGMENT] = flags[mujoco.mjtRndFlag.mjRND_IDCOLOR] = 0
                colors = self._read_colors()
                if frames.rgb is not None:
                    frames.rgb[i] = colors
                if frames.gray is not None:
                    to_gray(np.ascontiguousarray(colors).reshape(-1, 3), frames.gray[i].reshape(-1))
            if frames.depth is None and frames.segmentation is None:
                continue
            flags[mujoco.mjtRndFlag.mjRND_SEGMENT] = flags[mujoco.mjtRndFlag.mjRND_IDCOLOR] = 1
            ids = self._read_colors()
            if frames.depth is not None:
                frames.depth[i] = self._read_depth()
            if frames.segmentation is not None:
                frames.segmentation[i] = self._geom_ids(ids)
        return frames

    def close(self) -> None:
        """See :meth:`Camera.close`."""
        self._free()
        atexit.unregister(self._free)

    def _pose(self, poses: ScenePoses, i: int) -> None:
        """Fill the scene from row i; what geoms do not tell (tendons, sites) comes from the state."""
        model, data = self._drawn, self._data
        state, at = poses.state[i], 0
        for name in ("qpos", "mocap_pos", "mocap_quat"):
            field = getattr(data, name)
            field[:] = state[at : at + field.size].reshape(field.shape)
            at += field.size
        mujoco.mj_fwdPosition(model, data)
        for name, values in (poses.soft or {}).items():
            field = getattr(data, name)
            field[:] = values[i].reshape(field.shape)
        data.geom_xpos[:], data.geom_xmat[:] = poses.geom_pos[i], poses.geom_mat[i]
        data.site_xpos[:], data.site_xmat[:] = poses.site_pos[i], poses.site_mat[i]
        data.cam_xpos[:], data.cam_xmat[:] = poses.camera_pos[i], poses.camera_mat[i]
        data.light_xpos[:], data.light_xdir[:] = poses.light_pos[i], poses.light_dir[i]
        model.geom_size[:] = self.model.geom_size if poses.geom_size is None else poses.geom_size[i]
        model.geom_rgba[:] = self.model.geom_rgba if poses.geom_rgba is None else poses.geom_rgba[i]
        diffuse = base_diffuse(self.model) if poses.light_diffuse is None else poses.light_diffuse[i]
        model.vis.headlight.diffuse[:], model.light_diffuse[:] = diffuse[0], diffuse[1:]
        looks = poses.looks or {}
        for name in ROW_LOOKS:
            getattr(model, name)[:] = looks[name][i] if name in looks else getattr(self.model, name)
        # where a geom has no texture, the renderer takes that of the context's own table of materials
        self._mjr.mat_texid[: model.mat_texid.size] = model.mat_texid.ravel()
        mujoco.mjv_updateScene(
            model, data, self._option, None, self._view, int(mujoco.mjtCatBit.mjCAT_ALL), self._scene
        )
        if poses.geom_size is not None:
            for geom in self._scene.geoms[: self._scene.ngeom]:
                # the context keeps planes in the model's own sizes; without a number of its own one is scaled instead
                if geom.type == int(mujoco.mjtGeom.mjGEOM_PLANE) and (geom.size[:2] > 0).all():
                    geom.dataid = -1

    def _read_colors(self) -> NDArray[np.uint8]:
        mujoco.mjr_render(self._rect, self._scene, self._mjr)
        pixels = np.empty((self.spec.height, self.spec.width, 3), np.uint8)
        mujoco.mjr_readPixels(pixels, None, self._rect, self._mjr)
        return pixels[::-1]

    def _read_depth(self) -> NDArray[np.float32]:
        buffer = np.empty((self.spec.height, self.spec.width), np.float32)
        mujoco.mjr_readPixels(None, buffer, self._rect, self._mjr)
        view = self._scene.camera[0]
        near, far = float(view.frustum_near), float(view.frustum_far)
        depth = buffer[::-1].astype(np.float64)
        # the buffer holds 1 at the near plane and 0 at the far one; perspective makes it hyperbolic between
        if view.orthographic:
            return (far - depth * (far - near)).astype(np.float32)
        return (near * far / (near + depth * (far - near))).astype(np.float32)

    def _geom_ids(self, colors: NDArray[np.uint8]) -> NDArray[np.int32]:
        packed = colors.astype(np.int32) @ np.array([1, 256, 65536], np.int32)
        table = np.full(self._scene.ngeom + 2, -1, np.int32)
        for geom in self._scene.geoms[: self._scene.ngeom]:
            if geom.segid >= 0 and geom.objtype == int(mujoco.mjtObj.mjOBJ_GEOM):
                table[geom.segid + 1] = geom.objid
        return table[packed]


def _context(backend: str, width: int, height: int) -> Any:
    """Return an off-screen context; MuJoCo's modules raise various errors where the library is missing."""
    if backend not in _PACKAGES:
        raise ConfigError(f"backend: expected one of {', '.join(_PACKAGES)}, got {backend!r}")
    try:
        return importlib.import_module(f"mujoco.{backend}").GLContext(width, height)
    except (ImportError, AttributeError, RuntimeError) as error:
        raise ConfigError(
            f"the gl renderer: no {backend} context ({error}); on Debian run: apt-get install {_PACKAGES[backend]}, "
            "or use the native renderer, which needs no OpenGL"
        ) from error


def _free(gl: Any, mjr: Any) -> None:
    """Free under the camera's own context: under another one, MuJoCo would delete the other's buffers."""
    gl.make_current()
    mjr.free()
    gl.free()
