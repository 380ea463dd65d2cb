"""Which observation groups a learner reads, and what each is: a vector or an image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from gymnasium import spaces
from torch import Tensor

from headrace.errors import ConfigError
from headrace.types import Obs

Shapes: TypeAlias = dict[str, tuple[int, ...]]
"""Observation group → shape of one row."""
GroupKind = Literal["vector", "image", "several", "critic"]
"""What there may be to read: vectors, images, more than one group at a time, groups that only the critic reads."""

SMALLEST_IMAGE = 20
"""Pixels per side that two convolutions (8 wide with stride 4, 4 wide with stride 2) need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadGroups:
    """The groups that actor and critic read; each is a vector or an image of at least 20 x 20 pixels."""

    actor: Shapes
    critic: Shapes
    """Equal to ``actor`` where the critic reads the same."""
    unread: frozenset[str]
    """The other groups of the observation space."""
    draws_for_nobody: bool
    """Whether there are images, none of which is read: a step need not draw them."""

    @property
    def critic_only(self) -> bool:
        """Whether the critic reads other groups than the actor."""
        return self.critic != self.actor

    @property
    def all(self) -> Shapes:
        """Every group that is read."""
        return self.actor | self.critic

    def of(self, obs: Obs) -> Obs:
        """The groups of an observation that are read; the same tensors."""
        return {name: obs[name] for name in self.all} if self.unread else obs

    def kinds(self) -> dict[GroupKind, str]:
        """What there is to read, and a group as its example."""
        found: dict[GroupKind, str] = {}
        for name, shape in self.all.items():
            found["image" if is_image(shape) else "vector"] = name
        for groups in (self.actor, self.critic):
            if len(groups) > 1:
                found["several"] = list(groups)[-1]
        if self.critic_only:
            found["critic"] = next(iter(self.critic))
        return found


def read_groups(
    space: spaces.Space[object], actor: Sequence[str] | None = None, critic: Sequence[str] | None = None
) -> ReadGroups:
    """Choose the groups of an observation space that a learner reads; every one of them must be readable.

    Args:
        space: of one environment, a ``Dict`` of groups.
        actor: names of groups; None for all but ``critic``.
        critic: names of groups; None for ``critic`` where there is one, else what the actor reads.
    """
    if not isinstance(space, spaces.Dict):
        raise ConfigError(f"observations: expected groups (a Dict space), got {space}")
    names = list(space.spaces)
    if actor is None:
        actor = [name for name in names if name != "critic"]
    if critic is None:
        critic = ["critic"] if "critic" in names else actor
    for setting, chosen in (("actor_groups", actor), ("critic_groups", critic)):
        if isinstance(chosen, str) or not chosen or not set(chosen) <= set(names):
            raise ConfigError(f"{setting}: expected one or more of the observation groups {names}, got {chosen!r}")
    unread = frozenset(names) - {*actor, *critic}
    images = {name for name, group in space.spaces.items() if len(group.shape or ()) == 3}
    return ReadGroups(
        actor={name: _checked_shape(name, space.spaces[name]) for name in actor},
        critic={name: _checked_shape(name, space.spaces[name]) for name in critic},
        unread=unread,
        draws_for_nobody=bool(images) and images <= unread,
    )


def is_image(shape: tuple[int, ...]) -> bool:
    """Whether a group of this shape, which :func:`read_groups` let through, is an image."""
    return len(shape) == 3


def channels_first(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """The shape of an image with its channels first."""
    first, second, third = shape
    return (third, first, second) if third < first else (first, second, third)


def as_float_rows(rows: Tensor) -> Tensor:
    """Rows of a group as a network reads them: float32; images channels first, bytes divided by 255."""
    if rows.dim() != 4:
        return rows.to(torch.float32)
    rows = rows.to(torch.float32) / 255.0 if rows.dtype == torch.uint8 else rows.to(torch.float32)
    return rows.movedim(-1, 1) if rows.shape[-1] < rows.shape[1] else rows


def _checked_shape(name: str, space: spaces.Space[object]) -> tuple[int, ...]:
    hint = "choose the groups to read with actor_groups and critic_groups (--ppo)"
    if not isinstance(space, (spaces.Box, spaces.MultiBinary)) or len(space.shape) not in (1, 3):
        raise ConfigError(
            f"observation group {name!r}: expected a vector or an image (a Box of one or three axes), got {space}; "
            f"{hint}"
        )
    shape = tuple(space.shape)
    if is_image(shape) and min(channels_first(shape)[1:]) < SMALLEST_IMAGE:
        raise ConfigError(
            f"observation group {name!r}: expected images of at least {SMALLEST_IMAGE} x {SMALLEST_IMAGE} pixels, "
            f"got shape {shape}; use larger ones, or {hint}"
        )
    return shape
