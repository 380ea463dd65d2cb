"""Actor and critic of the small learner, and the files they are kept in."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headrace._published import find_published_file, read_form, read_published
from headrace.errors import ConfigError, DataError, UnknownNameError
from headrace.files import hash_file, write_whole
from headrace.learning._recurrent import GRU
from headrace.learning.groups import GroupEncoder, Normalizer
from headrace.types import Obs

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
        # images learn to see what the critic is told
        told = self.critic_encoder is not None and not self.critic_encoder.sees_images and self.encoder.sees_images
        self.guess = nn.Linear(width, critic_width) if told else None
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
