"""The page of ``headrace view``: a picture that replaces itself, and clicks that come back."""

from __future__ import annotations

import html
import json
import struct
import threading
import time
import zlib
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
from numpy.typing import NDArray

from headrace.envs._viewer import tile
from headrace.errors import ConfigError

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} · headrace</title><link rel="icon" href="data:,">
<style>
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
<div id="tiles"><img src="/stream" alt="all environments, tiled"><div>{buttons}</div></div>
<p>Click a tile to suspend its environment, again to resume it.</p>
<script>
for (const button of document.querySelectorAll("button"))
  button.onclick = () => fetch("/click/" + button.dataset.env, {{method: "POST"}});
const clock = setInterval(async () => {{
  let state;
  try {{
    state = await (await fetch("/state")).json();
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
        self._clicks: list[int] = []
        self._watchers = 0
        self.closed = False

    @property
    def watched(self) -> bool:
        """Whether anybody looks; nothing is drawn otherwise."""
        return self._watchers > 0

    def show(self, pictures: Sequence[NDArray[np.uint8]], suspended: NDArray[np.bool_], steps: int) -> None:
        """Put up a picture of each environment, uint8 (H, W, 3); nothing of it is kept."""
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

    def watch(self, change: int) -> None:
        """Somebody came (1) or went (-1)."""
        with self._changed:
            self._watchers += change

    def click(self, number: int) -> bool:
        """Ask for environment ``number`` to be suspended or resumed; False if there is none."""
        if not 0 <= number < self._num_envs:
            return False
        with self._changed:
            self._clicks.append(number)
        return True

    def take_clicks(self) -> list[int]:
        """The clicks since the last call."""
        with self._changed:
            taken, self._clicks = self._clicks, []
        return taken

    def state(self) -> dict[str, object]:
        """For the line above the picture."""
        with self._changed:
            rate = self._steps / max(time.monotonic() - self._began, 1e-9)
            return {"steps": self._steps, "rate": rate, "suspended": self._suspended}

    def close(self) -> None:
        """Let everybody who waits go."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def page(self) -> str:
        """The HTML."""
        columns = int(np.ceil(np.sqrt(self._num_envs)))
        rows = -(-self._num_envs // columns)
        buttons = "".join(
            f'<button data-env="{i}" aria-pressed="false" aria-label="environment {i}"></button>'
            for i in range(self._num_envs)
        )
        title = html.escape(self._title)
        return _PAGE.format(title=title, columns=columns, share=100 / rows, buttons=buttons)


def serve(screen: Screen, port: int) -> ThreadingHTTPServer:
    """A server on this machine only; the caller runs and closes it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/":
                self._answer("text/html; charset=utf-8", screen.page().encode())
            elif self.path == "/state":
                self._answer("application/json", json.dumps(screen.state()).encode())
            elif self.path == "/stream":
                self._stream()
            else:
                self.send_error(404)

        def do_POST(self) -> None:
            name, _, number = self.path.strip("/").partition("/")
            if name == "click" and number.isdigit() and screen.click(int(number)):
                self._answer("text/plain", b"ok")
            else:
                self.send_error(404)

        def _answer(self, kind: str, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _stream(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
            self.end_headers()
            screen.watch(1)
            try:
                number = 0
                while (shown := screen.next_picture(number)) is not None:
                    number, picture = shown
                    head = f"--frame\r\nContent-Type: image/png\r\nContent-Length: {len(picture)}\r\n\r\n"
                    self.wfile.write(head.encode() + picture + b"\r\n")
            except (BrokenPipeError, ConnectionResetError):
                pass  # the page was closed
            finally:
                screen.watch(-1)

        def log_message(self, format: str, *args: object) -> None:  # the signature is the base's
            """Requests are not worth a line each."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

    try:
        return Server(("127.0.0.1", port), Handler)
    except OSError as error:
        raise ConfigError(f"--port: expected a free one, got {port} ({error.strerror}); try --port 0") from error


def png(picture: NDArray[np.uint8]) -> bytes:
    """Encode uint8 (H, W, 3) with the standard library alone."""
    height, width, _ = picture.shape
    rows = np.zeros((height, 1 + 3 * width), np.uint8)  # each row begins with its filter, 0: none
    rows[:, 1:] = picture.reshape(height, -1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(rows.tobytes(), 1)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
