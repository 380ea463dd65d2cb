"""What each environment showed last: numbers, and pictures that are drawn only where they will be read.

An environment's last K frames are kept as rows of numbers (joint positions, mocap poses, model fields that differ
between environments), a few each. The pixels beside them are a cache that may be behind: a K-stack that is read once in
16 steps draws K frames, not 16, and is equal, bit for bit, to the stack of an environment that drew every step, because
a frame is a pure function of its row and of its episode's looks. The pixels are also what an environment holds whose
observation that is not read: they change when it is drawn, and at no other time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from headrace._kernels.compiled import kernel
from headrace._kernels.threads import available_cores
from headrace.envs._episode_state import F32, F64, I64, EpisodeState, Flags
from headrace.envs._sensors import Pixels, Sensor, add_noise, average_samples, there_on
from headrace.envs.image_spec import ImageSpec
from headrace.errors import ConfigError, DataError
from headrace.history import image_observation
from headrace.sim import Simulation
from headrace.sim.camera.appearance import AS_MODELLED, Appearance
from headrace.sim.camera.camera import PoseReader, SceneState
from headrace.sim.camera.names import make_camera
from headrace.sim.camera.warp_camera import WarpCamera
from headrace.types import Obs, StateDict

FLOAT32_MAX = float(np.finfo(np.float32).max)
_DTYPES = {"float32": torch.float32, "uint8": torch.uint8, "int32": torch.int32}
_NO_FLAGS = np.empty(0, np.bool_)


@kernel()
def post_rows(
    ids: I64, groups: tuple[F64, ...], held: tuple[F32, ...], reward: F64, failed: Flags, diverged: Flags
) -> int:
    """Write the rows whose numbers float32 can hold, and name the others.

    Inputs: ``ids`` (n,), ``groups`` of (n, F), ``reward`` (n,), ``failed`` (n,) or (0,) for none. Outputs: rows of
    ``held``, (N, F) per group, and ``diverged`` (n,). Returns the number of diverged rows, which are not written.
    """
    count = 0
    any_failed = failed.shape[0] > 0
    for row in range(ids.shape[0]):
        # written so that NaN is not fine either
        fine = abs(reward[row]) <= FLOAT32_MAX and not (any_failed and failed[row])
        for group in range(len(groups)):
            for column in range(groups[group].shape[1]):
                fine &= abs(groups[group][row, column]) <= FLOAT32_MAX
        diverged[row] = not fine
        if fine:
            for group in range(len(groups)):
                for column in range(groups[group].shape[1]):
                    held[group][ids[row], column] = groups[group][row, column]
        else:
            count += 1
    return count


class HeldObservations:
    """What N environments hold: numbers, group → (N, …), and the cameras that keep the pixels of the other groups.

    A row changes when its environment acted and is observed; all others stay as they are. Callers get copies.
    """

    def __init__(
        self,
        space: spaces.Dict,
        pictures: Mapping[str, ImageSpec],
        sim: Simulation,
        threads: int | None,
        positions: Tensor | None = None,
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
        self._cameras: list[EnvImages] = []
        self._pixels: dict[str, Pixels] = {}
        if pictures:
            self._cameras = group_images(pictures, sim, threads or available_cores(), positions)
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
            count = post_rows(rows, self._values(obs), self._lines, reward.numpy(), flags, diverged)
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
        for name in self._numbers:
            self._held[name].index_copy_(0, ids, obs[name].to(self._held[name].dtype))

    def note_poses(self, rows: NDArray[np.int64], ids: Tensor, episodes: EpisodeState, *, begins: bool = False) -> None:
        """Note for the cameras what is to be seen of environments; see :meth:`EnvImages.push`."""
        for camera in self._cameras:
            camera.push(rows, ids, episodes, begins=begins)

    def draw(self, rows: NDArray[np.int64], episodes: EpisodeState) -> None:
        """Render the pictures of environments ``rows`` (n,), on the host, which are in the episodes of ``episodes``."""
        for camera in self._cameras:
            camera.draw(rows, episodes)

    def rows(self, ids: Tensor | None = None) -> Obs:
        """Return some rows, or all, fresh."""
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


def group_images(
    pictures: Mapping[str, ImageSpec], sim: Simulation, threads: int, positions: Tensor | None = None
) -> list[EnvImages]:
    """Return one :class:`EnvImages` for all groups that show the same frames in different kinds."""
    together: dict[ImageSpec, dict[str, ImageSpec]] = {}
    for name, spec in pictures.items():
        together.setdefault(spec.source, {})[name] = spec
    if not together:
        return []
    reader = PoseReader(sim.model, threads=threads)  # one for all: it holds copies of the model
    return [EnvImages(specs, sim, reader, threads, positions) for specs in together.values()]


class EnvImages:
    """The camera of some observation groups over N environments.

    Owns a ring of rows, float64 (N, K, S), and the :class:`Pixels` of each group. Which row stands where is kept on the
    host. The rows are there, too, unless the camera draws from positions on the device, as Warp's does: then neither
    rows nor frames leave it.

    Environments are int64 (n,) arrays of the host.
    """

    def __init__(
        self,
        specs: Mapping[str, ImageSpec],
        sim: Simulation,
        reader: PoseReader,
        threads: int,
        positions: Tensor | None = None,
    ) -> None:
        self.specs = dict(specs)
        self.frames_drawn = 0
        """How many frames have been rendered so far, of whatever kinds."""
        first = next(iter(specs.values()))
        self._looks_spec, self._length, self._repeats = first.looks, first.frames, first.reset == "repeat"
        kinds = tuple(dict.fromkeys(spec.kind for spec in specs.values()))
        sides = {"width": first.camera.width * first.samples, "height": first.camera.height * first.samples}
        self._samples = first.samples
        self._camera = make_camera(
            first.renderer_on(sim.device),
            sim.model,
            replace(first.camera, data_types=kinds, **sides),
            threads=threads,
            device=sim.device,
        )
        if isinstance(self._camera, WarpCamera) and self._looks_spec != AS_MODELLED:
            raise ConfigError(
                "ImageSpec: the warp renderer, which auto means on a GPU, draws the model's own looks; leave looks "
                "out, or use renderer='native', which draws on the host"
            )
        self._state = SceneState(sim, reader, positions)
        self._sensor = Sensor(first, sim.num_envs, self._state.width)
        self._timed = self._sensor.late or any(spec.noise is not None for spec in specs.values())
        """Whether pictures depend on which step of the episode they are of."""
        if isinstance(self._camera, WarpCamera) and (self._timed or self._samples > 1):
            raise ConfigError(
                "ImageSpec: delay, hold, period, noise and samples are for pictures drawn on the host; use "
                "renderer='native', or leave them out"
            )
        self._far = float(sim.model.vis.map.zfar * sim.model.stat.extent)
        self._model = sim.model
        self._looks: Appearance | None = None
        self.pixels = {name: Pixels(spec, sim.num_envs, sim.device) for name, spec in specs.items()}
        """By group: what each environment showed last."""
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
        self._stamps = np.zeros((sim.num_envs, self._length), np.int64)
        """The step of the episode that each row of the ring is of."""
        self._drawn = np.full(sim.num_envs, -1)
        """The step that the newest pixels show, or -1 where they show no step of this episode."""

    def push(self, rows: NDArray[np.int64], ids: Tensor, episodes: EpisodeState, *, begins: bool) -> None:
        """Append what is to be seen of environments ``rows`` (n,) now, without drawing anything.

        Args:
            rows: the environments, on the host.
            ids: the same on the device.
            episodes: the episodes that they are in.
            begins: whether they begin an episode: what was seen of the last one is forgotten.
        """
        if begins:
            self._count[rows], self._drawn[rows] = 0, -1
        self._follow_fields()
        before = self._head[rows]
        head = (before + 1) % self._length
        self._head[rows] = head
        seen = self._state.take(ids)
        if self._stay:
            self._rows.flatten(0, 1).index_copy_(0, there_on(rows * self._length + head, self._rows.device), seen)
            self._stamps[rows, head] = 0 if begins else self._stamps[rows, before] + 1
        else:
            ring = self._rows.numpy()
            held = ring[rows, before] if self._sensor.late else ring[:0, 0]
            taken = seen.cpu().numpy(), held, self._stamps[rows, before]
            ring[rows, head], self._stamps[rows, head] = self._sensor.take(rows, *taken, begins, episodes)
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
            # zeros, which are not drawn
            envs, lags = envs[~before], lags[~before]
        # what lies before the episode is its first frame, which may stand in a stack several times: drawn once
        shown = np.minimum(lags, self._count[envs] - 1)
        slots = (self._head[envs] - shown) % self._length
        # a picture that a slow or stalled camera shows again is drawn once, and not at all if it is there already
        stamps = self._stamps[envs, slots]
        there = stamps == self._drawn[envs]
        if self._length == 1 and there.any():
            self._behind[envs[there]] = 0
            keep = ~there
            late, behind, envs, lags, slots = late[keep], behind[keep], envs[keep], lags[keep], slots[keep]
            stamps, there = stamps[keep], there[keep]
            if not len(late):
                return
        first = np.where(there, -1 - envs, envs * (stamps.max(initial=0) + 1) + stamps)
        keys, index, where = np.unique(first, return_index=True, return_inverse=True)
        reused = int((keys < 0).sum())
        envs_of, slots_of = envs[index], slots[index]
        wanted = envs_of[reused:] * self._length + slots_of[reused:]
        frames = self._render(wanted, episodes) if len(wanted) else {}
        self.frames_drawn += len(wanted)
        for name, spec in self.specs.items():
            pixels = self.pixels[name]
            parts = [pixels.newest(envs_of[:reused])] if reused else []
            if len(wanted):
                kind = self._disturb(spec, frames[spec.kind], wanted, episodes)
                parts.append(self._as_frame(spec, kind))
            if len(parts) == 1:
                frame = parts[0]
            elif self._stay:
                frame = torch.cat(parts)
            else:  # not by torch, whose threads cost more than the copy where other threads are awake
                frame = torch.from_numpy(np.concatenate([part.cpu().numpy() for part in parts]))
            pixels.update(late, behind, envs, self._length - 1 - lags, frame, where)
        self._behind[late] = 0
        self._drawn[late] = self._stamps[late, self._head[late]]

    def state_dict(self) -> StateDict:
        """Return rows, positions and pixels, as copies."""
        self._follow_fields()
        arrays = {"head": self._head, "count": self._count, "behind": self._behind}
        if self._timed:
            arrays |= {"stamps": self._stamps, "drawn": self._drawn}
        copies: StateDict = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        copies["poses"] = self._rows.clone()
        if self._timed:
            copies["sensor"] = self._sensor.state_dict()
        return copies | {"pixels": {name: pixels.copy() for name, pixels in self.pixels.items()}}

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
        if self._timed:
            self._stamps[:], self._drawn[:] = state["stamps"].numpy(), state["drawn"].numpy()
            self._sensor.load_state_dict(state["sensor"])
        else:  # each row is of a step of its own, whichever
            lags = (self._head[:, None] - np.arange(self._length)) % self._length
            self._stamps[:], self._drawn[:] = np.maximum(self._count[:, None] - 1 - lags, 0), -1
            self._sensor.time[:] = np.maximum(self._count - 1, 0)
        for name, pixels in self.pixels.items():
            pixels.load(state["pixels"][name])

    def close(self) -> None:
        """Release the camera."""
        self._camera.close()

    def _follow_fields(self) -> None:
        """Make room for model fields that have a value per environment from now on."""
        if self._state.refresh():
            self._rows = torch.from_numpy(self._state.widen(self._rows.cpu().numpy(), self._columns))
            self._sensor.rows = self._state.widen(self._sensor.rows, self._columns)
            self._columns, self._stay = self._state.columns, False

    def _render(self, places: NDArray[np.int64], episodes: EpisodeState) -> Mapping[str, Tensor]:
        """Return frames (m, height, width, …) of the rows at ``places`` (m,) of the ring, by kind."""
        if isinstance(self._camera, WarpCamera) and self._stay:
            seen = self._rows.flatten(0, 1).index_select(0, there_on(places, self._rows.device))
            return self._camera.draw(*self._state.positions(seen))
        poses = self._state.poses(self._rows.flatten(0, 1).numpy()[places])
        if self._looks_spec != AS_MODELLED:
            if self._looks is None or self._looks.seed != episodes.seed:
                self._looks = Appearance(self._model, self._looks_spec, seed=episodes.seed)
            poses = self._looks.apply(poses, episodes.episode_ids.cpu().numpy()[places // self._length])
        frames = self._camera.render(poses)
        found = {kind: torch.from_numpy(getattr(frames, kind)) for kind in self._camera.spec.data_types}
        return (
            found
            if self._samples == 1
            else {kind: average_samples(frame, self._samples) for kind, frame in found.items()}
        )

    def _disturb(self, spec: ImageSpec, frame: Tensor, places: NDArray[np.int64], episodes: EpisodeState) -> Tensor:
        """Return frames (m, height, width, …) of the rows at ``places`` (m,) of the ring with the noise of a group."""
        if spec.noise is None:
            return frame
        envs, slots = places // self._length, places % self._length
        ids, stream = episodes.episode_ids.cpu().numpy()[envs], f"sensor/{spec.camera.name}/{spec.kind}"
        shared = sum(other.kind == spec.kind for other in self.specs.values()) > 1
        noisy = frame.clone() if shared else frame
        add_noise(
            spec.noise, spec.kind, noisy.numpy(), self._far, episodes.seed, ids, self._stamps[envs, slots], stream
        )
        return noisy

    def _as_frame(self, spec: ImageSpec, frame: Tensor) -> Tensor:
        """Return one kind of image in the form of its group: channel axis, layout, and what stands for nothing."""
        if frame.dim() == 3:
            frame = frame[..., None]
        if spec.layout == "channels_first":
            frame = frame.movedim(-1, 1).contiguous()
        if spec.kind == "depth" and spec.missing is not None:
            far = torch.full((), self._far, dtype=frame.dtype, device=frame.device)
            frame = torch.where(frame >= far, torch.inf, frame)
        if spec.kind == "depth" and (spec.missing is not None or spec.normalize):
            return image_observation("depth", frame, missing=spec.missing, max_depth=spec.max_depth)
        if spec.kind == "normals" and spec.normalize:
            return image_observation("normals", frame)
        return frame
