"""``headrace serve``: serve a chunk policy on openpi's wire, batching over clients."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.text import Text

from headrace._cli.evaluate import add_batch_options
from headrace._cli.options import add_options, arguments_of
from headrace._jobs.serve import serve
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.serving import PolicyServer

_KEY = "HEADRACE_API_KEY"


HELP = "serve a policy that plans chunks of actions to clients elsewhere"
DESCRIPTION = (
    "Serve a policy that plans chunks of actions on openpi's websocket wire. Rows of all clients are merged "
    "into batches while the model runs; every row has the bits of an inline strict run, whoever shares its "
    "batch, unless --fast is given. Play with 'headrace evaluate TASK --policy openpi://HOST:PORT', or any "
    f"client of openpi. Clients must send the key in the environment variable {_KEY}, if it is set."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("task", metavar="TASK", nargs="?", help="serve the policy that we ship for it")
    add_options(parser, serve, "policy")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument(
        "--port", type=int, metavar="N", default=8000, help="port to listen on; 0 for any free one (default: 8000)"
    )
    parser.add_argument("--max-rows", type=int, default=64, help="largest merged batch (default: 64)")
    parser.add_argument(
        "--max-wait",
        type=float,
        default=10.0,
        metavar="MS",
        help="time that an idle model waits for other clients (default: 10)",
    )
    add_batch_options(parser)
    parser.add_argument("--buckets", metavar="N,N", help="with --fast: sizes that batches are padded to")
    add_options(parser, serve, "horizon", "action_dim", "obs_steps")


def handle(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    from headrace.chunking import Batching
    from headrace.serving import ServeCfg

    cfg = ServeCfg(
        host=arguments.host,
        port=arguments.port,
        max_rows=arguments.max_rows,
        max_wait=arguments.max_wait / 1000,
        batching=Batching(
            mode="fast" if arguments.fast else "strict",
            size=16 if arguments.batch_size is None else arguments.batch_size,
            buckets=_buckets(arguments.buckets),
        ),
        api_key=os.environ.get(_KEY) or None,
    )
    made = serve(**arguments_of(arguments, serve), cfg=cfg)
    name = str(arguments.policy or arguments.task)
    console = Console()
    with made as server:
        line = LiveLine(server)
        try:
            console.print(f"serving {name} at {server.address}; Ctrl-C stops", highlight=False)
            if cfg.host not in ("127.0.0.1", "localhost", "::1") and cfg.api_key is None:
                console.print(f"everybody who reaches this port can use the model; set {_KEY} to ask for a key")
            with Live(console=console, refresh_per_second=1, get_renderable=line.text, transient=True):
                server.wait()
        except KeyboardInterrupt:
            console.print(line.summary(), highlight=False)
    return 0


class LiveLine:
    """What the server did since the last look, in one line."""

    def __init__(self, server: PolicyServer) -> None:
        self._server = server
        self._before = replace(server.stats)
        self._time = time.monotonic()

    def text(self) -> Text:
        """Clients, rows per batch, and rates."""
        now, stats = time.monotonic(), replace(self._server.stats)
        before, seconds = self._before, max(now - self._time, 1e-6)
        if seconds > 0.5:  # the display also asks when something is printed
            self._before, self._time = stats, now
        batches, rows = stats.batches - before.batches, stats.rows - before.rows
        return Text(
            f"{self._server.clients} clients · {rows / max(batches, 1):.1f} rows per batch · "
            f"{batches / seconds:.1f} batches/s · {rows / seconds:.1f} rows/s · "
            f"model {100 * (stats.model_seconds - before.model_seconds) / seconds:.0f} %"
        )

    def summary(self) -> str:
        """All of it, at the end."""
        stats = self._server.stats
        return (
            f"{stats.requests:,} requests, {stats.rows:,} rows in {stats.batches:,} batches "
            f"({stats.shared:,} shared by several clients), {stats.padding:,} padding rows, {stats.failed:,} failed"
        )


def _buckets(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--buckets: expected sizes such as 4,16,64, got {text!r}") from error
