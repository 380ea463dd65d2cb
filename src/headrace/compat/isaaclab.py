"""Isaac Lab's buffers and image terms, with its names, arguments and defaults, over our ``history``.

Follows Isaac Lab's development branch after 2.3.2 (commit 09222b7); the names of 2.3 work as before.
What Isaac Lab leaves open or does silently wrong is decided here: depth is never written into the camera's own memory,
a lag that is refused changes nothing, and results are fresh memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
from headrace.ids import over

__all__ = ["CameraFrameStack", "CircularBuffer", "DelayBuffer", "image", "image_depth", "image_rgb"]
__all__ += ["image_segmentation", "is_depth_like", "is_normals_like", "is_rgb_like", "normalize_camera_image"]
__all__ += ["normalize_depth", "normalize_normals", "normalize_rgb", "normalize_segmentation", "stacked_image"]

BatchIds: TypeAlias = Sequence[int] | slice | Tensor | None
"""Elements of the batch: indices (negative ones count from the end), a slice, a bool mask, or None for all."""


class CircularBuffer:
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
        self.batch_size, self.device = batch_size, device
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
        """(N, max_length, …), oldest to newest: a view of a block that reads after the next append change."""
        return self._ours.buffer

    @property
    def stacked(self) -> Tensor:
        """The frames merged into ``stack_dim``, oldest to newest: a contiguous view of the block of ``buffer``."""
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


class DelayBuffer:
    """Data that arrives late by whole steps, per element of a batch; no delay at first.

    Args:
        history_length: the largest delay; below 0 means 0.
        batch_size: N.
        device: where the memory lives; data is moved there.
        min_lag: the smallest delay that is drawn.
        hold_prob: None for delays set by ``set_time_lag``; else delays are drawn, uniform from ``min_lag`` to
            ``history_length``, at a reset and at each appended step but with this probability.
    """

    def __init__(
        self, history_length: int, batch_size: int, device: str, *, min_lag: int = 0, hold_prob: float | None = None
    ) -> None:
        self.history_length = max(0, history_length)
        """The largest delay that may be set."""
        if not 0 <= min_lag <= self.history_length:
            raise ConfigError(f"min_lag: expected 0 to {self.history_length}, the history length, got {min_lag}")
        if hold_prob is not None and not 0 <= hold_prob <= 1:
            raise ConfigError(f"hold_prob: expected 0 to 1, got {hold_prob}")
        self._ours = buffers.CircularBuffer(self.history_length + 1, batch_size, device)
        self.batch_size, self.device = batch_size, device
        self.time_lags = self._ours.lengths.to(torch.int32)
        """int32 (N,): the delays in use; values written into it hold from the next ``compute`` on."""
        self._min_lag, self._hold_prob = min_lag, hold_prob
        if hold_prob is not None:
            self.time_lags.copy_(self._draw_lags())

    @property
    def num_pushes(self) -> Tensor:
        """int64 (N,): steps appended since each element's reset; a copy."""
        return self._ours.pushed

    @property
    def min_time_lag(self) -> int:
        """The smallest delay in use."""
        return int(self.time_lags.min())

    @property
    def max_time_lag(self) -> int:
        """The largest delay in use."""
        return int(self.time_lags.max())

    def set_time_lag(
        self, time_lag: int | Tensor, batch_ids: BatchIds = None, batch_mask: Tensor | None = None
    ) -> None:
        """Set the delay of some elements (None: all); one that is refused changes nothing.

        Args:
            time_lag: one int for all of them, or int32 or int64 with one delay for each, (N,) with ``batch_mask``.
            batch_ids: the elements.
            batch_mask: bool (N,), used in place of ``batch_ids``. Delays of a tensor are not looked at then: on a GPU
                nothing waits for them.
        """
        if not isinstance(time_lag, int | Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may be untyped
            raise DtypeError(f"time_lag: expected an int or a tensor of them, got {type(time_lag).__name__}")
        lags = self.time_lags.to(torch.int64)
        if isinstance(time_lag, Tensor):
            if time_lag.dtype not in (torch.int32, torch.int64):
                raise DtypeError(f"time_lag: expected int32 or int64, got {time_lag.dtype}")
            time_lag = time_lag.to(self.time_lags.device, torch.int64)
            if batch_mask is not None:
                self.time_lags.copy_(torch.where(batch_mask, time_lag, lags))
                return
        lags[_index(batch_ids if batch_mask is None else batch_mask)] = time_lag
        lowest, highest = int(lags.min()), int(lags.max())
        if lowest < 0 or highest > self.history_length:
            got = lowest if lowest < 0 else highest
            raise ConfigError(f"time_lag: expected 0 to {self.history_length}, the history length, got {got}")
        self.time_lags.copy_(lags)

    def reset(self, batch_ids: BatchIds = None, batch_mask: Tensor | None = None) -> None:
        """Forget the data of some elements (None: all), those of ``batch_mask`` bool (N,) where it is given.

        Delays stay, or are drawn again with ``hold_prob``.
        """
        chosen = _mask(batch_ids, self.batch_size, self.time_lags.device) if batch_mask is None else batch_mask
        self._ours.reset(chosen)
        if self._hold_prob is not None:
            drawn = self._draw_lags()
            self.time_lags.copy_(drawn if chosen is None else torch.where(chosen, drawn, self.time_lags))

    def compute(self, data: Tensor, *, update_history: bool = True) -> Tensor:
        """Append the data (N, …) of this step and give the delayed data, fresh.

        Where fewer steps were taken since the reset than the delay, it is the oldest data since then.
        ``update_history=False`` appends nothing; elements without data give what they are given.
        """
        if update_history and self._hold_prob is not None and self._hold_prob < 1:
            held = torch.rand(self.batch_size, device=self.time_lags.device) < self._hold_prob
            self.time_lags.copy_(torch.where(held, self.time_lags, self._draw_lags()))
        rows = data.to(self.time_lags.device)
        if update_history:
            self._ours.append(rows)
        if not self._ours.nbytes:
            return rows.clone()
        late = self._ours[self.time_lags.clamp(0, self.history_length)]
        return late if update_history else torch.where(over(self._ours.pushed > 0, rows), late, rows)

    def _draw_lags(self) -> Tensor:
        span = self._min_lag, self.history_length + 1
        return torch.randint(*span, (self.batch_size,), dtype=torch.int32, device=self.time_lags.device)


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


def normalize_rgb(
    images: Tensor,
    channel_dim: int = -1,
    output_channel_dim: int | None = None,
    mean: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return colors (N, H, W, C) or (N, C, H, W) as x/255 minus ``mean``, or minus the mean per image and channel.

    Args:
        images: uint8, or floating point with values from 0 to 255.
        channel_dim: where the channels are.
        output_channel_dim: where the result has them; None leaves them.
        mean: what is subtracted from all.
        out: float32 to write into, of the shape of the result.
    """
    axis = _axis(images, channel_dim)
    direct = out if output_channel_dim in (None, channel_dim) and mean is None else None
    normalized = _normalize_colors(images, axis, direct) if mean is None else images.float() / 255 - mean
    normalized = _move_channels(normalized, channel_dim, output_channel_dim)
    return normalized if out is None or direct is not None else out.copy_(normalized)


def normalize_depth(
    images: Tensor,
    channel_dim: int = -1,
    output_channel_dim: int | None = None,
    invalid_value: float = 0.0,
    max_depth: float | None = None,
    tanh_scale: float | None = None,
) -> Tensor:
    """Return distances with ``invalid_value`` for NaN and infinity: in meters, clipped to [0, 1], or through tanh.

    Args:
        images: (N, H, W, C) or (N, C, H, W); not written.
        channel_dim: where the channels are.
        output_channel_dim: where the result has them; None leaves them.
        invalid_value: what stands for a distance that is not there.
        max_depth: the distance that becomes 1; greater ones too.
        tanh_scale: gives tanh(x/this) − 0.5 instead.
    """
    if max_depth is not None and tanh_scale is not None:
        raise ConfigError("max_depth, tanh_scale: expected at most one of them; leave one out")
    normalized = image_observation("depth", images, missing=invalid_value, max_depth=max_depth)
    if tanh_scale is not None:
        normalized.div_(tanh_scale).tanh_().sub_(0.5)
    return _move_channels(normalized, channel_dim, output_channel_dim)


def normalize_normals(images: Tensor, channel_dim: int = -1, output_channel_dim: int | None = None) -> Tensor:
    """Return normals in [−1, 1] as (x + 1)/2."""
    return _move_channels(image_observation("normals", images), channel_dim, output_channel_dim)


def normalize_segmentation(images: Tensor, channel_dim: int = -1, output_channel_dim: int | None = None) -> Tensor:
    """Return colored segmentation (uint8) as colors, integer labels as the same numbers in float32."""
    if images.dtype == torch.uint8:
        return normalize_rgb(images, channel_dim, output_channel_dim)
    return _move_channels(images.to(torch.float32, copy=True), channel_dim, output_channel_dim)


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
        data_type: picks the function: colors :func:`normalize_rgb`, ``semantic_segmentation``
            :func:`normalize_segmentation`, distances :func:`normalize_depth`, normals :func:`normalize_normals`;
            anything else is returned itself.
        out: float32 to write colors into, of the shape of the result; other data types ignore it.
        channel_dim: where the channels are.
        output_channel_dim: where the result has them; None leaves them.
    """
    segmentation = data_type == "semantic_segmentation"
    if is_rgb_like(data_type) or (segmentation and images.dtype == torch.uint8):
        return normalize_rgb(images, channel_dim, output_channel_dim, out=out)
    if segmentation:
        return normalize_segmentation(images, channel_dim, output_channel_dim)
    if is_depth_like(data_type):
        return normalize_depth(images, channel_dim, output_channel_dim)
    if is_normals_like(data_type):
        return normalize_normals(images, channel_dim, output_channel_dim)
    return _move_channels(images, channel_dim, output_channel_dim)


class CameraFrameStack:
    """The newest ``frame_stack`` images of a camera, normalized and merged along the channels, oldest first.

    uint8 is kept as it comes and normalized when it is read. After a reset the next image fills all frames.

    Args:
        num_envs: N.
        device: where the frames live.
        frame_stack: how many.
        channel_first: whether results are (N, K·C, H, W) instead of (N, H, W, K·C).
    """

    def __init__(self, num_envs: int, device: str, frame_stack: int = 1, channel_first: bool = False) -> None:
        if frame_stack < 1:
            raise ConfigError(f"frame_stack must be >= 1, got {frame_stack}")
        self._channel_dim = 1 if channel_first else -1
        self._buffer = CircularBuffer(frame_stack, num_envs, device, stack_dim=self._channel_dim)

    def reset(self, env_ids: BatchIds = None) -> None:
        """Begin new stacks of some environments (None: all)."""
        self._buffer.reset(env_ids)

    def __call__(self, images: Tensor, normalize: Callable[..., Tensor] | None = None) -> Tensor:
        """Append images (N, H, W, C) and give the stacks, fresh.

        Args:
            images: of this step; not written.
            normalize: called as ``normalize(images, channel_dim=…, output_channel_dim=…)``, such as
                :func:`normalize_rgb`; None keeps the values.
        """
        late = normalize is not None and images.dtype == torch.uint8
        if normalize is None or late:
            self._buffer.append(images.movedim(-1, self._channel_dim))
        else:
            self._buffer.append(normalize(images, channel_dim=-1, output_channel_dim=self._channel_dim))
        stacked = self._buffer.stacked
        if normalize is None or not late:
            return stacked.clone()
        return normalize(stacked, channel_dim=self._channel_dim, output_channel_dim=None)


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
    given = data.output[data_type]
    camera: Tensor = given if isinstance(given, Tensor) else given.torch  # newer versions wrap their arrays
    images = camera
    if data_type == "distance_to_camera" and convert_perspective_to_orthogonal:
        images = _along_axis(images, data.intrinsic_matrices)
    if normalize:
        images = normalize_camera_image(images, data_type)
    return images.clone() if clone and images is camera else images


class _ImageTerm:
    """An observation term: images of a camera, normalized by their kind and stacked.

    Args:
        cfg: its ``params`` may have ``frame_stack`` (1 without) and ``channel_first`` (False without).
        env: has ``num_envs`` and ``device``.
    """

    _normalize: Callable[..., Tensor]
    _data_type: str

    def __init__(self, cfg: _TermCfg, env: Any) -> None:
        self._made = int(cfg.params.get("frame_stack", 1)), bool(cfg.params.get("channel_first", False))
        self._frames = CameraFrameStack(env.num_envs, env.device, *self._made)

    def reset(self, env_ids: BatchIds = None) -> None:
        """Begin new stacks of some environments (None: all): their next image fills all frames."""
        self._frames.reset(env_ids)

    def __call__(
        self,
        env: Any,
        sensor_cfg: _Named | str = "tiled_camera",
        data_type: str | None = None,
        *,
        frame_stack: int | None = None,
        channel_first: bool | None = None,
        **normalizing: Any,
    ) -> Tensor:
        """Append the camera's images and give the stacks, fresh.

        Args:
            env: as for :func:`image`.
            sensor_cfg: as for :func:`image`.
            data_type: which output; None for the one that the term is named after.
            frame_stack: that of ``cfg.params``, which Isaac Lab's manager passes again.
            channel_first: the same.
            normalizing: arguments of the normalizing function, such as ``max_depth``.
        """
        self._check(frame_stack, channel_first)
        images = image(env, sensor_cfg, data_type or self._data_type, normalize=False, clone=False)
        return self._frames(images, partial(type(self)._normalize, **normalizing))

    def _check(self, *called: int | bool | None) -> None:
        if any(got not in (None, made) for got, made in zip(called, self._made, strict=True)):
            made = f"frame_stack={self._made[0]}, channel_first={self._made[1]}"
            raise ConfigError(f"made with {made}, called with {called}")


class stacked_image(_ImageTerm):  # noqa: N801  # Isaac Lab's name
    """What :func:`image` gives, stacked."""

    _data_type = "rgb"

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]  # Isaac Lab's arguments
        self,
        env: Any,
        sensor_cfg: _Named | str = "tiled_camera",
        data_type: str | None = None,
        convert_perspective_to_orthogonal: bool = False,
        normalize: bool = True,
        frame_stack: int | None = None,
    ) -> Tensor:
        """Append the camera's images and give the stacks, fresh; arguments as for :func:`image`."""
        self._check(frame_stack, None)
        data_type = data_type or self._data_type
        images = image(env, sensor_cfg, data_type, convert_perspective_to_orthogonal, normalize=False, clone=False)
        return self._frames(images, partial(normalize_camera_image, data_type=data_type) if normalize else None)


class image_rgb(_ImageTerm):  # noqa: N801  # Isaac Lab's name
    """Colors through :func:`normalize_rgb`; ``mean=`` subtracts a constant."""

    _normalize, _data_type = staticmethod(normalize_rgb), "rgb"


class image_depth(_ImageTerm):  # noqa: N801  # Isaac Lab's name
    """Distances through :func:`normalize_depth`: ``invalid_value=``, ``max_depth=``, ``tanh_scale=``."""

    _normalize, _data_type = staticmethod(normalize_depth), "distance_to_image_plane"


class image_segmentation(_ImageTerm):  # noqa: N801  # Isaac Lab's name
    """Segmentation through :func:`normalize_segmentation`; other outputs are ``instance_segmentation_fast``, …"""

    _normalize, _data_type = staticmethod(normalize_segmentation), "semantic_segmentation"


def _move_channels(images: Tensor, source: int, target: int | None) -> Tensor:
    axis = _axis(images, source)
    return images if target is None else images.movedim(axis, _axis(images, target)).contiguous()


def _axis(images: Tensor, dim: int) -> int:
    if not -images.dim() <= dim < images.dim():
        raise ShapeError(f"channel_dim: expected an axis of images with {images.dim()} axes, got {dim}")
    return dim % images.dim()


def _normalize_colors(images: Tensor, channel_axis: int, out: Tensor | None) -> Tensor:
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
