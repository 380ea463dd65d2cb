"""``headrace.view``: a batch of environments, live in a browser, or one of them in MuJoCo's own window."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, cast

from headrace._jobs.request import recipe_of
from headrace._jobs.run import StepFunction, step_function
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace._jobs.view_page import Screen
    from headrace.envs import BatchEnv, EnvRecipe

_NUM_ENVS = 9


def view(
    task: str | EnvRecipe,
    *,
    policy: str | StepFunction = "random",
    num_steps: int | None = None,
    port: int = 8765,
    window: bool = False,
    renderer: str = "native",
    num_envs: int | None = None,
    seed: int | None = None,
    overrides: Mapping[str, object] | None = None,
    on_url: Callable[[str], None] = print,
) -> None:
    """Step a task in real time and show all environments, tiled, on a page of this machine.

    A click on a tile suspends that environment, another resumes it. Nothing is drawn while nobody looks.

    Args:
        task: a task name, ``module:NAME``, or a recipe, which then says everything about the environments.
        policy: ``random``, ``zero``, ``module:name`` of a function of the observation groups, or the function.
        num_steps: stop after so many steps of the batch; None to go on until Ctrl-C, or until the window is closed.
        port: of the page; 0 for any free one.
        window: show environment 0 in MuJoCo's viewer instead, which needs a display.
        renderer: what draws: ``native``, ``gl`` (MuJoCo's own images) or ``warp``.
        num_envs: environments in the batch (9).
        seed: of episodes and actions (0).
        overrides: task settings by path.
        on_url: called with the address of the page, which has a secret in it.
    """
    from headrace.sim._camera_names import check_camera_name

    if window and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        raise ConfigError(
            "window (--window): expected a display, got none (DISPLAY is not set); leave it out to use a browser"
        )
    check_camera_name(renderer)
    if not 0 <= port <= 65535:
        raise ConfigError(f"port (--port): expected 0 to 65535, got {port}")
    recipe = recipe_of(task, _NUM_ENVS, num_envs=num_envs, seed=seed, overrides=overrides)
    if recipe.bridged:
        raise ConfigError(f"view: expected a task of headrace, got {recipe.source!r}; see 'headrace tasks'")
    with closing(cast("BatchEnv", recipe.make())) as env:
        act = step_function(policy, env, recipe.seed)
        if window:
            _window(env, act, num_steps)
        else:
            env.open_renderer(renderer)  # one that cannot work says so now, not to the first viewer
            _page(env, act, num_steps, recipe.source, port, renderer, on_url)


def _page(
    env: BatchEnv,
    act: StepFunction,
    num_steps: int | None,
    title: str,
    port: int,
    renderer: str,
    on_url: Callable[[str], None],
) -> None:
    from headrace._jobs.view_page import Screen, serve

    screen = Screen(title=title, num_envs=env.num_envs)
    server = serve(screen, port)
    thread = threading.Thread(target=server.serve_forever, name="headrace-view", daemon=True)
    thread.start()
    on_url(server.url)
    try:
        _steps(env, act, num_steps, screen, renderer)
    finally:
        screen.close()
        server.shutdown()
        server.server_close()
        thread.join()


def _steps(env: BatchEnv, act: StepFunction, num_steps: int | None, screen: Screen, renderer: str) -> None:
    """Step in real time; draw only while somebody looks."""
    obs, _ = env.reset()
    due, done = time.monotonic(), 0
    while num_steps is None or done < num_steps:
        for number in screen.take_clicks():
            (env.resume if bool(env.suspended[number]) else env.suspend)([number])
        obs = env.step(act(obs)).obs
        done += 1
        if screen.watched:
            screen.show(env.render_each(renderer=renderer), env.suspended.cpu().numpy(), done)
        due = max(due + env.task.dt, time.monotonic() - 1.0)  # after a pause, do not race to catch up
        time.sleep(max(0.0, due - time.monotonic()))


def _window(env: BatchEnv, act: StepFunction, num_steps: int | None) -> None:
    from headrace.sim._mujoco_api import mujoco

    viewers = importlib.import_module("mujoco.viewer")
    obs, _ = env.reset()
    shown = mujoco.MjData(env.task.model)
    qpos, qvel = env.sim.field("qpos"), env.sim.field("qvel")
    done = 0
    with viewers.launch_passive(env.task.model, shown) as window:
        while window.is_running() and (num_steps is None or done < num_steps):
            obs = env.step(act(obs)).obs
            done += 1
            shown.qpos[:], shown.qvel[:] = qpos[0].cpu().numpy(), qvel[0].cpu().numpy()
            mujoco.mj_forward(env.task.model, shown)
            window.sync()
            time.sleep(env.task.dt)
