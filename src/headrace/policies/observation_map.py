"""The map from observation groups to the keys of a policy, and from its answer to actions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.errors import ConfigError
from headrace.policies.serving.images import Images, channels_last, is_picture, resize_with_pad
from headrace.types import Obs

Array = NDArray[np.generic]
_SOURCE = re.compile(r"(?P<group>[^\[\]]+)(\[(?P<start>\d*):(?P<stop>\d*)\])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservationMap:
    """From our observation groups to a server's keys, and from its answer to actions.

    ``ObservationMap(keys={"observation/image": "camera", "observation/state": "policy[0:8]"}, image_size=(224, 224))``
    """

    keys: Mapping[str, str] = field(default_factory=dict[str, str])
    """The server's key → one of our groups, or a part of its last axis: ``policy[0:7]``. GR00T's keys are written
    ``video.<name>`` and ``state.<name>``."""
    prompt: str | None = "prompt"
    """The server's key for the instruction; None sends none. GR00T's server names its own."""
    image_size: tuple[int, int] | None = None
    """(height, width) that pictures are resized to, undistorted and padded with black as openpi does; None sends them
    as they are. Pictures are sent as uint8 (H, W, C)."""
    flips: tuple[Literal["rows", "columns"], ...] = ()
    """Axes along which pictures are reversed before they are resized: both turn them by 180 degrees."""
    actions: tuple[str, ...] = ()
    """The keys of the answer whose arrays, side by side, are the action; empty for ``actions`` (openpi), or all keys
    in the server's own order (GR00T)."""

    def __post_init__(self) -> None:
        for key, source in self.keys.items():
            if not _SOURCE.fullmatch(source):
                raise ConfigError(
                    f"mapping {key!r}: expected a group, or a part of one such as 'policy[0:7]', got {source!r}"
                )
        if self.image_size is not None and (len(self.image_size) != 2 or min(self.image_size) < 1):
            raise ConfigError(f"mapping image_size: expected (height, width), got {self.image_size}")
        if not set(self.flips) <= {"rows", "columns"}:
            raise ConfigError(f"mapping flips: expected rows, columns or both, got {self.flips}")

    def fill(self, obs: Obs) -> dict[str, Array]:
        """The server's keys with our rows: key → (n, …). Pictures are channels last, and resized."""
        return {key: self._take(key, source, obs) for key, source in self.keys.items()}

    def _take(self, key: str, source: str, obs: Obs) -> Array:
        found = _SOURCE.fullmatch(source)
        assert found is not None  # checked at construction
        group = found["group"]
        if group not in obs:
            raise ConfigError(
                f"mapping {key!r}: expected a group of the environment, {sorted(obs)}, got {group!r}; "
                "change the mapping, or add the observation to the task"
            )
        rows = to_array(group, obs[group])
        if found["start"] is not None:
            start, stop = (int(found[end] or default) for end, default in (("start", 0), ("stop", rows.shape[-1])))
            if not start < stop <= rows.shape[-1]:
                raise ConfigError(f"mapping {key!r}: expected a part of {group!r} [0:{rows.shape[-1]}], got {source!r}")
            rows = rows[..., start:stop]
        if rows.ndim < 4 or not is_picture(rows.shape[1:], rows.dtype):
            return rows
        images = channels_last(cast("Images", rows))
        down, across = (-1 if axis in self.flips else 1 for axis in ("rows", "columns"))
        images = np.ascontiguousarray(images[..., ::down, ::across, :]) if self.flips else images
        return images if self.image_size is None else resize_with_pad(images, *self.image_size)


def to_array(group: str, values: torch.Tensor) -> Array:
    """The host array of observation rows, sharing memory where they are on the host."""
    if values.dtype == torch.bfloat16:
        raise ConfigError(f"observation {group!r}: expected a dtype that numpy has, got bfloat16; convert it")
    return cast("Array", values.detach().cpu().numpy())


def parse_mapping(
    assignments: Iterable[str], *, image_size: tuple[int, int] | None = None, prompt: str | None = "prompt"
) -> ObservationMap:
    """A mapping from ``KEY=GROUP`` texts, as on the command line."""
    keys: dict[str, str] = {}
    for text in assignments:
        key, equals, source = text.partition("=")
        if not equals or not key or not source or key in keys:
            raise ConfigError(f"--map: expected KEY=GROUP once per key, such as observation/state=policy, got {text!r}")
        keys[key] = source
    return ObservationMap(keys=keys, image_size=image_size, prompt=prompt)


def take_actions(answer: object, keys: tuple[str, ...]) -> Array:
    """The arrays of an answer side by side along the last axis; an answer that is one array is taken whole."""
    if isinstance(answer, np.ndarray):
        return cast("Array", answer)
    if not isinstance(answer, Mapping):
        raise ConfigError(f"answer: expected a map with actions, got {type(answer).__name__}")
    parts: list[Array] = []
    for key in keys:
        part = cast("Mapping[str, object]", answer).get(key, cast("Mapping[str, object]", answer).get(f"action.{key}"))
        if not isinstance(part, np.ndarray):
            raise ConfigError(
                f"answer: expected an array under {key!r}, got the keys "
                f"{sorted(map(str, cast('Mapping[object, object]', answer)))}; say ObservationMap(actions=…)"
            )
        parts.append(cast("Array", part))
    if len(parts) == 1:
        return parts[0]
    if len({part.shape[:-1] for part in parts}) != 1 or not parts[0].ndim:
        raise ConfigError(f"answer: expected parts of one length, got {[part.shape for part in parts]}")
    return np.concatenate(parts, axis=-1)
