"""Camera observations: a history of what was to be seen, and pixels only where somebody will look.

An environment's last K frames are kept as rows of numbers (joint positions, mocap poses, model fields that differ
between environments), a few each. The pixels beside them are a cache that may be behind: a K-stack that is read once in
16 steps draws K frames, not 16, and is equal, bit for bit, to the stack of an environment that drew every step, because
a frame is a pure function of its row and of its episode's looks. The pixels are also what an environment holds whose
observation nobody reads: they change when it is drawn, and at no other time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace._device import to_device
from headrace.buffers._ordered import OrderedFrames
from headrace.buffers._output import StackOutput, anonymous
from headrace.envs._episode_state import EpisodeState
from headrace.envs._image_spec import ImageSpec
from headrace.errors import ConfigError, DataError
from headrace.ids import EnvRows
from headrace.sim import Simulation
from headrace.sim._appearance import AS_MODELLED, Appearance
from headrace.sim._camera import PICTURE_FIELDS, PoseReader, ScenePoses
from headrace.sim._camera_names import make_camera
from headrace.sim._warp_camera import WarpCamera
from headrace.types import StateDict
from headrace.vision import image_observation

_SPARSE = 1 << 18
"""Below this many bytes zeros are written: a process has a limited number of mappings, and callers may keep many."""

_SEEN = ("geom_", "site_", "cam_", "light_", "mat_", "tex_", "mesh_", "hfield_", "skin_", "vis.", "stat.")
"""Model fields that begin so may change a picture."""
_UNSEEN = (
    *("geom_friction", "geom_margin", "geom_gap", "geom_solref", "geom_solimp", "geom_solmix", "geom_contype"),
    *("geom_conaffinity", "geom_condim", "geom_priority", "geom_fluid", "geom_user", "geom_rbound", "geom_aabb"),
    *("site_user", "cam_user"),
)
"""Those of them that do not."""


def group_images(pictures: Mapping[str, ImageSpec], sim: Simulation, threads: int) -> list[EnvImages]:
    """One :class:`EnvImages` for all groups that show the same frames in different kinds."""
    together: dict[ImageSpec, dict[str, ImageSpec]] = {}
    for name, spec in pictures.items():
        together.setdefault(spec.source, {})[name] = spec
    return [EnvImages(specs, sim, threads) for specs in together.values()]


class EnvImages:
    """The camera of some observation groups over N environments.

    Owns a ring of rows, float64 (N, K, S), and the :class:`Pixels` of each group. Which row stands where is kept on the
    host. The rows are there, too, unless the camera draws from positions on the device, as Warp's does: then neither
    rows nor frames leave it.

    Environments are int64 (n,) arrays of the host.
    """

    def __init__(self, specs: Mapping[str, ImageSpec], sim: Simulation, threads: int) -> None:
        self.specs = dict(specs)
        self.frames_drawn = 0
        """How many frames have been rendered so far, of whatever kinds."""
        first = next(iter(specs.values()))
        self._looks_spec, self._length, self._repeats = first.looks, first.frames, first.reset == "repeat"
        kinds = tuple(dict.fromkeys(spec.kind for spec in specs.values()))
        self._camera = make_camera(
            first.renderer_on(sim.device),
            sim.model,
            replace(first.camera, data_types=kinds),
            threads=threads,
            device=sim.device,
        )
        if isinstance(self._camera, WarpCamera) and self._looks_spec != AS_MODELLED:
            raise ConfigError(
                "ImageSpec: the warp renderer, which auto means on a GPU, draws the model's own looks; leave looks "
                "out, or use renderer='native', which draws on the host"
            )
        raw: Any = sim.model
        self._far = float(raw.vis.map.zfar * raw.stat.extent)
        self._model = sim.model
        self._looks: Appearance | None = None
        self.pixels = {name: Pixels(spec, sim.num_envs, sim.device) for name, spec in specs.items()}
        """By group: what each environment showed last."""
        self._state = SceneState(sim, threads=threads)
        self._columns = self._state.columns
        # a camera that draws from positions alone: they need not come to the host
        self._stay = isinstance(self._camera, WarpCamera) and not self._state.has_fields
        self._rows = torch.zeros(
            (sim.num_envs, self._length, self._state.width),
            dtype=torch.float64,
            device=sim.device if self._stay else "cpu",
        )
        self._head = np.zeros(sim.num_envs, np.int64)
        self._count = np.zeros(sim.num_envs, np.int64)
        self._behind = np.zeros(sim.num_envs, np.int64)

    def push(self, rows: NDArray[np.int64], ids: Tensor, *, begins: bool) -> None:
        """Append what is to be seen of environments ``rows`` (n,) now, without drawing anything.

        Args:
            rows: the environments, on the host.
            ids: the same on the device.
            begins: whether they begin an episode: what was seen of the last one is forgotten.
        """
        if begins:
            self._count[rows] = 0
        self._follow_fields()
        head = (self._head[rows] + 1) % self._length
        self._head[rows] = head
        seen = self._state.take(ids)
        if self._stay:
            self._rows.flatten(0, 1).index_copy_(0, _there(rows * self._length + head, self._rows.device), seen)
        else:
            self._rows.numpy()[rows, head] = seen.cpu().numpy()
        # the first frame of an episode makes the whole stack new
        added = np.where(self._count[rows] == 0, self._length, 1)
        self._behind[rows] = np.minimum(self._behind[rows] + added, self._length)
        self._count[rows] = np.minimum(self._count[rows] + 1, self._length)

    def draw(self, rows: NDArray[np.int64], episodes: EpisodeState) -> None:
        """Bring the pixels of environments up to date.

        What was not rendered yet is rendered now, with the looks of the episodes that ``episodes`` are in.
        """
        late = rows[self._behind[rows] > 0]
        if not len(late):
            return
        behind = self._behind[late]
        envs = np.repeat(late, behind)
        # within each environment from the oldest missing frame to the newest
        lags = np.repeat(np.cumsum(behind), behind) - np.arange(len(envs)) - 1
        before = lags >= self._count[envs]
        if not self._repeats and before.any():
            # zeros, which nobody draws
            envs, lags = envs[~before], lags[~before]
        # what lies before the episode is its first frame, which may stand in a stack several times: drawn once
        shown = np.minimum(lags, self._count[envs] - 1)
        places = envs * self._length + (self._head[envs] - shown) % self._length
        wanted, where = np.unique(places, return_inverse=True)
        frames = self._render(wanted, episodes)
        self.frames_drawn += len(wanted)
        for name, spec in self.specs.items():
            frame = self._as_frame(spec, frames[spec.kind])
            self.pixels[name].update(late, behind, envs, self._length - 1 - lags, frame, where)
        self._behind[late] = 0

    def state_dict(self) -> StateDict:
        """Rows, positions and pixels, as copies."""
        arrays = {"head": self._head, "count": self._count, "behind": self._behind}
        copies: StateDict = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        copies["poses"] = self._rows.clone()
        return copies | {"pixels": {name: pixels.data.clone() for name, pixels in self.pixels.items()}}

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from :meth:`state_dict` of a camera of the same shape; the simulation was loaded before."""
        self._follow_fields()
        if state["poses"].shape != self._rows.shape:
            raise DataError(
                f"snapshot: expected poses of shape {tuple(self._rows.shape)}, got {tuple(state['poses'].shape)}; "
                "load it into an environment with the same frame stack and randomization"
            )
        self._rows.copy_(state["poses"])
        self._head[:] = state["head"].numpy()
        self._count[:] = state["count"].numpy()
        self._behind[:] = state["behind"].numpy()
        for name, pixels in self.pixels.items():
            pixels.data.copy_(state["pixels"][name])

    def close(self) -> None:
        """Release the camera."""
        self._camera.close()

    def _follow_fields(self) -> None:
        """Make room for model fields that have a value per environment from now on."""
        if self._state.refresh():
            self._rows = torch.from_numpy(self._state.widen(self._rows.cpu().numpy(), self._columns))
            self._columns, self._stay = self._state.columns, False

    def _render(self, places: NDArray[np.int64], episodes: EpisodeState) -> Mapping[str, Tensor]:
        """Frames (m, height, width, …) of the rows at ``places`` (m,) of the ring, by kind."""
        if isinstance(self._camera, WarpCamera) and self._stay:
            seen = self._rows.flatten(0, 1).index_select(0, _there(places, self._rows.device))
            return self._camera.draw(*self._state.positions(seen))
        poses = self._state.poses(self._rows.flatten(0, 1).numpy()[places])
        if self._looks_spec != AS_MODELLED:
            if self._looks is None or self._looks.seed != episodes.seed:
                self._looks = Appearance(self._model, self._looks_spec, seed=episodes.seed)
            poses = self._looks.apply(poses, episodes.episode_ids.cpu().numpy()[places // self._length])
        frames = self._camera.render(poses)
        return {kind: torch.from_numpy(getattr(frames, kind)) for kind in self._camera.spec.data_types}

    def _as_frame(self, spec: ImageSpec, frame: Tensor) -> Tensor:
        """One kind of image in the form of its group: channel axis, layout, and what stands for nothing."""
        if frame.dim() == 3:
            frame = frame[..., None]
        if spec.layout == "channels_first":
            frame = frame.movedim(-1, 1).contiguous()
        if spec.kind == "depth" and spec.missing is not None:
            far = torch.full((), self._far, dtype=frame.dtype, device=frame.device)
            frame = torch.where(frame >= far, torch.inf, frame)
        if spec.kind == "depth" and (spec.missing is not None or spec.normalize):
            return image_observation("depth", frame, missing=spec.missing or 0.0, max_depth=spec.max_depth)
        if spec.kind == "normals" and spec.normalize:
            return image_observation("normals", frame)
        return frame


class SceneState:
    """Reads rows from a simulation: qpos, mocap poses, and the model fields that have a value per environment.

    A model field that changes what is seen and that cameras cannot draw per environment is an error, never a picture of
    the nominal model.
    """

    def __init__(self, sim: Simulation, *, threads: int = 1) -> None:
        self._sim = sim
        self._reader = PoseReader(sim.model, threads=threads)
        model: Any = sim.model
        self._positions = {"qpos": (model.nq,), "mocap_pos": (model.nmocap, 3), "mocap_quat": (model.nmocap, 4)}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.columns: dict[str, slice] = {}
        """Name of a quantity → its columns in a row."""
        self.width = 0
        """Numbers in a row."""
        self.refresh()

    def refresh(self) -> bool:
        """Notice model fields that got a value per environment; whether there are new ones."""
        expanded = self._sim.expanded
        for name in expanded:
            if name.startswith(_SEEN) and not name.startswith(_UNSEEN) and name not in PICTURE_FIELDS:
                raise ConfigError(
                    f"camera: {name!r} differs between environments, and pictures cannot show that; randomize one of "
                    f"{', '.join(PICTURE_FIELDS)}, or the looks of the camera"
                )
        shapes = self._positions | {
            name: np.shape(getattr(self._sim.model, name)) for name in PICTURE_FIELDS if name in expanded
        }
        if shapes == self._shapes:
            return False
        self._shapes, self.columns, self.width = shapes, {}, 0
        for name, shape in shapes.items():
            self.columns[name] = slice(self.width, self.width + math.prod(shape))
            self.width = self.columns[name].stop
        return True

    @property
    def has_fields(self) -> bool:
        """Whether rows hold more than positions."""
        return len(self._shapes) > len(self._positions)

    def take(self, ids: Tensor | None) -> Tensor:
        """Rows of the environments ``ids`` (n,), or of all: float64 (n, width), fresh, where the simulation is."""
        sim = self._sim
        rows = sim.num_envs if ids is None else len(ids)
        parts: list[Tensor] = [torch.empty((rows, 0), dtype=torch.float64, device=sim.device)]
        for name, shape in self._shapes.items():
            if math.prod(shape):
                part = sim.field(name) if name in self._positions else sim.expanded[name]
                parts.append((part if ids is None else part.index_select(0, ids)).flatten(1))
        if sim.device.type == "cpu":
            return torch.from_numpy(np.concatenate([part.numpy() for part in parts], axis=1, dtype=np.float64))
        return torch.cat([part.to(torch.float64) for part in parts], dim=1)

    def widen(self, rows: NDArray[np.float64], before: Mapping[str, slice]) -> NDArray[np.float64]:
        """Rows (…, width) that were taken when the columns were ``before``: what was not there yet was nominal."""
        wide = np.empty((*rows.shape[:-1], self.width))
        for name, columns in self.columns.items():
            known = name in before
            wide[..., columns] = rows[..., before[name]] if known else np.ravel(getattr(self._sim.model, name))
        return wide

    def positions(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Joint positions (n, nq), mocap positions (n, m, 3) and quaternions (n, m, 4) of rows (n, width): views."""
        qpos, places, turns = (rows[:, self.columns[name]] for name in ("qpos", "mocap_pos", "mocap_quat"))
        return qpos, places.unflatten(1, self._shapes["mocap_pos"]), turns.unflatten(1, self._shapes["mocap_quat"])

    def poses(self, rows: NDArray[np.float64]) -> ScenePoses:
        """The poses of rows (n, width)."""
        parts = {name: rows[:, self.columns[name]].reshape(len(rows), *shape) for name, shape in self._shapes.items()}
        qpos, places, turns = parts.pop("qpos"), parts.pop("mocap_pos"), parts.pop("mocap_quat")
        return self._reader.read(qpos, places, turns, fields=parts)


class Pixels:
    """The newest K frames of N environments as they were last drawn, in the dtype that the camera gives.

    Owns this one copy: observations are written from it straight into the tensor that the caller receives, and
    normalized on the way. Ids are int64, checked before.
    """

    def __init__(self, spec: ImageSpec, num_envs: int, device: torch.device) -> None:
        dtype = torch.from_numpy(np.empty(0, spec.dtype)).dtype
        shape, axis = spec.frame_shape, spec.stack.axis(len(spec.frame_shape))
        self._frames = OrderedFrames(spec.frames, num_envs, shape, axis, dtype, device)
        self.data = self._frames.data
        """The frames themselves, (N, …, K, …): the memory, not a copy."""
        self._output = StackOutput(
            spec.stack,
            shape,
            dtype,
            "last" if spec.layout == "channels_last" else "first",
            # numbers that are no colors were normalized frame by frame
            normalize=spec.normalize and spec.dtype == np.uint8,
        )
        self._length = spec.frames
        # on the CPU the host's numbers are where they are needed
        self._there = torch.from_numpy if device.type == "cpu" else partial(_there, device=device)
        self._one = torch.ones(num_envs, dtype=torch.int64, device=device)
        self._still, self._first = (torch.full((num_envs,), flag, device=device) for flag in (False, True))

    def update(
        self,
        ids: NDArray[np.int64],
        by: NDArray[np.int64],
        envs: NDArray[np.int64],
        slots: NDArray[np.int64],
        new: Tensor,
        source: NDArray[np.int64],
    ) -> None:
        """Bring stacks up to date.

        Args:
            ids: (n,): whose stacks.
            by: (n,), at least 1: how many frames each is behind; so many of its newest slots are empty then.
            envs: (m,): the environment of each empty slot that gets a frame; the others become zero.
            slots: (m,): that slot, 0 = oldest.
            new: (k, *frame_shape) on the CPU, or where the stacks are.
            source: (m,): which of ``new`` goes there.
        """
        new = new if new.device == self.data.device else to_device(new, self.data.device)
        where = EnvRows(len(self.data), self._there(ids), None)
        first, count = int(by[0]), len(self.data)
        alike = first in (1, self._length) and (by == first).all()
        if alike and np.array_equal(source, np.repeat(np.arange(len(ids)), by)):
            # one new frame each, as in every step that is read (moved and written in one pass), or in every slot
            fill = self._first if first == self._length else self._still
            self._frames.push(new, where, by=self._one, fill=fill)
            return
        if len(envs) < by.sum():
            lacking = ids[by > np.bincount(envs, minlength=count)[ids]]
            self.data.index_fill_(0, self._there(lacking), 0)
        if (by < self._length).any():
            steps = np.ones(count, np.int64)
            steps[ids] = by
            self._frames.push(None, where, by=self._there(steps), fill=self._still)
        self._frames.write(self._there(envs), self._there(slots), new, self._there(source))

    def observe(self, ids: Tensor | None) -> Tensor:
        """The stacks of ``ids`` (n,), or of all, as last drawn: fresh."""
        return self._output.take(self.data, ids)

    def last(self, ids: Tensor) -> Tensor:
        """(N, …), fresh: the stacks of ``ids`` (m,) in their rows, and zeros in all others, which cost nothing."""
        shape, dtype = (self.data.shape[0], *self._output.shape), self._output.dtype
        nbytes = math.prod(shape) * dtype.itemsize
        if self.data.device.type == "cpu" and nbytes >= _SPARSE:
            memory = anonymous(nbytes, sparse=True)
            out = torch.from_numpy(memory).view(dtype).view(shape)
        else:
            out = torch.zeros(shape, dtype=dtype, device=self.data.device)
        self._output.put(self.data, ids, out)
        return out


def _there(numbers: NDArray[Any], device: torch.device) -> Tensor:
    return to_device(torch.from_numpy(numbers), device)
