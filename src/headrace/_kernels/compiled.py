"""The one door to numba: a typed ``kernel`` decorator with the settings every CPU kernel shares.

Kernels are cached on disk and release the GIL. One that is worth several threads is a
function of rows ``[start, stop)`` and is called through :func:`run`, which shares the rows out over the process's own
threads (:mod:`headrace._kernels.threads`); numba's threading layers are not used. What is compiled is logged by
logger ``headrace.kernels``.

Where compiled kernels are kept: the user's cache directory, by the content of their sources.

numba keeps machine code beside the source, by the source's time stamp: it is gone after reinstalling, and it is old
after an edit of a kernel in another file that was inlined. Here a module's code lies in a directory named by a hash of
its source and of every module with kernels that it imports, all the way down: right after any edit, shared by all
installations of one version, and untouched by others. ``NUMBA_CACHE_DIR`` goes first where it is set.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import logging
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba
from numba.core import caching
from numba.core import event as _event
from numba.core.compiler import Compiler

from headrace._kernels.threads import kernel_threads as kernel_threads
from headrace._kernels.threads import run as run

PACKAGE = Path(__file__).resolve().parent.parent
_DOOR = "headrace._kernels.compiled"
_IMPORT = re.compile(
    r"^[ \t]*from[ \t]+(headrace[\w.]*)[ \t]+import[ \t]+(?:\(([^)]*)\)|((?:[^\n]*\\\n)*[^\n]*))", re.M
)


def cache_directory() -> Path:
    """``$XDG_CACHE_HOME/headrace/kernels``, by default under ``~/.cache``."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "headrace" / "kernels"


def sources(path: Path) -> list[Path]:
    """Return a module's file and those of the modules with kernels that it imports, all the way down, in order.

    Kernels use constants of modules in their own package, too: such modules count, but not what they import.
    """
    found = {path}
    waiting = [path]
    while waiting:
        importer = waiting.pop()
        for other in set(_imports(importer)) - found:
            if _has_kernels(other):
                waiting.append(other)
            elif other.parent != importer.parent:
                continue
            found.add(other)
    return sorted(found)


def digest(path: Path) -> str:
    """Hash the content of a module's :func:`sources` and their places in the package, which compiled code names."""
    content = hashlib.sha256()
    for source in sources(path):
        content.update(source.relative_to(_root(path)).as_posix().encode() + b"\0" + source.read_bytes())
    return content.hexdigest()[:24]


def _has_kernels(path: Path) -> bool:
    text = path.read_text("utf-8")
    return _DOOR in text or "\nimport numba\n" in text


def _root(path: Path) -> Path:
    """Return the directory of the package that a file lies in."""
    return next((parent for parent in path.parents if parent.name == "headrace"), path.parent)


@functools.cache
def _imports(path: Path) -> tuple[Path, ...]:
    """Return the modules of the package that a file imports from, but for the door to numba itself.

    Found in the text: parsing every file would take a fifth of the time to the first step of a process.
    """
    names: set[str] = set()
    for module, several, one in _IMPORT.findall(path.read_text("utf-8")):
        listed = re.sub(r"#[^\n]*", "", several or one).replace("\\\n", " ")
        names |= {module, *(f"{module}.{part.split()[0]}" for part in listed.split(",") if part.split())}
    names -= {_DOOR}
    root = _root(path)
    files = (root.joinpath(*name.split(".")[1:]).with_suffix(".py") for name in names if name.startswith("headrace."))
    return tuple(file for file in files if file.is_file())


_digest = functools.cache(digest)


class _Locator(caching.UserWideCacheLocator):
    """Tells numba where the code of a function of this package lies, and what it was made from."""

    def __init__(self, py_func: Callable[..., Any], py_file: str) -> None:
        path = Path(py_file).resolve()
        self._lineno = py_func.__code__.co_firstlineno
        self._stamp = _digest(path)
        self._cache_path = str(cache_directory() / f"{path.stem}-{self._stamp}")

    def get_cache_path(self) -> str:
        return self._cache_path

    def get_source_stamp(self) -> bytes:
        return self._stamp.encode()

    def get_disambiguator(self) -> str:
        return str(self._lineno)

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> _Locator | None:
        if not Path(py_file).resolve().is_relative_to(PACKAGE):
            return None
        locator = cls(py_func, py_file)
        try:
            locator.ensure_cache_path()
        except OSError:  # no home, or one that cannot be written: numba's own places come next
            return None
        return locator


def use_user_cache() -> None:
    """Have numba keep the kernels of this package here; other packages are not affected."""
    classes = caching.CompileResultCacheImpl._locator_classes  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType, reportUnknownVariableType]  # numba has no other way
    if _Locator not in classes:
        # behind what the user sets by NUMBA_CACHE_DIR
        classes.insert(1, _Locator)  # pyright: ignore[reportUnknownMemberType]  # as above


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
