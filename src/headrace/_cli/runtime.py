"""``headrace runtime``: how fast an environment steps, as a bundle."""

from __future__ import annotations

import argparse

from headrace._cli import bench_options as options
from headrace._cli.options import add_option, values


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]  # argparse has no public name for it
    """Add the sub-command."""
    parser = commands.add_parser(
        "runtime",
        help="measure how fast an environment steps, as a bundle",
        description=(
            "Step TASK with random or zero actions, warm up until the step time is steady, then measure each step: "
            "where its time goes (physics, rendering, task), CPU and memory. Writes runtime.json, also after Ctrl-C or "
            "a crash. Compare such files with 'headrace compare'."
        ),
    )
    options.add_target_options(parser)
    add_option(parser, "--num-steps", default=1000)
    add_option(parser, "--warmup-steps", default=50)
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
    from headrace._jobs.runtime import runtime

    result = runtime(
        **options.environment_of(arguments),
        **options.output_of(arguments),
        **values(arguments, "num_steps", "warmup_steps", "actions", "timing"),
        progress=options.progress_bar,
    )
    options.show_bundle(result.bundle, result.paths)
    return 0
