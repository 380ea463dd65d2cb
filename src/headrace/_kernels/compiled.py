"""The one door to numba: a typed ``kernel`` decorator with the settings every CPU kernel shares.

Kernels are cached on disk and release the GIL. One that is worth several threads is a function of rows
``[start, stop)`` and is called through :func:`run`, which shares the rows out over the process's own threads
(:mod:`headrace._kernels.threads`); numba's threading layers are not used. What is compiled is told to the logger
``headrace.kernels`` (level INFO).
"""

from __future__ import annotations

import functools
import hashlib
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba
from numba.core import event as _event

from headrace._kernels.threads import kernel_threads as kernel_threads
from headrace._kernels.threads import run as run

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Narrator(_event.Listener):
    """Logs each function that is compiled, not those found on disk: who waits for it should know what for."""

    def on_start(self, event: _event.Event) -> None:
        function = cast("dict[str, Any]", event.data)["dispatcher"].py_func
        _LOG.info("compiling %s", f"{function.__module__}.{function.__qualname__}")

    def on_end(self, event: _event.Event) -> None:
        pass


_LOG = logging.getLogger("headrace.kernels")
_event.register("numba:compile", _Narrator())


def kernel(*, checked_division: bool = True) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Compile a function with numba at its first call.

    A kernel for :func:`run` takes ``start`` and ``stop`` first and writes only what belongs to those rows.
    Strict IEEE arithmetic (no fastmath): results do not depend on the number of rows or threads.
    ``checked_division=False`` lets a division by zero give infinity or NaN instead of raising, which is what allows
    loops with divisions to be vectorized.
    """

    def compile_(function: Callable[_P, _R]) -> Callable[_P, _R]:
        error_model = "python" if checked_division else "numpy"
        compiled = numba.njit(cache=True, nogil=True, error_model=error_model)(function)
        _stamp_with_sources(compiled, Path(function.__code__.co_filename))
        return cast("Callable[_P, _R]", compiled)

    return compile_


def sources(path: Path) -> list[Path]:
    """A module's file and those of the kernels that it imports, all the way down, in order."""
    found: list[Path] = []
    waiting = [path]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.append(path)
            names = re.findall(r"^from headrace\._kernels\.(\w+) import", path.read_text("utf-8"), re.MULTILINE)
            waiting += [Path(__file__).with_name(f"{name}.py") for name in names if name != "compiled"]
    return sorted(found)


@functools.cache
def _digest(path: Path) -> bytes | None:
    """A hash of a module and of the kernels in it; None for one that imports no other kernels."""
    found = sources(path)
    return hashlib.sha256(b"".join(source.read_bytes() for source in found)).digest() if len(found) > 1 else None


def _stamp_with_sources(compiled: object, path: Path) -> None:
    """Have numba compile a kernel anew when one that it calls has changed.

    numba looks at the file of the kernel alone, while the machine code on disk has the kernels that it calls in it:
    after an upgrade that changed only those, the old code would run. Without a compiler (NUMBA_DISABLE_JIT) there is no
    cache.
    """
    cache_file = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if cache_file is not None and (digest := _digest(path)) is not None:
        cache_file._source_stamp = digest


def inline(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile a small function that kernels call, inlined into them."""
    return cast("Callable[_P, _R]", numba.njit(inline="always")(function))


def helper(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile a function that only kernels call: no way in from Python, nothing on disk of its own."""
    # the two settings without wrappers are missing from numba's types
    settings: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return cast("Callable[_P, _R]", numba.njit(nogil=True, error_model="numpy", **settings)(function))
