"""``isaaclab.utils.buffers``: the names there, the memory of ``headrace.history``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from headrace import history as buffers
from headrace.errors import (
    ConfigError,
    DtypeError,
    IdError,
    LifecycleError,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
)
from headrace.history import image_observation, normalize_image

BatchIds: TypeAlias = Sequence[int] | slice | Tensor | None
"""Elements of the batch: indices (negative ones count from the end), a slice, a bool mask, or None for all."""


class _Buffer:
    """What both have."""

    def __init__(self, batch_size: int, device: str) -> None:
        self._batch_size, self._device = batch_size, device

    @property
    def batch_size(self) -> int:
        """N."""
        return self._batch_size

    @property
    def device(self) -> str:
        """Where the memory lives, as it was given."""
        return self._device


class CircularBuffer(_Buffer):
    """The newest ``max_len`` rows of each element of a batch, oldest first in ``buffer``.

    Args:
        max_len: frames kept, at least 1.
        batch_size: N.
        device: where the memory lives; appended data is moved there.
        stack_dim: the axis of the appended data (N, …), not 0, that ``stacked`` merges the frames into.
    """

    def __init__(self, max_len: int, batch_size: int, device: str, stack_dim: int | None = None) -> None:
        if stack_dim == 0:
            raise ConfigError("CircularBuffer: stack_dim must not be 0, the batch axis; the last axis is -1")
        self._ours = buffers.CircularBuffer(max_len, batch_size, device, stack_dim)
        super().__init__(batch_size, device)
        self._stack_dim = stack_dim
        self._dtype: torch.dtype | None = None

    @property
    def max_length(self) -> int:
        """How many frames are kept."""
        return self._ours.max_len

    @property
    def current_length(self) -> Tensor:
        """int64 (N,): appends since the reset, at most ``max_length``."""
        return self._ours.lengths

    @property
    def buffer(self) -> Tensor:
        """(N, max_length, …), oldest to newest: a view that the next append changes."""
        return self._ours.buffer

    @property
    def stacked(self) -> Tensor:
        """The frames merged into ``stack_dim``, oldest to newest: a contiguous view that the next append changes."""
        if self._stack_dim is None:
            raise LifecycleError("stacked: this buffer was made without stack_dim; construct it with one")
        return self._ours.stacked

    def append(self, data: Tensor) -> None:
        """Add the newest frame (N, …) of every element; the first one after a reset fills all slots."""
        if data.dim() < 1 or data.shape[0] != self.batch_size:
            raise ShapeError(f"data: expected a batch of {self.batch_size}, got shape {tuple(data.shape)}")
        if self._stack_dim is not None and not -data.dim() < self._stack_dim < data.dim():
            raise IdError(f"stack_dim={self._stack_dim}: the data has {data.dim()} axes, the batch axis 0 among them")
        rows = data.to(self._ours.device, self._dtype or data.dtype)
        self._ours.append(rows)
        self._dtype = rows.dtype

    def reset(self, batch_ids: BatchIds = None) -> None:
        """Zero some elements (None: all); their next append fills all slots."""
        self._ours.reset(_mask(batch_ids, self.batch_size, self._ours.device))

    def __getitem__(self, key: Tensor) -> Tensor:
        """Return the frames of ``key`` (N,) appends ago, 0 = newest; the oldest where that is beyond them.

        Fresh (N, …).
        """
        if self._stack_dim is not None:
            raise UnsupportedError("indexing is not there in stacked-output mode; read .stacked or .buffer")
        if len(key) != self.batch_size:
            raise ShapeError(f"key: expected {self.batch_size} lags, one per element, got {len(key)}")
        return self._ours[key.clamp(min=0)]


class DelayBuffer(_Buffer):
    """Data that arrives late by whole steps, per element of a batch; no delay at first.

    Args:
        history_length: the largest delay; below 0 means 0.
        batch_size: N.
        device: where the memory lives; data is moved there.
    """

    def __init__(self, history_length: int, batch_size: int, device: str) -> None:
        self._history_length = max(0, history_length)
        self._ours = buffers.DelayBuffer(self._history_length, batch_size, device)
        super().__init__(batch_size, device)
        self._lags = self._ours.lags.to(torch.int32)
        self._range = (0, 0)

    @property
    def history_length(self) -> int:
        """The largest delay that may be set."""
        return self._history_length

    @property
    def min_time_lag(self) -> int:
        """The smallest delay in use."""
        return self._range[0]

    @property
    def max_time_lag(self) -> int:
        """The largest delay in use."""
        return self._range[1]

    @property
    def time_lags(self) -> Tensor:
        """int32 (N,): the delays in use."""
        return self._lags

    def set_time_lag(self, time_lag: int | Tensor, batch_ids: BatchIds = None) -> None:
        """Set the delay of some elements (None: all); one that is refused changes nothing.

        Args:
            time_lag: one int for all of them, or int32 or int64 with one delay for each.
            batch_ids: the elements.
        """
        if not isinstance(time_lag, int | Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may be untyped
            raise DtypeError(f"time_lag: expected an int or a tensor of them, got {type(time_lag).__name__}")
        if isinstance(time_lag, Tensor):
            if time_lag.dtype not in (torch.int32, torch.int64):
                raise DtypeError(f"time_lag: expected int32 or int64, got {time_lag.dtype}")
            time_lag = time_lag.to(self._lags.device, torch.int64)
        lags = self._lags.to(torch.int64)
        lags[_index(batch_ids)] = time_lag
        lowest, highest = int(lags.min()), int(lags.max())
        if lowest < 0 or highest > self._history_length:
            got = lowest if lowest < 0 else highest
            raise ConfigError(f"time_lag: expected 0 to {self._history_length}, the history length, got {got}")
        self._ours.set_lag(lags)
        self._lags, self._range = lags.to(torch.int32), (lowest, highest)

    def reset(self, batch_ids: BatchIds = None) -> None:
        """Forget the data of some elements (None: all); delays stay."""
        self._ours.reset(_mask(batch_ids, self._batch_size, self._lags.device))

    def compute(self, data: Tensor) -> Tensor:
        """Append the data (N, …) of this step and give the delayed data, fresh.

        Where fewer steps were taken since the reset than the delay, it is the oldest data since then.
        """
        return self._ours.compute(data.to(self._lags.device))


def _mask(batch_ids: BatchIds, count: int, device: torch.device) -> Tensor | None:
    if batch_ids is None:
        return None
    mask = torch.zeros(count, dtype=torch.bool, device=device)
    mask[_index(batch_ids)] = True
    return mask


def _index(batch_ids: BatchIds) -> slice | Tensor:
    if batch_ids is None:
        return slice(None)
    if isinstance(batch_ids, slice | Tensor):
        return batch_ids
    ids = torch.tensor(list(batch_ids))
    return ids if ids.numel() else ids.long()  # an empty list has no integers to tell its dtype by


_COLORS = ("rgb", "albedo", "simple_shading")
_DISTANCES = ("depth", "distance_to")


class _Named(Protocol):
    """What these terms read of a ``SceneEntityCfg``."""

    name: str


class _TermCfg(Protocol):
    """What these terms read of an ``ObservationTermCfg``."""

    params: Mapping[str, Any]


def is_rgb_like(data_type: str) -> bool:
    """Return whether a camera output holds colors: rgb, rgba, albedo, simple_shading_*."""
    return data_type.startswith(_COLORS)


def is_depth_like(data_type: str) -> bool:
    """Return whether a camera output holds distances: depth, distance_to_*."""
    return any(part in data_type for part in _DISTANCES)


def is_normals_like(data_type: str) -> bool:
    """Return whether a camera output holds surface normals."""
    return data_type.startswith("normals")


def normalize_camera_image(
    images: Tensor,
    data_type: str,
    out: Tensor | None = None,
    channel_dim: int = -1,
    output_channel_dim: int | None = None,
) -> Tensor:
    """Return what a policy reads of a camera output; the camera's own memory is never written.

    Args:
        images: (N, H, W, C), or (N, C, H, W) with ``channel_dim=1``.
        data_type: colors become x/255 minus the mean per image and channel, colored (uint8) semantic segmentation too,
            its integer labels the same numbers as float32; in distances, NaN and infinity become 0; normals (x + 1)/2;
            anything else is returned itself.
        out: float32 to write colors into, of the shape of the result; other data types ignore it.
        channel_dim: where the channels are.
        output_channel_dim: where the result has them; None leaves them.
    """
    segmentation = data_type == "semantic_segmentation"
    source = _axis(channel_dim, images.dim())
    target = source if output_channel_dim is None else _axis(output_channel_dim, images.dim())
    if is_rgb_like(data_type) or (segmentation and images.dtype == torch.uint8):
        direct = out if source == target else None
        normalized = _moved(_normalized_colors(images, source, direct), source, target)
        return normalized if out is None or direct is not None else out.copy_(normalized)
    if segmentation:
        normalized = images.to(torch.float32, copy=True)
    elif is_depth_like(data_type):
        normalized = image_observation("depth", images)
    elif is_normals_like(data_type):
        normalized = image_observation("normals", images)
    else:
        normalized = images
    return _moved(normalized, source, target)


def image(
    env: Any,
    sensor_cfg: _Named | str = "tiled_camera",
    data_type: str = "rgb",
    convert_perspective_to_orthogonal: bool = False,
    normalize: bool = True,
    clone: bool = True,
) -> Tensor:
    """Return the images (N, H, W, C) of a camera of ``env``: ``env.scene.sensors[name].data.output[data_type]``.

    Args:
        env: an Isaac Lab environment, or anything with its sensors.
        sensor_cfg: a ``SceneEntityCfg``, or the name of the sensor.
        data_type: which output.
        convert_perspective_to_orthogonal: turn ``distance_to_camera`` into the distance along the optical axis, with
            the sensor's ``intrinsic_matrices`` (N, 3, 3).
        normalize: as ``normalize_camera_image``.
        clone: False may return the camera's own tensor, for callers that copy at once.
    """
    name = sensor_cfg if isinstance(sensor_cfg, str) else sensor_cfg.name
    sensors: Mapping[str, Any] = env.scene.sensors
    if name not in sensors:
        raise UnknownNameError("sensor", name, sensors)
    data: Any = sensors[name].data
    if data_type not in data.output:
        raise UnknownNameError("camera output", data_type, data.output)
    camera: Tensor = data.output[data_type]
    images = camera
    if data_type == "distance_to_camera" and convert_perspective_to_orthogonal:
        images = _along_axis(images, data.intrinsic_matrices)
    if normalize:
        images = normalize_camera_image(images, data_type)
    return images.clone() if clone and images is camera else images


class stacked_image:  # noqa: N801  # Isaac Lab's name
    """An observation term: the newest ``frame_stack`` images of a camera, merged along the channels, oldest first.

    Colors are kept as they come (uint8: a quarter of float32) and normalized when they are read.

    Args:
        cfg: its ``params["frame_stack"]`` is how many; 1 without it.
        env: has ``num_envs`` and ``device``.
    """

    def __init__(self, cfg: _TermCfg, env: Any) -> None:
        frame_stack = int(cfg.params.get("frame_stack", 1))
        if frame_stack < 1:
            raise ConfigError(f"stacked_image: frame_stack must be >= 1, got {frame_stack}")
        self._buffer = CircularBuffer(frame_stack, env.num_envs, env.device, stack_dim=-1)

    def reset(self, env_ids: Sequence[int] | slice | Tensor | None = None) -> None:
        """Begin new stacks of some environments (None: all): their next image fills all frames."""
        self._buffer.reset(env_ids)

    def __call__(
        self,
        env: Any,
        sensor_cfg: _Named | str = "tiled_camera",
        data_type: str = "rgb",
        convert_perspective_to_orthogonal: bool = False,
        normalize: bool = True,
        frame_stack: int | None = None,
    ) -> Tensor:
        """Append the camera's images and give the stacks, fresh (N, H, W, frame_stack · C).

        ``frame_stack`` is the one of ``cfg.params``, which Isaac Lab's manager passes again.
        """
        if frame_stack not in (None, self._buffer.max_length):
            raise ConfigError(f"frame_stack: made with {self._buffer.max_length}, called with {frame_stack}")
        late = normalize and is_rgb_like(data_type)
        images = image(
            env, sensor_cfg, data_type, convert_perspective_to_orthogonal, normalize and not late, clone=False
        )
        self._buffer.append(images)
        stacked = self._buffer.stacked
        return normalize_camera_image(stacked, data_type) if late else stacked.clone()


def _axis(dim: int, rank: int) -> int:
    axis = dim + rank if dim < 0 else dim
    if not 0 <= axis < rank:
        raise ShapeError(f"channel_dim: expected an axis of images with {rank} axes, got {dim}")
    return axis


def _moved(images: Tensor, source: int, target: int) -> Tensor:
    return images if source == target else images.movedim(source, target).contiguous()


def _normalized_colors(images: Tensor, channel_axis: int, out: Tensor | None) -> Tensor:
    if images.dim() == 4 and channel_axis in (1, 3):
        return normalize_image(images, channels="last" if channel_axis == 3 else "first", out=out)
    pixels = tuple(axis for axis in range(1, images.dim()) if axis != channel_axis)
    scaled = images.double() / 255
    normalized = (scaled - scaled.mean(pixels, keepdim=True)).float()
    return normalized if out is None else out.copy_(normalized)


def _along_axis(distance: Tensor, intrinsics: Tensor) -> Tensor:
    """Distances to the camera's center, (N, H, W) or (N, H, W, 1), as distances along its optical axis."""
    _, height, width = distance.shape[:3]
    matrices = intrinsics.expand(distance.shape[0], 3, 3)
    fx, fy, cx, cy = (matrices[:, row, column].view(-1, 1, 1) for row, column in ((0, 0), (1, 1), (0, 2), (1, 2)))
    rows = torch.arange(height, device=distance.device, dtype=distance.dtype).view(1, -1, 1)
    columns = torch.arange(width, device=distance.device, dtype=distance.dtype).view(1, 1, -1)
    stretch = (((columns - cx) / fx).square() + ((rows - cy) / fy).square() + 1).sqrt()
    return distance / (stretch.unsqueeze(-1) if distance.dim() == 4 else stretch)
