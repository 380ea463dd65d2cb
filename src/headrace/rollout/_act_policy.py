"""A small action-chunking transformer: one observation in, sixteen actions out.

After ACT (Zhao et al., 2023), without its latent variable: our experts are functions of the observation, so there is no
style to encode. The observation becomes a few memory tokens that attend to each other; a learned query per action reads
them. What depends on the queries alone is computed once, not once a row.
"""

from __future__ import annotations

import pickle
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from headrace._published import published, published_file
from headrace.chunking import ChunkContext
from headrace.errors import ConfigError, DataError, ShapeError, UnknownNameError
from headrace.files import hash_file, write_whole
from headrace.types import Obs, as_device

_FORMAT = "headrace-act-1"
_LIBRARY = "headrace-chunk"
"""Marks our entries in the manifest, which other learners' checkpoints share."""


@dataclass(frozen=True, kw_only=True)
class ActCfg:
    """Sizes of an :class:`ActPolicy`."""

    obs_dim: int
    """Size of the observation group ``policy``."""
    action_dim: int
    horizon: int = 16
    width: int = 64
    """Of a token."""
    heads: int = 4
    memory_tokens: int = 4
    hidden: int = 256
    """Of the network that turns the observation into memory tokens."""


class ActPolicy(nn.Module):
    """A :class:`headrace.chunking.ChunkPolicy` over the observation group ``policy``. Deterministic.

    The statistics that normalize observations and actions are buffers: they travel with the weights.
    """

    obs_steps = 1

    def __init__(self, cfg: ActCfg) -> None:
        super().__init__()
        self.cfg = cfg
        self.horizon, self.action_dim = cfg.horizon, cfg.action_dim
        for name, size in (("obs", cfg.obs_dim), ("action", cfg.action_dim)):
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_std", torch.ones(size))
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

    def set_statistics(self, obs: Tensor, actions: Tensor) -> None:
        """Take mean and spread of data (M, obs_dim) and (M, action_dim); what hardly varies is not blown up."""
        for name, data in (("obs", obs), ("action", actions)):
            cast("Tensor", getattr(self, f"{name}_mean")).copy_(data.mean(dim=0))
            cast("Tensor", getattr(self, f"{name}_std")).copy_(data.std(dim=0).clamp(min=1e-3))

    def normalized(self, rows: Tensor) -> Tensor:
        """Chunks in units of the actions' spread, (n, horizon, action_dim), of observation rows (n, obs_dim)."""
        if rows.dim() != 2 or rows.shape[1] != self.cfg.obs_dim:
            raise ShapeError(
                f"policy: expected observations (n, {self.cfg.obs_dim}), got {tuple(rows.shape)}; "
                "use it with the task it was trained on"
            )
        scaled = (rows - cast("Tensor", self.obs_mean)) / cast("Tensor", self.obs_std)
        memory = self.read(scaled.clamp(-10.0, 10.0)).reshape(len(rows), self.cfg.memory_tokens, self.cfg.width)
        memory = self.memory_norm(self.encoder(memory))
        plan = self.queries + self._recalled(memory)
        return self.write(plan + self.think(plan))

    def _recalled(self, memory: Tensor) -> Tensor:
        """What each query reads in the memory (n, tokens, width): (n, horizon, width)."""
        count, heads = len(memory), self.cfg.heads
        query = self.ask(self.queries).reshape(1, self.horizon, heads, -1).transpose(1, 2).expand(count, -1, -1, -1)
        key, value = self.key_value(memory).reshape(count, -1, 2, heads, self.cfg.width // heads).unbind(dim=2)
        read = nn.functional.scaled_dot_product_attention(query, key.transpose(1, 2), value.transpose(1, 2))
        return self.answer(read.transpose(1, 2).reshape(count, self.horizon, self.cfg.width))

    def forward(self, obs: Obs, context: ChunkContext | None = None) -> Tensor:
        """Plan float32 (n, horizon, action_dim); ``context`` is not used."""
        del context
        with torch.no_grad():
            plan = self.normalized(obs["policy"].to(device=self.queries.device, dtype=torch.float32))
            return plan * cast("Tensor", self.action_std) + cast("Tensor", self.action_mean)


def save_policy(policy: ActPolicy, path: Path, *, task: str) -> str:
    """Write a checkpoint that ``torch.load(weights_only=True)`` reads; returns its SHA-256."""
    content = {"format": _FORMAT, "task": task, "cfg": asdict(policy.cfg), "weights": policy.state_dict()}
    write_whole(path, lambda part: torch.save(content, part))
    return hash_file(path)


def load_chunk_policy(path_or_task: str | Path, *, device: torch.device | str = "cpu") -> ActPolicy:
    """A trained chunk policy, ready to evaluate: the one we ship for a task, or one from a file.

    Args:
        path_or_task: a task's name, or the path of a file written by ``headrace imitate``.
        device: where its weights go; observations are moved there.
    """
    target = as_device(device)
    name = str(path_or_task)
    shipped = shipped_policies()
    if name in shipped:
        return _read(published_file(str(shipped[name]["name"]))).to(target)
    path = Path(path_or_task)
    if path.is_file():
        return _read(path).to(target)
    if path.suffix or len(path.parts) > 1:
        raise ConfigError(f"load_chunk_policy: expected a checkpoint file or a task's name, got {name!r}: no such file")
    raise UnknownNameError("chunk policy", name, shipped)


def shipped_policies() -> dict[str, dict[str, object]]:
    """The chunk policies in the package: task → name, file, sha256, made_by, score."""
    entries = published().items()
    return {str(entry["task"]): {"name": name, **entry} for name, entry in entries if entry["library"] == _LIBRARY}


def _read(path: Path) -> ActPolicy:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    # torch reports a file that was cut short as a seek that failed
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise DataError(f"{path}: expected a checkpoint written by 'headrace imitate', got {error}") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise DataError(f"{path}: expected a checkpoint of format {_FORMAT!r}; write one with 'headrace imitate'")
    policy = ActPolicy(ActCfg(**content["cfg"]))
    try:
        policy.load_state_dict(content["weights"])
    except RuntimeError as error:
        raise DataError(f"{path}: weights do not match the saved network sizes: {error}") from error
    return policy.eval()
