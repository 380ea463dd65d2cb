"""``headrace.serve``: a chunk policy, by name, on openpi's wire."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.chunking._policy import PolicyLike
    from headrace.serving import PolicyServer, ServeCfg


def serve(
    task: str | None = None,
    *,
    policy: PolicyLike | str | Path | None = None,
    cfg: ServeCfg | None = None,
    horizon: int | None = None,
    action_dim: int | None = None,
    obs_steps: int | None = None,
) -> PolicyServer:
    """Serve a policy that plans chunks of actions to clients elsewhere, batching over them::

        with headrace.serve("pusher-solid") as server:
            print(server.address)
            server.wait()

    Args:
        task: serve the policy that we ship for it.
        policy: a checkpoint that ``headrace imitate`` wrote, ``module:name`` of a policy object, class or function, or
            ``lerobot:DIR``; None for the policy that we ship for the task; in Python also the policy itself.
        cfg: address, batching and key.
        horizon: rows of a chunk, where the policy does not say.
        action_dim: size of an action, where the policy does not say.
        obs_steps: observations per row, where the policy does not say.

    Returns:
        A server that listens from within its ``with`` block on, or from ``start()``.
    """
    from headrace.chunking import as_chunk_policy
    from headrace.rollout._policy_source import load_policy_source
    from headrace.serving import PolicyServer

    if task is None and policy is None:
        raise ConfigError("serve: expected TASK or --policy; 'headrace serve pusher-solid' serves the policy we ship")
    name = str(policy) if isinstance(policy, (str, Path)) else task or type(policy).__name__
    if policy is None or isinstance(policy, (str, Path)):
        policy = load_policy_source(None if policy is None else str(policy), task=task)
    fitted = as_chunk_policy(policy, horizon=horizon, action_dim=action_dim, obs_steps=obs_steps)
    return PolicyServer(fitted, cfg, name=name)
