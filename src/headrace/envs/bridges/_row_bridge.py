"""Makes environments of batched simulators: of an object, or of a name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Unpack

from headrace._gymnasium_ids import ENVPOOL, PLAYGROUND
from headrace.envs._recipe import EnvRecipe, EpisodeRules, check_count
from headrace.envs.bridges._bridge_env import BridgeEnv
from headrace.envs.bridges._rows import RowBackend, RowSimulator
from headrace.errors import ConfigError, UnknownNameError

# a pool with a batch_size of its own answers for rows that nobody asked for
_BRIDGES_OWN = ("batch_size", "env_type", "num_envs", "seed", "task", "task_id")
MJLAB_ENTRY = f"{Path(__file__).with_name('mjlab_rows.py')}:make"
"""The ``entry`` of mjlab's tasks, for ``headrace.bridge(python=…, entry=MJLAB_ENTRY, env_kwargs={"task": …})``."""


def row_bridge(
    source: str | RowSimulator, num_envs: int, env_kwargs: Mapping[str, object], **episodes: Unpack[EpisodeRules]
) -> BridgeEnv:
    """Put the contract on a batched simulator, which the environment closes; the arguments are those of ``bridge``."""
    sim = _named(source, num_envs, episodes.get("seed", 0), env_kwargs) if isinstance(source, str) else source
    try:
        backend = RowBackend(sim)
        env = BridgeEnv(
            backend,
            name=getattr(sim, "name", None) or type(sim).__name__,
            observation_space=backend.observation_space,
            action_space=backend.action_space,
            render_mode="rgb_array" if hasattr(sim, "render") else None,
            **episodes,
        )
    except BaseException:  # also Ctrl-C; raised again
        if isinstance(source, str) and hasattr(sim, "close"):
            sim.close()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]  # asked for above
        raise
    if isinstance(source, str):
        env.recipe = EnvRecipe(source, num_envs=num_envs, overrides=env_kwargs, **episodes)
    return env


def _named(source: str, num_envs: int, seed: int, env_kwargs: Mapping[str, object]) -> RowSimulator:
    check_count("num_envs", num_envs)
    if taken := [name for name in env_kwargs if name in _BRIDGES_OWN]:
        raise ConfigError(
            f"env_kwargs of {source}: expected none of {', '.join(_BRIDGES_OWN)}, which the bridge sets itself, got "
            f"{', '.join(taken)}; num_envs= and seed= are arguments of bridge"
        )
    if not isinstance(env_kwargs.get("instruction", ""), str):
        raise ConfigError(f"instruction: expected a text, got {env_kwargs['instruction']!r}")
    if source.startswith(PLAYGROUND):
        from headrace.envs.bridges._playground import PlaygroundRows

        known = [name for name in inspect.signature(PlaygroundRows).parameters if name not in ("task", "num_envs")]
        for name in env_kwargs:
            if name not in known:
                raise UnknownNameError(f"setting (env_kwargs) of {source}", name, known)
        return PlaygroundRows(source.removeprefix(PLAYGROUND), num_envs, **env_kwargs)  # pyright: ignore[reportArgumentType]  # the user's
    from headrace.envs.bridges._envpool import EnvPoolRows

    return EnvPoolRows(source.removeprefix(ENVPOOL), num_envs, seed=seed, **env_kwargs)  # pyright: ignore[reportArgumentType]  # the user's
