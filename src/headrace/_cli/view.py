"""``headrace view``: a batch of environments, live in a browser, or one of them in MuJoCo's own window."""

from __future__ import annotations

import argparse
import importlib
import os
import threading
import time
from typing import TYPE_CHECKING

from rich.console import Console

from headrace._cli.actions import action_source
from headrace._cli.options import add_option
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace._cli.view_page import Screen
    from headrace.envs import BatchEnv


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]  # argparse has no public name for it
    """Add the sub-command."""
    parser = commands.add_parser(
        "view",
        help="watch a task live in a browser, or in MuJoCo's own window",
        description=(
            "Step TASK in real time and show all environments, tiled, on a page of this machine. A click on a tile "
            "suspends that environment, another resumes it. Ctrl-C ends."
        ),
    )
    parser.add_argument("task", metavar="TASK", help="a name from 'headrace tasks'")
    add_option(parser, "--num-envs", default=9)
    add_option(parser, "--seed", default=0)
    parser.add_argument(
        "--policy",
        default="random",
        help="random, zero, or module:name of a function of the observation groups (default: random)",
    )
    add_option(parser, "--port", default=8765)
    add_option(parser, "--num-steps", otherwise="run until Ctrl-C")
    parser.add_argument("--window", action="store_true", help="environment 0 in MuJoCo's viewer; needs a display")
    add_option(parser, "--renderer", default="native")
    add_option(parser, "--set")
    parser.set_defaults(handler=_view)


def _view(arguments: argparse.Namespace) -> int:
    from headrace.envs import make
    from headrace.envs._overrides import parse_assignments
    from headrace.sim._camera_names import check_camera_name

    if arguments.window and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        raise ConfigError("--window: expected a display, got none (DISPLAY is not set); leave it out to use a browser")
    check_camera_name(arguments.renderer)
    if not 0 <= arguments.port <= 65535:
        raise ConfigError(f"--port: expected 0 to 65535, got {arguments.port}")
    env = make(arguments.task, arguments.num_envs, seed=arguments.seed, overrides=parse_assignments(arguments.set))
    try:
        return _window(env, arguments) if arguments.window else _page(env, arguments)
    finally:
        env.close()


def _page(env: BatchEnv, arguments: argparse.Namespace) -> int:
    from headrace._cli.view_page import Screen, serve

    screen = Screen(title=arguments.task, num_envs=env.num_envs)
    server = serve(screen, arguments.port)
    thread = threading.Thread(target=server.serve_forever, name="headrace-view", daemon=True)
    thread.start()
    Console().print(f"{server.url}  (Ctrl-C ends)", soft_wrap=True, highlight=False)
    try:
        _steps(env, arguments, screen)
    finally:
        screen.close()
        server.shutdown()
        server.server_close()
        thread.join()
    return 0


def _steps(env: BatchEnv, arguments: argparse.Namespace, screen: Screen) -> None:
    """Step in real time; draw only while somebody looks."""
    policy = action_source(arguments.policy, env, arguments.seed)
    obs, _ = env.reset()
    env.render_each(
        [0], renderer=arguments.renderer
    )  # a renderer that cannot work says so now, not to the first viewer
    due, done = time.monotonic(), 0
    while arguments.num_steps is None or done < arguments.num_steps:
        for number in screen.take_clicks():
            (env.resume if bool(env.suspended[number]) else env.suspend)([number])
        obs = env.step(policy(obs)).obs
        done += 1
        if screen.watched:
            screen.show(env.render_each(renderer=arguments.renderer), env.suspended.cpu().numpy(), done)
        due = max(due + env.task.dt, time.monotonic() - 1.0)  # after a pause, do not race to catch up
        time.sleep(max(0.0, due - time.monotonic()))


def _window(env: BatchEnv, arguments: argparse.Namespace) -> int:
    from headrace.sim._mujoco_api import mujoco

    viewers = importlib.import_module("mujoco.viewer")
    policy = action_source(arguments.policy, env, arguments.seed)
    obs, _ = env.reset()
    shown = mujoco.MjData(env.task.model)
    qpos, qvel = env.sim.field("qpos"), env.sim.field("qvel")
    done = 0
    with viewers.launch_passive(env.task.model, shown) as window:
        while window.is_running() and (arguments.num_steps is None or done < arguments.num_steps):
            obs = env.step(policy(obs)).obs
            done += 1
            shown.qpos[:], shown.qvel[:] = qpos[0].cpu().numpy(), qvel[0].cpu().numpy()
            mujoco.mj_forward(env.task.model, shown)
            window.sync()
            time.sleep(env.task.dt)
    return 0
