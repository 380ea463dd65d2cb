"""Every exception that headrace raises on purpose, drawn in one place.

```
HeadraceError
├── ShapeError (ValueError)        an array of the wrong shape or rank
├── DtypeError (TypeError)         an array of the wrong dtype, or not an array
├── DeviceError (ValueError)       an array on the wrong device
├── IdError (IndexError)           environment or episode ids out of range, repeated or ill-formed
├── ActionError (ValueError)       an action that must not reach the simulator (NaN, infinite, unknown choice)
├── ConfigError (ValueError)       a setting that cannot work
│   └── UnknownNameError           a task, rule, library or field that does not exist; suggests the nearest
├── LifecycleError (RuntimeError)  a call at the wrong time: step before reset, use after close
├── CapacityError (MemoryError)    an allocation that cannot fit, refused with the numbers
├── DataError (ValueError)         a file or record that is damaged or is not what it claims to be
├── StorageError (OSError)         a disk that did not take what was written: full, read-only, gone or stalled
├── EnvError (RuntimeError)        an environment that raised or answered badly, or whose worker died; names them
├── UnsupportedError (NotImplementedError) what this kind of environment cannot do; says which kind can
├── PolicyError (RuntimeError)     a policy that raised or answered badly; names the environments
├── EvaluationError (RuntimeError) an evaluation that an observer or environment ended; has the finished episodes
└── MissingExtraError (ImportError) an optional dependency is absent; names the extra to install
```
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Sequence
from types import ModuleType


class HeadraceError(Exception):
    """Base of every exception that headrace raises on purpose."""

    finished: object | None = None
    """What was finished before: the ``Evaluation`` so far, where the error ended one."""


class ShapeError(HeadraceError, ValueError):
    """An array has the wrong shape or rank."""


class DtypeError(HeadraceError, TypeError):
    """An array has the wrong dtype, or something is not an array."""


class DeviceError(HeadraceError, ValueError):
    """An array is on the wrong device."""


class IdError(HeadraceError, IndexError):
    """Environment or episode ids are out of range, repeated or ill-formed."""


class ActionError(HeadraceError, ValueError):
    """An action must not reach the simulator."""


class ConfigError(HeadraceError, ValueError):
    """A setting cannot work."""


class UnknownNameError(ConfigError):
    """A name that nothing answers to. The message suggests the nearest known names."""

    def __init__(self, kind: str, name: object, known: Iterable[str], hint: str = "") -> None:
        super().__init__(f"unknown {kind} {name!r}; {nearest(str(name), sorted(known))}{hint}")


def nearest(name: str, known: Sequence[str]) -> str:
    """Return what a message says after an unknown name: the nearest known ones, or all."""
    near = difflib.get_close_matches(name, known, n=3)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"choose from {', '.join(known)}"


class LifecycleError(HeadraceError, RuntimeError):
    """A call came at the wrong time."""


class CapacityError(HeadraceError, MemoryError):
    """An allocation cannot fit; the message has the numbers."""


class DataError(HeadraceError, ValueError):
    """A file or record is damaged, or is not what it claims to be."""


class StorageError(HeadraceError, OSError):
    """A disk did not take what was written; the message says what is safe."""


class EnvError(HeadraceError, RuntimeError):
    """An environment raised or answered badly, or its worker process died; the message names the environments."""


class UnsupportedError(HeadraceError, NotImplementedError):
    """This kind of environment cannot do that; the message says which kind can."""


class PolicyError(HeadraceError, RuntimeError):
    """A policy raised or answered badly; the message names the environments."""


class EvaluationError(HeadraceError, RuntimeError):
    """An error that is not ours ended an evaluation; it is the cause, and ``finished`` has the episodes so far."""


class MissingExtraError(HeadraceError, ImportError):
    """An optional dependency is absent; the message names the extra that installs it."""


def require_extra(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import an optional module, or say which extra installs it.

    Args:
        module: dotted name of the module to import.
        extra: the headrace extra that brings it.
        purpose: what the caller wanted it for, as the subject of the error message.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # a module that is there but lacks one of its own dependencies is another fault: show that one
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise MissingExtraError(
            f"{purpose} needs {module.split('.')[0]!r}, which is not installed; run: pip install 'headrace[{extra}]'"
        ) from error


def installed_version(distribution: str) -> str | None:
    """Return the version of a package, read without importing it; None where it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def check_counts(**counts: int | None) -> None:
    """Refuse a count below 1, by the name of its argument; None is not checked."""
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ConfigError(f"{name} (--{name.replace('_', '-')}): expected at least 1, got {count}")
