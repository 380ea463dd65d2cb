"""``isaaclab.utils.images`` and the image terms of ``isaaclab.envs.mdp``, over ``headrace.vision``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.compat.isaaclab._buffers import CircularBuffer
from headrace.errors import ConfigError, ShapeError, UnknownNameError
from headrace.vision import image_observation, normalize_image

_COLORS = ("rgb", "albedo", "simple_shading")
_DISTANCES = ("depth", "distance_to")


class _Named(Protocol):
    """What these terms read of a ``SceneEntityCfg``."""

    name: str


class _TermCfg(Protocol):
    """What these terms read of an ``ObservationTermCfg``."""

    params: Mapping[str, Any]


def is_rgb_like(data_type: str) -> bool:
    """Whether a camera output holds colors: rgb, rgba, albedo, simple_shading_*."""
    return data_type.startswith(_COLORS)


def is_depth_like(data_type: str) -> bool:
    """Whether a camera output holds distances: depth, distance_to_*."""
    return any(part in data_type for part in _DISTANCES)


def is_normals_like(data_type: str) -> bool:
    """Whether a camera output holds surface normals."""
    return data_type.startswith("normals")


def normalize_camera_image(
    images: Tensor,
    data_type: str,
    out: Tensor | None = None,
    channel_dim: int = -1,
    output_channel_dim: int | None = None,
) -> Tensor:
    """What a policy reads of a camera output; the camera's own memory is never written.

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
    """The images (N, H, W, C) of a camera of ``env``: ``env.scene.sensors[name].data.output[data_type]``.

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
