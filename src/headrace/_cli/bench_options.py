"""Options and small steps that the benchmark commands share."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import JsonValue

    from headrace.bench import Bundle, RunConfig, RunSettings
    from headrace.bench._schema import Kind
    from headrace.bench._step_times import StartupClock
    from headrace.bench._targets import AnyEnv, Target
    from headrace.envs import TaskCfg

FORMS = "schema, json, omniperf, osmo, summary, tensorboard"


def add_target_options(parser: argparse.ArgumentParser) -> None:
    """What to run on."""
    parser.add_argument(
        "task",
        metavar="TASK",
        help="a name from 'headrace tasks'; gym:ID for a Gymnasium environment over a bridge; or module:NAME for a "
        "task that importing your module registers",
    )
    parser.add_argument("--num-envs", type=int, default=64, help="environments in the batch (default: 64)")
    parser.add_argument("--seed", type=int, default=0, help="seed of episodes and actions (default: 0)")
    parser.add_argument("--threads", type=int, default=None, help="physics threads (default: all cores)")
    parser.add_argument("--sim", default="mujoco", metavar="SIM", help="physics: mujoco or warp (default: mujoco)")
    parser.add_argument("--device", default="cpu", help="of the tensors: cpu, or cuda with --sim warp (default: cpu)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="override a setting of the task, or an argument of a Gymnasium environment; repeatable",
    )
    parser.add_argument(
        "--preset",
        action="append",
        default=[],
        type=Path,
        metavar="FILE.yaml",
        help="a file of settings ('path: value' lines), applied before --set; repeatable",
    )


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Where results go, and in what form."""
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="where to write the result (default: runs/<run id>); never overwrites",
    )
    parser.add_argument(
        "--formatter",
        action="append",
        metavar="FORM",
        help=f"form of the result, repeatable: {FORMS} (default: schema, the bundle)",
    )
    parser.add_argument("--label", help="a name for this run in comparisons and reports")


def overrides_of(arguments: argparse.Namespace) -> dict[str, object]:
    """Settings of presets, then of ``--set``."""
    from headrace.bench._targets import read_preset

    found: dict[str, object] = {}
    for preset in arguments.preset:
        found |= read_preset(preset)
    if arguments.set:
        from headrace.envs._overrides import parse_assignments  # brings torch

        found |= parse_assignments(arguments.set)
    return found


def run_config(arguments: argparse.Namespace, target: Target, overrides: dict[str, object]) -> RunConfig:
    """The settings that a comparison will hold two runs to."""
    from headrace.bench import RunConfig, environment_variables

    ours = target.kind == "task"
    return RunConfig(
        physics_backend=arguments.sim if ours else target.physics,
        rendering_backend=None,
        presets=[preset.stem for preset in arguments.preset],
        overrides={path: _plain(value) for path, value in sorted(overrides.items())},
        device=arguments.device,
        threads=arguments.threads,
        actions=getattr(arguments, "actions", None),
        environment=environment_variables(),
    )


def run_settings(arguments: argparse.Namespace, config: RunConfig) -> RunSettings:
    """The identity of a run, as far as it is known before."""
    from headrace.bench import RunSettings

    return RunSettings(
        task=arguments.task,
        num_envs=arguments.num_envs,
        seed=arguments.seed,
        config=config,
        label=arguments.label,
    )


def checked_target(arguments: argparse.Namespace, *, ours_for: str | None = None) -> Target:
    """What to run on; raises an error if no environment could be made of it. Nothing heavy is imported.

    Args:
        arguments: of the command line.
        ours_for: the command, where it takes tasks of ours only.
    """
    from headrace.bench._targets import check_request, parse_target

    target = parse_target(arguments.task)
    check_request(target, num_envs=arguments.num_envs, sim=arguments.sim)
    if ours_for is not None and target.kind == "gym":
        raise ConfigError(f"{ours_for}: expected a task of headrace, got {target.text!r}; see 'headrace tasks'")
    return target


def made_env(
    arguments: argparse.Namespace, target: Target, cfg: TaskCfg | None, overrides: dict[str, object]
) -> AnyEnv:
    """The environment of a command, with the settings of ``target_cfg``."""
    from headrace.bench._targets import make_target

    return make_target(
        target,
        cfg,
        arguments.num_envs,
        seed=arguments.seed,
        threads=arguments.threads,
        device=arguments.device,
        sim=arguments.sim,
        overrides=overrides,
    )


def checked_output(
    arguments: argparse.Namespace, target: Target, kind: Kind, *, framework: str | None = None
) -> tuple[Path, tuple[str, ...]]:
    """Where the result goes and in which forms; raises an error if it could not be written there."""
    from headrace.bench._benchmark import check_output, run_id

    given = cast("Path | None", arguments.output)
    physics = arguments.sim if target.kind == "task" else target.physics
    began = datetime.now(UTC)
    name = run_id(framework=framework or kind, physics=physics, task=arguments.task, seed=arguments.seed, began=began)
    folder = Path("runs") / name if given is None else given
    return folder, check_output(folder, kind, arguments.formatter or ("schema",))


def imports_phase(startup: StartupClock, target: Target) -> AbstractContextManager[None]:
    """Time the imports of ``target``; not, and null in the bundle, where this process has done them before."""
    from headrace.bench._targets import environments_module

    done = environments_module(target) in sys.modules
    return nullcontext() if done else startup.phase("python_imports")


@contextmanager
def progress_bar(description: str, total: int) -> Generator[Callable[[int], None]]:
    """A bar on standard error, gone when the block ends; yields what to call with the number of steps done.

    It is updated and drawn twice a second, so that a loop is not slowed down.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    shown = console.is_terminal
    with Progress(*columns, console=console, transient=True, refresh_per_second=2, disable=not shown) as progress:
        bar = progress.add_task(description, total=total)
        due = 0.0

        def update(done: int) -> None:
            nonlocal due
            now = time.perf_counter()
            if now >= due:
                due = now + 0.5
                progress.update(bar, completed=done)

        yield update


def show_bundle(bundle: Bundle, paths: list[Path]) -> None:
    """Print the summary box of a bundle, and the files it was written to."""
    from headrace.bench.formatters._summary import summary_table

    console = Console()
    console.print(summary_table(bundle))
    for path in paths:
        console.print(Text(f"wrote {path}"), soft_wrap=True)


def _plain(value: object) -> JsonValue:
    """A setting as JSON: tuples as lists, what JSON does not know as text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in cast("list[object]", value)]
    return repr(value)
