"""Start-ups in processes of their own, profiled: what each phase costs, and which functions it is spent in."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from headrace._interrupts import Child
from headrace.bench import _startup_worker as startup_worker
from headrace.bench._startup_worker import Entry
from headrace.bench.schema import ProfiledFunction, StartupPhase, StartupTime
from headrace.errors import EnvError

if TYPE_CHECKING:
    from headrace.bench.builders import StartupBuilder
    from headrace.envs.recipe import EnvRecipe

_LAST_WORDS = 12

# "<built-in method posix.stat>", "<method 'read' of '_io.BytesIO' objects>", addresses of objects
_BUILTIN = re.compile(r"^<(built-in )?(method )?|>$| at 0x[0-9a-f]+|'| objects")


def top_functions(entries: Sequence[Entry], top_n: int) -> list[ProfiledFunction]:
    """Return the ``top_n`` functions with the most time of their own, most first.

    Those of one name in one module (lambdas, overloads) are added up.
    """
    found: dict[str, tuple[float, float, int]] = {}
    for entry in entries:
        name = _name(entry)
        own, cum, calls = found.get(name, (0.0, 0.0, 0))
        # the one may call the other: their cumulative times cannot be added
        found[name] = own + entry["own"], max(cum, entry["cum"]), calls + entry["calls"]
    functions = [ProfiledFunction(name=n, own_time_s=o, cum_time_s=cum, calls=c) for n, (o, cum, c) in found.items()]
    return sorted(functions, key=lambda function: -function.own_time_s)[:top_n]


def _name(entry: Entry) -> str:
    """``module:function``, without folders of this machine."""
    if entry["file"] == "~":
        return f"builtins:{_BUILTIN.sub('', entry['function'])}"
    return f"{_module(entry['file'])}:{entry['function']}"


def _module(file: str) -> str:
    if file.startswith("<"):
        return file.strip("<>").removeprefix("frozen ")
    path = Path(file).with_suffix("")
    parts = path.parts
    # installed, or in place
    markers = [name for name in ("site-packages", "dist-packages", "headrace") if name in parts]
    if markers:
        last = len(parts) - parts[::-1].index(markers[0])
        parts = parts[last - (markers[0] == "headrace") :]
    elif path.is_relative_to(library := sysconfig.get_path("stdlib")):
        parts = path.relative_to(library).parts
    else:
        parts = Path(os.path.relpath(path)).parts
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
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Start two processes, one after the other: without profiler, and with it.

    Phases that a process finished before it failed are in the builder all the same.
    """
    with tempfile.TemporaryDirectory() as folder:
        plain = _run(recipe, Path(folder) / "plain", profiled=False)
        builder.unprofiled = StartupTime(**{answer["phase"]: answer["seconds"] for answer in plain})
        progress(1)

        def keep(answer: _Answer) -> None:
            functions = top_functions(answer["entries"] or [], top_n)
            builder.phases[answer["phase"]] = StartupPhase(total_time_s=answer["seconds"], top_functions=functions)

        _run(recipe, Path(folder) / "profiled", profiled=True, answered=keep)
        progress(2)


def _run(
    recipe: EnvRecipe, answer: Path, *, profiled: bool, answered: Callable[[_Answer], None] = lambda _: None
) -> list[_Answer]:
    answer.touch()
    # -P: the worker's own folder is not where modules are looked for
    command = [sys.executable, "-P", startup_worker.__file__]
    try:
        request = {"recipe": recipe.to_json(), "answer": str(answer), "profiled": profiled}
        pipe = subprocess.PIPE
        with Child(command, stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe, text=True) as worker:
            try:
                _, errors = worker.communicate(json.dumps(request))
            except BaseException:  # also Ctrl-C; raised again
                worker.kill()
                raise
    finally:
        answers: list[_Answer] = [json.loads(line) for line in answer.read_text().splitlines()]
        for found in answers:
            answered(found)
    if worker.returncode:
        last = "\n".join(errors.strip().splitlines()[-_LAST_WORDS:])
        begun = answers[-1]["phase"] if answers else "the beginning"
        raise EnvError(f"start-up of {recipe.source!r} failed after {begun}:\n{last}")
    return answers
