"""What the checks need to know of an environment, and what they answer.

Comparison bit for bit, or within a tolerance, with failures that read as sentences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol, TypeAlias, TypeVar, cast

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


_BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def fail(sentence: str) -> NoReturn:
    """Raise the AssertionError of a broken contract."""
    raise AssertionError(sentence)


def require(holds: bool, sentence: str) -> None:
    """Raise an AssertionError with ``sentence`` unless it ``holds``."""
    if not holds:
        fail(sentence)


def differing(got: Tensor, expected: Tensor, tolerance: Tolerance = EXACT) -> Tensor:
    """Return bool, of the common shape: where two tensors differ, by their bits or by more than ``tolerance``."""
    if not expected.is_floating_point():
        return got != expected
    if tolerance.exact:
        bits = _BITS[expected.dtype]
        return got.contiguous().view(bits) != expected.contiguous().view(bits)
    return ~torch.isclose(got, expected, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True)


def require_equal(got: Tensor, expected: Tensor, sentence: str, tolerance: Tolerance = EXACT) -> None:
    """Fail with ``sentence`` and the first difference unless the tensors are equal.

    ``sentence`` says who, when and which field: "env 3, step 12: obs['policy'] of a suspended environment".
    """
    if got.shape != expected.shape or got.dtype != expected.dtype:
        fail(f"{sentence}: expected {expected.dtype} {tuple(expected.shape)}, got {got.dtype} {tuple(got.shape)}")
    wrong = differing(got, expected, tolerance)
    if bool(wrong.any()):
        index = tuple(wrong.nonzero()[0].tolist())
        where = f" at index {index}" if index else ""
        fail(f"{sentence}: expected {expected[index].item()!r}, got {got[index].item()!r}{where}")


def require_rows_equal(
    got: Tensor, expected: Tensor, rows: Tensor, when: str, field: str, tolerance: Tolerance = EXACT
) -> None:
    """Fail, naming the first environment of ``rows`` (int64 (n,)) whose row of two (N, …) tensors differs."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        fail(f"{when}: {field}: expected {expected.dtype} {tuple(expected.shape)}, got {got.dtype} {tuple(got.shape)}")
    if not len(rows):
        return
    wrong = differing(got[rows], expected[rows], tolerance).reshape(len(rows), -1).any(dim=1)
    if bool(wrong.any()):
        env = int(rows[int(wrong.nonzero()[0])])
        require_equal(got[env], expected[env], f"env {env}, {when}: {field}", tolerance)


def tensors_in(value: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor inside nested dicts, sequences and records, with the path that leads to it."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, entry in cast("Mapping[object, object]", value).items():
            yield from tensors_in(entry, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        labels = getattr(value, "_fields", None) or range(len(cast("list[object]", value)))
        for label, entry in zip(labels, cast("list[object]", value), strict=True):
            yield from tensors_in(entry, f"{name}.{label}" if isinstance(label, str) else f"{name}[{label}]")
    else:
        for label in getattr(type(value), "__dataclass_fields__", {}):
            yield from tensors_in(getattr(value, label), f"{name}.{label}")


def require_same_tensors(got: object, expected: object, sentence: str, tolerance: Tolerance = EXACT) -> None:
    """Fail unless two nested structures hold the same tensors under the same names."""
    ours, theirs = dict(tensors_in(got)), dict(tensors_in(expected))
    require(set(ours) == set(theirs), f"{sentence}: expected the entries {sorted(theirs)}, got {sorted(ours)}")
    for name, tensor in theirs.items():
        require_equal(ours[name], tensor, f"{sentence}: {name}", tolerance)
