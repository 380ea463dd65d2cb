"""The contract of policies: answers are functions of their rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace.evaluation.cfg import PlayCfg
from headrace.evaluation.player import open_player

if TYPE_CHECKING:
    from headrace.envs.recipe import AnyEnv
    from headrace.policies.load_policy import PolicySource


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCheck:
    """What a check of a policy found."""

    verified: int
    """Rows that were answered again alone and in another batch, with equal bits; 0 where that was not possible."""
    strict_size: int | None
    """Rows of its strict batches; None for a server whose answers depend on the batch."""
    rows_per_row: float
    """Rows that were computed per row that was needed."""


def check_policy(policy: PolicySource, env: AnyEnv, *, steps: int = 20, play: PlayCfg = PlayCfg()) -> PolicyCheck:
    """Play some steps of a policy and verify its answers as a strict evaluation does, before a long one.

    Args:
        policy: as for :func:`headrace.evaluate`.
        env: to play in, made with ``autoreset="disabled"``; it is reset.
        steps: of the batch.
        play: how the policy is played.

    Raises:
        PolicyError: an answer depends on the batch, on earlier calls, or on a global random generator.
    """
    from headrace.evaluation.cursors import EndlessPlan

    with torch.no_grad(), open_player(env, policy, play, env.seed) as player:
        found = player.play(EndlessPlan(env.num_envs), most_steps=steps)
    return PolicyCheck(
        verified=found.counters.rows_verified, strict_size=found.strict_size, rows_per_row=found.rows_per_row
    )
