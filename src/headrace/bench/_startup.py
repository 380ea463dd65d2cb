"""Start-ups in processes of their own: what each phase costs, and which functions it is spent in."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from headrace.bench import _startup_worker as startup_worker
from headrace.bench._profiling import Entry, Whitelist, call_tree, import_tree, top_functions, whitelisted
from headrace.bench._schema import ProfileNode, StartupPhase, StartupTime
from headrace.errors import EnvError

if TYPE_CHECKING:
    from headrace.bench._builders import StartupBuilder
    from headrace.envs._recipe import EnvRecipe

_LAST_WORDS = 12


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
    imports = builder.phases["python_imports"]
    builder.phases["python_imports"] = imports.model_copy(update={"tree": _import_tree(recipe)})
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


def _import_tree(recipe: EnvRecipe) -> ProfileNode:
    module = recipe.maker
    done = _ended([sys.executable, "-X", "importtime", "-c", f"import {module}"])
    if done.returncode:
        raise EnvError(f"importing {module} failed: {done.stderr.strip().splitlines()[-1]}")
    return import_tree(done.stderr)


def _ended(command: list[str], given: str = "") -> subprocess.CompletedProcess[str]:
    """Run a process to its end; whatever ends us meanwhile ends it, too."""
    return subprocess.run(command, input=given, capture_output=True, text=True, check=False)
