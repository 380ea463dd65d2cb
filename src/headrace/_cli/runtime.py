"""``headrace runtime``: how fast an environment steps, as a bundle."""

from __future__ import annotations

import argparse
import dataclasses
from contextlib import closing
from typing import TYPE_CHECKING

from headrace._cli import bench_options as options
from headrace._cli.options import add_option
from headrace._jobs.request import imports_phase
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.bench import RuntimeBuilder
    from headrace.bench._stepping import WarmupRule
    from headrace.bench._targets import AnyEnv


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]  # argparse has no public name for it
    """Add the sub-command."""
    parser = commands.add_parser(
        "runtime",
        help="measure how fast an environment steps, as a bundle",
        description=(
            "Step TASK with random or zero actions, warm until the step time is steady, then measure each step: where "
            "its time goes (physics, rendering, task), CPU and memory. Writes runtime.json, also after Ctrl-C or a "
            "crash. Compare such files with 'headrace compare'."
        ),
    )
    options.add_target_options(parser)
    add_option(parser, "--num-steps", default=1000)
    parser.add_argument(
        "--warmup-steps",
        type=int,
        default=50,
        help="least number of warm-up steps; more until the step time is steady (default: 50)",
    )
    parser.add_argument(
        "--actions", choices=("random", "zero"), default="random", help="how actions are chosen (default: random)"
    )
    parser.add_argument(
        "--timing",
        choices=("host_return", "synchronized"),
        default="host_return",
        help="host_return: until env.step returned; synchronized: until the device has done the work "
        "(default: host_return; no difference on a CPU)",
    )
    options.add_output_options(parser)
    parser.set_defaults(handler=_runtime)


def _runtime(arguments: argparse.Namespace) -> int:
    from headrace.bench import Benchmark, RuntimeBuilder
    from headrace.bench._stepping import WarmupRule
    from headrace.bench._targets import import_environments, rendering_backend, target_cfg

    # everything that can be refused without importing torch comes first
    target = options.checked_target(arguments)
    if arguments.num_steps < 1:
        raise ConfigError(f"--num-steps: expected at least 1, got {arguments.num_steps}")
    rule = WarmupRule(steps=arguments.warmup_steps)
    folder, forms = options.checked_output(arguments, target, "runtime")

    builder = RuntimeBuilder(arguments.num_envs, mode=arguments.timing)
    with imports_phase(builder.startup, target):
        import_environments(target)
    with builder.startup.phase("task_config"):
        overrides = options.overrides_of(arguments)
        cfg = target_cfg(target, overrides)
    config = options.run_config(arguments, target, overrides)
    settings = options.run_settings(arguments, config)
    with Benchmark(builder, settings, output=folder, formatters=forms) as run:
        with builder.startup.phase("env_creation"):
            env = options.made_env(arguments, target, cfg, overrides)
        run.settings = dataclasses.replace(
            settings, config=config.model_copy(update={"rendering_backend": rendering_backend(env)})
        )
        with closing(env):
            _measure(env, builder, arguments, rule)
    options.show_bundle(run.bundle, run.paths)
    return 0


def _measure(env: AnyEnv, builder: RuntimeBuilder, arguments: argparse.Namespace, rule: WarmupRule) -> None:
    from headrace.bench._actions import action_maker
    from headrace.bench._stepping import Stepper

    actions = action_maker(arguments.actions, env.single_action_space, env.num_envs, env.device, seed=arguments.seed)
    stepper = Stepper(env, actions, builder)
    with builder.startup.phase("first_step"):
        env.reset()
        stepper.step()
    with options.progress_bar("warming up", rule.limit * rule.steps) as update:
        stepper.warm_up(rule, update)
    with options.progress_bar("measuring", arguments.num_steps) as update:
        stepper.run(arguments.num_steps, update)
