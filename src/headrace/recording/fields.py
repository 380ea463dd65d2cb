"""What an episode is made of: named fields, chosen by name, flat on disk and nested for people."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import numpy as np
import torch
from annotated_types import Predicate
from numpy.typing import NDArray
from torch import Tensor

from headrace.errors import ConfigError, DtypeError, UnknownNameError
from headrace.types import StackSpec

Array: TypeAlias = NDArray[Any]

NUMBERS = "biufc"
"""Kinds of dtype that episodes have: bool, integers, floats, complex numbers."""

TEXT = "a text in Unicode without null characters"


def is_text(value: object) -> bool:
    """Return whether something is a text that every format can hold."""
    return isinstance(value, str) and "\0" not in value and not any("\ud800" <= sign <= "\udfff" for sign in value)


Text: TypeAlias = Annotated[str, Predicate(is_text)]

Nested: TypeAlias = "dict[str, Nested] | Array"
"""Arrays by name, nested as the observations were."""

PLAIN_FIELDS = ("actions", "processed_actions", "rewards", "flags", "states", "substeps")
"""Fields that are not observations. ``flags`` is stored as two: ``terminated`` and ``truncated``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One array of an episode of T steps."""

    name: str
    """Path in the episode, such as ``obs/policy`` or ``actions``."""
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    """Shape of one row."""
    with_first: bool = False
    """Whether there is a row for the beginning of the episode and one after every step, (T+1, …): observations and
    states. Others have one row per step."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; 0 where a dimension is empty."""
        return self.dtype.itemsize * math.prod(self.shape)

    def rows(self, length: int) -> int:
        """Return rows of an episode of ``length`` steps."""
        return length + self.with_first


def first_difference(here: Iterable[Field], there: Iterable[Field]) -> tuple[str, str, str] | None:
    """Return the first field by name that two episodes do not have alike, and what it is in each.

    None where all are.
    """
    ours, theirs = ({field.name: f"{field.dtype}{field.shape}" for field in fields} for fields in (here, there))
    for name in sorted(ours.keys() | theirs.keys()):
        one, other = ours.get(name, "absent"), theirs.get(name, "absent")
        if one != other:
            return name, one, other
    return None


def as_array(value: Tensor | Array, name: str) -> Array:
    """Return a tensor on any device, or an array, as a numpy array; shares memory where it can."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in NUMBERS:
            raise DtypeError(f"{name}: expected numbers, got {value.dtype}; convert them before recording")
        return value
    try:
        if value.device.type == "cpu" and not value.requires_grad:
            return value.numpy()
        return value.detach().cpu().numpy()
    except TypeError as error:
        raise DtypeError(
            f"{name}: expected a dtype that numpy has, got {value.dtype}; convert it before recording"
        ) from error


def is_image(shape: tuple[int, ...]) -> bool:
    """Return whether rows of this shape are images (H, W, C) or stacks of them."""
    return len(shape) >= 3


def can_be_shown(field: Field) -> bool:
    """Return whether rows are single images as screens know them: uint8 with 1, 3 or 4 channels, last or first."""
    shape = field.shape
    return (
        field.dtype == np.uint8 and len(shape) == 3 and field.row_bytes > 0 and bool({shape[0], shape[2]} & {1, 3, 4})
    )


def as_rgb(pictures: Array) -> NDArray[np.uint8]:
    """Images (…, H, W, C) or (…, C, H, W) as (…, H, W, 3), a view if possible: gray is repeated, alpha left out."""
    if pictures.shape[-1] not in (1, 3, 4):
        pictures = np.moveaxis(pictures, -3, -1)
    return np.broadcast_to(pictures[..., :3], (*pictures.shape[:-1], 3))


def newest_rgb(rows: Array, stack: StackSpec | None) -> NDArray[np.uint8]:
    """Return rows of images, or of stacks of frames, as uint8 (n, H, W, 3): of a stack the newest frame."""
    return as_rgb(rows if stack is None else stack.newest(torch.from_numpy(rows)).numpy())


def check_choice(fields: Iterable[str]) -> None:
    """Refuse field names that nothing can answer to, before the first step."""
    for name in fields:
        group = name.split("/", 1)[0]
        if name not in PLAIN_FIELDS and group not in ("obs", "cameras"):
            raise UnknownNameError("field", name, [*PLAIN_FIELDS, "obs", "obs/<group>", "cameras", "cameras/<group>"])


def needs_frames(fields: Iterable[str]) -> bool:
    """Return whether the choice includes what a camera must render in every step."""
    return any(name == "obs" or name.split("/", 1)[0] == "cameras" for name in fields)


def choose_observations(fields: Iterable[str], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the observation paths (``obs/…``) that a choice of fields means, sorted.

    Args:
        fields: names as in ``RecorderCfg.fields``.
        shapes: row shape of every observation there is, by path.
    """
    chosen: set[str] = set()
    for name in fields:
        kind, _, group = name.partition("/")
        if kind not in ("obs", "cameras"):
            continue
        prefix = f"obs/{group}" if group else "obs"
        found = {path for path in shapes if path == prefix or path.startswith(f"{prefix}/")}
        if kind == "cameras":
            found = {path for path in found if is_image(shapes[path])}
        if group and not found:
            raise UnknownNameError("observation to record", name, [path.replace("obs", kind, 1) for path in shapes])
        if kind == "obs" and group:
            pictures = sorted(path for path in found if is_image(shapes[path]))
            if pictures:
                raise ConfigError(
                    f"fields: {name!r} is an image {shapes[pictures[0]]}; name it 'cameras/{group}', so that it is "
                    "rendered in every step and not only when the policy looks"
                )
        chosen |= found
    return sorted(chosen)
