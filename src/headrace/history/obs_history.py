"""``image_observation``: from what a camera gives to what a policy reads, by the kind of data.

Past observations of policies that read several, kept per environment.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from headrace.errors import ConfigError, DtypeError, UnknownNameError
from headrace.history._buffers import CircularBuffer
from headrace.history._normalize import Channels, normalize_image
from headrace.history.output import fresh
from headrace.types import Obs

ImageKind: TypeAlias = Literal["rgb", "gray", "depth", "segmentation", "normals"]
"""What the channels of an image mean."""


def image_observation(
    kind: ImageKind,
    image: Tensor,
    *,
    channels: Channels = "last",
    missing: float | None = None,
    max_depth: float | None = None,
    clone: bool = True,
) -> Tensor:
    """Return the observation that belongs to one camera output; never written into the camera's own memory.

    The kinds of :class:`~headrace.envs.ImageSpec`, whose groups hold the same numbers; Isaac Lab's are those of
    ``headrace.compat.isaaclab.normalize_camera_image``.

    | kind | input | observation |
    |---|---|---|
    | rgb, gray | uint8, or float 0–255 | x/255 minus its mean (``normalize_image``) |
    | depth | float | NaN and ±infinity become ``missing``; with ``max_depth``, clipped and in [0, 1] |
    | normals | float in [−1, 1] | (x + 1)/2 |
    | segmentation | uint8 | as colors |
    | segmentation | integer ids | unchanged |

    Args:
        kind: what the camera output is.
        image: (…, H, W, C), (…, C, H, W) or (…, H, W), as ``channels`` says.
        channels: where the channels are; only colors look at it.
        missing: what stands for a distance that is not there; None for 0.
        max_depth: the distance that becomes 1; greater ones too.
        clone: False returns ``image`` itself where it is unchanged, for callers that copy at once: the camera's next
            picture overwrites it.

    Returns:
        Memory that the receiver owns (but for ``clone=False``).
    """
    if kind not in get_args(ImageKind):
        raise UnknownNameError("kind of image", kind, get_args(ImageKind))
    if not isinstance(image, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]  (callers may be untyped)
        raise DtypeError(f"image: expected a torch tensor, got {type(image).__name__}; use torch.as_tensor")
    if channels not in get_args(Channels):
        raise UnknownNameError("channels", str(channels), get_args(Channels))
    for name, value in (("missing", missing), ("max_depth", max_depth)):
        if kind != "depth" and value is not None:
            raise ConfigError(f"{name}: only distances have one, not {kind!r}; leave it out")
    if kind in ("rgb", "gray") or (kind == "segmentation" and image.dtype == torch.uint8):
        return normalize_image(image, channels=channels)
    if kind == "segmentation":
        if image.is_floating_point() or image.is_complex() or image.dtype == torch.bool:
            raise DtypeError(f"{kind}: expected uint8 colors or integer ids, got {image.dtype}")
        return image.clone() if clone else image
    if not image.is_floating_point():
        raise DtypeError(f"{kind}: expected a floating point image, got {image.dtype}")
    if kind == "depth":
        return _distance(image, 0.0 if missing is None else missing, max_depth)
    return torch.add(image, 1.0, out=fresh(tuple(image.shape), image.dtype, image.device)).mul_(0.5)


def _distance(image: Tensor, missing: float, max_depth: float | None) -> Tensor:
    if max_depth is not None and not (0 < max_depth < math.inf):
        raise ConfigError(f"max_depth: expected a positive distance, got {max_depth}")
    if not math.isfinite(missing):
        raise ConfigError(f"missing: expected a finite value, got {missing}")
    out = fresh(tuple(image.shape), image.dtype, image.device)
    torch.nan_to_num(image, nan=missing, posinf=missing, neginf=missing, out=out)
    return out if max_depth is None else out.clamp_(0.0, max_depth).div_(max_depth)


class ObsHistory:
    """Owns the newest ``steps`` observations of N environments, group → (N, steps, …), oldest first.

    At the start of an episode the first observation fills all places. Environments not addressed do not change.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._kept: dict[str, CircularBuffer] = {}

    def begin(self, ids: Tensor, obs: Obs, num_envs: int) -> None:
        """Start with the first observations (m, …) of ``ids`` (m,)."""
        for name, values in obs.items():
            if name not in self._kept:
                self._kept[name] = CircularBuffer(self.steps, num_envs, values.device)
            self._kept[name].reset(ids)
            self._kept[name].append(values, ids)

    def push(self, ids: Tensor, obs: Obs) -> None:
        """Append the observations (n, …) of ``ids`` (n,)."""
        for name, values in obs.items():
            self._kept[name].append(values, ids)

    def rows(self, ids: Tensor) -> Obs:
        """Return (n, steps, …) of ``ids`` (n,), fresh."""
        return {name: kept.take(ids) for name, kept in self._kept.items()}
