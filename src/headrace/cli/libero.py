"""LIBERO's 130 tasks, natively. They are exported once, by an interpreter that has LIBERO:

headrace libero export --python .venv-libero/bin/python          all suites
headrace libero export libero_spatial libero_goal/3 --python …    some of them
headrace libero compare libero_spatial/0 --policy P               the same episodes natively and in genuine LIBERO
headrace tasks libero                                             names and instructions
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.progress import MofNCompleteColumn, TimeRemainingColumn

from headrace._progress import progress, say
from headrace.cli.records import Command, Positional
from headrace.envs.tasks.libero.names import SUITES, libero_names


@dataclass(frozen=True, kw_only=True)
class LiberoExportOptions:
    """Write tasks as files that need neither LIBERO nor robosuite. Those whose files are up to date are left as they
    are. Exit code 1 if one fails."""

    names: Annotated[Sequence[str], Positional("NAME")] = ()
    """Suites or tasks (default: all suites)."""
    python: Path
    """Interpreter with hf-libero 0.1.4 and robosuite 1.4."""
    assets: Path | None = None
    """LIBERO's assets (default: $HEADRACE_LIBERO_ASSETS, then its config)."""


def _export(given: LiberoExportOptions) -> int:
    from headrace.envs.tasks.libero.exported import export_directory, export_tasks, find_assets, find_missing_files

    names = [name for part in given.names or SUITES for name in (libero_names(part) if "/" not in part else [part])]
    assets = find_assets() if given.assets is None else given.assets
    missing = find_missing_files(assets)
    if missing:
        say(f"{assets}: {len(missing)} files that its XML names are not there, for example {missing[0]}", "yellow")
    failed: list[str] = []
    with progress("exporting", len(names), MofNCompleteColumn(), TimeRemainingColumn()) as show:
        for done, line in enumerate(export_tasks(names, given.python, assets), 1):
            show(description=line.name, completed=done)
            if line.error is not None:
                failed.append(f"{line.name}: {line.error}")
    for text in failed:
        say(text, "red")
    Console().print(f"{len(names) - len(failed)} of {len(names)} tasks in {export_directory()}", highlight=False)
    return 1 if failed else 0


@dataclass(frozen=True, kw_only=True)
class LiberoCompareOptions:
    """Play the same episodes of a task in several simulations, natively and in genuine LIBERO for example, and print
    how often each succeeds and which episodes end differently. Exit code 1 if some do."""

    task: Annotated[str, Positional("TASK")]
    """Such as libero_spatial/0."""
    policy: str
    """As for 'headrace evaluate'."""
    sims: str = "mujoco,robosuite"
    """Simulations, separated by commas: mujoco (native), robosuite (genuine), mujoco-3.3 (plain, in its MuJoCo)."""
    episodes: int = 50
    num_envs: int = 1
    protocol: str = "openpi"
    """Evaluation loop of LIBERO to reproduce: openpi, oft, lerobot, groot or vla-eval."""
    state: bool = False
    """Without cameras, for a policy that reads the state alone."""


def _compare(given: LiberoCompareOptions) -> int:
    from headrace.envs.tasks.libero.names import split_name
    from headrace.evaluation.cfg import PlayCfg
    from headrace.evaluation.libero import compare_sims, libero_protocol, libero_suite

    suite, index = split_name(given.task)
    overrides = {**libero_suite(suite, given.protocol)[index].overrides, **({"cameras": ()} if given.state else {})}
    rules, served = libero_protocol(given.protocol), "://" in given.policy
    play = PlayCfg(execute=rules.execute if served else None, mapping=rules.mapping if served else None)
    found = compare_sims(
        *(given.task, given.policy, given.sims.split(",")),
        episodes=given.episodes,
        num_envs=given.num_envs,
        overrides=overrides,
        play=play,
    )
    Console().print(found.summary())
    return 1 if found.disagreements else 0


COMMANDS = {"export": Command(LiberoExportOptions, _export), "compare": Command(LiberoCompareOptions, _compare)}
