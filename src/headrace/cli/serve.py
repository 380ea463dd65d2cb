"""``headrace serve``: serve a chunk policy on openpi's wire, batching over clients."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.live import Live
from rich.text import Text

from headrace.cli.records import Command, Positional
from headrace.errors import ConfigError
from headrace.policies.serving.serve import serve

if TYPE_CHECKING:
    from headrace.policies import PolicyServer

_KEY = "HEADRACE_API_KEY"


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--buckets: expected sizes such as 4,16,64, got {text!r}") from error


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Serve a policy that plans chunks of actions on openpi's websocket wire. Rows of all clients are merged into
    batches while the model runs; every row has the bits of an inline strict run, whichever rows share its batch, unless
    --fast is given. Play with 'headrace evaluate TASK --policy openpi://HOST:PORT', or any client of openpi. Clients
    must send the key in the environment variable HEADRACE_API_KEY, if it is set."""

    task: Annotated[str | None, Positional("TASK")] = None
    """Serve the policy that we ship for it."""
    policy: str | None = None
    """A checkpoint that 'headrace imitate' wrote, module:name of a policy object, class or function, or lerobot:DIR
    (default: the policy that we ship for the task)."""
    host: str = "127.0.0.1"
    """Address to listen on; the default is reachable from this machine only."""
    port: int = 8000
    max_rows: int = 64
    """Largest merged batch."""
    max_wait: float = 10.0
    """Time that an idle model waits for other clients."""
    fast: bool = False
    batch_size: int | None = None
    buckets: Annotated[tuple[int, ...], _sizes] = ()
    """With --fast: sizes that batches are padded to."""
    horizon: int | None = None
    """Rows of a chunk, where the policy does not state them."""
    action_dim: int | None = None
    """Size of an action, where the policy does not state it."""
    obs_steps: int | None = None
    """Observations per row, where the policy does not state them."""


def _serve(given: ServeOptions) -> int:
    from headrace.policies import ServeCfg
    from headrace.policies.batching import Batching

    cfg = ServeCfg(
        host=given.host,
        port=given.port,
        max_rows=given.max_rows,
        max_wait=given.max_wait / 1000,
        batching=Batching(
            mode="fast" if given.fast else "strict",
            size=given.batch_size,
            buckets=given.buckets,
        ),
        api_key=os.environ.get(_KEY) or None,
    )
    sizes = {"horizon": given.horizon, "action_dim": given.action_dim, "obs_steps": given.obs_steps}
    console = Console()
    with serve(given.task, policy=given.policy, cfg=cfg, **sizes) as server:
        line = LiveLine(server)
        try:
            console.print(f"serving {given.policy or given.task} at {server.address}; Ctrl-C stops", highlight=False)
            if cfg.host not in ("127.0.0.1", "localhost", "::1") and cfg.api_key is None:
                console.print(f"every client that reaches this port can use the model; set {_KEY} to require a key")
            with Live(console=console, refresh_per_second=1, get_renderable=line.text, transient=True):
                server.wait()
        except KeyboardInterrupt:
            console.print(line.summary(), highlight=False)
    return 0


class LiveLine:
    """The work of a server since the line was drawn last."""

    def __init__(self, server: PolicyServer) -> None:
        self._server = server
        self._before = replace(server.stats)
        self._time = time.monotonic()

    def text(self) -> Text:
        """Return clients, rows per batch, and rates."""
        now, stats = time.monotonic(), replace(self._server.stats)
        before, seconds = self._before, max(now - self._time, 1e-6)
        if seconds > 0.5:  # the line is also drawn when something is printed
            self._before, self._time = stats, now
        batches, rows = stats.batches - before.batches, stats.rows - before.rows
        return Text(
            f"{self._server.clients} clients · {rows / max(batches, 1):.1f} rows per batch · "
            f"{batches / seconds:.1f} batches/s · {rows / seconds:.1f} rows/s · "
            f"model {100 * (stats.model_seconds - before.model_seconds) / seconds:.0f} %"
        )

    def summary(self) -> str:
        """Return the totals."""
        stats = self._server.stats
        return (
            f"{stats.requests:,} requests, {stats.rows:,} rows in {stats.batches:,} batches "
            f"({stats.shared:,} shared by several clients), {stats.padding:,} padding rows, {stats.failed:,} failed"
        )


COMMANDS = {"serve": Command(ServeOptions, _serve)}
