"""The contracts of learners, which every adapter of an RL library must hold, and of policies."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from headrace.envs.recipe import AnyEnv
from headrace.evaluation.cfg import PlayCfg
from headrace.evaluation.player import open_player
from headrace.libraries.learner import Learner
from headrace.libraries.training import CheckpointMeta
from headrace.testing._contract import CheckResult
from headrace.types import Obs, ResetRecord, StepRecord

if TYPE_CHECKING:
    from headrace.policies.load_policy import PolicySource


def check_learner(
    make_env: Callable[[], AnyEnv],
    make_learner: Callable[[AnyEnv], Learner],
    meta: CheckpointMeta,
    folder: Path,
    *,
    suffix: str,
    reads: Collection[str] | None = None,
) -> list[CheckResult]:
    """Run every check on a learner; the first broken claim raises an AssertionError that says which.

    Args:
        make_env: a new environment, the same each time.
        make_learner: a new learner over it, the same each time: it seeds the random streams it uses.
        meta: passed to ``save``.
        folder: for checkpoints.
        suffix: of its checkpoint files.
        reads: the observation groups that its policy reads, and no others; None for all but ``critic``.
    """
    path = folder / f"checkpoint{suffix}"
    env = make_env()
    count = _Count()
    env.attach(count)
    learner = make_learner(env)
    _check_times(learner)
    learner.iterate()
    _check_episodes(learner, count)
    learner.save(path, meta)
    begun, obs = learner.state_dict(), env.observe()
    actions = learner.policy()(obs).clone()
    learner.load_state_dict(begun)
    learner.iterate()
    after = learner.policy()(obs).clone()
    _check_actions(actions, env)
    _check_groups(learner, obs, {name for name in obs if name != "critic"} if reads is None else reads)
    learner.close()
    env.close()
    assert not torch.equal(actions, after), "iterate: expected learning to change the policy, got the same actions"

    other_env = make_env()
    other = make_learner(other_env)
    assert not torch.equal(actions, other.policy()(obs)), "a new learner: expected other actions than a trained one"
    other.load(path)
    assert torch.equal(actions, other.policy()(obs)), "load: expected the saved policy's actions, bit for bit"
    other.load_state_dict(begun)
    other.iterate()
    resumed = other.policy()(obs)
    assert torch.equal(after, resumed), (
        "load + load_state_dict: expected resumed training to equal training without a break, "
        f"got actions that differ by up to {float((after - resumed).abs().max()):.3g}"
    )
    other.close()
    other_env.close()
    names = (
        *("time_split", "episodes_counted", "actions_in_bounds", "observation_groups_read"),
        *("checkpoint_round_trip", "resumes_exactly"),
    )
    return [CheckResult(check=name) for name in names]


def _check_times(learner: Learner) -> None:
    begin = time.perf_counter()
    collect, learn = learner.iterate()
    wall = time.perf_counter() - begin
    assert collect > 0.0, f"iterate: expected a collection time, got {collect}"
    assert learn > 0.0, f"iterate: expected a learning time, got {learn}"
    # libraries that read time.time() see steps of the system's clock
    assert collect + learn <= wall + 0.01, f"iterate: {collect} s + {learn} s are more than the wall time, {wall} s"


def _check_episodes(learner: Learner, count: _Count) -> None:
    found = learner.finished()
    columns = (found.env_ids, found.lengths, found.returns)
    said = list(zip(*(column.tolist() for column in columns), strict=True))
    assert said, "finished: expected episodes to end in two iterations; use an environment with short ones"
    # rewards are float32 here and added up as float64 in the environment: about seven digits
    same = len(said) == len(count.ended) and all(
        mine[:2] == given[:2] and math.isclose(mine[2], given[2], rel_tol=1e-5, abs_tol=1e-5)
        for given, mine in zip(said, count.ended, strict=True)
    )
    assert same, f"finished: expected (slot, length, return) {count.ended}, got {said}"
    again = learner.finished()
    assert not len(again), f"finished: expected each episode once, got {len(again)} a second time"


def _check_groups(learner: Learner, obs: Obs, reads: Collection[str]) -> None:
    """Turn each group upside down: the actions change if the policy reads it, and not otherwise."""
    before = learner.policy()(obs).clone()
    for name, rows in obs.items():
        turned = {**obs, name: 255 - rows if rows.dtype == torch.uint8 else 1 - rows}
        changed = not torch.equal(before, learner.policy()(turned))
        if name in reads:
            assert changed, f"observation group {name!r}: expected the policy to read it, got the same actions without"
        else:
            assert not changed, (
                f"observation group {name!r}: expected that the policy does not read it, got that it does"
            )


def _check_actions(actions: Tensor, env: AnyEnv) -> None:
    space = env.single_action_space
    assert actions.shape == (env.num_envs, *(space.shape or ())), f"policy: got actions of shape {actions.shape}"
    assert not actions.requires_grad, "policy: expected actions without gradients"
    assert all(space.contains(row.numpy()) for row in actions.cpu()), "policy: expected actions within the bounds"


class _Count:
    """Counts episodes by hand: rewards of each environment added up until a flag says that its episode ended."""

    needs = frozenset[Literal["states", "frames"]]()

    def __init__(self) -> None:
        self.ended: list[tuple[int, int, float]] = []
        self._running: dict[int, tuple[int, float]] = {}

    def after_reset(self, record: ResetRecord) -> None:
        pass

    def after_step(self, record: StepRecord) -> None:
        ended = record.step.terminated | record.step.truncated
        for slot in record.env_ids.tolist():
            steps, total = self._running.get(slot, (0, 0.0))
            steps, total = steps + 1, total + float(record.step.reward[slot])
            self._running[slot] = (steps, total)
            if bool(ended[slot]):
                self.ended.append((slot, steps, total))
                del self._running[slot]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCheck:
    """What a check of a policy found."""

    verified: int
    """Rows that were answered again alone and in another batch, with equal bits; 0 where that was not possible."""
    strict_size: int | None
    """Rows of its strict batches; None for a server whose answers depend on the batch."""
    rows_per_row: float
    """Rows that were computed per row that was needed."""


def check_policy(policy: PolicySource, env: AnyEnv, *, steps: int = 20, play: PlayCfg = PlayCfg()) -> PolicyCheck:
    """Play some steps of a policy and verify its answers as a strict evaluation does, before a long one.

    Args:
        policy: as for :func:`headrace.evaluate`.
        env: to play in, made with ``autoreset="disabled"``; it is reset.
        steps: of the batch.
        play: how the policy is played.

    Raises:
        PolicyError: an answer depends on the batch, on earlier calls, or on a global random generator.
    """
    from headrace.evaluation.scheduling import EndlessPlan

    with torch.no_grad(), open_player(env, policy, play, env.seed) as player:
        found = player.play(EndlessPlan(env.num_envs), most_steps=steps)
    return PolicyCheck(
        verified=found.counters.rows_verified, strict_size=found.strict_size, rows_per_row=found.rows_per_row
    )
