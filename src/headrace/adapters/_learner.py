"""What a library's learner is to the loops above it, and the policy it hands out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias, cast

from torch import Tensor

from headrace.envs import BatchEnv
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
class Finished:
    """The episodes that ended in some steps; k of them, in order of time."""

    env_ids: list[int]
    returns: list[float]
    lengths: list[int]
    success: list[bool] | None
    """None where the task has no success measure."""

    @classmethod
    def of(cls, ends: Sequence[EpisodeEnds]) -> Finished:
        """The episodes of some steps, one record per step."""
        known = bool(ends) and ends[0].success is not None
        return cls(
            env_ids=[number for end in ends for number in end.env_ids.tolist()],
            returns=[number for end in ends for number in end.returns.tolist()],
            lengths=[number for end in ends for number in end.lengths.tolist()],
            success=[flag for end in ends for flag in cast("Tensor", end.success).tolist()] if known else None,
        )

    def __len__(self) -> int:
        return len(self.returns)


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


class InferencePolicy(Protocol):
    """Actions for observations. A recurrent one keeps a state per environment until :meth:`reset` says it ended."""

    @property
    def recurrent(self) -> bool:
        """Whether it has such a state."""
        ...

    def __call__(self, obs: Obs) -> Tensor:
        """Observation groups (N, …) → actions (N, A) within the environment's bounds; the caller owns them."""
        ...

    def reset(self, ended: Tensor) -> None:
        """Forget the state of environments whose episode ended, bool (N,)."""
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

    def finished(self) -> Finished:
        """The episodes that ended since the last call."""
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
