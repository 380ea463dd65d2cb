"""One start-up in a fresh process, phase by phase, with or without a profiler. Run as a program by ``startup``.

Reads a request as JSON from standard input, writes a line of JSON per finished phase to the file it names. Only the
standard library is imported before the first phase: importing ours is what it measures.
"""

from __future__ import annotations

import cProfile
import importlib
import json
import pstats
import sys
import time
from collections.abc import Callable
from typing import Any

Entry = dict[str, Any]
"""One function of a profile, or another JSON object."""


def _entries(profile: cProfile.Profile) -> list[Entry]:
    """Return every profiled function, as JSON."""
    stats: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]  # typeshed does not list it
    return [
        {"file": function[0], "line": function[1], "function": function[2], "calls": calls, "own": own, "cum": cum}
        for function, (_, calls, own, cum, _) in stats.items()
    ]


def _time_call(phase: Callable[[], Any], *, profiled: bool) -> tuple[Any, Entry]:
    profile = cProfile.Profile() if profiled else None
    begin = time.perf_counter()
    if profile is not None:
        profile.enable()
    try:
        result = phase()
    finally:
        if profile is not None:
            profile.disable()
    seconds = time.perf_counter() - begin
    return result, {"seconds": seconds, "entries": None if profile is None else _entries(profile)}


def main() -> None:
    """Run the phases of a request."""
    request: Entry = json.loads(sys.stdin.read())
    profiled: bool = request["profiled"]
    with open(request["answer"], "w", encoding="utf-8") as answer:

        def run(name: str, phase: Callable[[], Any]) -> Any:
            result, found = _time_call(phase, profiled=profiled)
            answer.write(json.dumps({"phase": name, **found}) + "\n")
            answer.flush()
            return result

        def imports() -> Any:
            from headrace.envs.recipe import EnvRecipe

            recipe = EnvRecipe.from_json(request["recipe"]).resolve()  # imports the user's module, if it names one
            importlib.import_module(recipe.maker)
            return recipe

        def first_step() -> None:
            from headrace.bench.stepping import action_maker

            env.reset()
            env.step(action_maker("random", env.single_action_space, env.num_envs, env.device, recipe.seed)())

        recipe = run("python_imports", imports)
        run("task_config", recipe.cfg)
        env = run("env_creation", recipe.make)
        try:
            run("first_step", first_step)
        finally:
            env.close()


if __name__ == "__main__":
    main()
