"""Names of what environments are made of, checked without importing anything heavy."""

from __future__ import annotations

import re
import sys
from importlib.metadata import entry_points

from headrace._gymnasium_ids import BATCHED, FOREIGN, GYMNASIUM, IDS
from headrace._named import import_module
from headrace.envs.tasks.libero.names import is_libero_name, split_name
from headrace.errors import ConfigError, UnknownNameError

ENTRY_POINTS = "headrace.tasks"
"""Entry points by which installed packages add tasks: ``my-task = "my_package.tasks:MY_TASK"``, a ``TaskEntry``."""


def resolve_source(text: str) -> str:
    """Return the source of a recipe under the name that it is registered by: ``headrace/Ant-v0`` and ``ant-Play`` are
    ``ant``.

    An unknown name raises an error that suggests the nearest. A module in it (``module:task``, ``gym:module:Id-v0``) is
    imported; for names of ours and of Gymnasium nothing heavy is.
    """
    if text.startswith((*FOREIGN, *BATCHED)):  # what it has is known over there
        return text
    if is_libero_name(text):
        split_name(text)
        return text
    module, colon, name = text.removeprefix(GYMNASIUM).rpartition(":")
    if colon:
        import_module(module, f"task {text!r}")
    if text.startswith(GYMNASIUM):
        _check_gym_id(name)
        return text
    if colon or "headrace.envs.registry" in sys.modules:  # this process may have registered tasks
        from headrace.envs.registry import task_entry

        found = task_entry(text).name
        return f"{module}:{name}" if colon else found
    known = list(IDS.values())
    if not set(spellings(name)) & set(known):
        known += [point.name for point in entry_points(group=ENTRY_POINTS)]
    return known_name(name, known)


def check_told(source: str, whose: str, option: str) -> None:
    """Refuse the source of a file that would import a module, or start a program, which the user did not name.

    Args:
        source: that the file names.
        whose: the file, or what it is, for the error.
        option: how to say it oneself, for the error.
    """
    module = source.removeprefix(GYMNASIUM).rpartition(":")[0]
    if source.startswith(FOREIGN):
        what, advice = "which program is started, or connected to", f"pass it ({option}), as a recipe file for example"
    elif module and module not in sys.modules:
        what, advice = "which module is imported", f"import {module} first, or pass the task ({option} {source})"
    else:
        return
    raise ConfigError(f"{whose} names {source!r}, and a file must not decide {what}; if you trust it, {advice}")


def known_name(name: str, known: list[str]) -> str:
    """Return which of ``known`` a task's name means; an unknown one raises an error that suggests the nearest."""
    found = next((spelled for spelled in spellings(name) if spelled in known), None)
    if found is None:
        raise UnknownNameError("task", name, known)
    return found


def spellings(name: str) -> list[str]:
    """Return what a task may be called: its name, its Gymnasium id, either with a namespace before or ``-Play`` after
    it."""
    played = re.sub(r"-Play(?=-v\d+$|$)", "", name)
    plain = [name, played, played.rpartition("/")[2]]
    return [*plain, *(IDS[spelled] for spelled in (played, f"headrace/{plain[-1]}") if spelled in IDS)]


def _check_gym_id(name: str) -> None:
    import gymnasium

    try:
        gymnasium.spec(name)
    except gymnasium.error.UnregisteredEnv as error:
        raise UnknownNameError("Gymnasium environment", name, gymnasium.registry) from error
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise ConfigError(f"{name!r}: Gymnasium does not accept this id: {error}") from error
