"""The mujoco-warp ray caster behind the camera protocol: made for CUDA, and it runs on a CPU too."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace._device import warp_launches
from headrace.errors import ConfigError, LifecycleError, require_extra
from headrace.sim.camera.camera import (
    CameraFrames,
    CameraSpec,
    ScenePoses,
    base_colors,
    camera_id,
    check_poses,
    frames_for,
    refuse_kinds,
)
from headrace.sim.mujoco_api import Model, mujoco
from headrace.sim.warp_sim import Worlds

_LOG = logging.getLogger("headrace.sim")


class WarpCamera:
    """A :class:`~headrace.sim.camera.camera.Camera` over ``mujoco_warp.render`` (``pip install 'headrace[warp]'``).

    Depth and segmentation agree with the other cameras; colors follow mujoco-warp's own lighting. Compiles at the
    first picture. Rows with colors and lights of their own are refused. No site is drawn: a warning says so where the
    other cameras would show some. :meth:`render` copies frames to the host; :meth:`draw` leaves them on the device.

    Args:
        model: the model that poses belong to.
        spec: which camera, and what to take.
        device: where to draw; ``cuda:0`` where there is one, else ``cpu``.
    """

    def __init__(self, model: Model, spec: CameraSpec, *, device: torch.device | str | None = None) -> None:
        purpose = "WarpCamera"
        self._wp: Any = require_extra("warp", extra="warp", purpose=purpose)
        self._mjw: Any = require_extra("mujoco_warp", extra="warp", purpose=purpose)
        refuse_kinds(spec, "warp", ("normals",))
        self.spec = spec
        self.model = model
        if camera_id(model, spec.name) < 0:
            raise ConfigError("the warp renderer: expected a camera of the model, got 'free'; use native or gl for it")
        _warn_of_sites(model, spec)
        self._wp.init()
        self.device = torch.device(device or ("cuda:0" if self._wp.is_cuda_available() else "cpu"))
        self._far = float(model.vis.map.zfar * model.stat.extent)
        self._sky = bool((model.tex_type == int(mujoco.mjtTexture.mjTEXTURE_SKYBOX)).any())
        self._capacity = 0
        self._closed = False
        with warp_launches(self.device):
            self._model: Any = self._mjw.put_model(model)

    def render(self, poses: ScenePoses, out: CameraFrames | None = None) -> CameraFrames:
        """See :meth:`Camera.render`."""
        self._check_open()
        check_poses(f"camera {self.spec.name!r}", self.model, poses)
        if not (poses.geom_rgba is None and poses.geom_size is None and poses.looks is None):
            raise ConfigError(
                "the warp renderer draws the model's colors, lights and sizes; use native or gl for looks"
            )
        n = len(poses)
        frames = frames_for(self.spec, n, out)
        if n == 0:
            return frames
        with warp_launches(self.device):
            self._reserve(n)
            data = replace(self._data, nworld=n)
            fields = {
                "geom_xpos": poses.geom_pos,
                "geom_xmat": poses.geom_mat,
                "cam_xpos": poses.camera_pos,
                "cam_xmat": poses.camera_mat,
                "light_xpos": poses.light_pos,
                "light_xdir": poses.light_dir,
            }
            for name, values in fields.items():
                target = getattr(data, name)[:n]
                if target.size:
                    target.assign(values.astype(np.float32).reshape(*target.shape, *target.dtype._shape_))
            self._mjw.refit_bvh(self._model, data, self._context)
            self._mjw.render(self._model, data, self._context)
            for kind, drawn in self._frames(n).items():
                getattr(frames, kind)[:] = drawn.cpu().numpy()
        return frames

    def draw(self, qpos: Tensor, mocap_pos: Tensor, mocap_quat: Tensor) -> dict[str, Tensor]:
        """Draw frames of joint positions and mocap poses, without the host: Warp computes what follows from them, too.

        One captured graph per power of two of rows; rows are padded to it with copies of the last one.

        Args:
            qpos: (n, nq), any float dtype, on ``device``.
            mocap_pos: (n, mocap bodies, 3).
            mocap_quat: (n, mocap bodies, 4).

        Returns:
            Kind of image → (n, height, width) and its channels, in the dtype of ``CameraFrames``, on ``device``; valid
            until the next call.
        """
        self._check_open()
        n = len(qpos)
        size = 1 << max(n - 1, 0).bit_length()
        with warp_launches(self.device):
            self._reserve(size)
        for name, rows in (("qpos", qpos), ("mocap_pos", mocap_pos), ("mocap_quat", mocap_quat)):
            if n and rows[0].numel():
                there = self._worlds.view(name)
                there[:n].copy_(rows)
                there[n:size].copy_(rows[-1:].expand(size - n, *rows.shape[1:]))
        if n:
            self._worlds.replay("draw", size, self._run, ())
        return self._frames(n)

    def close(self) -> None:
        """See :meth:`Camera.close`."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise LifecycleError(f"camera {self.spec.name!r} is closed; make a new one")

    def _run(self, model: Any, data: Any) -> None:
        for follow in (self._mjw.kinematics, self._mjw.com_pos, self._mjw.camlight):
            follow(model, data)
        self._mjw.refit_bvh(model, data, self._context)
        self._mjw.render(model, data, self._context)

    def _frames(self, n: int) -> dict[str, Tensor]:
        """Return what was drawn, as :meth:`draw` gives it."""
        shape = (n, self.spec.height, self.spec.width)
        kinds, found = self.spec.data_types, dict[str, Tensor]()
        if "rgb" in kinds or "gray" in kinds:
            # blue, green, red, alpha from the lowest byte on
            packed: Tensor = self._wp.to_torch(self._context.rgb_data)[:n].view(torch.uint8)
            found["rgb"] = packed.reshape(*shape, 4)[..., :3].flip(-1)
        if "gray" in kinds:
            red, green, blue = found["rgb"].to(torch.int32).unbind(-1)
            found["gray"] = ((red * 77 + green * 150 + blue * 29) >> 8).to(torch.uint8)
        if "depth" in kinds or "segmentation" in kinds:
            pairs: Tensor = self._wp.to_torch(self._context.seg_data)[:n].reshape(*shape, 2)
            is_geom = pairs[..., 1] == int(mujoco.mjtObj.mjOBJ_GEOM)
            found["segmentation"] = torch.where(is_geom, pairs[..., 0], -1)
            if "depth" in kinds:
                depth: Tensor = self._wp.to_torch(self._context.depth_data)[:n].reshape(shape)
                found["depth"] = torch.where(is_geom, depth, self._far)
        return {kind: found[kind] for kind in kinds}

    def _reserve(self, rows: int) -> None:
        if rows <= self._capacity:
            return
        want = self.spec.data_types
        self._data: Any = self._mjw.make_data(self.model, nworld=rows)
        self._context: Any = self._mjw.create_render_context(
            self.model,
            nworld=rows,
            cam_res=(self.spec.width, self.spec.height),
            render_rgb="rgb" in want or "gray" in want,
            render_depth="depth" in want,
            # the background of a depth picture is told by the segmentation
            render_seg="segmentation" in want or "depth" in want,
            cam_active=[self.spec.name],
            enabled_geom_groups=list(self.spec.groups),
            render_skybox=self._sky,
        )
        self._worlds = Worlds(self._wp, self.device, self._model, self._data)
        self._capacity = rows


def _warn_of_sites(model: Model, spec: CameraSpec) -> None:
    visible = np.isin(model.site_group, spec.shown_sites) & (base_colors(model, "site")[0, :, 3] > 0)
    if visible.any():
        _LOG.warning(
            "camera %r: mujoco-warp draws no sites, and %d of this model would be shown; renderer='native' draws them",
            spec.name,
            visible.sum(),
        )
