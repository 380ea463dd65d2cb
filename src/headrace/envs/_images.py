"""Camera observations: a history of poses, and pixels only where somebody will look.

An environment's last K frames are kept as joint positions, a few numbers each. The pixels beside them are a cache with
valid bits: a K-stack that is read once in 16 steps draws K frames, not 16, and is equal, bit for bit, to the stack of
an environment that drew every step, because a frame is a pure function of its pose and of its episode's looks.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.envs._episode_state import EpisodeState
from headrace.envs._image_spec import ImageSpec
from headrace.errors import DataError, ShapeError
from headrace.sim._appearance import AS_MODELLED, Appearance
from headrace.sim._camera import PoseReader
from headrace.sim._camera_names import make_camera
from headrace.sim._mujoco_api import Model
from headrace.types import StateDict
from headrace.vision import Channels, FrameStack


class EnvImages:
    """The camera of one observation group over N environments.

    Owns a ring of poses, float64 (N, K, S); the pixels are a :class:`~headrace.vision.FrameStack`. Stacks it hands out
    are fresh.
    """

    def __init__(self, spec: ImageSpec, model: Model, num_envs: int, threads: int) -> None:
        self.spec = spec
        self.frames_drawn = 0
        """How many frames have been rendered so far."""
        self._reader = PoseReader(model, threads=threads)
        self._camera = make_camera(spec.renderer, model, spec.camera, threads=threads)
        self._model = model
        self._looks: Appearance | None = None
        channels: Channels = "last" if spec.layout == "channels_last" else "first"
        shape = spec.frame_shape
        self._stack = FrameStack(
            spec.stack, num_envs=num_envs, frame_shape=shape, channels=channels, normalize=spec.normalize
        )
        self._poses = np.zeros((num_envs, spec.frames, model.nq))
        self._head = np.zeros(num_envs, np.int64)
        self._count = np.zeros(num_envs, np.int64)

    def begin(self, ids: Tensor) -> None:
        """Forget the history of ``ids`` (m,): their next pose is the first of an episode."""
        self._count[ids.numpy()] = 0
        self._stack.reset(ids)

    def push(self, ids: Tensor, qpos: Tensor) -> None:
        """Append the poses float64 (n, nq) of ``ids`` (n,), without drawing anything."""
        rows = ids.numpy()
        head = (self._head[rows] + 1) % self.spec.frames
        self._head[rows] = head
        self._poses[rows, head] = qpos.numpy()
        self._count[rows] = np.minimum(self._count[rows] + 1, self.spec.frames)
        self._stack.skip(ids)

    def draw(self, ids: Tensor, held: Tensor, episodes: EpisodeState) -> None:
        """Write the stacks of ``ids`` (n,) into their rows of ``held``, uint8 or float32 (N, …).

        What was not rendered yet is rendered now, with the looks of their episodes.
        """
        missing = self._stack.missing(ids)
        if len(missing):
            envs = missing.env_ids.numpy()
            # what lies before the episode is its first frame, which may stand in a stack several times: drawn once
            lags = np.minimum(missing.lags.numpy(), self._count[envs] - 1)
            places = envs * self.spec.frames + (self._head[envs] - lags) % self.spec.frames
            wanted, where = np.unique(places, return_inverse=True)
            episode_ids = episodes.episode_ids.cpu().numpy()[wanted // self.spec.frames]
            frames = self._rendered(self._poses.reshape(-1, self._poses.shape[-1])[wanted], episodes.seed, episode_ids)
            self.frames_drawn += len(wanted)
            # unique places come sorted, the missing ones oldest first: the same order only without a wrap of the ring
            in_order = np.array_equal(wanted, places)
            self._stack.fill(missing, torch.from_numpy(frames if in_order else frames[where]))
        self._stack.show(ids, held)

    def state_dict(self) -> StateDict:
        """Poses and positions; pixels are drawn again when they are needed."""
        arrays = {"poses": self._poses, "head": self._head, "count": self._count}
        return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from :meth:`state_dict` of a camera of the same shape."""
        if tuple(state["poses"].shape) != self._poses.shape:
            raise DataError(
                f"snapshot: expected poses of shape {self._poses.shape}, got {tuple(state['poses'].shape)}; "
                "load it into an environment with the same frame stack"
            )
        self._poses[:] = state["poses"].numpy()
        self._head[:] = state["head"].numpy()
        self._count[:] = state["count"].numpy()
        self._stack.reset()
        # every frame counts as not rendered: those of each environment's episode so far, oldest first
        counts = torch.from_numpy(self._count)
        for age in range(self.spec.frames):
            self._stack.skip(counts > age)

    def close(self) -> None:
        """Release the camera."""
        self._camera.close()

    def _rendered(self, qpos: NDArray[np.float64], seed: int, episodes: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Frames of poses (m, nq) in episodes (m,), in the layout of the observation, uint8 (m, …)."""
        poses = self._reader.read(qpos)
        if self.spec.looks != AS_MODELLED:
            if self._looks is None or self._looks.seed != seed:
                self._looks = Appearance(self._model, self.spec.looks, seed=seed)
            poses = self._looks.apply(poses, episodes)
        rgb = self._camera.render(poses).rgb
        if rgb is None:
            raise ShapeError(f"camera {self.spec.camera.name!r}: expected data_types to have rgb")
        if self.spec.color == "gray":
            # Rec. 601 in integers: the same on every machine
            weighted = rgb[..., 0] * np.uint32(77) + rgb[..., 1] * np.uint32(150) + rgb[..., 2] * np.uint32(29)
            rgb = (weighted >> 8).astype(np.uint8)[..., None]
        return rgb if self.spec.layout == "channels_last" else np.ascontiguousarray(np.moveaxis(rgb, -1, 1))
