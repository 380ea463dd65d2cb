"""Settings of a connection to a policy server."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from headrace.errors import ConfigError

FRAME_LIMIT = 64 << 20
"""Bytes of the largest frame, unless settings say otherwise."""
_LONGEST_S = 1e9
"""30 years; the clocks of threads and sockets overflow beyond."""


def check_seconds(cfg: object, what: str, *names: str, least: float = 1e-9) -> None:
    """Reject what no socket takes for a time-out: NaN, infinity, negative and huge numbers. Pings may be None."""
    for name in names:
        value: object = getattr(cfg, name)
        if value is None and name.startswith("ping"):
            continue
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= _LONGEST_S:
            raise ConfigError(f"{what} {name}: expected seconds from {least:g} to {_LONGEST_S:g}, got {value!r}")


def check_whole(cfg: object, what: str, **bounds: tuple[int, int | None]) -> None:
    """Reject what is not a whole number within (least, most)."""
    for name, (least, most) in bounds.items():
        value: object = getattr(cfg, name)
        if type(value) is not int or value < least or (most is not None and value > most):
            upto = "" if most is None else f" to {most}"
            raise ConfigError(f"{what} {name}: expected a whole number from {least}{upto}, got {value!r}")


@dataclass(frozen=True, slots=True)
class RemoteCfg:
    """A policy server, and how requests reach it."""

    address: str
    """``openpi://host:8000``, the same as ``ws://`` (``wss://`` with TLS), or ``gr00t://host:5555``, the same as
    ``tcp://``; ``headrace serve`` uses openpi's dialect."""
    _: KW_ONLY
    timeout: float = 120.0
    """Seconds that an answer may take, from the moment the request was sent."""
    reconnect: float = 30.0
    """Seconds in which a server must be there, at the start and after a lost connection; tries are spaced by a
    growing, random pause. A request whose connection was lost is sent again."""
    ping_interval: float | None = 20.0
    """Seconds between keep-alive pings; None for none."""
    ping_timeout: float | None = None
    """Seconds in which a ping must be answered; None waits for ever, since stock openpi servers answer no ping while
    their model runs or compiles."""
    frame_limit: int = FRAME_LIMIT
    """Bytes of the largest frame that is read."""
    api_key: str | None = None
    """Sent as ``Authorization: Api-Key …`` (openpi) or ``api_token`` (GR00T)."""

    def __post_init__(self) -> None:
        check_seconds(self, "remote", "timeout", "reconnect", "ping_interval", "ping_timeout")
        check_whole(self, "remote", frame_limit=(1, None))
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError("remote api_key: expected printable ASCII characters, as a header can hold them")
