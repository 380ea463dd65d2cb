"""Profiles as records: the functions that cost most, the ones a whitelist names, and a call tree."""

from __future__ import annotations

import fnmatch
import os
import re
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, cast

from headrace.bench._builders import STARTUP_PHASES
from headrace.bench._schema import ProfiledFunction, ProfileNode
from headrace.errors import ConfigError, DataError, UnknownNameError

_SHARE = 0.01
_DEPTH = 14
_WIDTH = 12
_IMPORT_LINE = re.compile(r"^import time:\s+(\d+) \|\s+(\d+) \| ( *)(\S+)$")

# "<built-in method posix.stat>", "<method 'read' of '_io.BytesIO' objects>", addresses of objects
_BUILTIN = re.compile(r"^<(built-in )?(method )?|>$| at 0x[0-9a-f]+|'| objects")

Whitelist = dict[str, list[str]]


class Entry(TypedDict):
    """One function of a profile, as ``startup_worker`` writes it."""

    file: str
    line: int
    function: str
    calls: int
    own: float
    cum: float
    callers: list[tuple[int, float, float]]
    """Index of the caller, and own and cumulative seconds of the calls from it."""


def read_whitelist(path: Path, phases: Sequence[str] = STARTUP_PHASES[1:]) -> Whitelist:
    """Patterns per phase from YAML: ``python_imports: ["torch*"]``. Names are matched whole, as fnmatch does."""
    import yaml

    try:
        found: object = yaml.safe_load(path.read_text())
    except OSError as error:
        raise DataError(f"--whitelist {path}: expected a YAML file, got: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DataError(f"--whitelist {path}: expected YAML, got: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"--whitelist {path}: expected 'phase: [patterns]' lines, got {type(found).__name__}")
    return checked_whitelist(cast("dict[object, object]", found), f"--whitelist {path}", phases)


def checked_whitelist(
    found: Mapping[Any, object], source: str, phases: Sequence[str] = STARTUP_PHASES[1:]
) -> Whitelist:
    """Patterns per phase; ``source`` is named in errors."""
    whitelist: Whitelist = {}
    for phase, patterns in found.items():
        if phase not in phases:
            raise UnknownNameError("phase in the whitelist:", str(phase), phases)
        listed = cast("list[object]", patterns) if isinstance(patterns, list) else [patterns]
        if not listed or not all(isinstance(pattern, str) for pattern in listed):
            raise DataError(f"{source}: {phase}: expected a list of patterns, got {patterns!r}")
        whitelist[str(phase)] = cast("list[str]", listed)
    return whitelist


def top_functions(entries: Sequence[Entry], top_n: int) -> list[ProfiledFunction]:
    """The ``top_n`` functions with the most time of their own, most first."""
    return sorted(_functions(entries), key=lambda function: -function.own_time_s)[:top_n]


def whitelisted(entries: Sequence[Entry], patterns: Sequence[str], phase: str) -> list[ProfiledFunction]:
    """The functions that match any pattern, most own time first; a pattern that matches nothing is an error."""
    functions = _functions(entries)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(function.name, pattern) for function in functions):
            raise ConfigError(
                f"--whitelist: pattern {pattern!r} of phase {phase!r} matches none of {len(functions)} functions; "
                "names look like 'torch.nn.modules.module:Module.__init__' or 'headrace.envs._registry:make'"
            )
    chosen = [f for f in functions if any(fnmatch.fnmatchcase(f.name, pattern) for pattern in patterns)]
    return sorted(chosen, key=lambda function: -function.own_time_s)


def call_tree(name: str, seconds: float, entries: Sequence[Entry]) -> ProfileNode:
    """Callers above callees. cProfile knows who called whom, not by which way: a function called from several places
    shares its callees' time out by the time measured for each caller. Callees under 1 % are left out."""
    return _TreeBuilder(entries, _SHARE * seconds).tree(name, seconds)


def import_tree(report: str) -> ProfileNode:
    """The exact tree of imports, from the standard error of ``python -X importtime``."""
    levels: list[list[ProfileNode]] = [[]]
    for line in report.splitlines():
        match = _IMPORT_LINE.match(line)
        if match is None:
            continue
        own, cum, indent, module = match.groups()
        depth = len(indent) // 2
        while len(levels) <= depth + 1:
            levels.append([])
        # a module is reported after all that it imports, which stand one level deeper
        children = _largest(levels[depth + 1], 0.002)
        levels[depth + 1] = []
        node = ProfileNode(name=module, own_time_s=int(own) / 1e6, cum_time_s=int(cum) / 1e6, children=children)
        levels[depth].append(node)
    total = sum(node.cum_time_s for node in levels[0])
    return ProfileNode(
        name="python_imports", own_time_s=0.0, cum_time_s=total, children=_largest(levels[0], _SHARE * total)
    )


@dataclass(slots=True)
class _TreeBuilder:
    entries: Sequence[Entry]
    least: float

    def tree(self, name: str, seconds: float) -> ProfileNode:
        callees: list[list[tuple[int, float, float]]] = [[] for _ in self.entries]
        for index, entry in enumerate(self.entries):
            for caller, own, cum in entry["callers"]:
                callees[caller].append((index, own, cum))
        roots = [i for i, entry in enumerate(self.entries) if not entry["callers"]]
        children = [
            self._node(i, self.entries[i]["own"], self.entries[i]["cum"], callees, (i,))
            for i in roots
            if self.entries[i]["cum"] >= self.least
        ]
        return ProfileNode(name=name, own_time_s=0.0, cum_time_s=seconds, children=_largest(children, self.least))

    def _node(
        self, index: int, own: float, cum: float, callees: list[list[tuple[int, float, float]]], path: tuple[int, ...]
    ) -> ProfileNode:
        entry = self.entries[index]
        share = cum / entry["cum"] if entry["cum"] else 0.0
        children = [
            self._node(callee, edge_own * share, edge_cum * share, callees, (*path, callee))
            for callee, edge_own, edge_cum in callees[index]
            # a function that is on the way already would be shown inside itself without end
            if callee not in path and edge_cum * share >= self.least and len(path) < _DEPTH
        ]
        return ProfileNode(name=_name(entry), own_time_s=own, cum_time_s=cum, children=_largest(children, self.least))


def _largest(nodes: list[ProfileNode], least: float) -> list[ProfileNode]:
    kept = [node for node in nodes if node.cum_time_s >= least]
    return sorted(kept, key=lambda node: -node.cum_time_s)[:_WIDTH]


def _functions(entries: Sequence[Entry]) -> list[ProfiledFunction]:
    """Functions by name; those of one name in one module (lambdas, overloads) are added up."""
    found: dict[str, tuple[float, float, int]] = {}
    for entry in entries:
        name = _name(entry)
        own, cum, calls = found.get(name, (0.0, 0.0, 0))
        # the one may call the other: their cumulative times cannot be added
        found[name] = own + entry["own"], max(cum, entry["cum"]), calls + entry["calls"]
    return [ProfiledFunction(name=n, own_time_s=o, cum_time_s=cum, calls=c) for n, (o, cum, c) in found.items()]


def _name(entry: Entry) -> str:
    """``module:function``, without folders of this machine."""
    if entry["file"] == "~":
        return f"builtins:{_BUILTIN.sub('', entry['function'])}"
    return f"{_module(entry['file'])}:{entry['function']}"


def _module(file: str) -> str:
    if file.startswith("<"):
        return file.strip("<>").removeprefix("frozen ")
    parts = Path(file).with_suffix("").parts
    for marker in ("site-packages", "dist-packages"):
        if marker in parts:
            parts = parts[parts.index(marker) + 1 :]
            break
    else:
        library = Path(sysconfig.get_path("stdlib")).parts
        if parts[: len(library)] == library:
            parts = parts[len(library) :]
        elif "headrace" in parts:  # installed in place
            parts = parts[len(parts) - 1 - parts[::-1].index("headrace") :]
        else:
            parts = Path(os.path.relpath(file)).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")
