"""What the checks need to know of an environment, and what they answer.

Comparison bit for bit, or within a tolerance, with failures that read as sentences.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, TypeAlias, cast

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from headrace import rng
from headrace.envs.recipe import AnyEnv
from headrace.errors import ConfigError
from headrace.types import Obs, StateDict, Step

MakeEnv: TypeAlias = Callable[..., AnyEnv]
"""``make_env(num_envs=…, seed=…, autoreset=…, **more)`` gives a new environment, not reset yet, which has the
properties and methods of ``headrace.BatchEnv``.

The three keywords are always given; ``more`` is what the caller of a check put into ``variants``.
``functools.partial(headrace.make, "ant")`` is one.
"""


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


def explain_no_identity(env: AnyEnv) -> str | None:
    """Why an episode of this environment is not a function of (seed, episode id, actions); None where it is one."""
    if getattr(env, "reseeds", True):
        return None
    return "no identity of episodes: " + (getattr(env, "no_identity", "") or "the environment says reseeds is False")


def reset_some(env: AnyEnv, mask: Tensor) -> str | None:
    """Reset the environments of a bool mask (N,); what the environment says if it cannot reset some without all."""
    try:
        env.reset(options={"reset_mask": mask})
    except NotImplementedError as refusal:
        return str(refusal)
    return None


def take_snapshot(env: AnyEnv) -> StateDict | None:
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


_ACTION_SEED = 20_240_229
# a call of step lets about half of the watched environments act; this many calls per wanted step are plenty
_CALLS_PER_STEP = 20


@dataclass(slots=True)
class Trajectory:
    """What one episode went through; owns its tensors."""

    obs: list[dict[str, Tensor]]
    """The first observation, and the one after each step (the true last one where it ended)."""
    rewards: list[Tensor] = field(default_factory=list[Tensor])
    terminated: list[bool] = field(default_factory=list[bool])
    truncated: list[bool] = field(default_factory=list[bool])

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def ended(self) -> bool:
        """Whether the last step was the end of the episode."""
        return bool(self.rewards) and (self.terminated[-1] or self.truncated[-1])


def draw_actions(env: AnyEnv, episode_ids: Tensor, steps: Tensor) -> Tensor:
    """Random actions as a function of (episode id, step) and of nothing else, one row per environment."""
    low, width, whole = _find_range(env.single_action_space)
    ids, steps = episode_ids.cpu().clamp_min(0), steps.cpu()
    count = low.numel()
    unit = rng.uniform(_ACTION_SEED, ids, "actions", count, draw=steps * count).reshape(-1, *low.shape)
    actions = low + torch.floor(unit * width) if whole else low + unit * width
    return actions.to(torch.int64 if whole else torch.float32).to(env.device)


def poison_actions(env: AnyEnv, actions: Tensor, rows: Tensor) -> Tensor:
    """Return the actions with some rows (a mask or ids) made unusable: NaN, or a choice that does not exist."""
    low, _, whole = _find_range(env.single_action_space)
    actions = actions.clone()
    actions[rows] = (low - 1).to(actions) if whole else float("nan")
    return actions


def _find_range(space: spaces.Space[object]) -> tuple[Tensor, Tensor, bool]:
    """Lowest value and width, float64 of one action's shape, and whether actions are whole numbers."""
    if isinstance(space, spaces.Discrete):
        low, width, whole = np.asarray(space.start), np.asarray(space.n), True
    elif isinstance(space, spaces.MultiDiscrete):
        low, width, whole = space.start, space.nvec, True
    elif isinstance(space, spaces.MultiBinary):
        low, width, whole = np.zeros(space.shape), np.full(space.shape, 2), True
    elif isinstance(space, spaces.Box):
        whole = np.dtype(space.dtype).kind != "f"
        low = np.clip(space.low.astype(np.float64), -1e3, 1e3)
        width = np.clip(space.high.astype(np.float64), -1e3, 1e3) - low + whole
    else:
        raise ConfigError(f"action space: expected Box, Discrete, MultiDiscrete or MultiBinary, got {space}")
    return torch.from_numpy(np.array(low, np.float64)), torch.from_numpy(np.array(width, np.float64)), whole


def next_actions(env: AnyEnv) -> Tensor:
    """Return the actions for the coming step; rows of environments that are not active are unusable."""
    return poison_actions(env, draw_actions(env, env.episode_ids, env.episode_steps), ~env.active)


def final_or_next_obs(step: Step, env_id: int) -> dict[str, Tensor]:
    """Return the observation that belongs to the end of this step, before any automatic reset."""
    obs: Obs = step.obs
    final = step.info.get("_final_obs")
    if final is not None and bool(final[env_id]):
        obs = step.info.get("final_obs", obs)
    return {name: values[env_id].clone() for name, values in obs.items()}


class SuspensionPattern:
    """Which environments rest before each call of ``step``: random, about half, the same for the same number."""

    def __init__(self, env: AnyEnv, number: int) -> None:
        self._env = env
        self._episodes = torch.arange(env.num_envs)
        self._number = number

    def apply(self, call: int) -> None:
        """Suspend and resume environments for the coming call."""
        env = self._env
        draws = rng.uniform(self._number, self._episodes, "suspension", 1, draw=call)[:, 0]
        rest = (draws < 0.5).to(env.device)
        env.suspend(rest & env.active)
        env.resume(env.suspended & ~rest)

    def lift(self) -> None:
        """Resume all suspended environments."""
        self._env.resume(self._env.suspended)


def play(
    env: AnyEnv, obs: Obs, steps: int, *, watch: Collection[int], pattern: SuspensionPattern | None = None
) -> dict[int, Trajectory]:
    """Step until each episode in ``watch`` has ended or taken ``steps`` steps.

    Args:
        env: just reset, with all episodes of ``watch`` in it.
        obs: what ``reset`` returned.
        steps: how far to watch.
        watch: episode ids.
        pattern: which environments rest when; None for none.
    """
    seen: dict[int, Trajectory] = {}
    for slot, episode in enumerate(env.episode_ids.tolist()):
        if episode in watch:
            seen[episode] = Trajectory(obs=[{name: values[slot].clone() for name, values in obs.items()}])
    for call in range(steps * _CALLS_PER_STEP):
        if all(t.ended or len(t) >= steps for t in seen.values()):
            return seen
        if pattern is not None:
            pattern.apply(call)
        active, episodes = env.active.tolist(), env.episode_ids.tolist()
        step = env.step(next_actions(env))
        for slot, episode in enumerate(episodes):
            trajectory = seen.get(episode)
            if trajectory is None or trajectory.ended or not active[slot]:
                continue
            trajectory.obs.append(final_or_next_obs(step, slot))
            trajectory.rewards.append(step.reward[slot].clone())
            trajectory.terminated.append(bool(step.terminated[slot]))
            trajectory.truncated.append(bool(step.truncated[slot]))
    slow = {episode: len(t) for episode, t in seen.items()}
    raise AssertionError(f"expected {steps} steps of each episode in {steps * _CALLS_PER_STEP} calls, got {slow}")


def require_same_trajectories(
    got: Mapping[int, Trajectory],
    expected: Mapping[int, Trajectory],
    steps: int,
    situation: str,
    tolerance: Tolerance = EXACT,
) -> None:
    """Fail unless the episodes agree over their first ``steps`` steps. ``situation`` says how ``got`` was played."""
    for episode, theirs in expected.items():
        ours = got[episode]
        for t in range(min(steps, len(theirs)) + 1):
            where = f"episode {episode} {situation}, step {t}"
            if t > len(ours):
                fail(f"{where}: expected it to go on, got its end after {len(ours)} steps")
            for name, values in theirs.obs[t].items():
                require_equal(ours.obs[t][name], values, f"{where}: obs[{name!r}]", tolerance)
            if t == 0:
                continue
            require_equal(ours.rewards[t - 1], theirs.rewards[t - 1], f"{where}: reward", tolerance)
            for flag in ("terminated", "truncated"):
                ours_flag, theirs_flag = getattr(ours, flag)[t - 1], getattr(theirs, flag)[t - 1]
                if ours_flag != theirs_flag:
                    fail(f"{where}: {flag}: expected {theirs_flag}, got {ours_flag}")
