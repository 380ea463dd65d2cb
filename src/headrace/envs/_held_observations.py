"""The held observations: what each environment showed last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from headrace._kernels.threads import available_cores
from headrace.sim import Simulation
from headrace.types import Obs, StateDict

if TYPE_CHECKING:
    from headrace.envs._episode_state import EpisodeState
    from headrace.envs._image_spec import ImageSpec
    from headrace.envs._images import EnvImages, Pixels

FLOAT32_MAX = torch.finfo(torch.float32).max
_DTYPES = {"float32": torch.float32, "uint8": torch.uint8, "int32": torch.int32}
_NO_FLAGS = np.empty(0, np.bool_)


class HeldObservations:
    """What N environments hold: numbers, group → (N, …), and the cameras that keep the pixels of the other groups.

    A row changes when its environment acted and is observed; all others stay as they are. Callers get copies.
    """

    def __init__(
        self, space: spaces.Dict, pictures: Mapping[str, ImageSpec], sim: Simulation, threads: int | None
    ) -> None:
        self._sim = sim
        self._held: Obs = {
            name: torch.zeros((sim.num_envs, *(box.shape or ())), dtype=_DTYPES[str(box.dtype)], device=sim.device)
            for name, box in space.spaces.items()
            if name not in pictures
        }
        self._groups = list(space.spaces)
        self._numbers = list(self._held)
        # views of the numbers; numba and numpy are quicker than torch on a handful of rows
        self._arrays = {name: self._held[name].numpy() for name in self._numbers} if sim.device.type == "cpu" else {}
        self._lines = tuple(self._arrays.values())
        if self._arrays:
            from headrace._kernels import episodes

            self._kernels = episodes
        self._cameras: list[EnvImages] = []
        self._pixels: dict[str, Pixels] = {}
        if pictures:
            from headrace.envs._images import group_images  # loads renderers: only for tasks that look

            self._cameras = group_images(pictures, sim, threads or available_cores())
            self._pixels = {name: pixels for camera in self._cameras for name, pixels in camera.pixels.items()}
        self.has_cameras = bool(self._cameras)
        """Whether some group is filled by a camera."""

    @property
    def frames_drawn(self) -> int:
        """How many camera frames have been rendered so far."""
        return sum(camera.frames_drawn for camera in self._cameras)

    def post(self, ids: Tensor, obs: Obs, reward: Tensor, failed: Tensor | None) -> Tensor | None:
        """Show the rows that acted, but for what cameras see.

        A row is diverged if its simulation failed or if it has a number that float32 cannot hold: it keeps what it
        showed before.

        Args:
            ids: the environments that acted, int64 (n,).
            obs: the groups that the task computes, float64 (n, F).
            reward: float64 (n,).
            failed: bool (n,); None for none.

        Returns:
            bool (n,): the diverged rows; None if it is known that there are none.
        """
        if self._arrays:
            rows, flags = ids.numpy(), _NO_FLAGS if failed is None else failed.numpy()
            diverged = np.empty(len(rows), np.bool_)
            count = self._kernels.post_rows(rows, self._values(obs), self._lines, reward.numpy(), flags, diverged)
            return torch.from_numpy(diverged) if count else None
        fine = reward.abs() <= FLOAT32_MAX
        for name in self._numbers:
            fine &= (obs[name].abs() <= FLOAT32_MAX).all(dim=1)
        if failed is not None:
            fine &= ~failed
        for name in self._numbers:
            held = self._held[name]
            kept = torch.where(fine[:, None], obs[name].to(held.dtype), held.index_select(0, ids))
            held.index_copy_(0, ids, kept)
        # whether a row on a GPU is not fine is not asked here: the host would wait for the answer
        return None if fine.is_cpu and bool(fine.all()) else ~fine

    def show(self, ids: Tensor, obs: Obs) -> None:
        """Show the first observation of episodes that begin in ``ids`` (m,), groups of float64 (m, F); as ``post``."""
        if self._arrays:
            self._kernels.scatter_rows(ids.numpy(), self._values(obs), self._lines)
        else:
            for name in self._numbers:
                self._held[name][ids] = obs[name].to(self._held[name].dtype)

    def note_poses(self, rows: NDArray[np.int64], ids: Tensor, *, begins: bool = False) -> None:
        """Note for the cameras what is to be seen of environments; see :meth:`EnvImages.push`."""
        for camera in self._cameras:
            camera.push(rows, ids, begins=begins)

    def draw(self, rows: NDArray[np.int64], episodes: EpisodeState) -> None:
        """Render the pictures of environments ``rows`` (n,), on the host, which are in the episodes of ``episodes``."""
        for camera in self._cameras:
            camera.draw(rows, episodes)

    def array(self) -> NDArray[np.float32]:
        """The memory itself, (N, F), of a task on the CPU with the one group ``policy`` of numbers."""
        return self._arrays["policy"]

    def rows(self, ids: Tensor | None = None) -> Obs:
        """Some rows, or all, fresh."""
        found: Obs = {}
        for name in self._groups:
            if name in self._pixels:
                found[name] = self._pixels[name].observe(ids)
            elif name in self._arrays:
                array = self._arrays[name]
                found[name] = torch.from_numpy(array.copy() if ids is None else array[ids.numpy()])
            else:
                held = self._held[name]
                found[name] = held.clone() if ids is None else held.index_select(0, ids)
        return found

    def last(self, ids: Tensor) -> Obs:
        """(N, …), fresh: the rows ``ids`` (m,) of episodes that ended; images of other rows are zeros."""
        return {
            name: self._pixels[name].last(ids) if name in self._pixels else self._held[name].clone()
            for name in self._groups
        }

    def state_dict(self) -> StateDict:
        """Held numbers, and what the cameras hold, as copies."""
        held = {name: values.clone() for name, values in self._held.items()}
        return {"held": held, "cameras": {min(camera.specs): camera.state_dict() for camera in self._cameras}}

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from :meth:`state_dict`."""
        for camera in self._cameras:
            camera.load_state_dict(state["cameras"][min(camera.specs)])
        for name, values in self._held.items():
            values.copy_(state["held"][name])

    def close(self) -> None:
        """Release the cameras."""
        for camera in self._cameras:
            camera.close()

    def _values(self, obs: Obs) -> tuple[NDArray[np.float64], ...]:
        return tuple([np.ascontiguousarray(obs[name].numpy()) for name in self._numbers])
