"""Start-ups in processes of their own, profiled: what each phase costs, and which functions it is spent in."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

from headrace.bench import _startup_worker as startup_worker
from headrace.bench._builders import STARTUP_PHASES
from headrace.bench.schema import ProfiledFunction, ProfileNode, StartupPhase, StartupTime
from headrace.envs.recipe import read_yaml
from headrace.errors import ConfigError, DataError, EnvError, UnknownNameError

if TYPE_CHECKING:
    from headrace.bench._builders import StartupBuilder
    from headrace.envs.recipe import EnvRecipe

_LAST_WORDS = 12
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


def read_whitelist(path: Path) -> Whitelist:
    """Patterns per phase from YAML: ``python_imports: ["torch*"]``. Names are matched whole, as fnmatch does."""
    found = read_yaml(path, "--whitelist", "'phase: [patterns]' lines")
    return checked_whitelist(found, f"--whitelist {path}")


def checked_whitelist(found: Mapping[Any, object], source: str) -> Whitelist:
    """Patterns per phase; ``source`` is named in errors."""
    whitelist: Whitelist = {}
    for phase, patterns in found.items():
        if phase not in STARTUP_PHASES[1:]:
            raise UnknownNameError("phase in the whitelist:", str(phase), STARTUP_PHASES[1:])
        listed = cast("list[object]", patterns) if isinstance(patterns, list) else [patterns]
        if not listed or not all(isinstance(pattern, str) for pattern in listed):
            raise DataError(f"{source}: {phase}: expected a list of patterns, got {patterns!r}")
        whitelist[str(phase)] = cast("list[str]", listed)
    return whitelist


def top_functions(entries: Sequence[Entry], top_n: int) -> list[ProfiledFunction]:
    """Return the ``top_n`` functions with the most time of their own, most first."""
    return _functions(entries)[:top_n]


def whitelisted(entries: Sequence[Entry], patterns: Sequence[str], phase: str) -> list[ProfiledFunction]:
    """Return the functions that match any pattern, most own time first; a pattern that matches nothing is an error."""
    functions = _functions(entries)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(function.name, pattern) for function in functions):
            raise ConfigError(
                f"--whitelist: pattern {pattern!r} of phase {phase!r} matches none of {len(functions)} functions; "
                "names look like 'torch.nn.modules.module:Module.__init__' or 'headrace.envs.registry:make'"
            )
    return [f for f in functions if any(fnmatch.fnmatchcase(f.name, pattern) for pattern in patterns)]


def call_tree(name: str, seconds: float, entries: Sequence[Entry]) -> ProfileNode:
    """Callers above callees. cProfile knows who called whom, not by which way: a function called from several places
    shares its callees' time out by the time measured for each caller. Callees under 1 % are left out."""
    least = _SHARE * seconds
    callees: list[list[tuple[int, float, float]]] = [[] for _ in entries]
    for index, entry in enumerate(entries):
        for caller, own, cum in entry["callers"]:
            callees[caller].append((index, own, cum))

    def node(index: int, own: float, cum: float, path: tuple[int, ...]) -> ProfileNode:
        entry = entries[index]
        share = cum / entry["cum"] if entry["cum"] else 0.0
        children = [
            node(callee, edge_own * share, edge_cum * share, (*path, callee))
            for callee, edge_own, edge_cum in callees[index]
            # a function that is on the way already would be shown inside itself without end
            if callee not in path and edge_cum * share >= least and len(path) < _DEPTH
        ]
        return ProfileNode(name=_name(entry), own_time_s=own, cum_time_s=cum, children=_largest(children, least))

    roots = [
        node(index, entry["own"], entry["cum"], (index,))
        for index, entry in enumerate(entries)
        if not entry["callers"] and entry["cum"] >= least
    ]
    return ProfileNode(name=name, own_time_s=0.0, cum_time_s=seconds, children=_largest(roots, least))


def import_tree(report: str) -> ProfileNode:
    """Return the exact tree of imports, from the standard error of ``python -X importtime``."""
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


def _largest(nodes: list[ProfileNode], least: float) -> list[ProfileNode]:
    kept = [node for node in nodes if node.cum_time_s >= least]
    return sorted(kept, key=lambda node: -node.cum_time_s)[:_WIDTH]


def _functions(entries: Sequence[Entry]) -> list[ProfiledFunction]:
    """Functions, most own time first; those of one name in one module (lambdas, overloads) are added up."""
    found: dict[str, tuple[float, float, int]] = {}
    for entry in entries:
        name = _name(entry)
        own, cum, calls = found.get(name, (0.0, 0.0, 0))
        # the one may call the other: their cumulative times cannot be added
        found[name] = own + entry["own"], max(cum, entry["cum"]), calls + entry["calls"]
    functions = [ProfiledFunction(name=n, own_time_s=o, cum_time_s=cum, calls=c) for n, (o, cum, c) in found.items()]
    return sorted(functions, key=lambda function: -function.own_time_s)


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


class _Answer(TypedDict):
    phase: str
    seconds: float
    entries: list[Entry] | None


def profile_startup(
    recipe: EnvRecipe,
    builder: StartupBuilder,
    *,
    top_n: int,
    whitelist: Whitelist | None,
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Start three processes, one after the other: without profiler, with it, and one that only imports.

    Phases that a process finished before it failed are in the builder all the same.
    """
    with tempfile.TemporaryDirectory() as folder:
        plain = _run(recipe, Path(folder) / "plain", profiled=False)
        builder.unprofiled = StartupTime(**{answer["phase"]: answer["seconds"] for answer in plain})
        progress(1)

        def keep(answer: _Answer) -> None:
            phase, seconds, entries = answer["phase"], answer["seconds"], answer["entries"] or []
            patterns = None if whitelist is None else whitelist.get(phase)
            # first whole, so that a bad pattern does not cost the phase
            builder.phases[phase] = StartupPhase(
                total_time_s=seconds,
                top_functions=top_functions(entries, top_n),
                tree=call_tree(phase, seconds, entries),
            )
            if patterns is not None:
                chosen = whitelisted(entries, patterns, phase)
                builder.phases[phase] = builder.phases[phase].model_copy(update={"top_functions": chosen})

        _run(recipe, Path(folder) / "profiled", profiled=True, answered=keep)
        progress(2)
    done = _ended([sys.executable, "-X", "importtime", "-c", f"import {recipe.maker}"])
    if done.returncode:
        raise EnvError(f"importing {recipe.maker} failed: {done.stderr.strip().splitlines()[-1]}")
    imports = builder.phases["python_imports"]
    builder.phases["python_imports"] = imports.model_copy(update={"tree": import_tree(done.stderr)})
    progress(3)


def _run(
    recipe: EnvRecipe, answer: Path, *, profiled: bool, answered: Callable[[_Answer], None] = lambda _: None
) -> list[_Answer]:
    answer.touch()
    # -P: the worker's own folder is not where modules are looked for
    command = [sys.executable, "-P", startup_worker.__file__]
    try:
        request = {"recipe": recipe.to_json(), "answer": str(answer), "profiled": profiled}
        done = _ended(command, json.dumps(request))
    finally:
        answers: list[_Answer] = [json.loads(line) for line in answer.read_text().splitlines()]
        for found in answers:
            answered(found)
    if done.returncode:
        last = "\n".join(done.stderr.strip().splitlines()[-_LAST_WORDS:])
        begun = answers[-1]["phase"] if answers else "the beginning"
        raise EnvError(f"start-up of {recipe.source!r} failed after {begun}:\n{last}")
    return answers


def _ended(command: list[str], given: str = "") -> subprocess.CompletedProcess[str]:
    """Run a process to its end; whatever ends us meanwhile ends it, too."""
    return subprocess.run(command, input=given, capture_output=True, text=True, check=False)
