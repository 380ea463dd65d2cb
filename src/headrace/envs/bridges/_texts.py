"""Instructions of bridged environments: texts in the observation (Gymnasium's ``Text`` spaces) or in ``info``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

from gymnasium import spaces

from headrace.errors import ConfigError, EnvError

Path: TypeAlias = tuple[str | int, ...]

INSTRUCTION_KEYS = ("instruction", "language_instruction", "task_description", "prompt")
"""Under which an environment's ``info``, or a ``Text`` space of its observation, says what to do; the first wins."""


def text_paths(space: spaces.Space[Any], path: Path = ()) -> Iterator[Path]:
    """Where the ``Text`` spaces of one environment's observation lie."""
    if isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            yield from text_paths(part, (*path, key))
    elif isinstance(space, spaces.Tuple):
        for index, part in enumerate(space.spaces):
            yield from text_paths(part, (*path, index))
    elif isinstance(space, spaces.Text):
        yield path


def instruction_path(space: spaces.Space[Any]) -> Path | None:
    """Where an observation has its instruction; None where it has no text."""
    paths = list(text_paths(space))
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


def text_at(obs: object, path: Path) -> str:
    """The text of an observation at a path of :func:`instruction_path`."""
    for key in path:
        obs = cast("Mapping[str | int, object]", obs)[key]
    return str(obs)


def instruction_of(obs: object, info: Mapping[str, object], path: Path | None) -> str:
    """What one environment says at the start of an episode; "" if nothing."""
    for key in INSTRUCTION_KEYS:
        if isinstance(said := info.get(key), str):
            return said
    return "" if path is None else text_at(obs, path)


def instructions_of(obs: object, infos: Mapping[str, Any], path: Path | None, env_ids: Sequence[int]) -> list[str]:
    """What the environments ``env_ids`` of a vector environment say at the start of an episode."""
    told: list[str] = []
    for env_id in env_ids:
        found = ""
        for key in INSTRUCTION_KEYS:
            values = infos.get(key)
            if values is None:
                continue
            said = values if isinstance(values, str) else values[env_id]
            if isinstance(said, str):
                found = said
                break
        else:
            found = "" if path is None else str(cast("Any", _batched(obs, path))[env_id])
        told.append(found)
    return told


def check_unchanged(env_id: int, obs: object, path: Path, told: str) -> None:
    """As :func:`require_same_text`, of one environment's observation."""
    require_same_text(env_id, told, text_at(obs, path))


def require_same_text(env_id: int, told: str, now: str) -> None:
    """An instruction is constant within an episode: whoever read it at the start would not see it change."""
    if now != told:
        raise EnvError(
            f"environment {env_id}: expected the instruction {told!r} for the whole episode, got {now!r} in a step; "
            "begin a new episode with a new instruction"
        )


def _batched(obs: object, path: Path) -> object:
    for key in path:
        obs = cast("Mapping[str | int, object]", obs)[key]
    return obs
