"""``headrace serve``: serve a chunk policy on openpi's wire, batching over clients."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.live import Live
from rich.text import Text

from headrace.cli.records import Command, Positional

if TYPE_CHECKING:
    from headrace.policies import PolicyServer

_KEY = "HEADRACE_API_KEY"


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
    forward: str | None = None
    """Serve the policy of another server, openpi://HOST:PORT: rows of all clients in one batch for 'headrace serve',
    one request per client in turn for openpi's. The key in HEADRACE_API_KEY is sent there, too."""
    host: str = "127.0.0.1"
    """Address to listen on; the default is reachable from this machine only."""
    port: int = 8000
    certificate: str | None = None
    """PEM file with a certificate and its private key, for TLS (wss://)."""
    max_rows: int = 64
    """Largest merged batch."""
    max_wait: float = 10.0
    """Time that an idle model waits for other clients."""
    fast: bool = False
    batch_size: int | None = None
    horizon: int | None = None
    """Rows of a chunk, where the policy does not state them."""
    action_dim: int | None = None
    """Size of an action, where the policy does not state it."""
    obs_steps: int | None = None
    """Observations per row, where the policy does not state them."""


def _serve(given: ServeOptions) -> int:
    from headrace.policies import RemoteCfg, ServeCfg, serve
    from headrace.policies.batching import Batching

    key = os.environ.get(_KEY) or None
    cfg = ServeCfg(
        host=given.host,
        port=given.port,
        max_rows=given.max_rows,
        max_wait=given.max_wait / 1000,
        batching=Batching(mode="fast" if given.fast else "strict", size=given.batch_size),
        forward=None if given.forward is None else RemoteCfg(given.forward, api_key=key),
        api_key=key,
        certificate=given.certificate,
    )
    sizes = {"horizon": given.horizon, "action_dim": given.action_dim, "obs_steps": given.obs_steps}
    console = Console()
    with serve(given.task, policy=given.policy, cfg=cfg, **sizes) as server:
        try:
            console.print(
                f"serving {given.forward or given.policy or given.task} at {server.address}; Ctrl-C stops",
                highlight=False,
            )
            if cfg.host not in ("127.0.0.1", "localhost", "::1") and cfg.api_key is None:
                console.print(f"every client that reaches this port can use the model; set {_KEY} to require a key")
            with Live(console=console, refresh_per_second=1, get_renderable=lambda: _totals(server), transient=True):
                server.wait()
        except KeyboardInterrupt:
            console.print(_totals(server), soft_wrap=True)
    return 0


def _totals(server: PolicyServer) -> Text:
    stats = server.stats
    return Text(
        f"{server.clients} clients · {stats.requests:,} requests · {stats.rows:,} rows in {stats.batches:,} batches, "
        f"{stats.shared:,} shared by several clients · {stats.padding:,} padding rows · {stats.failed:,} failed · "
        f"{stats.model_seconds:,.0f} s of the model"
    )


COMMANDS = {"serve": Command(ServeOptions, _serve)}
