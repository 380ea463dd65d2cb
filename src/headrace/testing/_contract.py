"""What the checks need to know of an environment, and what they answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

import torch
from gymnasium import spaces
from torch import Tensor

from headrace.bridges.executors import Fidelity
from headrace.types import Ids, Obs, StateDict, Step, StepInfo


class ContractEnv(Protocol):
    """The environment contract, as far as the checks use it. ``BatchEnv`` and every bridge fulfill it."""

    num_envs: int

    @property
    def device(self) -> torch.device:
        """Where all tensors are."""
        ...

    @property
    def fidelity(self) -> Fidelity:
        """How a suspended environment is kept; ``hold`` does not claim that it is frozen, the others do."""
        ...

    @property
    def single_observation_space(self) -> spaces.Space[object]:
        """A ``Dict`` of observation groups."""
        ...

    @property
    def single_action_space(self) -> spaces.Space[object]:
        """A ``Box``, ``Discrete``, ``MultiDiscrete`` or ``MultiBinary``."""
        ...

    @property
    def active(self) -> Tensor:
        """bool (N,)."""
        ...

    @property
    def suspended(self) -> Tensor:
        """bool (N,)."""
        ...

    @property
    def episode_ids(self) -> Tensor:
        """int64 (N,)."""
        ...

    @property
    def episode_steps(self) -> Tensor:
        """int64 (N,)."""
        ...

    def suspend(self, ids: Ids) -> None:
        """Freeze environments."""
        ...

    def resume(self, ids: Ids) -> None:
        """Let them act again."""
        ...

    def reset(self, *, seed: int | None = None, options: dict[str, object] | None = None) -> tuple[Obs, StepInfo]:
        """Start new episodes."""
        ...

    def step(self, actions: Tensor) -> Step:
        """Advance the active environments."""
        ...

    def observe(self, ids: Ids | None = None) -> Obs:
        """Return the current observation."""
        ...

    def state_dict(self) -> StateDict:
        """Return everything needed to go on; raises NotImplementedError where that cannot be had."""
        ...

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from a snapshot."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


MakeEnv: TypeAlias = Callable[..., ContractEnv]
"""``make_env(num_envs=…, seed=…, autoreset=…, **more)`` gives a new environment, not reset yet.

The three keywords are always given; ``more`` is what the caller of a check put into ``variants``.
``functools.partial(headrace.make, "ant")`` is one.
"""

Env = TypeVar("Env", bound=ContractEnv)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """What a check that did not raise has to say."""

    check: str
    """Name of the check."""
    not_claimed: str | None = None
    """What was left out because the environment does not claim it, and why; None if everything was checked."""

    def __str__(self) -> str:
        return f"{self.check}: " + ("held" if self.not_claimed is None else f"not claimed: {self.not_claimed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far two numbers of the same episode may lie apart. The default is not at all: bit for bit."""

    atol: float = 0.0
    rtol: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether bits are compared."""
        return self.atol == 0.0 and self.rtol == 0.0


EXACT = Tolerance()
NO_VARIANTS: Sequence[Mapping[str, object]] = ({},)


def no_identity_of(env: ContractEnv) -> str | None:
    """Why an episode of this environment is not a function of (seed, episode id, actions); None where it is one."""
    if getattr(env, "reseeds", True):
        return None
    return "no identity of episodes: " + (getattr(env, "no_identity", "") or "the environment says reseeds is False")


def reset_some(env: ContractEnv, mask: Tensor) -> str | None:
    """Reset the environments of a bool mask (N,); what the environment says if it cannot reset some without all."""
    try:
        env.reset(options={"reset_mask": mask})
    except NotImplementedError as refusal:
        return str(refusal)
    return None


def snapshot_of(env: ContractEnv) -> StateDict | None:
    """Return the environment's snapshot, or None if it says that it has none."""
    try:
        return env.state_dict()
    except NotImplementedError:
        return None
