"""``headrace serve``: serve a chunk policy on openpi's wire, batching over clients."""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.text import Text

from headrace._cli.options import add_option, values
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.serving import PolicyServer
    from headrace.serving._batcher import ServingStats

_KEY = "HEADRACE_API_KEY"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]  # argparse has no public name for it
    """Add the sub-command."""
    parser = commands.add_parser(
        "serve",
        help="serve a policy that plans chunks of actions to clients elsewhere",
        description=(
            "Serve a policy that plans chunks of actions on openpi's websocket wire. Rows of all clients are merged "
            "into batches while the model runs; every row has the bits of an inline strict run, whoever shares its "
            "batch, unless --fast is given. Play with 'headrace evaluate TASK --policy openpi://HOST:PORT', or any "
            f"client of openpi. Clients must send the key in the environment variable {_KEY}, if it is set."
        ),
    )
    parser.add_argument("task", metavar="TASK", nargs="?", help="serve the policy that we ship for it")
    parser.add_argument(
        "--policy",
        help="a checkpoint that 'headrace imitate' wrote, module:name of a policy object, class or function, or "
        "lerobot:DIR (default: the policy that we ship for TASK)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    add_option(parser, "--port", default=8000)
    parser.add_argument("--max-rows", type=int, default=64, help="largest merged batch (default: 64)")
    parser.add_argument(
        "--max-wait",
        type=float,
        default=10.0,
        metavar="MS",
        help="time that an idle model waits for other clients (default: 10)",
    )
    add_option(parser, "--fast")
    add_option(parser, "--batch-size", default=16)
    parser.add_argument("--buckets", metavar="N,N", help="with --fast: sizes that batches are padded to")
    add_option(parser, "--horizon", otherwise="what the policy says")
    parser.add_argument("--action-dim", type=int, help="size of an action, where the policy does not say")
    parser.add_argument("--obs-steps", type=int, help="observations per row, where the policy does not say")
    parser.set_defaults(handler=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    from headrace._jobs.serve import serve
    from headrace.chunking import Batching
    from headrace.serving import ServeCfg

    cfg = ServeCfg(
        host=arguments.host,
        port=arguments.port,
        max_rows=arguments.max_rows,
        max_wait=arguments.max_wait / 1000,
        batching=Batching(
            mode="fast" if arguments.fast else "strict",
            size=arguments.batch_size,
            buckets=_buckets(arguments.buckets),
        ),
        api_key=os.environ.get(_KEY) or None,
    )
    made = serve(arguments.task, cfg=cfg, **values(arguments, "policy", "horizon", "action_dim", "obs_steps"))
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
        self._before = _copy(server.stats)
        self._time = time.monotonic()

    def text(self) -> Text:
        """Clients, rows per batch, and rates."""
        now, stats = time.monotonic(), _copy(self._server.stats)
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


def _copy(stats: ServingStats) -> ServingStats:
    from dataclasses import replace

    return replace(stats)


def _buckets(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--buckets: expected sizes such as 4,16,64, got {text!r}") from error
