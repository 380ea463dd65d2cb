"""Requests for the tests of remote engines: rows that are told apart by their numbers."""

from __future__ import annotations

import torch

from headrace.policies.engines import Request
from headrace.policies.protocol import ChunkContext

HORIZON, ACTION_DIM = 4, 3


def make_request(
    rows: int, *, first_episode: int = 0, seed: int = 0, chunk: int = 0, obs: dict[str, torch.Tensor] | None = None
) -> Request:
    """Rows with state (episode, 0.5) and an 8×4 picture full of their episode's number."""
    episodes = torch.arange(rows) + first_episode
    if obs is None:
        state = torch.stack([episodes.float(), torch.full((rows,), 0.5)], dim=1)
        pictures = episodes.to(torch.uint8)[:, None, None, None].expand(rows, 8, 4, 3).contiguous()
        obs = {"policy": state, "camera": pictures}
    context = ChunkContext(
        seeds=torch.full((rows,), seed),
        env_ids=torch.arange(rows),
        episode_ids=episodes,
        chunk_index=torch.full((rows,), chunk),
        instructions=tuple(f"do {episode}" for episode in episodes.tolist()),
        left_over=torch.zeros((rows, HORIZON, ACTION_DIM)),
        left_over_length=torch.zeros(rows, dtype=torch.int64),
        delay=torch.zeros(rows, dtype=torch.int64),
    )
    return Request(obs=obs, context=context)
