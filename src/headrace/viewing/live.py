"""``headrace.viewing.view``: a batch of environments, live in a browser, or one of them in MuJoCo's own window."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, TypeAlias, Unpack, cast

from headrace._gymnasium_ids import GYMNASIUM
from headrace.bench.measured.run import StepFunction, step_function, trained_recipe
from headrace.envs.recipe import EnvKeywords, EnvRecipe
from headrace.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headrace.bridges.bridge_env import BridgeEnv
    from headrace.envs.batch_env import BatchEnv
    from headrace.envs.recipe import AnyEnv

Picture: TypeAlias = "NDArray[np.uint8]"
_NUM_ENVS = 9
_BRIDGED_STEP = 1 / 30
"""Seconds per step that a bridged environment is shown at, whose own rate is not known."""


def view(
    task: str | EnvRecipe,
    *,
    policy: str | StepFunction = "random",
    num_steps: int | None = None,
    port: int = 8765,
    window: bool = False,
    renderer: str = "native",
    on_url: Callable[[str], None] = print,
    **env: Unpack[EnvKeywords],
) -> None:
    """Step a task in real time and show all environments, tiled, on a page of this machine.

    A click on a tile suspends that environment, another resumes it. Nothing is drawn while no page is open.

    Args:
        task: a task name, ``module:NAME``, ``gym:ID``, a recipe file; or a recipe, which then says everything about
            the environments. A bridged environment draws itself; ``gym:ID`` is made with ``render_mode="rgb_array"``.
        policy: ``random``, ``zero``, ``module:name`` of a function of the observation groups, a checkpoint of a
            training, its directory, ``latest`` or ``best`` of ``runs/``, a TorchScript or ONNX file; in Python also
            the function itself.
        num_steps: of the batch, after which it ends; None to run until Ctrl-C, or until the
            window is closed.
        port: port to listen on; 0 for any free one.
        window: environment 0 in MuJoCo's viewer instead, which needs a display.
        renderer: what draws: ``native``, ``gl`` (MuJoCo's own images) or ``warp``.
        on_url: called with the address of the page, which has a secret in it.
        **env: ``num_envs`` (9), ``seed``, ``overrides``, ``threads``, ``device`` and ``sim`` of the environments.
    """
    from headrace.sim.camera.names import check_camera_name

    if window and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        raise ConfigError(
            "window (--window): expected a display, got none (DISPLAY is not set); leave it out to use a browser"
        )
    check_camera_name(renderer)
    if not 0 <= port <= 65535:
        raise ConfigError(f"port (--port): expected 0 to 65535, got {port}")
    recipe = drawn_recipe(EnvRecipe.of(task, _NUM_ENVS, **env))
    if recipe.bridged and (window or renderer != "native"):
        raise ConfigError(
            f"window, renderer (--window, --renderer): expected a task of ours with them, got {recipe.source!r}, which "
            "draws itself"
        )
    recipe, file = trained_recipe(recipe, policy)
    with closing(recipe.make()) as envs:
        act = step_function(policy, envs, recipe.seed, file)
        if window:
            _window(cast("BatchEnv", envs), act, num_steps)
        else:
            _page(envs, act, num_steps, recipe.source, port, renderer, on_url)


def _drawing(env: AnyEnv, renderer: str) -> tuple[Callable[[], Sequence[Picture]], float]:
    """Return what draws every environment, and the seconds of a step. One that cannot work
    raises now, not in front of a viewer."""
    from headrace.envs.batch_env import BatchEnv

    if isinstance(env, BatchEnv):
        env.open_renderer(renderer)
        return lambda: env.render_each(renderer=renderer), env.task.dt
    check_draws(env)
    return lambda: env.render_each() or (), _BRIDGED_STEP


def drawn_recipe(recipe: EnvRecipe) -> EnvRecipe:
    """Return the recipe with pictures, if it is of a Gymnasium environment and has no other render mode."""
    if not recipe.source.startswith(GYMNASIUM):
        return recipe
    return recipe.replace(overrides={"render_mode": "rgb_array", **recipe.overrides})


def check_draws(env: BridgeEnv) -> None:
    """Refuse an environment that gives no pictures."""
    if env.render_mode != "rgb_array":
        raise ConfigError(
            f"{env.name}: expected an environment that draws itself (render_mode 'rgb_array'), got "
            f"{env.render_mode!r}; give it one"
        )


def _page(
    env: AnyEnv,
    act: StepFunction,
    num_steps: int | None,
    title: str,
    port: int,
    renderer: str,
    on_url: Callable[[str], None],
) -> None:
    """Step in real time; draw only while a page is open."""
    from headrace.viewing._page import Screen, serve

    draw, dt = _drawing(env, renderer)
    screen = Screen(title=title, num_envs=env.num_envs)
    server = serve(screen, port)
    thread = threading.Thread(target=server.serve_forever, name="headrace-view", daemon=True)
    thread.start()
    on_url(server.url)
    try:
        obs, _ = env.reset()
        due, done = time.monotonic(), 0
        while num_steps is None or done < num_steps:
            for number in screen.take_clicks():
                (env.resume if bool(env.suspended[number]) else env.suspend)([number])
            obs = env.step(act(obs)).obs
            done += 1
            if screen.watched:
                screen.show(draw(), env.suspended.cpu().numpy(), done)
            due = max(due + dt, time.monotonic() - 1.0)  # after a pause, do not race to catch up
            time.sleep(max(0.0, due - time.monotonic()))
    finally:
        screen.close()
        server.shutdown()
        server.server_close()
        thread.join()


def _window(env: BatchEnv, act: StepFunction, num_steps: int | None) -> None:
    from headrace.sim.mujoco_api import mujoco

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
