"""What a library's learner is to the loops above it, and the policy it hands out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

from torch import Tensor

from headrace.envs._batch_env import BatchEnv
from headrace.envs.bridges import BridgeEnv
from headrace.rollout import PPOCfg
from headrace.types import EpisodeEnds, Obs, StateDict

AnyEnv: TypeAlias = BatchEnv | BridgeEnv
"""A batch of environments of ours, or bridged ones."""


class Times(NamedTuple):
    """Seconds of one iteration, wall time."""

    collect: float
    learn: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMeta:
    """Our description in a checkpoint, next to the library's own content."""

    library: str
    task: str
    iteration: int
    score: float | None
    """Mean return of recent training episodes, where some had ended."""
    settings: PPOCfg
    overrides: Mapping[str, object] = field(default_factory=dict[str, object])
    """Of the task's settings, by path."""


Memory: TypeAlias = tuple[Tensor, ...]
"""What a recurrent policy keeps of n rows: tensors (layers, n, size), zeros before an episode."""


class InferencePolicy(Protocol):
    """Actions for rows of observations, any number of them. A recurrent one reads and replaces :attr:`memory`."""

    memory: Memory | None
    """Of the rows of the next call, then of those of the last; None for rows that begin, and where nothing is kept."""

    @property
    def recurrent(self) -> bool:
        """Whether it keeps something from call to call."""
        ...

    def __call__(self, obs: Obs) -> Tensor:
        """Observation groups (n, …) → actions (n, A) within the environment's bounds; the caller owns them."""
        ...


class Learner(Protocol):
    """A library's PPO over one environment. Owns its networks and rollout memory, not the environment."""

    @property
    def library(self) -> str:
        """As in ``--library``."""
        ...

    @property
    def settings(self) -> PPOCfg:
        """What it was built from."""
        ...

    def iterate(self) -> Times:
        """Collect ``settings.steps`` steps of every environment, and learn from them."""
        ...

    def finished(self) -> EpisodeEnds:
        """The episodes that ended since the last call, in order of time."""
        ...

    def save(self, path: Path, meta: CheckpointMeta) -> None:
        """Write weights, normalizer statistics and optimizer as a file that the library itself can load."""
        ...

    def load(self, path: Path, *, trust: bool = False) -> None:
        """Take weights, statistics and optimizer from a file.

        Args:
            path: written by :meth:`save` or by the library.
            trust: unpickle whatever is in it, which can execute arbitrary code; otherwise a file with more than weights
                is refused.
        """
        ...

    def state_dict(self) -> StateDict:
        """What a checkpoint does not hold and resuming needs: environment, random streams, unfinished episodes."""
        ...

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from :meth:`state_dict`, after :meth:`load` of the checkpoint of the same moment."""
        ...

    def policy(self, *, deterministic: bool = True) -> InferencePolicy:
        """The policy as it is now, reading the learner's own weights; sampling if not ``deterministic``."""
        ...

    def close(self) -> None:
        """End threads and files of the library. The environment stays open."""
        ...
