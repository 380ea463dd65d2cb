"""``headrace.viewing.view``: a batch of environments, live in a browser, or one of them in MuJoCo's own window.

The page of ``headrace view``: a picture that replaces itself, and clicks that come back.
"""

from __future__ import annotations

import contextlib
import html
import importlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, TypeAlias, Unpack, cast

import numpy as np
from numpy.typing import NDArray

from headrace._gymnasium_ids import GYMNASIUM
from headrace.bench.measured.run import StepFunction, step_function, trained_recipe
from headrace.envs.recipe import EnvKeywords, EnvRecipe
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.bridges.bridge_env import BridgeEnv
    from headrace.envs.batch_env import BatchEnv
    from headrace.envs.recipe import AnyEnv

_MOST_WATCHERS = 16
_MOST_DIGITS = 9
_ALWAYS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} · headrace</title><link rel="icon" href="data:,">
<style nonce="{nonce}">
:root {{ color-scheme: light dark; font: 16px/1.4 system-ui, sans-serif; }}
body {{ margin: 1rem auto; max-width: 900px; padding: 0 1rem; }}
#tiles {{ position: relative; }}
#tiles img {{ width: 100%; display: block; image-rendering: pixelated; background: #888; }}
#tiles div {{ position: absolute; inset: 0; display: grid;
  grid-template-columns: repeat({columns}, 1fr); grid-auto-rows: {share}%; }}
#tiles button {{ background: none; border: 0; cursor: pointer; }}
#tiles button:focus-visible {{ outline: 3px solid #0d9488; outline-offset: -3px; }}
#tiles button[aria-pressed=true] {{ background: #0009; color: #fff; font: inherit; }}
</style></head><body>
<h1>{title}</h1>
<p id="state" role="status">waiting for the first picture</p>
<div id="tiles"><img src="stream" alt="all environments, tiled"><div>{buttons}</div></div>
<p>Click a tile to suspend its environment, again to resume it.</p>
<script nonce="{nonce}">
for (const button of document.querySelectorAll("button"))
  button.onclick = () => fetch("click/" + button.dataset.env, {{method: "POST"}});
const clock = setInterval(async () => {{
  let state;
  try {{
    state = await (await fetch("state")).json();
  }} catch {{
    clearInterval(clock);
    document.getElementById("state").textContent = "headrace view has ended; start it again and reload";
    return;
  }}
  document.getElementById("state").textContent =
    `step ${{state.steps}}, ${{state.rate.toFixed(0)}} steps per second, ${{state.suspended.length}} suspended`;
  for (const button of document.querySelectorAll("button")) {{
    const rests = state.suspended.includes(Number(button.dataset.env));
    button.setAttribute("aria-pressed", rests);
    button.textContent = rests ? "suspended" : "";
  }}
}}, 500);
</script></body></html>"""


class Screen:
    """What is shown now. Written by the loop that steps, read by the threads that serve; one lock between them."""

    def __init__(self, title: str, num_envs: int) -> None:
        self._title, self._num_envs = title, num_envs
        self._changed = threading.Condition()
        self._picture, self._number = b"", 0
        self._suspended: list[int] = []
        self._steps, self._began = 0, time.monotonic()
        self._clicked: set[int] = set()
        self._watchers = 0
        self.closed = False

    @property
    def watched(self) -> bool:
        """Whether a page is open; nothing is drawn otherwise."""
        return self._watchers > 0

    def show(self, pictures: Sequence[NDArray[np.uint8]], suspended: NDArray[np.bool_], steps: int) -> None:
        """Put up a picture of each environment, uint8 (H, W, 3); nothing of it is kept."""
        from headrace.envs.viewer import png, tile  # imports torch, which the help of commands does without

        encoded = png(tile(np.stack(pictures)))
        with self._changed:
            self._picture, self._number = encoded, self._number + 1
            self._suspended, self._steps = np.flatnonzero(suspended).tolist(), steps
            self._changed.notify_all()

    def next_picture(self, after: int) -> tuple[int, bytes] | None:
        """Wait for a picture newer than number ``after``; None when the screen is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or self._number > after)
            return None if self.closed else (self._number, self._picture)

    @contextlib.contextmanager
    def watching(self) -> Generator[bool]:
        """Count one more viewer in the block; False, and not counted, if there are too many already."""
        with self._changed:
            welcome = self._watchers < _MOST_WATCHERS
            self._watchers += welcome
        try:
            yield welcome
        finally:
            with self._changed:
                self._watchers -= welcome

    def click(self, number: int) -> bool:
        """Request that environment ``number`` is suspended or resumed; False if there is none. Two clicks cancel."""
        if not 0 <= number < self._num_envs:
            return False
        with self._changed:
            self._clicked ^= {number}
        return True

    def take_clicks(self) -> list[int]:
        """Return the environments that were clicked since the last call, ascending."""
        with self._changed:
            taken, self._clicked = self._clicked, set()
        return sorted(taken)

    def state(self) -> dict[str, object]:
        """For the line above the picture."""
        with self._changed:
            rate = self._steps / max(time.monotonic() - self._began, 1e-9)
            return {"steps": self._steps, "rate": rate, "suspended": self._suspended}

    def close(self) -> None:
        """Release all waiting requests."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def page(self, nonce: str) -> str:
        """Return the HTML; ``nonce`` marks the only script and style that a browser may use."""
        columns = int(np.ceil(np.sqrt(self._num_envs)))
        rows = -(-self._num_envs // columns)
        buttons = "".join(
            f'<button data-env="{i}" aria-pressed="false" aria-label="environment {i}"></button>'
            for i in range(self._num_envs)
        )
        title = html.escape(self._title)
        return _PAGE.format(title=title, columns=columns, share=100 / rows, buttons=buttons, nonce=nonce)


class ViewServer(ThreadingHTTPServer):
    """Serves one screen on this machine, to clients that have the address with its secret.

    Any page of any site can send requests to a port of the machine that its reader sits at. So every request must name
    this server as its Host (a site that gives its own name our address does not), have the secret in its path, and, if
    it changes something, come from our own page by its Origin.
    """

    daemon_threads = True

    def __init__(self, screen: Screen, port: int) -> None:
        self.screen = screen
        self.secret = secrets.token_urlsafe(16)
        super().__init__(("127.0.0.1", port), _Handler)
        self.hosts = frozenset(f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost"))

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://127.0.0.1:{self.server_port}/{self.secret}/"


class _Handler(BaseHTTPRequestHandler):
    timeout = 30  # a request that does not end holds a thread for no longer

    @property
    def _view(self) -> ViewServer:
        assert isinstance(self.server, ViewServer)
        return self.server

    def do_GET(self) -> None:
        place = self._admitted()
        if place == "":
            nonce = secrets.token_urlsafe(16)
            policy = (
                f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src 'self' data:; "
                "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
            )
            body = self._view.screen.page(nonce).encode()
            self._answer("text/html; charset=utf-8", body, {"Content-Security-Policy": policy})
        elif place == "state":
            self._answer("application/json", json.dumps(self._view.screen.state()).encode())
        elif place == "stream":
            self._stream()
        elif place is not None:
            self.send_error(404)

    def do_POST(self) -> None:
        place = self._admitted()
        if place is None:
            return
        if self.headers.get("Origin") != f"http://{self.headers['Host']}":
            self.send_error(403, "the request does not come from the page of headrace view")
            return
        name, _, number = place.partition("/")
        known = name == "click" and number.isascii() and number.isdecimal() and len(number) <= _MOST_DIGITS
        if known and self._view.screen.click(int(number)):
            self._answer("text/plain", b"ok")
        else:
            self.send_error(404)

    def _admitted(self) -> str | None:
        """Return what is asked for, behind the secret; None if the request was refused."""
        if self.headers.get_all("Host", []) not in [[host] for host in self._view.hosts]:
            self.send_error(403, "expected the Host that headrace view printed")
            return None
        _, secret, *rest = f"{self.path}/".split("/", 2)
        if not secrets.compare_digest(secret.encode(errors="replace"), self._view.secret.encode()):
            self.send_error(403, "open the address that headrace view printed")
            return None
        return rest[0].removesuffix("/") if rest else ""

    def _answer(self, kind: str, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(200)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def end_headers(self) -> None:
        """No other site may show, read or keep anything, or learn the secret."""
        for name, value in _ALWAYS.items():
            self.send_header(name, value)
        super().end_headers()

    def _stream(self) -> None:
        screen = self._view.screen
        with screen.watching() as welcome:
            if not welcome:
                self.send_error(503, "too many viewers")
                return
            self.send_response(200)
            self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
            self.end_headers()
            number = 0
            with contextlib.suppress(BrokenPipeError, ConnectionResetError, TimeoutError):  # the page was closed
                while (shown := screen.next_picture(number)) is not None:
                    number, picture = shown
                    head = f"--frame\r\nContent-Type: image/png\r\nContent-Length: {len(picture)}\r\n\r\n"
                    self.wfile.write(head.encode() + picture + b"\r\n")

    def log_message(self, format: str, *args: object) -> None:  # the signature is the base's
        """Log nothing: requests are not worth a line each."""


def serve(screen: Screen, port: int) -> ViewServer:
    """Return a server on this machine only; the caller runs and closes it."""
    try:
        return ViewServer(screen, port)
    except OSError as error:
        raise ConfigError(f"--port: expected a free one, got {port} ({error.strerror}); try --port 0") from error


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
    from headrace.viewing.live import Screen, serve

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
