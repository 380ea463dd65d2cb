"""Settings of an evaluation: how a policy is played, where its rows are kept, and which processes play them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from headrace.envs.recipe import check_count
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.evaluation.scheduling import Admission
    from headrace.policies.batching import Batching
    from headrace.policies.engines import Engine
    from headrace.policies.observation_map import ObservationMap


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayCfg:
    """How a policy is played: chunks, scheduling, the engine that runs it, and what it reads."""

    execute: int | None = None
    """Actions executed of each chunk (default: all that are left after offset and latency, 1 with ensembling)."""
    offset: int = 0
    """First row of a chunk that is played."""
    latency: int = 0
    """Simulated steps between an observation and the moment its chunk takes over."""
    horizon: int | None = None
    """Rows of a chunk, where the policy does not state them."""
    admission: Admission | str = "greedy"
    """When to infer, and for which environments: greedy, immediate, synchronized, whole-batch-on-any,
    or module:name of a rule; in Python also the rule itself."""
    engine: Engine | str = "inline"
    """Where the model runs: inline, thread (beside the physics), process (for policies that hold the GIL); in Python
    also an engine of your own, which you close. A server's policy has its own."""
    batching: Batching | Literal["strict", "fast"] | None = None
    """``strict`` (the default) gives the model batches of one fixed size: results are equal bit for bit for every
    ``num_envs``, and a sample of rows is verified. The size follows from device and policy: 1 on a CPU where a row uses
    each weight often (convolutions, attention), else 16, at the price of padding rows. ``fast`` gives the model the
    waiting rows; the last bits of results then depend on the batch. A :class:`headrace.policies.Batching` sets the
    size. A server, or an engine of your own, has its own."""
    ensemble_decay: float | None = None
    """Temporal ensembling as in ACT, with this decay, which executes one action of each chunk; negative favors new
    predictions."""
    timeout: float | None = None
    """Seconds that one call of the model may take, with an engine by name or a server (default: no limit, or the
    server's own)."""
    instruction: str | None = None
    """Instruction in every episode (default: the task's own text)."""
    policy_id: str | None = None
    """Name of the policy in journal and output, needed for that of a server (default: a hash of its weights, settings
    and code)."""
    mapping: ObservationMap | None = None
    """From observation groups to the keys that the policy reads, here or on a server; part of a table's identity."""

    def __post_init__(self) -> None:
        given = cast("object", self.instruction)
        if given is not None and not isinstance(given, str):
            raise ConfigError(
                f"instruction: expected one text for every episode, or None for the task's own, got "
                f"{given!r}; a suite has a text for each of its tasks"
            )
        for name, least in (("timeout", 0.0), ("ensemble_decay", -math.inf)):
            number: object = getattr(self, name)
            if number is not None and not (isinstance(number, int | float) and least < number < math.inf):
                raise ConfigError(
                    f"{name}: expected a number{' of seconds above 0' if least == 0 else ''}, or None, got {number!r}"
                )
        if self.mapping is not None and not hasattr(self.mapping, "fill"):
            raise ConfigError(f"mapping: expected a headrace.policies.ObservationMap, got {self.mapping!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalCfg:
    """The file that every finished episode is appended to at once."""

    path: str | Path
    """The file; a directory of such files for a suite."""
    resume: bool = False
    """Play only the episodes that the journal lacks. What decides the rows (source, overrides, seed, policy, lengths,
    strict size, …) must be the same."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("resume: expected a journal to write or resume, got none; pass its path")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersCfg:
    """Worker processes over Ray, each with a batch of environments of its own."""

    count: int
    """Processes."""
    block: int | None = None
    """Episodes that a worker takes at a time; None for four per environment, and fewer near the end."""
    cpus: int = 1
    """Cores that Ray reserves for a worker, and its threads where the recipe sets none."""
    gpus: float = 0.0
    """GPUs, or a share of one, that Ray reserves for a worker."""
    ray_address: str | None = None
    """Address of a cluster, or ``auto`` (default: the one that this program is connected to, or else one on this
    machine that ends with the call)."""
    stall_s: float | None = None
    """Seconds in which a worker that plays must finish an episode; one that does not is ended, and its episodes are
    played again, as those of a worker that died. None: any time."""

    def __post_init__(self) -> None:
        check_count("workers", self.count)
        if self.stall_s is not None and not self.stall_s > 0:
            raise ConfigError(f"workers: stall_s: expected more than 0 seconds, or None, got {self.stall_s}")
        check_count("workers: cpus", self.cpus)
        if self.block is not None:
            check_count("workers: block", self.block)
