"""What a user names by its place in a module of theirs: ``module:name``."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType

from headrace.errors import ConfigError, UnknownNameError


def import_module(module: str, option: str) -> ModuleType:
    """Import a module of the user's, which may be in the current directory.

    Args:
        module: its name.
        option: what asked for it, for the error.
    """
    # a script's own directory is on Python's path, that of an installed command is not: people mean where they are
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module)
    except (ImportError, ValueError, TypeError) as error:  # the last two: no name of a module, such as ""
        raise ConfigError(f"{option}: module {module!r} cannot be imported: {error}") from error


def load(text: str, option: str) -> object:
    """Return what ``module:name`` means.

    Args:
        text: as the user wrote it.
        option: what asked for it, for the error.
    """
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise ConfigError(f"{option}: expected module:name, got {text!r}")
    found = import_module(module, option)
    try:
        return getattr(found, name)
    except AttributeError:
        raise UnknownNameError(f"name in {module} for {option}:", name, dir(found)) from None


def load_made(text: str, option: str) -> object:
    """As :func:`load`; a class is made without arguments."""
    found = load(text, option)
    return found() if isinstance(found, type) else found
