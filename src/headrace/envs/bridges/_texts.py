"""Instructions of bridged environments: texts in the observation (Gymnasium's ``Text`` spaces) or in ``info``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gymnasium import spaces

from headrace._leaves import Path, leaves
from headrace.envs.bridges.child import told_by
from headrace.errors import ConfigError

INSTRUCTION_KEYS = ("instruction", "language_instruction", "task_description", "prompt")
"""Under which an environment's ``info``, or a ``Text`` space of its observation, says what to do; the first wins."""


def instruction_path(space: spaces.Space[Any]) -> Path | None:
    """Where an observation has its instruction; None where it has no text."""
    paths = [leaf.path for leaf in leaves(space) if isinstance(leaf.value, spaces.Text)]
    if len(paths) <= 1:
        return paths[0] if paths else None
    for name in INSTRUCTION_KEYS:
        found = [path for path in paths if path[-1] == name]
        if len(found) == 1:
            return found[0]
    raise ConfigError(
        f"observation space: expected one Text space, or one with a name of {INSTRUCTION_KEYS}, got texts at {paths}; "
        "rename the one that is the instruction"
    )


def instructions_of(obs: object, infos: Mapping[str, Any], path: Path | None, env_ids: Sequence[int]) -> list[str]:
    """What the environments ``env_ids`` of a vector environment say at the start of an episode."""
    texts: Any = obs
    for part in path or ():
        texts = texts[part]
    told = [(told_by(infos, INSTRUCTION_KEYS, env_id), env_id) for env_id in env_ids]
    return [said if said is not None else "" if path is None else str(texts[env_id]) for said, env_id in told]
