"""``headrace.policies.serve``: a chunk policy, by name, on openpi's wire."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from headrace.envs.recipe import EnvRecipe
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.policies.protocol import PolicyLike
    from headrace.policies.serving._server import PolicyServer, ServeCfg


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

        with headrace.policies.serve("pusher-solid") as server:
            print(server.address)
            server.wait()

    Args:
        task: serve the policy that we ship for it; needed for the checkpoint of a training.
        policy: a checkpoint that ``headrace imitate`` or ``headrace train`` wrote, ``module:name`` of a policy object,
            class or function, or ``lerobot:DIR``; None for the policy that we ship for the task; in Python also
            everything that :func:`headrace.load_policy` takes.
        cfg: address, batching and key.
        horizon: rows of a chunk, where the policy does not state them.
        action_dim: size of an action, where the policy does not state it.
        obs_steps: observations per row, where the policy does not state them.

    Returns:
        A server that listens from within its ``with`` block on, or from ``start()``.
    """
    from headrace.policies.load_policy import find_policy, load_policy
    from headrace.policies.protocol import as_chunk_policy
    from headrace.policies.serving._server import PolicyServer, ServeCfg
    from headrace.policies.strictness import choose_batching

    if task is None and policy is None:
        raise ConfigError("serve: expected TASK or --policy; 'headrace serve pusher-solid' serves the policy we ship")
    name = str(policy) if isinstance(policy, (str, Path)) else task or type(policy).__name__
    found = find_policy(policy, task)
    loaded = found.source if found.kind == "object" else load_policy(policy, EnvRecipe.of(task) if task else None)
    fitted = as_chunk_policy(
        cast("PolicyLike", loaded), horizon=horizon, action_dim=action_dim, obs_steps=obs_steps, single=True
    )
    cfg = cfg or ServeCfg()
    if task is not None and cfg.batching.mode == "strict":
        with closing(EnvRecipe.of(task).make(num_envs=1)) as env:
            cfg = replace(cfg, batching=choose_batching(fitted, cfg.batching, env))
    return PolicyServer(fitted, cfg, name=name)
