"""``headrace demo``: the whole story in a few minutes, with real parts, real files and a table of what was saved."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.progress import track
from rich.rule import Rule
from rich.table import Table

from headrace._cli import bench_options as options
from headrace._cli.compiling import compile_bar
from headrace._cli.options import add_option

if TYPE_CHECKING:
    from headrace.replay import ReplayBuffer
    from headrace.rollout import Evaluation

_STACKED = {"frame_stack": 4, "pixels": 48}
"""The pictures of the replay buffer."""


class Saving(NamedTuple):
    """One line of the last table: how much the usual way takes, how much ours."""

    what: str
    usual_way: str
    usual: float
    ours: float
    unit: str


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]  # argparse has no public name for it
    """Add the sub-command."""
    parser = commands.add_parser(
        "demo",
        help="the whole story in a few minutes",
        description=(
            "Evaluate the shipped chunk policy under the usual scheduler and under ours, play the shipped pixel "
            "policy, fill a replay buffer, measure a task, and write bundles, a video and report.html. Ends with what "
            "was saved: model inferences, frames, bytes."
        ),
    )
    add_option(parser, "--output", default=Path("outputs/demo"))
    parser.add_argument("--quick", action="store_true", help="fewer episodes, to see what it shows")
    parser.set_defaults(handler=_demo)


def _demo(arguments: argparse.Namespace) -> int:
    console, begin = Console(), time.perf_counter()
    output = _free_folder(arguments.output)
    with compile_bar():
        warm_kernels()
    episodes, slots = (16, 8) if arguments.quick else (96, 32)
    savings: list[Saving] = []
    console.print(Rule("1 of 4: a chunk policy, one inference a chunk and only where it is needed"))
    savings += chunk_savings(console, episodes, slots)
    console.print(Rule("2 of 4: a pixel policy, filmed"))
    savings += pixel_savings(console, output, *((6, 4) if arguments.quick else (24, 16)))
    console.print(Rule("3 of 4: a replay buffer that keeps every frame once"))
    savings += replay_savings(console, 60 if arguments.quick else 400)
    console.print(Rule("4 of 4: measure, and put it all on one page"))
    _report(output, arguments.quick)
    console.print(_table(savings))
    console.print(f"\nOpen [bold]{output / 'report.html'}[/]; the film is {output / 'play' / 'cartpole-camera.mp4'}.")
    console.print(
        f"Next: headrace view ant, the lessons in docs/tutorials/, examples/. ({time.perf_counter() - begin:.0f} s)"
    )
    return 0


def warm_kernels() -> None:
    """Use a little of everything, so that what the first run on a machine compiles is compiled under one bar."""
    import torch

    import headrace
    from headrace.rollout._actor_critic import load_actor_critic

    saved = load_actor_critic("cartpole-camera")
    camera, ant = headrace.make("cartpole-camera", 2, overrides=saved.overrides), headrace.make("ant", 2)
    ant.reset()
    ant.step(torch.zeros(2, 8))
    camera.step(saved.act(camera.reset()[0]))
    ant.close()
    camera.close()
    _filled(1).sample(1)


def chunk_savings(console: Console, episodes: int, slots: int) -> list[Saving]:
    """The shipped ACT policy on the same episodes under two schedulers."""
    import headrace
    from headrace.chunking import Greedy, WholeBatchOnAny
    from headrace.rollout import evaluate, load_chunk_policy

    policy = load_chunk_policy("pusher-solid")
    env = headrace.make("pusher-solid", slots, autoreset="disabled", final_obs=False)
    results: dict[str, Evaluation] = {}
    for name, rule in (("any environment triggers all", WholeBatchOnAny()), ("each when it needs one", Greedy())):
        results[name] = evaluate(env, policy, episodes=episodes, execute=16, seed=1, admission=rule)
    env.close()
    table = Table(title=f"{episodes} episodes of pusher-solid in {slots} environments, chunks of 16")
    for column in ("who is inferred", "success", "model calls", "rows inferred", "seconds"):
        table.add_column(column, justify="left" if column.startswith("who") else "right")
    for name, result in results.items():
        counters, rate = result.counters, result.success_rate
        shown = "–" if rate is None else f"{rate.value:.0%} [{rate.low:.0%}, {rate.high:.0%}]"
        figures = f"{counters.model_calls:,}", f"{counters.rows_inferred:,}", f"{counters.seconds:.1f}"
        table.add_row(name, shown, *figures)
    console.print(table)
    usual, ours = (result.counters for result in results.values())
    way = "any environment triggers all"
    return [
        Saving("model calls", way, usual.model_calls, ours.model_calls, ""),
        Saving("rows inferred", way, usual.rows_inferred, ours.rows_inferred, ""),
    ]


def pixel_savings(console: Console, output: Path, episodes: int, slots: int) -> list[Saving]:
    """The shipped pixel policy, each planned episode once. Who has nothing left to play is not drawn any more."""
    import headrace

    film = output / "play" / "cartpole-camera.mp4"
    with options.progress_bar("playing", episodes) as update:
        result = headrace.play(
            "cartpole-camera",
            policy="published",
            episodes=episodes,
            num_envs=slots,
            seed=1,
            video=film,
            output=film.parent,
            on_progress=update,
        )
    reward, steps = result.bundle.reward, result.bundle.runtime.iterations_completed
    assert reward is not None, "a plan of episodes was played to its end"
    console.print(
        f"{episodes} episodes from pixels: mean return {reward.mean:.1f} (a perfect run scores about 300); film: {film}"
    )
    return [Saving("frames drawn", "every environment in every step", steps * slots, result.frames_drawn, "")]


def replay_savings(console: Console, steps: int) -> list[Saving]:
    """Bytes per transition of real images, compared with keeping ``obs`` and ``next_obs``."""
    buffer = _filled(steps)
    sample = buffer.sample(min(32, len(buffer)))
    usual = sum(2 * sample["observation", group][0].nbytes for group in ("policy", "critic"))
    console.print(f"{len(buffer):,} transitions of 48 × 48 images in stacks of 4: {buffer.nbytes / 2**20:.1f} MiB")
    return [Saving("bytes per transition", "obs and next_obs stored", usual, buffer.bytes_per_transition, " B")]


def _filled(steps: int) -> ReplayBuffer:
    import torch

    import headrace
    from headrace.replay import ReplayBuffer
    from headrace.types import StackSpec

    env = headrace.make("cartpole-camera", 4, seed=0, overrides=_STACKED)
    spaces = env.single_observation_space, env.single_action_space
    buffer = ReplayBuffer(4 * steps, 4, *spaces, stack={"policy": StackSpec(frames=4)})
    obs, _ = env.reset()
    for _ in track(range(steps), "filling", console=Console(stderr=True), transient=True, disable=steps == 1):
        active, action = env.active, torch.rand(4, 1) * 2 - 1
        step = env.step(action)
        buffer.extend(obs, action, step, active)
        obs = step.obs
    env.close()
    return buffer


def _report(output: Path, quick: bool) -> None:
    """Bundles of a measured and a played run, then the page."""
    import headrace

    for num_envs in (4, 16) if quick else (16, 64, 256):
        measured = headrace.runtime(
            "ant",
            num_envs=num_envs,
            num_steps=20 if quick else 60,
            output=output / f"ant-{num_envs}",
            progress=options.progress_bar,
        )
        options.show_bundle(measured.bundle, measured.paths)
    # not the newest of the user's own trainings, which play would take
    played = headrace.play("cartpole", policy="published", episodes=32, num_envs=16, output=output / "play-cartpole")
    options.show_bundle(played.bundle, played.paths)
    headrace.report([output], output=output / "report.html", title="headrace demo")


def _table(savings: list[Saving]) -> Table:
    table = Table(title="What was saved")
    for column in ("what", "the usual way", "it takes", "here", "saved"):
        table.add_column(column, justify="left" if column in ("what", "the usual way") else "right")
    for saving in savings:
        share = 1 - saving.ours / saving.usual
        figures = f"{saving.usual:,.0f}{saving.unit}", f"{saving.ours:,.0f}{saving.unit}", f"{share:.0%}"
        table.add_row(saving.what, saving.usual_way, *figures)
    return table


def _free_folder(wanted: Path) -> Path:
    """The folder, or the first of ``wanted-2``, ``wanted-3``, … that is not there: nothing is overwritten."""
    folder, number = wanted, 1
    while folder.exists():
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    return folder
