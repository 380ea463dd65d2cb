"""``headrace.evaluation.evaluate_suite``: several tasks, with their seeds and instructions, evaluated as one plan.

MetaWorld's MT50 and PushT are suites that run over the bridge in an interpreter of their own.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import headrace.bridges
from headrace.envs.recipe import EnvRecipe, check_count
from headrace.errors import ConfigError, DataError, UnknownNameError
from headrace.evaluation._result import EpisodeResult, Evaluation, format_number, format_percent
from headrace.evaluation.cfg import JournalCfg, PlayCfg, WorkersCfg
from headrace.evaluation.evaluating import NUM_ENVS, evaluate
from headrace.files import check_new, read_text

if TYPE_CHECKING:
    from rich.table import Table

    from headrace.policies.load_policy import PolicySource

PYTHON_VARIABLE = "HEADRACE_BENCHMARKS_PYTHON"
"""The interpreter that has them; by default ``.venv-benchmarks/bin/python`` in the working directory."""
_ENTRY = Path(headrace.bridges.__file__).parent / "benchmark_entry.py"
_WORDS = """assembly basketball bin-picking box-close button-press-topdown button-press-topdown-wall button-press
button-press-wall coffee-button coffee-pull coffee-push dial-turn disassemble door-close door-lock door-open door-unlock
drawer-close drawer-open faucet-close faucet-open hammer hand-insert handle-press-side handle-press handle-pull-side
handle-pull lever-pull peg-insert-side peg-unplug-side pick-out-of-hole pick-place pick-place-wall plate-slide-back-side
plate-slide-back plate-slide-side plate-slide push-back push push-wall reach reach-wall shelf-place soccer stick-pull
stick-push sweep-into sweep window-close window-open"""
BENCHMARKS = {"metaworld_mt50": tuple(f"{word}-v3" for word in _WORDS.split()), "pusht": ("pusht",)}
"""Suite → its tasks."""
_PIXELS = {"metaworld_mt50": 480, "pusht": 96}
_KEYS = ("task", "name", "overrides", "instruction", "episodes", "seeds")


@dataclass(frozen=True, kw_only=True)
class SuiteTask:
    """One row of a suite."""

    task: str | EnvRecipe
    """A task name, ``module:NAME``, ``gym:ID``, or a recipe of one environment."""
    name: str
    """Of the row, and of its files; unique in a suite."""
    overrides: Mapping[str, object]
    instruction: str | None
    """What the policy receives, in place of the task's own text; None for that."""
    episodes: int
    """Per seed."""
    seeds: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SuiteResult:
    """What a policy reached on a suite."""

    tasks: tuple[SuiteTask, ...]
    parts: Mapping[tuple[str, int], Evaluation]
    """By name and seed; those that an interrupt left out are missing."""

    @property
    def unfinished(self) -> int:
        """Episodes of the suite that are not in the tables."""
        planned = sum(task.episodes * len(task.seeds) for task in self.tasks)
        return planned - sum(len(part.episodes) for part in self.parts.values())

    @property
    def interrupt(self) -> KeyboardInterrupt | None:
        """What ended an interrupted suite."""
        return next((part.interrupt for part in self.parts.values() if part.interrupt is not None), None)

    def of_task(self, name: str) -> Evaluation:
        """All seeds of a row as one evaluation, whose rows are in the order of seeds and ids."""
        return self._pool([task for task in self.tasks if task.name == name])

    @property
    def total(self) -> Evaluation:
        """All episodes together."""
        return self._pool(self.tasks)

    def _pool(self, tasks: tuple[SuiteTask, ...] | list[SuiteTask]) -> Evaluation:
        """Rates and intervals over the episodes of several plans; ids are counted through, since seeds repeat them."""
        from headrace.evaluation._result_files import total_counters

        rows: list[EpisodeResult] = []
        parts: list[Evaluation] = []
        planned = 0
        for task in tasks:
            for seed in task.seeds:
                part = self.parts.get((task.name, seed))
                if part is not None:
                    parts.append(part)
                    rows += [replace(row, episode_id=planned + row.episode_id) for row in part.episodes]
                planned += task.episodes
        strict = {part.strict_size for part in parts}
        return Evaluation(
            episodes=rows,
            plan=tuple(range(planned)),
            status="completed" if len(rows) == planned else "interrupted",
            counters=total_counters([part.counters for part in parts]),
            strict_size=strict.pop() if len(strict) == 1 else None,
        )

    def summary(self) -> Table:
        """Return a row per task, and the total."""
        from rich.table import Table

        counters = self.total.counters
        table = Table(
            title=f"{len(self.tasks)} tasks, {self.unfinished or 'no'} episodes unfinished",
            caption=f"{counters.model_calls:,} model calls, {counters.frames_drawn:,} pictures, "
            f"{counters.env_steps:,} steps in {counters.seconds:,.0f} s",
        )
        for column in ("task", "episodes", "success rate", "mean reward", "mean length"):
            table.add_column(column, justify="left" if column == "task" else "right")
        for name in [task.name for task in self.tasks]:
            table.add_row(name, *_figures(self.of_task(name)))
        table.add_section()
        table.add_row("total", *_figures(self.total), style="bold")
        return table


def read_suite(path: str | Path) -> tuple[SuiteTask, ...]:
    """Return the rows of a suite file: ``[[task]]`` tables with task, overrides, instruction, episodes, seeds, name.

    ``episodes`` and ``seeds`` may stand above the tables, for all of them.
    """
    path = Path(path)
    try:
        data = tomllib.loads(read_text(path.resolve()))
    except (DataError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: expected a suite, a TOML file with [[task]] tables, got: {error}") from error
    rows = data.pop("task", None)
    shared = {"episodes": data.pop("episodes", 100), "seeds": data.pop("seeds", [0])}
    for name in data:
        raise UnknownNameError(f"setting of the suite {path}:", name, ("episodes", "seeds", "task"))
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in cast("list[object]", rows)):
        raise ConfigError(f"{path}: expected [[task]] tables, got {rows!r}")
    found = tuple(_task(path, shared | row) for row in cast("list[dict[str, Any]]", rows))
    names = [task.name for task in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{path}: {name!r} is there twice; give the rows different names (name = …)")
    return found


def evaluate_suite(
    suite: str | Path | tuple[SuiteTask, ...],
    policy: PolicySource = None,
    *,
    num_envs: int | None = None,
    threads: int | None = None,
    play: PlayCfg = PlayCfg(),
    journal: str | Path | JournalCfg | None = None,
    workers: int | WorkersCfg | None = None,
    output: str | Path | None = None,
    progress: bool = True,
) -> SuiteResult:
    """Evaluate a policy on every task and seed of a suite.

    Args:
        suite: a file, or its rows.
        policy: as for :func:`headrace.evaluate`; None for the policies that we ship for the tasks.
        num_envs: environments in the batch; None for the recipe's, else 16.
        threads: physics threads; None for the recipe's, else all cores.
        play: how the policy is played; the instructions are those of the suite.
        journal: directory of journals, one per task and seed.
        workers: processes to play in over Ray; None for this process.
        output: new directory; the evaluation of each task and seed is saved in it, where ``headrace report`` finds it.
        progress: show a progress bar for each.

    Returns:
        ``parts`` (an Evaluation per task and seed), ``of_task(name)``, ``total``, ``unfinished``, ``summary()``.
    """
    tasks = suite if isinstance(suite, tuple) else read_suite(suite)
    saved, book = None if output is None else Path(output), journal
    if isinstance(book, (str, Path)):
        book = JournalCfg(path=book)
    check_new(saved, "output")
    if book is not None:
        Path(book.path).mkdir(parents=True, exist_ok=True)
    parts: dict[tuple[str, int], Evaluation] = {}
    for task, seed in [(row, seed) for row in tasks for seed in row.seeds]:
        place = f"{task.name}-{seed}"
        if saved is not None:
            (saved / place).mkdir(parents=True)
        found = evaluate(
            _recipe(task, seed, num_envs, threads),
            policy,
            episodes=task.episodes,
            play=replace(play, instruction=task.instruction),
            journal=None if book is None else replace(book, path=Path(book.path) / f"{place}.jsonl"),
            workers=workers,
            output=None if saved is None else saved / place / "evaluation.json",
            progress=progress,
        )
        parts[task.name, seed] = found
        if found.interrupt is not None:
            break
    return SuiteResult(tasks=tasks, parts=parts)


def _recipe(task: SuiteTask, seed: int, num_envs: int | None, threads: int | None) -> EnvRecipe:
    if isinstance(task.task, EnvRecipe):
        return task.task.replace(num_envs=num_envs or NUM_ENVS, seed=seed, workers=threads)
    return EnvRecipe.of(task.task, NUM_ENVS, num_envs=num_envs, seed=seed, threads=threads, overrides=task.overrides)


def _task(path: Path, row: dict[str, Any]) -> SuiteTask:
    for key in row:
        if key not in _KEYS:
            raise UnknownNameError(f"setting of a task in {path}:", key, _KEYS)
    if not isinstance(row.get("task"), str):
        raise ConfigError(f'{path}: expected task = "NAME" in every [[task]] table, got {row.get("task")!r}')
    check_count(f"{path}: episodes", row["episodes"])
    seeds = row["seeds"]
    if not isinstance(seeds, list) or not seeds or not all(type(seed) is int for seed in cast("list[object]", seeds)):
        raise ConfigError(f"{path}: expected seeds = [0, 1, …], got {seeds!r}")
    if len(set(cast("list[int]", seeds))) < len(cast("list[int]", seeds)):
        raise ConfigError(f"{path}: expected every seed once, got {seeds!r}")
    overrides, instruction = row.get("overrides", {}), row.get("instruction")
    if not isinstance(overrides, dict) or not isinstance(instruction, (str, type(None))):
        raise ConfigError(f"{path}: expected overrides as a table and instruction as a text, in {row['task']!r}")
    name = row.get("name", row["task"])
    if not isinstance(name, str) or not re.fullmatch(r"[\w.:-]+", name):
        raise ConfigError(f"{path}: expected a name of letters, digits and -_.:, got {name!r}")
    return SuiteTask(
        task=row["task"],
        name=name,
        overrides=cast("dict[str, object]", overrides),
        instruction=instruction,
        episodes=row["episodes"],
        seeds=tuple(cast("list[int]", seeds)),
    )


def _figures(found: Evaluation) -> tuple[str, str, str, str]:
    length = "–" if found.mean_length is None else f"{found.mean_length:.1f}"
    count = f"{len(found.episodes)}" + (f" of {found.planned}" if found.unfinished else "")
    return count, format_percent(found.success_rate), format_number(found.mean_reward), length


def benchmark_suite(name: str, trials: int = 50, pixels: int | None = None) -> tuple[SuiteTask, ...]:
    """Return ``metaworld_mt50`` or ``pusht`` as rows for :func:`headrace.evaluate_suite`.

    Observations have LeRobot's keys: ``observation.state`` and ``observation.image``, which is drawn when it is read,
    and all numbers as ``observation.environment_state``. Episodes are functions of their ids.

    Args:
        name: a key of ``BENCHMARKS``.
        trials: episodes per task.
        pixels: side of the pictures, 0 for none; None for LeRobot's, 480 and 96.
    """
    check_count("trials", trials)
    python = Path(os.environ.get(PYTHON_VARIABLE) or ".venv-benchmarks/bin/python")
    if not python.is_file():
        raise ConfigError(
            f"{name}: expected an interpreter that has it, got {python}: no such file; run "
            f"scripts/setup_simulators.sh benchmarks, or set {PYTHON_VARIABLE}"
        )
    side = _PIXELS[name] if pixels is None else pixels

    def row(task: str) -> SuiteTask:
        recipe = EnvRecipe(
            f"entry:{_ENTRY}:make", python=str(python.absolute()), overrides={"name": task, "pixels": side}
        )
        return SuiteTask(task=recipe, name=task, overrides={}, instruction=None, episodes=trials, seeds=(0,))

    return tuple(map(row, BENCHMARKS[name]))
