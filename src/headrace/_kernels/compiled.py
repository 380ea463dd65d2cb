"""The one door to numba: a typed ``kernel`` decorator with the settings every CPU kernel shares.

Kernels are cached on disk (:mod:`headrace._kernels.cache`) and release the GIL. One that is worth several threads is a
function of rows ``[start, stop)`` and is called through :func:`run`, which shares the rows out over the process's own
threads (:mod:`headrace._kernels.threads`); numba's threading layers are not used. What is compiled is told to the
logger ``headrace.kernels``.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numba
from numba.core import event as _event
from numba.core.compiler import Compiler

from headrace._kernels.cache import cache_directory, use_user_cache
from headrace._kernels.threads import kernel_threads as kernel_threads
from headrace._kernels.threads import run as run

_P = ParamSpec("_P")
_R = TypeVar("_R")


_LOG = logging.getLogger("headrace.kernels")
_PATIENCE_S = 2.0
"""Compiling that is over sooner is not worth a warning."""


class _Narrator(_event.Listener):
    """Tells what is compiled, not what was found on disk: who waits for it should know what for.

    Log each function at level INFO, and once per process, when it takes long, a warning.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._timer: threading.Timer | None = None
        self._collects = False

    def on_start(self, event: _event.Event) -> None:
        function = cast("dict[str, Any]", event.data)["dispatcher"].py_func
        name = f"{function.__module__}.{function.__qualname__}"
        _LOG.info("compiling %s", name)
        with self._lock:
            self._depth += 1
            if self._depth == 1 and gc.isenabled():
                # millions of small objects that live until the end: looking for garbage takes a third of the time
                gc.disable()
                self._collects = True
            if self._depth == 1 and self._timer is None:
                self._timer = threading.Timer(_PATIENCE_S, self._warn, (name,))
                self._timer.daemon = True
                self._timer.start()

    def on_end(self, event: _event.Event) -> None:
        del event
        with self._lock:
            self._depth -= 1
            if self._depth == 0 and self._collects:
                gc.enable()
                self._collects = False
            if self._depth == 0 and self._timer is not None and self._timer.is_alive():
                self._timer.cancel()
                self._timer = None

    def _warn(self, name: str) -> None:
        _LOG.warning(
            "compiling kernels for their first use on this machine, at the moment %s; later runs load them from %s. "
            "'headrace doctor --compile' compiles all of them at once. "
            "To silence this: logging.getLogger('headrace.kernels').setLevel('ERROR')",
            name,
            cache_directory(),
        )


_event.register("numba:compile", _Narrator())
use_user_cache()


class _NoOverlap(Compiler):
    """Compiles functions whose arrays never overlap."""

    def define_pipelines(self) -> Any:
        self.state.flags.noalias = True
        return super().define_pipelines()


def kernel(
    *, checked_division: bool = True, no_overlap: bool = False
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Compile a function with numba at its first call.

    A kernel for :func:`run` takes ``start`` and ``stop`` first and writes only what belongs to those rows.
    Strict IEEE arithmetic (no fastmath): results do not depend on the number of rows or threads.
    ``checked_division=False`` lets a division by zero give infinity or NaN instead of raising, which is what allows
    loops with divisions to be vectorized. ``no_overlap=True`` promises that no array that is written shares memory with
    another one: otherwise a loop is vectorized only where LLVM can show that with eight comparisons.
    """

    def compile_(function: Callable[_P, _R]) -> Callable[_P, _R]:
        error_model = "python" if checked_division else "numpy"
        # called from Python and from other kernels, never as a C callback; the setting is missing from numba's types
        settings: dict[str, Any] = {"no_cfunc_wrapper": True, "error_model": error_model}
        if no_overlap:
            settings["pipeline_class"] = _NoOverlap
        return cast("Callable[_P, _R]", numba.njit(cache=True, nogil=True, **settings)(function))

    return compile_


def inline(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile a small function that kernels call, inlined into them."""
    return cast("Callable[_P, _R]", numba.njit(inline="always")(function))


def helper(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile a function that only kernels call: no way in from Python, nothing on disk of its own."""
    # the two settings without wrappers are missing from numba's types
    settings: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return cast("Callable[_P, _R]", numba.njit(nogil=True, error_model="numpy", **settings)(function))
