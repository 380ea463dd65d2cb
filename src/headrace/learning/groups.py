"""Observation groups: which of them a learner reads, what each is, and what turns them into features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from gymnasium import spaces
from torch import Tensor, nn

from headrace.errors import ConfigError
from headrace.learning.ranks import gather_ranks, moments
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
    images_unread: bool
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
        """Return the groups of an observation that are read; the same tensors."""
        return {name: obs[name] for name in self.all} if self.unread else obs

    def kinds(self) -> dict[GroupKind, str]:
        """Return what there is to read, and a group as its example."""
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
        actor={name: _check_shape(name, space.spaces[name]) for name in actor},
        critic={name: _check_shape(name, space.spaces[name]) for name in critic},
        unread=unread,
        images_unread=bool(images) and images <= unread,
    )


def is_image(shape: tuple[int, ...]) -> bool:
    """Return whether a group of this shape, which :func:`read_groups` let through, is an image."""
    return len(shape) == 3


def channels_first(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the shape of an image with its channels first."""
    first, second, third = shape
    return (third, first, second) if third < first else (first, second, third)


def as_float_rows(rows: Tensor) -> Tensor:
    """Return rows of a group as a network reads them: float32; images channels first, bytes divided by 255."""
    if rows.dim() != 4:
        return rows.to(torch.float32)
    rows = rows.to(torch.float32) / 255.0 if rows.dtype == torch.uint8 else rows.to(torch.float32)
    return rows.movedim(-1, 1) if rows.shape[-1] < rows.shape[1] else rows


def _check_shape(name: str, space: spaces.Space[object]) -> tuple[int, ...]:
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


class Normalizer(nn.Module):
    """Running mean and variance of every element; buffers, so they are saved with the weights."""

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        start = {"mean": torch.zeros(size), "variance": torch.ones(size), "count": torch.tensor(1e-4).double()}
        for name, value in start.items():
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        """Zero mean and unit variance, clamped to ±10."""
        return ((x - self.mean) / (self.variance + 1e-8).sqrt()).clamp(-10, 10)

    def denormalize(self, x: Tensor) -> Tensor:
        """Return the inverse, without the clamp."""
        return x * (self.variance + 1e-8).sqrt() + self.mean

    @torch.no_grad()
    def update(self, rows: Tensor) -> None:
        """Take rows (n, size) in, n at least 1."""
        count, mean, variance = moments(rows)
        share = count / (float(self.count) + count)
        shift, spread = mean - self.mean, variance - self.variance
        self.mean += shift * share
        self.variance += (spread + shift.square() * (1 - share)) * share
        self.count += count


class ImageNormalizer(nn.Module):
    """Subtracts what all images have in common, and makes the channels independent and of equal variance.

    Two frames of a stack are almost the same image, and their small difference carries the velocity: as a channel of
    equal variance it is as easy to see as the image itself. Fitted once, on the first rollout.
    """

    mean: Tensor
    mix: Tensor
    fitted: Tensor

    def __init__(self, height: int, width: int, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(height, width, channels))
        self.register_buffer("mix", torch.eye(channels))
        self.register_buffer("fitted", torch.tensor(False))

    def forward(self, images: Tensor) -> Tensor:
        """Images (n, C, H, W); channels last in memory where the input is."""
        return ((images.movedim(1, -1) - self.mean) @ self.mix).movedim(-1, 1)

    @torch.no_grad()
    def update(self, images: Tensor) -> None:
        """Fit mean and mix to images (n, C, H, W)."""
        pixels = images.movedim(1, -1)
        self.mean.copy_(pixels.mean(0))
        rest = (pixels - self.mean).flatten(0, -2)
        spread, axes = torch.linalg.eigh((rest.T @ rest / len(rest)).double())
        # less than one gray level is not a signal
        self.mix.copy_(axes / (spread + 1e-5).sqrt())
        for buffer, first in zip((self.mean, self.mix), gather_ranks((self.mean, self.mix))[0], strict=True):
            buffer.copy_(first)
        self.fitted.fill_(True)


class GroupEncoder(nn.Module):
    """Several observation groups as one row of features: each group's own, concatenated in the order of ``groups``.

    A vector is normalized. An image goes through two convolutions, and, with ``image_features``, through
    :class:`ImageNormalizer` before them and one layer after them.
    """

    def __init__(
        self, groups: Mapping[str, tuple[int, ...]], *, normalize: bool, image_features: int | None = None
    ) -> None:
        """Build the encoder of every group.

        Args:
            groups: name → shape of one row: (features,) or an image, (H, W, C) or (C, H, W).
            normalize: keep running statistics of vectors; otherwise they pass as they are.
            image_features: size of the layer behind the convolutions; None for no such layer.
        """
        super().__init__()
        self.names = tuple(groups)
        self._centered = image_features is not None
        self.encoders = nn.ModuleList()
        self.width = 0
        for shape in groups.values():
            if is_image(shape):
                encoder, width = _image_encoder(shape, image_features)
            else:
                encoder, width = Normalizer(shape[0]) if normalize else nn.Identity(), shape[0]
            self.encoders.append(encoder)
            self.width += width
        self.sees_images = any(map(is_image, groups.values()))

    def forward(self, obs: Mapping[str, Tensor]) -> Tensor:
        """Features (n, width) of groups (n, …)."""
        rows = [encoder(self._rows(obs[name])) for name, encoder in zip(self.names, self.encoders, strict=True)]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=-1)

    def update(self, obs: Mapping[str, Tensor], chosen: Tensor) -> None:
        """Let the statistics take in rows of every group.

        Args:
            obs: groups (T, N, …).
            chosen: bool (T, N): the rows to take in; at least one.
        """
        for name, encoder in zip(self.names, self.encoders, strict=True):
            first = encoder[0] if isinstance(encoder, nn.Sequential) else encoder
            if isinstance(first, Normalizer) or (isinstance(first, ImageNormalizer) and not bool(first.fitted)):
                first.update(self._rows(obs[name][chosen]))

    def _rows(self, rows: Tensor) -> Tensor:
        # as one product, since large images of whole rollouts come by here
        if self._centered and rows.dtype == torch.uint8:
            rows = rows.float().mul_(1 / 255).sub_(0.5)
        return as_float_rows(rows)


def _image_encoder(shape: tuple[int, ...], features: int | None) -> tuple[nn.Module, int]:
    channels, height, width = channels_first(shape)
    convolutions = nn.Sequential(nn.Conv2d(channels, 16, 8, 4), nn.ELU(), nn.Conv2d(16, 32, 4, 2), nn.ELU())
    if features is None:
        trunk = nn.Sequential(*convolutions, nn.Flatten())
        with torch.no_grad():
            return trunk, int(trunk(torch.zeros(1, channels, height, width)).shape[1])
    # torch's convolutions of small images run up to three times as fast with channels last
    convolutions = convolutions.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]  # not in its types
    trunk = nn.Sequential(ImageNormalizer(height, width, channels), convolutions, nn.Flatten())
    size = int(trunk(as_float_rows(torch.zeros(1, *shape))).shape[1])
    return trunk.extend([nn.Linear(size, features), nn.LayerNorm(features), nn.ELU()]), features
