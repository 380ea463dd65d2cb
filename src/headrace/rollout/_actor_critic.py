"""Actor and critic of the small learner, and the files they are kept in."""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headrace._published import published, published_file
from headrace.errors import ConfigError, DataError, UnknownNameError
from headrace.files import hash_file, write_whole
from headrace.learning import GRU, MinGRU
from headrace.types import Obs

_FORMAT, _VERSION = "headrace-actor-critic", 1
_LIBRARY = "headrace"
"""Marks our entries in the manifest, which other learners' checkpoints share."""


@dataclass(frozen=True, kw_only=True)
class NetworkCfg:
    """Sizes of a :class:`Policy`."""

    hidden: tuple[int, ...] = (64, 64)
    memory: Literal["none", "gru", "min_gru"] = "none"
    memory_size: int = 64
    image_features: int = 128
    initial_std: float = 0.6
    """Of actions, before learning."""


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
        """Zero mean and unit variance, cut at ±10."""
        return ((x - self.mean) / (self.variance + 1e-8).sqrt()).clamp(-10, 10)

    def denormalize(self, x: Tensor) -> Tensor:
        """The inverse, without the cut."""
        return x * (self.variance + 1e-8).sqrt() + self.mean

    @torch.no_grad()
    def update(self, rows: Tensor) -> None:
        """Take rows (n, size) in, n at least 1."""
        share = len(rows) / (float(self.count) + len(rows))
        shift, spread = rows.mean(0) - self.mean, rows.var(0, unbiased=False) - self.variance
        self.mean += shift * share
        self.variance += (spread + shift.square() * (1 - share)) * share
        self.count += len(rows)


class ImageNormalizer(nn.Module):
    """Takes out what all pictures have in common, and makes the channels independent and of equal strength.

    Two frames of a stack are almost the same picture, and what tells the velocity is their small difference: turned
    into channels of equal variance it is as easy to see as the picture itself. Fitted once, on the first rollout.
    """

    mean: Tensor
    mix: Tensor
    fitted: Tensor

    def __init__(self, height: int, width: int, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(height, width, channels))
        self.register_buffer("mix", torch.eye(channels))
        self.register_buffer("fitted", torch.tensor(False))

    def forward(self, pictures: Tensor) -> Tensor:
        """Pictures (n, C, H, W); channels last in memory where the input is."""
        return ((pictures.movedim(1, -1) - self.mean) @ self.mix).movedim(-1, 1)

    @torch.no_grad()
    def update(self, pictures: Tensor) -> None:
        """Fit mean and mix to pictures (n, C, H, W)."""
        pixels = pictures.movedim(1, -1)
        self.mean.copy_(pixels.mean(0))
        rest = (pixels - self.mean).flatten(0, -2)
        spread, axes = torch.linalg.eigh((rest.T @ rest / len(rest)).double())
        # less than one gray level is not a signal
        self.mix.copy_(axes / (spread + 1e-5).sqrt())
        self.fitted.fill_(True)


class Policy(nn.Module):
    """Actor and critic. The actor sees the group ``policy``; the critic sees ``critic`` where the task has it.

    Where the actor sees pictures and the critic numbers, ``guess`` reads those numbers off the actor's features: a
    target to learn from while training, unused when acting.

    Keeps no state of environments: the caller hands the memory back in, ``initial_state`` begins it.
    """

    low: Tensor
    high: Tensor

    def __init__(
        self, groups: Mapping[str, tuple[int, ...]], low: list[float], high: list[float], cfg: NetworkCfg
    ) -> None:
        super().__init__()
        sizes = {item.name: getattr(cfg, item.name) for item in fields(NetworkCfg)}
        self.made_of: dict[str, Any] = {"groups": dict(groups), "low": low, "high": high, "cfg": sizes}
        self.encoder, width = _encoder(groups["policy"], cfg)
        memory = {"gru": GRU, "min_gru": MinGRU}.get(cfg.memory)
        self.memory = None if memory is None else memory(width, cfg.memory_size)
        self.memory_size = cfg.memory_size if memory else 0
        width = self.memory_size or width
        self.critic_encoder, critic_width = _encoder(groups["critic"], cfg) if "critic" in groups else (None, width)
        self.actor = _mlp(width, cfg.hidden, len(low), last_gain=0.01)
        self.critic = _mlp(critic_width, cfg.hidden, 1, last_gain=1.0)
        # pictures learn to see what the critic is told
        told = isinstance(self.critic_encoder, Normalizer) and not isinstance(self.encoder, Normalizer)
        self.guess = nn.Linear(width, critic_width) if told else None
        self.log_std = nn.Parameter(torch.full((len(low),), math.log(cfg.initial_std)))
        self.value_scale = Normalizer(1)
        self.register_buffer("low", torch.tensor(low))
        self.register_buffer("high", torch.tensor(high))

    def update_normalizers(self, obs: Obs, active: Tensor) -> None:
        """Let the normalizers take the active rows of a rollout in: groups (T, N, …), bool (T, N)."""
        for name, encoder in {"policy": self.encoder, "critic": self.critic_encoder}.items():
            first = encoder[0] if isinstance(encoder, nn.Sequential) else encoder
            if isinstance(first, Normalizer) or (isinstance(first, ImageNormalizer) and not bool(first.fitted)):
                first.update(_channels_first(obs[name][active]))

    def initial_state(self, envs: int) -> Tensor:
        """The memory before an episode, (1, envs, memory_size); of width 0 without memory."""
        return self.low.new_zeros((1, envs, self.memory_size))

    def features(
        self, obs: Obs, state: Tensor, reset: Tensor | None = None, active: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What actor and critic read, and the memory after it: of a step, or of a slice where ``reset`` is (T, n)."""
        sliced = reset is not None and reset.dim() == 2
        seen = _encode(self.encoder, obs["policy"], sliced)
        if self.memory is not None:
            seen, state = (self.memory if sliced else self.memory.step)(seen, state, reset, active)
        watched = seen if self.critic_encoder is None else _encode(self.critic_encoder, obs["critic"], sliced)
        return seen, watched, state

    def distribution(self, features: Tensor) -> torch.distributions.Normal:
        """Of actions before they are cut to their bounds."""
        mean = self.actor(features)
        return torch.distributions.Normal(mean, self.log_std.exp().expand_as(mean), validate_args=False)

    @torch.no_grad()
    def act(self, obs: Obs, state: Tensor, reset: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The deterministic action (n, A) within its bounds, and the memory after it. Reads the group ``policy``."""
        seen = _encode(self.encoder, obs["policy"], False)
        if self.memory is not None:
            seen, state = self.memory.step(seen, state, reset)
        return self.actor(seen).clamp(self.low, self.high), state


@dataclass(frozen=True, kw_only=True)
class SavedPolicy:
    """A policy from a file, and what it was trained on."""

    policy: Policy
    task: str
    overrides: dict[str, Any] = field(default_factory=dict[str, Any])
    """Of the task's settings: ``headrace.make(task, overrides=overrides)`` gives what the policy can see."""

    def act(self, obs: Obs) -> Tensor:
        """The deterministic action (n, A) for observations (n, …); for policies without memory."""
        if self.policy.memory is not None:
            raise ConfigError("this policy has a memory; use policy.act(obs, state, reset) and keep the state it gives")
        return self.policy.act(obs, self.policy.initial_state(len(obs["policy"])))[0]


def save_actor_critic(
    policy: Policy, path: str | os.PathLike[str], *, task: str, overrides: Mapping[str, Any] | None = None
) -> str:
    """Write weights, normalizers and what is needed to build the policy again; returns the file's SHA-256."""
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "task": task,
        "overrides": dict(overrides or {}),
        "network": policy.made_of,
        "state_dict": policy.state_dict(),
    }
    write_whole(Path(path), lambda part: torch.save(content, part))
    return hash_file(Path(path))


def load_actor_critic(path_or_name: str | os.PathLike[str], device: torch.device | str = "cpu") -> SavedPolicy:
    """A trained policy: one that ships with headrace, by its name, or one from a file. Nothing in it is executed.

    Args:
        path_or_name: ``cartpole``, ``cartpole-camera``, … (see :func:`shipped_actor_critics`), or a path.
        device: where its tensors go.
    """
    name, shipped = str(path_or_name), shipped_actor_critics()
    if name in shipped:
        return _read(published_file(name), device)
    path = Path(path_or_name)
    if path.is_file():
        return _read(path, device)
    if path.suffix or len(path.parts) > 1:
        raise ConfigError(f"load_actor_critic: expected a checkpoint file or a name, got {name!r}: no such file")
    raise UnknownNameError("shipped policy", name, shipped)


def shipped_actor_critics() -> dict[str, dict[str, Any]]:
    """The policies in the package: name → its entry of the manifest (file, task, sha256, made_by, score)."""
    return {name: entry for name, entry in published().items() if entry["library"] == _LIBRARY}


def _read(path: Path, device: torch.device | str) -> SavedPolicy:
    try:
        data: Any = torch.load(path, map_location=device, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise DataError(f"{path}: expected a file written by save_actor_critic, got {error}") from error
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise DataError(f"{path}: expected a file written by save_actor_critic, of format {_FORMAT!r}")
    if data.get("version") != _VERSION:
        raise DataError(
            f"{path}: expected version {_VERSION} of the format, got {data.get('version')}; upgrade headrace"
        )
    policy = Policy(**(data["network"] | {"cfg": NetworkCfg(**data["network"]["cfg"])})).to(device)
    try:
        policy.load_state_dict(data["state_dict"])
    except RuntimeError as error:
        raise DataError(f"{path}: the weights do not fit the sizes beside them: {error}") from error
    return SavedPolicy(policy=policy.eval(), task=data["task"], overrides=data["overrides"])


def _encode(encoder: nn.Module, group: Tensor, sliced: bool) -> Tensor:
    rows = encoder(_channels_first(group.flatten(0, 1) if sliced else group))
    return rows.unflatten(0, group.shape[:2]) if sliced else rows


def _channels_first(rows: Tensor) -> Tensor:
    """Pictures (n, H, W, C) or (n, C, H, W), uint8 or float, for convolutions; vectors as they are."""
    rows = rows.float().mul_(1 / 255).sub_(0.5) if rows.dtype == torch.uint8 else rows
    return rows.movedim(-1, 1) if rows.dim() == 4 and rows.shape[-1] < rows.shape[1] else rows


def _encoder(shape: tuple[int, ...], cfg: NetworkCfg) -> tuple[nn.Module, int]:
    """What turns a group into features, and how many."""
    if len(shape) < 2:
        return Normalizer(math.prod(shape)), math.prod(shape)
    picture, size = _channels_first(torch.zeros(1, *shape)), cfg.image_features
    _, channels, height, width = picture.shape
    convolutions = nn.Sequential(nn.Conv2d(channels, 16, 8, 4), nn.ELU(), nn.Conv2d(16, 32, 4, 2), nn.ELU())
    # torch's convolutions of small pictures run up to three times as fast with channels last
    convolutions = convolutions.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]  # not in its types
    trunk = nn.Sequential(ImageNormalizer(height, width, channels), convolutions, nn.Flatten())
    return trunk.extend([nn.Linear(trunk(picture).shape[1], size), nn.LayerNorm(size), nn.ELU()]), size


def _mlp(width: int, hidden: tuple[int, ...], out: int, *, last_gain: float) -> nn.Sequential:
    sizes = (width, *hidden)
    layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ELU())]
    last = nn.Linear(sizes[-1], out)
    nn.init.orthogonal_(last.weight, last_gain)
    nn.init.zeros_(last.bias)
    return nn.Sequential(*layers, last)
