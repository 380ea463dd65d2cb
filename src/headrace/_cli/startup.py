"""``headrace startup``: where the time before the first step goes, as a bundle."""

from __future__ import annotations

import argparse
from pathlib import Path

from headrace._cli import bench_options as options
from headrace.errors import ConfigError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]  # argparse has no public name for it
    """Add the sub-command."""
    parser = commands.add_parser(
        "startup",
        help="profile what happens before the first step, as a bundle",
        description=(
            "Start TASK in fresh processes and profile each phase: python_imports, task_config, env_creation and "
            "first_step (reset included). Writes startup.json with the functions that cost most, a call tree, and the "
            "same times without the profiler."
        ),
    )
    options.add_target_options(parser)
    parser.add_argument("--top-n", type=int, default=20, help="functions to keep of each phase (default: 20)")
    parser.add_argument(
        "--whitelist",
        type=Path,
        metavar="FILE.yaml",
        help="'phase: [patterns]' lines: keep the functions that match (fnmatch, 'module:function') instead of the "
        "top; a pattern that matches nothing is an error",
    )
    options.add_output_options(parser)
    parser.set_defaults(handler=_startup)


def _startup(arguments: argparse.Namespace) -> int:
    from headrace.bench import Benchmark, StartupBuilder
    from headrace.bench._profiling import read_whitelist
    from headrace.bench._schema import StartupConfig
    from headrace.bench._startup import StartupRequest, profile_startup
    from headrace.bench._targets import read_preset, target_cfg

    target = options.checked_target(arguments)
    if arguments.top_n < 1:
        raise ConfigError(f"--top-n: expected at least 1, got {arguments.top_n}")
    whitelist = None if arguments.whitelist is None else read_whitelist(arguments.whitelist)
    preset: dict[str, object] = {}
    for path in arguments.preset:
        preset |= read_preset(path)
    folder, forms = options.checked_output(arguments, target, "startup")
    request = StartupRequest(
        target=target,
        num_envs=arguments.num_envs,
        seed=arguments.seed,
        threads=arguments.threads,
        device=arguments.device,
        sim=arguments.sim,
        assignments=arguments.set,
        preset=preset,
    )
    builder = StartupBuilder(StartupConfig(top_n=arguments.top_n, whitelist=whitelist))
    overrides = options.overrides_of(arguments)
    if overrides:
        target_cfg(target, overrides)  # a wrong path is told before three processes find it
    settings = options.run_settings(arguments, options.run_config(arguments, target, overrides))
    with (
        Benchmark(builder, settings, output=folder, formatters=forms) as run,
        options.progress_bar("starting processes", 3) as update,
    ):
        profile_startup(request, builder, top_n=arguments.top_n, whitelist=whitelist, progress=update)
    options.show_bundle(run.bundle, run.paths)
    return 0
