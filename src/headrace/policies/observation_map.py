"""The map from observation groups to the keys of a policy, and from its answer to actions.

Changes of pictures before a policy reads them, pixel by pixel as those who train policies make them.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.errors import ConfigError, ShapeError, require_extra
from headrace.files import read_record
from headrace.policies.protocol import ChunkContext, ChunkPolicy, EpisodeRows, RemembersEpisodes, has_memory
from headrace.types import Obs

Images = NDArray[np.uint8]


def is_picture(shape: tuple[int, ...], dtype: object) -> bool:
    """Whether an array (…, H, W, C) or (…, C, H, W) is taken for pictures: uint8 with 1 or 3 channels."""
    return dtype == np.uint8 and len(shape) >= 3 and (shape[-1] in (1, 3) or shape[-3] in (1, 3))


def channels_last(images: Images) -> Images:
    """(…, H, W, C) of pictures in either layout; a view."""
    return images if images.shape[-1] in (1, 3) else np.moveaxis(images, -3, -1)


def resize_with_pad(images: Images, height: int, width: int) -> Images:
    """Pictures (…, H, W, C) fitted into (…, height, width, C): bilinear, undistorted, centered on black.

    The same pixels as ``openpi_client.image_tools.resize_with_pad``.
    """
    if images.dtype != np.uint8 or images.ndim < 3 or images.shape[-1] not in (1, 3):
        raise ShapeError(f"resize: expected uint8 (…, H, W, 1 or 3), got {images.dtype} {images.shape}")
    rows, columns, channels = images.shape[-3:]
    if (rows, columns) == (height, width):
        return images
    ratio = max(columns / width, rows / height)
    inner_rows, inner_columns = int(rows / ratio), int(columns / ratio)
    top, left = max(0, (height - inner_rows) // 2), max(0, (width - inner_columns) // 2)
    fitted = np.zeros((*images.shape[:-3], height, width, channels), np.uint8)
    small = _resample(images, inner_rows, inner_columns, "BILINEAR")
    fitted[..., top : top + inner_rows, left : left + inner_columns, :] = small
    return fitted


def resize_to_fill(images: Images, height: int, width: int) -> Images:
    """Resize pictures (…, H, W, C) to (…, height, width, C) with Lanczos' filter, whatever their proportions."""
    return _resample(images, height, width, "LANCZOS")


def crop_middle(images: Images, area: float) -> Images:
    """Cut a share of the area from the middle of pictures (…, H, W, C), resized to their size, bilinear."""
    rows, columns = images.shape[-3:-1]
    down, across = ((1 - math.sqrt(area)) / 2 * size for size in (rows, columns))
    return _resample(images, rows, columns, "BILINEAR", (across, down, columns - across, rows - down))


def through_jpeg(images: Images, quality: int) -> Images:
    """Write pictures (…, H, W, C) to JPEG files and read them back."""

    def change(pillow: Any, picture: Any) -> Any:
        file = io.BytesIO()
        picture.save(file, format="jpeg", quality=quality)
        return pillow.open(file)

    return _change_each(images, images.shape[-3], images.shape[-2], change)


def _resample(
    images: Images, height: int, width: int, name: str, box: tuple[float, float, float, float] | None = None
) -> Images:
    return _change_each(
        images,
        height,
        width,
        lambda pillow, picture: picture.resize((width, height), getattr(pillow.Resampling, name), box=box),
    )


def _change_each(images: Images, height: int, width: int, change: Callable[[Any, Any], Any]) -> Images:
    """Return what ``change`` makes of each picture (H, W, C), given Pillow and the picture as Pillow's."""
    pillow: Any = require_extra("PIL.Image", extra="serve", purpose="changing pictures for a policy")
    flat = images.reshape(-1, *images.shape[-3:])
    found = np.zeros((len(flat), height, width, images.shape[-1]), np.uint8)
    for image, target in zip(flat, found, strict=True):
        picture = pillow.fromarray(np.ascontiguousarray(image if image.shape[-1] == 3 else image[..., 0]))
        target[:] = np.asarray(change(pillow, picture)).reshape(target.shape)
    return found.reshape(*images.shape[:-3], *found.shape[1:])


Array = NDArray[np.generic]
_PART = re.compile(
    r"(?P<turn>-|axis_angle |axis_angle_wxyz )?(?P<group>[^\[\]+ -][^\[\]+]*?)(\[(?P<start>\d*):(?P<stop>\d*)\])?"
)


_KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    **dict.fromkeys(("keys", "dtypes"), ("a dictionary", (Mapping,))),
    **dict.fromkeys(("flips", "actions", "negated"), ("a tuple", (list, tuple))),
    "prompt": ("a text or None", (str, type(None))),
    "jpeg": ("a number or None", (int, type(None))),
    "crop": ("a number or None", (int, float, type(None))),
    "image_size": ("(height, width) or None", (list, tuple, type(None))),
}
_DTYPES = ("float64", "float32", "float16", "uint8", "int64", "int32")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservationMap:
    """From our observation groups to a policy's keys, and from its answer to actions.

    ``ObservationMap(keys={"observation/image": "camera", "observation/state": "policy[0:8]"}, image_size=(224, 224))``
    """

    keys: Mapping[str, str] = field(default_factory=dict[str, str])
    """The policy's key → one of our groups, a part of its last axis, ``policy[0:7]``, or several of these side by side,
    ``policy[0:3] + axis_angle policy[3:7] + -gripper``: ``-`` turns signs, ``axis_angle`` makes three numbers of a
    quaternion (x, y, z, w), ``axis_angle_wxyz`` of MuJoCo's (w, x, y, z). GR00T's keys are written ``video.<name>`` and
    ``state.<name>``."""
    prompt: str | None = "prompt"
    """A server's key for the instruction; None sends none. GR00T's server names its own; other policies have it in
    their context."""
    flips: tuple[Literal["rows", "columns"], ...] = ()
    """Axes along which pictures, uint8 (H, W, C), are reversed, before all else: both turn them by 180 degrees."""
    jpeg: int | None = None
    """Quality of a JPEG file that pictures are written to and read from, as training data were; None for none."""
    image_size: tuple[int, int] | None = None
    """(height, width) that pictures are resized to; None keeps their size."""
    resize: Literal["pad", "lanczos"] = "pad"
    """``pad``: undistorted, bilinear, padded with black as openpi does; ``lanczos``: filled, as OpenVLA does."""
    crop: float | None = None
    """Share of the area that is cut from the middle, last, and resized to the size before; None for all."""
    dtypes: Mapping[str, str] = field(default_factory=dict[str, str])
    """The policy's key → the dtype that it wants, such as ``float32``; others stay as they are."""
    actions: tuple[str, ...] = ()
    """The keys of a server's answer whose arrays, side by side, are the action; empty for ``actions`` (openpi), or all
    keys in the server's own order (GR00T)."""
    negated: tuple[int, ...] = ()
    """Parts of the action whose sign is turned, such as (-1,) for a gripper that closes the other way."""

    def __post_init__(self) -> None:
        for name, (form, kinds) in _KINDS.items():
            given: object = getattr(self, name)
            if not isinstance(given, kinds) or isinstance(given, bool):
                raise ConfigError(f"mapping {name}: expected {form}, got {given!r}")
        if not all(type(part) is int for part in self.negated):
            raise ConfigError(f"mapping negated: expected numbers of parts of the action, got {self.negated}")
        for key, source in self.keys.items():
            if not all(_PART.fullmatch(part) for part in _parts(source)):
                raise ConfigError(
                    f"mapping {key!r}: expected a group, or a part of one such as 'policy[0:7]', got {source!r}"
                )
        if self.image_size is not None and (len(self.image_size) != 2 or min(self.image_size) < 1):
            raise ConfigError(f"mapping image_size: expected (height, width), got {self.image_size}")
        if not set(self.flips) <= {"rows", "columns"}:
            raise ConfigError(f"mapping flips: expected rows, columns or both, got {self.flips}")
        if self.resize not in ("pad", "lanczos"):
            raise ConfigError(f"mapping resize: expected 'pad' or 'lanczos', got {self.resize!r}")
        if self.crop is not None and not 0 < self.crop <= 1:
            raise ConfigError(f"mapping crop: expected a share of the area, more than 0 up to 1, got {self.crop}")
        if self.jpeg is not None and not 1 <= self.jpeg <= 100:
            raise ConfigError(f"mapping jpeg: expected a quality from 1 to 100, got {self.jpeg}")
        for key, name in self.dtypes.items():
            if key not in self.keys or name not in _DTYPES:
                raise ConfigError(
                    f"mapping dtypes: expected a key of {sorted(self.keys)} and one of {_DTYPES}, got {key!r}: {name!r}"
                )

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are set, in the form of JSON: what decides the rows of a table."""
        default = ObservationMap()
        entries = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        changed = {name: value for name, value in entries.items() if value != getattr(default, name)}
        return cast("dict[str, Any]", json.loads(json.dumps(changed, default=dict)))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ObservationMap:
        """Read what :meth:`to_json` gave."""
        return read_record(cls, data, "mapping")

    def fill(self, obs: Obs) -> dict[str, Array]:
        """Return the policy's keys with our rows: key → (n, …). Pictures are channels last, and changed as set."""
        return {key: self._take(key, source, obs) for key, source in self.keys.items()}

    def groups(self, key: str) -> tuple[str, ...]:
        """Return the groups that one of the policy's keys is filled from; none for a key that the map has not."""
        found = [_PART.fullmatch(part) for part in _parts(self.keys[key])] if key in self.keys else []
        return tuple(part["group"].strip() for part in found if part is not None)

    def finish(self, actions: torch.Tensor) -> torch.Tensor:
        """Return a policy's actions (…, A) as ours; a copy where signs are turned."""
        if not self.negated:
            return actions
        turned = actions.clone()
        turned[..., list(self.negated)] *= -1
        return turned

    def _take(self, key: str, source: str, obs: Obs) -> Array:
        found = [_take_part(key, part, obs) for part in _parts(source)]
        if len(found) > 1 and len({part.shape[:-1] for part in found}) > 1:
            raise ConfigError(f"mapping {key!r}: expected parts of one shape, got {[part.shape for part in found]}")
        rows = found[0] if len(found) == 1 else np.concatenate(found, axis=-1)
        if rows.ndim >= 4 and is_picture(rows.shape[1:], rows.dtype):
            rows = cast("Array", self._change(channels_last(cast("Images", rows))))
        return rows.astype(self.dtypes[key]) if key in self.dtypes else rows

    def _change(self, images: Images) -> Images:
        down, across = (-1 if axis in self.flips else 1 for axis in ("rows", "columns"))
        images = np.ascontiguousarray(images[..., ::down, ::across, :]) if self.flips else images
        if self.jpeg is not None:
            images = through_jpeg(images, self.jpeg)
        if self.image_size is not None:
            images = (resize_with_pad if self.resize == "pad" else resize_to_fill)(images, *self.image_size)
        return images if self.crop is None else crop_middle(images, self.crop)


class MappedPolicy:
    """A policy that reads what a map makes of the observation groups.

    Args:
        policy: what it is given are the map's keys, as tensors.
        mapping: with at least one key.
    """

    policy_identity = "mapped-1"

    def __init__(self, policy: ChunkPolicy, mapping: ObservationMap) -> None:
        if not mapping.keys:
            raise ConfigError("mapping: expected at least one key that the policy reads, got none")
        if not all(-policy.action_dim <= part < policy.action_dim for part in mapping.negated):
            raise ConfigError(f"mapping negated: expected parts of {policy.action_dim}, got {mapping.negated}")
        self.policy, self.mapping = policy, mapping
        self.horizon, self.action_dim, self.obs_steps = policy.horizon, policy.action_dim, policy.obs_steps

    def __call__(self, obs: Obs, context: ChunkContext) -> torch.Tensor:
        """Plan float (n, horizon, action_dim)."""
        rows = {key: torch.from_numpy(np.ascontiguousarray(values)) for key, values in self.mapping.fill(obs).items()}
        return self.mapping.finish(self.policy(rows, context))


class RememberingMappedPolicy(MappedPolicy):
    """One with memory."""

    def begin(self, rows: EpisodeRows) -> None:
        """Begin in the policy."""
        cast("RemembersEpisodes", self.policy).begin(rows)

    def end(self, rows: EpisodeRows) -> None:
        """End in the policy."""
        cast("RemembersEpisodes", self.policy).end(rows)


def map_policy(policy: ChunkPolicy, mapping: ObservationMap) -> MappedPolicy:
    """Return a policy that reads observations through a map."""
    return (RememberingMappedPolicy if has_memory(policy) else MappedPolicy)(policy, mapping)


def axis_angle(quaternions: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
    """Return the rotation vectors (…, 3) of unit quaternions (…, 4), x, y, z, w, as robosuite and openpi do."""
    exact = quaternions.astype(np.float64)
    real = exact[..., 3:].clip(-1.0, 1.0)
    length = np.sqrt(1.0 - real * real)
    still = np.isclose(length, 0.0)
    vector = exact[..., :3] * 2.0 * np.arccos(real) / np.where(still, 1.0, length)
    return np.where(still, 0.0, vector).astype(quaternions.dtype)


def _parts(source: str) -> list[str]:
    return [part.strip() for part in source.split("+")]


def _take_part(key: str, source: str, obs: Obs) -> Array:
    found = _PART.fullmatch(source)
    assert found is not None  # checked at construction
    group = found["group"].strip()
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
    turn = (found["turn"] or "").strip()
    if not turn:
        return rows
    if rows.dtype.kind != "f" or (turn != "-" and rows.shape[-1] != 4):
        raise ConfigError(
            f"mapping {key!r}: expected numbers with a fraction, four of them for a quaternion, for {source!r}, got "
            f"{rows.dtype} {rows.shape}"
        )
    exact = cast("NDArray[np.floating[Any]]", rows)
    if turn == "-":
        return cast("Array", -exact)
    return cast("Array", axis_angle(exact if turn == "axis_angle" else np.roll(exact, -1, axis=-1)))


def to_array(group: str, values: torch.Tensor) -> Array:
    """Return the host array of observation rows, sharing memory where they are on the host."""
    if values.dtype == torch.bfloat16:
        raise ConfigError(f"observation {group!r}: expected a dtype that numpy has, got bfloat16; convert it")
    return cast("Array", values.detach().cpu().numpy())


def parse_mapping(assignments: Iterable[str], *, image_size: tuple[int, int] | None = None) -> ObservationMap:
    """Return a mapping from ``KEY=GROUP`` texts, as on the command line."""
    keys: dict[str, str] = {}
    for text in assignments:
        key, equals, source = text.partition("=")
        if not equals or not key or not source or key in keys:
            raise ConfigError(f"--map: expected KEY=GROUP once per key, such as observation/state=policy, got {text!r}")
        keys[key] = source
    return ObservationMap(keys=keys, image_size=image_size)


def take_actions(answer: object, keys: tuple[str, ...]) -> Array:
    """Return the arrays of an answer side by side along the last axis; an answer that is one array is taken whole."""
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
