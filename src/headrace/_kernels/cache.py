"""Where compiled kernels are kept: the user's cache directory, by the content of their sources.

numba keeps machine code beside the source, by the source's time stamp: it is gone after reinstalling, and it is old
after an edit of a kernel in another file that was inlined. Here a module's code lies in a directory named by a hash of
its source and of every module with kernels that it imports, all the way down: right after any edit, shared by all
installations of one version, and untouched by others. ``NUMBA_CACHE_DIR`` goes first where it is set.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba.core import caching

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
