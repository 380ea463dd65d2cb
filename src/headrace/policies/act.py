"""A small action-chunking transformer: one observation in, sixteen actions out.

After ACT (Zhao et al., 2023), without its latent variable: our experts are functions of the observation, so there is no
style to encode. Vectors become a few memory tokens, an image one token per patch, an instruction one token; they attend
to each other, and a learned query per action reads them. What depends on the queries alone is computed once, not once
a row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from headrace._published import read_form
from headrace.errors import ConfigError, DataError, ShapeError
from headrace.files import hash_file, write_whole
from headrace.learning.actor_critic import as_float_rows, channels_first
from headrace.policies.preflight import ACTION, FeatureSpec
from headrace.policies.protocol import PADDING, ChunkContext
from headrace.types import Obs

_FORMAT = "headrace-act-1"
SHIPPED = "headrace-chunk"
"""Marks chunk policies in the manifest, which learners' checkpoints share."""


@dataclass(frozen=True, kw_only=True)
class ActCfg:
    """Sizes of an :class:`ActPolicy`."""

    obs_dim: int
    """Numbers of all vectors together; 0 where it reads images alone."""
    action_dim: int
    horizon: int = 16
    width: int = 64
    """Of a token."""
    heads: int = 4
    memory_tokens: int = 4
    hidden: int = 256
    """Of the network that turns the vectors into memory tokens."""
    vectors: tuple[str, ...] = ("policy",)
    """Observation groups that are vectors, in the order in which they are joined."""
    images: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Observation groups that are images, and the shape of one, (H, W, C) or (C, H, W)."""
    image_size: int = 96
    """Longer images are averaged down to this many pixels on their longer side before they are read."""
    instructions: tuple[str, ...] = ()
    """The instructions that it can follow; empty for a policy that reads none."""

    def __post_init__(self) -> None:
        for name in ("action_dim", "horizon", "width", "heads", "memory_tokens", "hidden", "image_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"ActCfg: {name}: expected at least 1, got {getattr(self, name)}")
        if self.width % self.heads:
            raise ConfigError(f"ActCfg: expected a width that {self.heads} heads divide, got {self.width}")
        if not self.obs_dim and not self.images:
            raise ConfigError("ActCfg: expected vectors or images to read, got neither")


class PolicyInputs(NamedTuple):
    """Rows that an :class:`ActPolicy` reads, n of each."""

    vectors: Tensor
    """float32 (n, obs_dim): the vector groups, joined."""
    images: tuple[Tensor, ...] = ()
    """One (n, …) per image group, in the order of ``ActCfg.images``; bytes, or floats as they are."""
    instructions: Tensor | None = None
    """int64 (n,): indices into ``ActCfg.instructions``."""


class ActPolicy(nn.Module):
    """A :class:`headrace.policies.protocol.ChunkPolicy` over vectors, images and instructions. Deterministic.

    The statistics that normalize observations and actions are buffers: they travel with the weights.
    """

    obs_steps = 1
    policy_identity = "act-1"

    def __init__(self, cfg: ActCfg) -> None:
        super().__init__()
        self.cfg = cfg
        self.horizon, self.action_dim = cfg.horizon, cfg.action_dim
        for name, size in (("obs", cfg.obs_dim), ("action", cfg.action_dim)):
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_std", torch.ones(size))
        if cfg.obs_dim:
            self.read = nn.Sequential(
                nn.Linear(cfg.obs_dim, cfg.hidden),
                nn.GELU(),
                nn.Linear(cfg.hidden, cfg.hidden),
                nn.GELU(),
                nn.Linear(cfg.hidden, cfg.memory_tokens * cfg.width),
            )
        self.encoder = nn.TransformerEncoderLayer(
            cfg.width, cfg.heads, 2 * cfg.width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.memory_norm = nn.LayerNorm(cfg.width)
        self.queries = nn.Parameter(torch.randn(cfg.horizon, cfg.width))
        self.ask = nn.Linear(cfg.width, cfg.width)
        self.key_value = nn.Linear(cfg.width, 2 * cfg.width)
        self.answer = nn.Linear(cfg.width, cfg.width)
        self.think = nn.Sequential(
            nn.LayerNorm(cfg.width),
            nn.Linear(cfg.width, 2 * cfg.width),
            nn.GELU(),
            nn.Linear(2 * cfg.width, cfg.width),
        )
        self.write = nn.Sequential(nn.LayerNorm(cfg.width), nn.Linear(cfg.width, cfg.action_dim))
        if cfg.images:
            self.look = nn.ModuleList(_ImageTokens(shape, cfg.image_size, cfg.width) for _, shape in cfg.images)
        if cfg.instructions:
            self.listen = nn.Embedding(len(cfg.instructions), cfg.width)

    @property
    def feature_specs(self) -> dict[str, FeatureSpec]:
        """What it reads and plans, with the means of its training data."""
        mean, cfg = tuple(cast("Tensor", self.obs_mean).tolist()), self.cfg
        vectors = dict.fromkeys(cfg.vectors, FeatureSpec(convert="flat"))
        if len(cfg.vectors) == 1:  # of several, only the sum of the sizes is known
            vectors = dict.fromkeys(cfg.vectors, FeatureSpec(convert="flat", shape=(cfg.obs_dim,), mean=mean))
        images = {name: FeatureSpec(convert="picture", shape=tuple(shape)) for name, shape in cfg.images}
        return vectors | images | {ACTION: FeatureSpec(mean=tuple(cast("Tensor", self.action_mean).tolist()))}

    def set_statistics(self, obs: Tensor, actions: Tensor) -> None:
        """Take mean and spread of data (M, obs_dim) and (M, action_dim); what hardly varies is not blown up.

        An action that never varies has no spread: the policy plans its exact value.
        """
        for name, data in (("obs", obs), ("action", actions)):
            fixed = (data == data[:1]).all(dim=0) & (name == "action")
            cast("Tensor", getattr(self, f"{name}_mean")).copy_(data[:1].squeeze(0).where(fixed, data.mean(dim=0)))
            if data.shape[1] and len(data) > 1:
                spread = data.std(dim=0).clamp(min=1e-3)
                cast("Tensor", getattr(self, f"{name}_std")).copy_(spread.masked_fill(fixed, 0.0))

    def normalized(self, inputs: PolicyInputs) -> Tensor:
        """Chunks in units of the actions' spread, (n, horizon, action_dim)."""
        rows, cfg = inputs.vectors, self.cfg
        if rows.dim() != 2 or rows.shape[1] != cfg.obs_dim:
            raise ShapeError(
                f"policy: expected observations (n, {cfg.obs_dim}), got {tuple(rows.shape)}; "
                "use it with the task it was trained on"
            )
        tokens: list[Tensor] = []
        if cfg.obs_dim:
            scaled = (rows - cast("Tensor", self.obs_mean)) / cast("Tensor", self.obs_std)
            tokens.append(self.read(scaled.clamp(-10.0, 10.0)).reshape(len(rows), cfg.memory_tokens, cfg.width))
        for place, images in enumerate(inputs.images):
            name, shape = cfg.images[place]
            if images.dim() != 4 or channels_first(tuple(images.shape[1:])) != channels_first(shape):
                raise ShapeError(
                    f"policy: expected images {name!r} of shape {tuple(shape)}, got {tuple(images.shape[1:])}; use it "
                    "with the camera it was trained on (stacks of frames as they were recorded)"
                )
            tokens.append(self.look[place](images))
        if inputs.instructions is not None:
            tokens.append(self.listen(inputs.instructions)[:, None])
        memory = self.memory_norm(self.encoder(tokens[0] if len(tokens) == 1 else torch.cat(tokens, dim=1)))
        plan = self.queries + self._attend(memory)
        return self.write(plan + self.think(plan))

    def _attend(self, memory: Tensor) -> Tensor:
        """Return what each query reads in the memory (n, tokens, width): (n, horizon, width)."""
        count, heads = len(memory), self.cfg.heads
        query = self.ask(self.queries).reshape(1, self.horizon, heads, -1).transpose(1, 2).expand(count, -1, -1, -1)
        key, value = self.key_value(memory).reshape(count, -1, 2, heads, self.cfg.width // heads).unbind(dim=2)
        read = nn.functional.scaled_dot_product_attention(query, key.transpose(1, 2), value.transpose(1, 2))
        return self.answer(read.transpose(1, 2).reshape(count, self.horizon, self.cfg.width))

    def forward(self, obs: Obs, context: ChunkContext | None = None) -> Tensor:
        """Plan float32 (n, horizon, action_dim); of ``context`` only the instructions are read, if any."""
        cfg, device = self.cfg, self.queries.device
        names = [*cfg.vectors, *dict(cfg.images)]
        if not obs.keys() >= set(names):
            raise ConfigError(
                f"policy: expected the observation groups {names}, got {list(obs)}; use it with the task it was "
                "trained on"
            )
        if cfg.instructions and context is None:
            raise ConfigError("policy: expected a context with instructions, since it was trained to follow them")
        groups = [obs[name].to(device) for name in names]
        rows, images = groups[: len(cfg.vectors)], tuple(groups[len(cfg.vectors) :])
        vectors = torch.cat([values.to(torch.float32).flatten(1) for values in rows or [images[0][:, :0]]], dim=1)
        said = None if context is None or not cfg.instructions else instruction_numbers(context, cfg.instructions)
        with torch.no_grad():
            plan = self.normalized(PolicyInputs(vectors, images, None if said is None else said.to(device)))
            return plan * cast("Tensor", self.action_std) + cast("Tensor", self.action_mean)


class _ImageTokens(nn.Module):
    """Images as tokens, one per patch of 16 x 16 pixels: four convolutions that halve, and a learned place for each."""

    policy_identity = "act-image-tokens-1"

    def __init__(self, shape: tuple[int, ...], longest: int, width: int) -> None:
        super().__init__()
        channels, high, wide = channels_first(shape)
        shrink = min(1.0, longest / max(high, wide))
        self.size = max(1, round(high * shrink)), max(1, round(wide * shrink))
        sizes = (channels, 32, 32, 64, width)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(sizes):
            layers += [nn.Conv2d(before, after, 3, 2, padding=1), nn.GELU()]
        self.layers = nn.Sequential(*layers[:-1])
        patches = math.prod(math.ceil(side / 16) for side in self.size)
        self.norm = nn.LayerNorm(width)
        self.places = nn.Parameter(0.02 * torch.randn(patches, width))

    def forward(self, images: Tensor) -> Tensor:
        """Tokens (n, patches, width) of images (n, …)."""
        rows = as_float_rows(images)
        if tuple(rows.shape[2:]) != self.size:
            rows = nn.functional.adaptive_avg_pool2d(rows, self.size)
        return self.norm(self.layers(4.0 * (rows - 0.5)).flatten(2).transpose(1, 2)) + self.places


def save_policy(policy: ActPolicy, path: Path, *, task: str, overrides: Mapping[str, object] | None = None) -> str:
    """Write a checkpoint that ``torch.load(weights_only=True)`` reads; returns its SHA-256.

    Args:
        policy: the policy.
        path: the file.
        task: what it was trained on.
        overrides: of the task's settings, as JSON; a player of the file gets them.
    """
    content = {"format": _FORMAT, "task": task, "cfg": asdict(policy.cfg), "weights": policy.state_dict()}
    if overrides:
        content["overrides"] = dict(overrides)
    write_whole(path, lambda part: torch.save(content, part))
    return hash_file(path)


def instruction_numbers(context: ChunkContext, known: Sequence[str]) -> Tensor:
    """int64 (n,): where in ``known`` the instruction of each row stands; 0 for padding rows."""
    numbers: list[int] = []
    for text, episode in zip(context.instructions, context.episode_ids.tolist(), strict=True):
        if text not in known and episode != PADDING:
            raise ConfigError(
                f"policy: expected one of the instructions {list(known)} that it was trained on, got {text!r}"
            )
        numbers.append(0 if episode == PADDING else known.index(text))
    return torch.tensor(numbers, dtype=torch.int64)


def read_policy(path: Path) -> ActPolicy:
    """Read a checkpoint that ``headrace imitate`` wrote."""
    content = read_form(path, "a chunk policy that 'headrace imitate' wrote", _FORMAT)
    try:
        policy = ActPolicy(ActCfg(**content["cfg"]))
    except (TypeError, ConfigError) as error:
        raise DataError(f"{path}: its sizes are not those of a policy of this version: {error}") from error
    try:
        policy.load_state_dict(content["weights"])
    except RuntimeError as error:
        raise DataError(f"{path}: weights do not match the saved network sizes: {error}") from error
    return policy.eval()
