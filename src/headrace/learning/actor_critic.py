"""Actor and critic of the small learner, and the files they are kept in.

Observation groups: which of them a learner reads, what each is, and what turns them into features.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from gymnasium import spaces
from torch import Tensor, nn

from headrace._published import find_published_file, read_form, read_published
from headrace.errors import ConfigError, DataError, UnknownNameError
from headrace.files import hash_file, write_whole
from headrace.learning._recurrent import GRU
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


_FORMAT, _VERSION = "headrace-actor-critic", 2
_LIBRARY = "headrace"
"""Marks our entries in the manifest, which other learners' checkpoints share."""
MemoryKind = Literal["none", "gru"]


@dataclass(frozen=True, kw_only=True)
class NetworkCfg:
    """Sizes of a :class:`Policy`."""

    hidden: tuple[int, ...] = (64, 64)
    """Layers of the actor and of the critic, which share nothing; ELU between them."""
    memory: MemoryKind = "none"
    """``gru`` puts a recurrent layer of ``memory_size`` before the layers."""
    memory_size: int = 64
    image_features: int = 128
    """Features that an image is turned into, before memory and layers."""
    initial_std: float = 0.6
    """Of the Gaussian around the actor's mean, before learning; the same in every state."""
    normalize_obs: bool = True
    """Running mean and variance of vectors, saved with the weights. Images are scaled whatever this says."""


class Policy(nn.Module):
    """Actor and critic, each with the observation groups that it reads.

    Where the actor sees images and the critic numbers, ``guess`` reads those numbers off the actor's features: a
    target to learn from while training, unused when acting.

    Keeps no state of environments: the caller hands the memory back in, ``initial_state`` begins it.
    """

    low: Tensor
    high: Tensor

    def __init__(
        self,
        actor_groups: Mapping[str, tuple[int, ...]],
        low: list[float],
        high: list[float],
        cfg: NetworkCfg,
        critic_groups: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """Build the networks.

        Args:
            actor_groups: what the actor reads: group → shape of one row.
            low: lower bounds of the actions.
            high: upper bounds of the actions.
            cfg: sizes.
            critic_groups: what the critic reads; None for the actor's features.
        """
        super().__init__()
        sizes = {item.name: getattr(cfg, item.name) for item in fields(NetworkCfg)}
        groups = {"actor_groups": dict(actor_groups), "critic_groups": dict(critic_groups) if critic_groups else None}
        self.made_of: dict[str, Any] = {**groups, "low": low, "high": high, "cfg": sizes}
        options: dict[str, Any] = {"normalize": cfg.normalize_obs, "image_features": cfg.image_features}
        self.encoder = GroupEncoder(actor_groups, **options)
        self.memory = GRU(self.encoder.width, cfg.memory_size) if cfg.memory == "gru" else None
        self.memory_size = 0 if self.memory is None else cfg.memory_size
        width = self.memory_size or self.encoder.width
        self.critic_encoder = GroupEncoder(critic_groups, **options) if critic_groups else None
        critic_width = width if self.critic_encoder is None else self.critic_encoder.width
        self.actor = _mlp(width, cfg.hidden, len(low), last_gain=0.01)
        self.critic = _mlp(critic_width, cfg.hidden, 1, last_gain=1.0)
        # images learn to see what the critic receives
        guesses = self.critic_encoder is not None and not self.critic_encoder.sees_images and self.encoder.sees_images
        self.guess = nn.Linear(width, critic_width) if guesses else None
        self.log_std = nn.Parameter(torch.full((len(low),), math.log(cfg.initial_std)))
        self.value_scale = Normalizer(1)
        self.register_buffer("low", torch.tensor(low))
        self.register_buffer("high", torch.tensor(high))

    def update_normalizers(self, obs: Obs, active: Tensor) -> None:
        """Let the normalizers take in the active rows of a rollout: groups (T, N, …), bool (T, N)."""
        for encoder in (self.encoder, self.critic_encoder):
            if encoder is not None:
                encoder.update(obs, active)

    def initial_state(self, envs: int) -> Tensor:
        """Return the memory before an episode, (1, envs, memory_size); of width 0 without memory."""
        return self.low.new_zeros((1, envs, self.memory_size))

    def features(
        self, obs: Obs, state: Tensor, reset: Tensor | None = None, active: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what actor and critic read, and the memory after it; of a slice where ``reset`` is (T, n)."""
        seen, state = self.actor_features(obs, state, reset, active)
        sliced = reset is not None and reset.dim() == 2
        return seen, seen if self.critic_encoder is None else _encode(self.critic_encoder, obs, sliced), state

    def actor_features(
        self, obs: Obs, state: Tensor, reset: Tensor | None = None, active: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return what the actor reads, and the memory after it: of a step, or of a slice where ``reset`` is (T, n)."""
        sliced = reset is not None and reset.dim() == 2
        seen = _encode(self.encoder, obs, sliced)
        if self.memory is not None:
            seen, state = (self.memory if sliced else self.memory.step)(seen, state, reset, active)
        return seen, state

    def distribution(self, features: Tensor) -> torch.distributions.Normal:
        """Of actions before they are cut to their bounds."""
        mean = self.actor(features)
        return torch.distributions.Normal(mean, self.log_std.exp().expand_as(mean), validate_args=False)

    @torch.no_grad()
    def act(self, obs: Obs, state: Tensor, reset: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the deterministic action (n, A) within its bounds, and the memory after it.

        Reads the actor's groups.
        """
        seen, state = self.actor_features(obs, state, reset)
        return self.actor(seen).clamp(self.low, self.high), state


@dataclass(frozen=True, kw_only=True)
class SavedPolicy:
    """A policy from a file, and what it was trained on."""

    policy: Policy
    task: str
    overrides: dict[str, Any] = field(default_factory=dict[str, Any])
    """Of the task's settings: ``headrace.make(task, overrides=overrides)`` gives what the policy can see."""

    def act(self, obs: Obs) -> Tensor:
        """Return the deterministic action (n, A) for observations (n, …); for policies without memory."""
        if self.policy.memory is not None:
            raise ConfigError("this policy has a memory; use policy.act(obs, state, reset) and keep the state it gives")
        return self.policy.act(obs, self.policy.initial_state(len(next(iter(obs.values())))))[0]


def actor_critic_content(policy: Policy, task: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return what :func:`save_actor_critic` writes."""
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "task": task,
        "overrides": dict(overrides),
        "network": policy.made_of,
        "state_dict": policy.state_dict(),
    }


def save_actor_critic(
    policy: Policy, path: str | os.PathLike[str], *, task: str, overrides: Mapping[str, Any] | None = None
) -> str:
    """Write weights, normalizers and what is needed to build the policy again; returns the file's SHA-256."""
    content = actor_critic_content(policy, task, overrides or {})
    write_whole(Path(path), lambda part: torch.save(content, part))
    return hash_file(Path(path))


def load_actor_critic(
    path_or_name: str | os.PathLike[str], device: torch.device | str = "cpu", *, trust: bool = False
) -> SavedPolicy:
    """Return a trained policy: one that ships with headrace, by its name, or one from a file.

    Args:
        path_or_name: ``cartpole``, ``cartpole-camera``, … (see :func:`list_shipped_actor_critics`), or a path.
        device: where its tensors go.
        trust: unpickle whatever is in the file, which can execute arbitrary code; otherwise nothing in it is executed.
    """
    name, shipped = str(path_or_name), list_shipped_actor_critics()
    if name in shipped:
        return _read(find_published_file(name), device)
    path = Path(path_or_name)
    if path.is_file():
        return _read(path, device, trust=trust)
    if path.suffix or len(path.parts) > 1:
        raise ConfigError(f"load_actor_critic: expected a checkpoint file or a name, got {name!r}: no such file")
    raise UnknownNameError("shipped policy", name, shipped)


def list_shipped_actor_critics() -> dict[str, dict[str, Any]]:
    """Return the policies in the package: name → its entry of the manifest (file, task, sha256, made_by, score)."""
    return {name: entry for name, entry in read_published().items() if entry["library"] == _LIBRARY}


def _read(path: Path, device: torch.device | str, *, trust: bool = False) -> SavedPolicy:
    data = read_form(path, "a file written by save_actor_critic", _FORMAT, trust=trust)
    if data.get("version") != _VERSION:
        raise DataError(
            f"{path}: expected version {_VERSION} of the format, got {data.get('version')}; upgrade headrace"
        )
    policy = Policy(**(data["network"] | {"cfg": NetworkCfg(**data["network"]["cfg"])})).to(device)
    try:
        policy.load_state_dict(data["state_dict"])
    except RuntimeError as error:
        raise DataError(f"{path}: weights do not match the saved network sizes: {error}") from error
    return SavedPolicy(policy=policy.eval(), task=data["task"], overrides=data["overrides"])


def _encode(encoder: GroupEncoder, obs: Obs, sliced: bool) -> Tensor:
    if not sliced:
        return encoder(obs)
    steps = obs[encoder.names[0]].shape[:2]
    return encoder({name: obs[name].flatten(0, 1) for name in encoder.names}).unflatten(0, steps)


def _mlp(width: int, hidden: tuple[int, ...], out: int, *, last_gain: float) -> nn.Sequential:
    sizes = (width, *hidden)
    layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ELU())]
    last = nn.Linear(sizes[-1], out)
    nn.init.orthogonal_(last.weight, last_gain)
    nn.init.zeros_(last.bias)
    return nn.Sequential(*layers, last)
