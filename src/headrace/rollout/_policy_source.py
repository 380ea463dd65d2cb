"""A chunk policy from what a user writes on the command line: a checkpoint, ``module:name``, ``lerobot:DIR``."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from headrace._named import load_made
from headrace.chunking import load_lerobot_policy
from headrace.chunking._policy import PolicyLike
from headrace.errors import ConfigError
from headrace.rollout._act_policy import load_chunk_policy, shipped_policies
from headrace.rollout._words_policy import PusherWordsPolicy

_LEROBOT = "lerobot:"
_WORDS = "pusher-words"
"""A task whose shipped policy is that of another one, with the words read."""


def load_policy_source(source: str | None, *, task: str | None = None) -> PolicyLike:
    """The policy that ``source`` names; a class is made without arguments.

    Args:
        source: a checkpoint that ``headrace imitate`` wrote, ``module:name`` of a policy object, class or function, or
            ``lerobot:DIR`` with a checkpoint directory of LeRobot. None for the policy that we ship for ``task``.
        task: a task's name.
    """
    if source is None:
        shipped = shipped_policies()
        if task == _WORDS:
            return PusherWordsPolicy()
        if task not in shipped:
            known = ", ".join(sorted([*shipped, _WORDS]))
            raise ConfigError(
                f"--policy: expected one, since we ship none for {task!r}, only for {known}; pass module:name, "
                "lerobot:DIR, or a checkpoint of 'headrace imitate' or 'headrace train'"
            )
        return load_chunk_policy(task)
    if source.startswith(_LEROBOT):
        return load_lerobot_policy(source.removeprefix(_LEROBOT))
    if ":" not in source or Path(source).is_file():
        return load_chunk_policy(source)
    return cast("PolicyLike", load_made(source, "--policy"))
