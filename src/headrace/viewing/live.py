"""``headrace.viewing.view``: a batch of environments, live in a browser.

The page of ``headrace view``: a picture that replaces itself, and clicks that come back.
"""

from __future__ import annotations

import contextlib
import html
import json
import re
import secrets
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import TYPE_CHECKING, Literal, TypeAlias, Unpack, cast

import numpy as np
from numpy.typing import NDArray

from headrace._gymnasium_ids import GYMNASIUM
from headrace.bench.stepping import action_maker
from headrace.envs.recipe import EnvKeywords, EnvRecipe
from headrace.errors import ConfigError
from headrace.evaluation.cfg import PlayCfg

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.bridges.bridge_env import BridgeEnv
    from headrace.envs.recipe import AnyEnv
    from headrace.evaluation.player import Player
    from headrace.policies.load_policy import PolicySource
    from headrace.policies.protocol import ChunkPolicy
    from headrace.types import Obs

_MOST_WATCHERS = 16
_MOST_DIGITS = 9
_SLOWEST = 64
_CLOSEST, _FARTHEST = 5, 2000
"""Percent of the distance that the free camera begins with."""
_ALWAYS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Screen:
    """What is shown now. Written by the loop that steps, read by the threads that serve; one lock between them."""

    def __init__(self, title: str, num_envs: int) -> None:
        self._title, self._num_envs = title, num_envs
        self._changed = threading.Condition()
        self._picture, self._number = b"", 0
        self._suspended: list[int] = []
        self._steps, self._began = 0, time.monotonic()
        self._clicked: set[int] = set()
        self.paused, self._singles, self.slow = False, 0, 1
        self.gaze: tuple[int, int, int] | None = None
        """Of the free camera: azimuth, elevation + 90, percent of the first distance; None for other cameras."""
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

    def control(self, name: str, numbers: Sequence[int]) -> bool:
        """Do what a button of the page asks for; False if there is no such button.

        ``click`` and an environment suspends or resumes it (two clicks cancel), ``pause`` takes 0 or 1, ``step`` makes
        one step and pauses, ``slow`` takes a factor, ``look`` a new gaze.
        """
        with self._changed:
            match name, numbers:
                case "click", [number] if number < self._num_envs:
                    self._clicked ^= {number}
                case "pause", [0 | 1 as paused]:
                    self.paused = bool(paused)
                case "step", []:
                    self.paused, self._singles = True, 1
                case "slow", [factor] if 1 <= factor <= _SLOWEST:
                    self.slow = factor
                case "look", [turn, rise, zoom] if self.gaze and rise <= 180 and _CLOSEST <= zoom <= _FARTHEST:
                    self.gaze = (turn, rise, zoom)
                case _:
                    return False
        return True

    def take_step(self) -> bool:
        """Return whether the environments should step now: while not paused, or once after ``step``."""
        with self._changed:
            single, self._singles = self._singles, 0
            return not self.paused or single > 0

    def take_clicks(self) -> list[int]:
        """Return the environments that were clicked since the last call, ascending."""
        with self._changed:
            taken, self._clicked = self._clicked, set()
        return sorted(taken)

    def state(self) -> dict[str, object]:
        """For the line above the picture."""
        with self._changed:
            rate = self._steps / max(time.monotonic() - self._began, 1e-9)
            paces: dict[str, object] = {"steps": self._steps, "rate": rate, "paused": self.paused}
            return {**paces, "suspended": self._suspended, "gaze": self.gaze}

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
        values = {"title": title, "columns": columns, "share": 100 / rows, "buttons": buttons, "nonce": nonce}
        values |= {"closest": _CLOSEST, "farthest": _FARTHEST}
        page = files("headrace.viewing").joinpath("live.html").read_text(encoding="utf-8")
        return re.sub(r"\{\{(\w+)\}\}", lambda found: str(values[found[1]]), page)


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
        place = self._admit()
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
        place = self._admit()
        if place is None:
            return
        if self.headers.get("Origin") != f"http://{self.headers['Host']}":
            self.send_error(403, "the request does not come from the page of headrace view")
            return
        name, _, given = place.partition("/")
        numbers = given.split(",") if given else []
        known = all(part.isascii() and part.isdecimal() and len(part) <= _MOST_DIGITS for part in numbers)
        if known and self._view.screen.control(name, [int(part) for part in numbers]):
            self._answer("text/plain", b"ok")
        else:
            self.send_error(404)

    def _admit(self) -> str | None:
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
_PAUSED_S = 1 / 30
"""Seconds between pictures while nothing steps."""


def view(
    task: str | EnvRecipe,
    *,
    policy: PolicySource = "random",
    num_steps: int | None = None,
    port: int = 8765,
    renderer: str = "native",
    camera: str | None = None,
    on_url: Callable[[str], None] = print,
    **env: Unpack[EnvKeywords],
) -> None:
    """Step a task in real time and show all environments, tiled, on a page of this machine.

    A click on a tile suspends that environment, another resumes it. The page pauses, makes single steps and slows
    down; the free camera turns and comes closer with the mouse. Nothing is drawn while no page is open.

    Args:
        task: a task name, ``module:NAME``, ``gym:ID``, a recipe file; or a recipe, which then says everything about
            the environments. A bridged environment draws itself; ``gym:ID`` is made with ``render_mode="rgb_array"``.
        policy: ``random``, ``zero``, or what :func:`headrace.load_policy` takes, whole chunks played at once.
        num_steps: of the batch, after which it ends; None to run until Ctrl-C.
        port: port to listen on; 0 for any free one.
        renderer: what draws: ``native``, ``gl`` (MuJoCo's own images) or ``warp``.
        camera: camera of the model, or ``free`` for one that sees all of it; None for its first, else the free one.
        on_url: called with the address of the page, which has a secret in it.
        **env: ``num_envs`` (9), ``seed``, ``overrides``, ``threads``, ``device`` and ``sim`` of the environments.
    """
    from headrace.evaluation.player import open_player
    from headrace.policies.load_policy import find_policy
    from headrace.sim.camera.names import check_camera_name

    if not 0 <= port <= 65535:
        raise ConfigError(f"port (--port): expected 0 to 65535, got {port}")
    recipe = enable_drawing(EnvRecipe.of(task, _NUM_ENVS, **env))
    check_camera_name(renderer)  # the module of the task may have registered it
    if recipe.bridged and (renderer != "native" or camera is not None):
        raise ConfigError(
            f"renderer, camera (--renderer, --camera): expected a task of ours with them, got "
            f"{recipe.source!r}, which draws itself"
        )
    acts = isinstance(policy, str) and policy in ("random", "zero")
    found = None if acts else find_policy(policy, recipe.source)
    if found is not None:  # with the settings that it was trained with
        recipe = recipe.replace(overrides=found.overrides | dict(recipe.overrides))
    cfg = PlayCfg() if found is not None and found.kind == "remote" else _CFG
    with closing(recipe.make(autoreset="disabled", final_obs=False)) as envs, ExitStack() as stack:
        screen = Screen(title=recipe.source, num_envs=envs.num_envs)
        draw, dt, close = _drawing(envs, renderer, camera, screen)
        stack.callback(close)
        source = found or _act(cast("Literal['random', 'zero']", policy), envs)
        player = stack.enter_context(open_player(envs, source, cfg, recipe.seed))
        _page(player, envs.num_envs, num_steps, port, screen, draw, dt, on_url)


_CFG = PlayCfg(admission="immediate", batching="fast")


def _act(kind: Literal["random", "zero"], env: AnyEnv) -> ChunkPolicy:
    """Return random or zero actions as a policy."""
    from headrace.envs.task import count_actions
    from headrace.policies.protocol import as_chunk_policy

    make = action_maker(kind, env.single_action_space, env.num_envs, env.device, env.seed)

    def act(obs: Obs) -> Tensor:
        return make()[: len(next(iter(obs.values())))]

    return as_chunk_policy(act, action_dim=count_actions(env.single_action_space), single=True)


def _drawing(
    env: AnyEnv, renderer: str, camera: str | None, screen: Screen
) -> tuple[Callable[[], Sequence[Picture]], float, Callable[[], None]]:
    """Return what draws every environment, the seconds of a step, and what releases the camera. One that cannot work
    raises now, not in front of a viewer."""
    from headrace.envs.batch_env import BatchEnv
    from headrace.envs.viewer import Viewer

    if not isinstance(env, BatchEnv):
        check_draws(env)
        return lambda: env.render_each() or (), _BRIDGED_STEP, lambda: None
    viewer = Viewer(env.sim, camera=camera, images=env.task.images, renderer=renderer)
    first = viewer.free
    if first is not None:
        screen.gaze = round(first.azimuth % 360), round(first.elevation + 90), 100

    def draw() -> Sequence[Picture]:
        if first is not None and screen.gaze is not None:
            turn, rise, zoom = screen.gaze
            viewer.free = replace(first, azimuth=turn, elevation=rise - 90, distance=first.distance * zoom / 100)
        return tuple(viewer.pictures())

    return draw, env.task.dt, viewer.close


def enable_drawing(recipe: EnvRecipe) -> EnvRecipe:
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
    player: Player,
    num_envs: int,
    num_steps: int | None,
    port: int,
    screen: Screen,
    draw: Callable[[], Sequence[Picture]],
    dt: float,
    on_url: Callable[[str], None],
) -> None:
    """Play in real time; draw only while a page is open."""
    from headrace.evaluation.scheduling import EndlessPlan

    server = serve(screen, port)
    thread = threading.Thread(target=server.serve_forever, name="headrace-view", daemon=True)
    thread.start()
    on_url(server.url)
    held, due, done = np.zeros(num_envs, np.bool_), time.monotonic(), 0

    def watch(*_: object) -> None:
        """Show the step that was made, and wait until the next is due."""
        nonlocal due, done
        done += 1
        while True:
            held[screen.take_clicks()] ^= True
            if screen.watched:
                screen.show(draw(), held, done)
            pace = max(dt, _PAUSED_S) if screen.paused else dt * screen.slow
            due = max(due + pace, time.monotonic() - 1.0)  # after a pause, do not race to catch up
            time.sleep(max(0.0, due - time.monotonic()))
            if done == num_steps or (not held.all() and screen.take_step()):
                return

    try:
        plan = EndlessPlan(num_envs)
        result = player.play(plan, most_steps=num_steps, clamp=True, held=held, on_step=watch)
        if result.interrupt is not None:
            raise result.interrupt
    finally:
        screen.close()
        server.shutdown()
        server.server_close()
        thread.join()
