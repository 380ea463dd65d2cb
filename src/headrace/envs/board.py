"""The board: the observation that each environment shows until it shows another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from gymnasium import spaces
from torch import Tensor

from headrace.sim import Simulation, default_threads
from headrace.types import Obs, StateDict

if TYPE_CHECKING:
    from headrace.envs.picture_spec import PictureSpec
    from headrace.envs.pictures import Pictures

_DTYPES = {"float32": torch.float32, "uint8": torch.uint8}


class Board:
    """Owns the held observation of N environments, group → (N, …), and the cameras that fill some of its groups.

    A row changes when its environment acted and is observed; all others stay as they are. Callers get copies.
    """

    def __init__(
        self, space: spaces.Dict, pictures: Mapping[str, PictureSpec], sim: Simulation, threads: int | None
    ) -> None:
        self._sim = sim
        self._held: Obs = {
            name: torch.zeros((sim.num_envs, *(box.shape or ())), dtype=_DTYPES[str(box.dtype)], device=sim.device)
            for name, box in space.spaces.items()
        }
        self._numbers = [name for name in self._held if name not in pictures]
        self._cameras: dict[str, Pictures] = {}
        if pictures:
            from headrace.envs.pictures import Pictures  # compiles the ray caster: only for tasks that look

            self._cameras = {
                name: Pictures(spec, sim.model, sim.num_envs, threads or default_threads())
                for name, spec in pictures.items()
            }

    @property
    def has_cameras(self) -> bool:
        """Whether some group is filled by a camera."""
        return bool(self._cameras)

    @property
    def frames_drawn(self) -> int:
        """How many camera frames have been rendered so far."""
        return sum(camera.frames_drawn for camera in self._cameras.values())

    def write(self, ids: Tensor | None, obs: Obs, keep: Tensor | None) -> None:
        """Write the rows' numbers, float64 (n, …), and note their poses for the cameras, without drawing.

        Args:
            ids: int64 (n,); None for all.
            obs: the groups that the task computes.
            keep: rows (not environments) to write, int64; None for all. A diverged row keeps its last finite one.
        """
        if keep is not None:
            everyone = torch.arange(self._sim.num_envs, device=self._sim.device) if ids is None else ids
            ids, obs = everyone.index_select(0, keep), {name: obs[name].index_select(0, keep) for name in self._numbers}
        for name in self._numbers:
            held, values = self._held[name], obs[name]
            if ids is None:
                held.copy_(values)
            else:
                held[ids] = values.to(held.dtype)
        if self._cameras:
            everyone = torch.arange(self._sim.num_envs, device=self._sim.device) if ids is None else ids
            qpos = self._sim.field("qpos").index_select(0, everyone).cpu()
            for camera in self._cameras.values():
                camera.push(everyone.cpu(), qpos)

    def begin(self, ids: Tensor) -> None:
        """Forget the camera history of environments that begin an episode."""
        for camera in self._cameras.values():
            camera.begin(ids.cpu())

    def draw(self, ids: Tensor) -> None:
        """Render the pictures of ``ids`` (n,)."""
        if not len(ids):
            return
        for name, camera in self._cameras.items():
            held = self._held[name]
            held[ids] = camera.draw(ids.cpu()).to(held.device)

    def copy(self) -> Obs:
        """All rows, fresh."""
        return {name: held.clone() for name, held in self._held.items()}

    def rows(self, ids: Tensor) -> Obs:
        """Some rows, fresh."""
        return {name: held.index_select(0, ids) for name, held in self._held.items()}

    def state_dict(self) -> StateDict:
        """Held observations and camera histories, as copies."""
        return {"held": self.copy(), "cameras": {name: camera.state_dict() for name, camera in self._cameras.items()}}

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from :meth:`state_dict`."""
        for name, camera in self._cameras.items():
            camera.load_state_dict(state["cameras"][name])
        for name, values in self._held.items():
            values.copy_(state["held"][name])

    def close(self) -> None:
        """Release the cameras."""
        for camera in self._cameras.values():
            camera.close()
