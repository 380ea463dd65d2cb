"""Each check fails on an environment that breaks its claim, and says who, when and what."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import headrace
from headrace import testing
from headrace.envs.batch_env import BatchEnv
from headrace.envs.registry import make_task, task_cfg
from headrace.errors import UnknownNameError
from headrace.sim import MujocoSim
from headrace.testing import _boundaries, episodes
from headrace.testing._contract import MakeEnv


def making(env_class: type[BatchEnv]) -> MakeEnv:
    def make_env(*, num_envs: int, seed: int, autoreset: Any) -> BatchEnv:
        task = make_task("cartpole", task_cfg("cartpole", {"episode_length": 23}))
        return env_class(task, MujocoSim(task.model, num_envs, threads=1), seed=seed, autoreset=autoreset)

    return make_env


class SuspendedStateDrifts(BatchEnv):
    def step(self, actions, observe=None):
        step = super().step(actions, observe)
        self.sim.field("qvel")[self.suspended] += 1e-15
        return step


class SuspendedObservationChanges(BatchEnv):
    def step(self, actions, observe=None):
        step = super().step(actions, observe)
        step.obs["policy"][self.suspended] += 1e-3
        return step


class SuspendedIsRewarded(BatchEnv):
    def step(self, actions, observe=None):
        step = super().step(actions, observe)
        return step._replace(reward=torch.where(self.active, step.reward, 1.0))


class SuspendedTerminates(BatchEnv):
    def step(self, actions, observe=None):
        step = super().step(actions, observe)
        return step._replace(terminated=step.terminated | ~self.active)


class NeighborsResetMovesSuspended(BatchEnv):
    def reset(self, *, seed=None, options=None):
        result = super().reset(seed=seed, options=options)
        self.sim.field("qpos")[self.suspended] += 1e-15
        return result


class ResetResumes(BatchEnv):
    def reset(self, *, seed=None, options=None):
        result = super().reset(seed=seed, options=options)
        if options is not None and "reset_mask" in options:
            self.resume(options["reset_mask"] & self.suspended)
        return result


class SuspendStepsOnce(BatchEnv):
    def suspend(self, ids):
        super().suspend(ids)
        self.sim.field("qpos")[ids] += 1e-15


class ResumeForgetsWarmStart(BatchEnv):
    """Loses what no observation shows: the physics' start for its solver, here stood in for by a tiny push."""

    def resume(self, ids):
        super().resume(ids)
        self.sim.field("qvel")[ids] += 1e-7


class ForgetsInALongPause(BatchEnv):
    """Keeps what is suspended, but not for as long as twenty steps of the others."""

    def suspend(self, ids):
        super().suspend(ids)
        self.calls = 0

    def step(self, actions, observe=None):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 20 and bool(self.suspended.any()):
            self.sim.field("qvel")[self.suspended] += 1e-7
        return super().step(actions, observe)


class StartDependsOnBatchSize(BatchEnv):
    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed, options=options)
        self.sim.field("qvel")[:] += 1e-6 * self.num_envs
        return obs, info


class StartDependsOnSlot(BatchEnv):
    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed, options=options)
        obs["policy"][:, 0] += 1e-3 * torch.arange(self.num_envs)
        return obs, info


class IgnoresEpisodeIds(BatchEnv):
    def reset(self, *, seed=None, options=None):
        kept = {name: value for name, value in (options or {}).items() if name != "episode_ids"}
        return super().reset(seed=seed, options=kept)


class FinalObsIsTheNext(BatchEnv):
    def step(self, actions, observe=None):
        step = super().step(actions, observe)
        if "final_obs" in step.info:
            step.info["final_obs"] = {name: values.clone() for name, values in step.obs.items()}
        return step


class EndsCountOneTooFew(BatchEnv):
    def step(self, actions, observe=None):
        step = super().step(actions, observe)
        if "ends" in step.info:
            step.info["ends"].lengths.sub_(1)
        return step


class ShowsEmptyFinalObs(BatchEnv):
    def step(self, actions, observe=None):
        step = super().step(actions, observe)
        step.info.setdefault("final_obs", step.obs)
        return step


class NeverParks(BatchEnv):
    def step(self, actions, observe=None):
        step = super().step(actions, observe)
        if self.autoreset == "disabled" and bool((step.terminated | step.truncated).any()):
            self.reset(options={"reset_mask": step.terminated | step.truncated})
        return step


class AcceptsNaN(BatchEnv):
    def step(self, actions, observe=None):
        return super().step(torch.nan_to_num(actions) if isinstance(actions, torch.Tensor) else actions, observe)


class ClipsIds(BatchEnv):
    def suspend(self, ids):
        super().suspend([i for i in ids if 0 <= i < self.num_envs] if isinstance(ids, list) else ids)


class StepsBeforeItChecks(BatchEnv):
    def step(self, actions, observe=None):
        if self.active.any() and not self.closed:
            self.sim.field("ctrl")[0] += 1e-15
        return super().step(actions, observe)


class ReturnsItsOwnMemory(BatchEnv):
    def step(self, actions, observe=None):
        step = super().step(actions, observe)
        if not hasattr(self, "pool"):
            self.pool = torch.empty_like(step.reward)
        self.pool.copy_(step.reward)
        return step._replace(reward=self.pool)


class SharesFlags(BatchEnv):
    def step(self, actions, observe=None):
        step = super().step(actions, observe)
        return step._replace(truncated=step.terminated)


class ClipsTheCallersActions(BatchEnv):
    def step(self, actions, observe=None):
        return super().step(actions.mul_(0.5), observe)


class ForgetsVelocitiesInSnapshots(BatchEnv):
    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.sim.field("qvel").zero_()


class ForgetsSuspensionInSnapshots(BatchEnv):
    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.resume(self.suspended)


class ObservesDoubles(BatchEnv):
    def step(self, actions, observe=None):
        step = super().step(actions, observe)
        return step._replace(obs={name: values.double() for name, values in step.obs.items()})


class NamesAnotherGroup(BatchEnv):
    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed, options=options)
        return {"actor": obs["policy"]}, info


BROKEN: list[tuple[type[BatchEnv], Callable[..., object], str]] = [
    (SuspendedStateDrifts, episodes.check_suspend_is_exact, r"env 1, call 0 while suspended: state_dict\(\).*'state'"),
    (SuspendedObservationChanges, episodes.check_suspend_is_exact, r"env 1, call 0 while suspended: obs\['policy'\]"),
    (SuspendedIsRewarded, episodes.check_suspend_is_exact, r"env 1, call 0 while suspended: reward: expected 0.0"),
    (SuspendedTerminates, episodes.check_suspend_is_exact, r"env 1, call 0 while suspended: terminated"),
    (NeighborsResetMovesSuspended, episodes.check_suspend_is_exact, r"env 1, after the reset of neighbors before"),
    (ResetResumes, episodes.check_suspend_is_exact, r"env 5, reset while suspended: expected it to stay suspended"),
    (SuspendStepsOnce, episodes.check_suspend_is_exact, r"env 1, after suspend: state_dict"),
    (
        ForgetsInALongPause,
        episodes.check_episodes_do_not_depend_on_the_batch,
        r"after a pause of 20 calls in a batch of 7, step \d+: obs",
    ),
    (ResumeForgetsWarmStart, episodes.check_episodes_do_not_depend_on_the_batch, r"with suspensions, step \d+: obs"),
    (StartDependsOnBatchSize, episodes.check_episodes_do_not_depend_on_the_batch, r"of 7, step 1: obs\['policy'\]"),
    (StartDependsOnSlot, episodes.check_episodes_do_not_depend_on_the_batch, r"in slots .* of 7, step 0: obs"),
    (IgnoresEpisodeIds, episodes.check_episodes_do_not_depend_on_the_batch, r"expected that episode, got \[0\]"),
    (FinalObsIsTheNext, episodes.check_autoreset, r"env \d, call \d+: info\['final_obs'\]\['policy'\]"),
    (EndsCountOneTooFew, episodes.check_autoreset, r"call \d+: ends.lengths"),
    (ShowsEmptyFinalObs, episodes.check_autoreset, r"call 0: expected no info\['final_obs'\]"),
    (NeverParks, episodes.check_autoreset, r"with autoreset disabled: active"),
    (
        AcceptsNaN,
        _boundaries.check_bad_input_changes_nothing,
        r"an action of environment 0 .*: expected ActionError, got no",
    ),
    (ClipsIds, _boundaries.check_bad_input_changes_nothing, r"suspend of id 4: expected IdError, got no error"),
    (StepsBeforeItChecks, _boundaries.check_bad_input_changes_nothing, r"expected no change: .*'state'"),
    (ReturnsItsOwnMemory, _boundaries.check_returned_tensors_are_owned, r"call 0: .reward after later steps"),
    (SharesFlags, _boundaries.check_returned_tensors_are_owned, r"call 0: .truncated shares memory with .terminated"),
    (ClipsTheCallersActions, _boundaries.check_returned_tensors_are_owned, r"call 0: the caller's actions after step"),
    (ForgetsVelocitiesInSnapshots, episodes.check_snapshot_round_trip, r"loaded a snapshot: .*'state'"),
    (ForgetsSuspensionInSnapshots, episodes.check_snapshot_round_trip, r"loaded a snapshot: .*'suspended'"),
    (ObservesDoubles, _boundaries.check_gymnasium_spaces, r"env 0, call 0: obs\['policy'\]: expected a member of Box"),
    (
        NamesAnotherGroup,
        _boundaries.check_gymnasium_spaces,
        r"reset: expected the groups \['policy'\], got \['actor'\]",
    ),
]


@pytest.mark.parametrize(("env_class", "check", "sentence"), BROKEN, ids=[case[0].__name__ for case in BROKEN])
def test_check_fails_on_an_env_that_breaks_the_contract(env_class, check, sentence) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check(making(env_class))


def test_every_check_passes_on_the_env_that_the_broken_ones_derive_from() -> None:
    results = testing.check_env(making(BatchEnv), sizes=(1, 5))
    assert [str(result) for result in results if result.not_claimed] == []
    assert len(results) == 7


def test_check_env_names_what_the_caller_left_out() -> None:
    others = ("gymnasium_spaces", "autoreset", "episodes_do_not_depend_on_the_batch", "snapshot_round_trip")
    results = testing.check_env(making(BatchEnv), steps=3, skip=others)
    assert [r.check for r in results if r.not_claimed == "left out by the caller"] == [
        "gymnasium_spaces",
        "episodes_do_not_depend_on_the_batch",
        "autoreset",
        "snapshot_round_trip",
    ]


def test_check_env_refuses_to_skip_a_check_that_does_not_exist() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'autoreset'"):
        testing.check_env(making(BatchEnv), skip=("autoresets",))
    with pytest.raises(UnknownNameError, match="did you mean 'gymnasium_spaces'"):
        testing.check_env(making(BatchEnv), only=("gymnasium_space",))


def test_only_the_named_checks_run() -> None:
    results = testing.check_env(making(BatchEnv), steps=3, only=("snapshot_round_trip", "gymnasium_spaces"))
    assert [result.check for result in results] == ["gymnasium_spaces", "snapshot_round_trip"]


class CannotBeSaved(BatchEnv):
    def state_dict(self):
        raise NotImplementedError("this environment cannot be saved")


def test_an_env_that_cannot_be_saved_is_checked_by_what_it_shows() -> None:
    make_env = making(CannotBeSaved)
    assert episodes.check_suspend_is_exact(make_env).not_claimed is None
    assert _boundaries.check_bad_input_changes_nothing(make_env).not_claimed is None
    assert episodes.check_snapshot_round_trip(make_env).not_claimed == (
        "CannotBeSaved.state_dict() says that it cannot be saved"
    )


def test_a_tolerance_lets_pass_what_bits_would_not() -> None:
    make_env, tolerance = making(StartDependsOnBatchSize), testing.Tolerance(atol=1e-2)
    result = episodes.check_episodes_do_not_depend_on_the_batch(make_env, sizes=(3,), steps=5, tolerance=tolerance)
    assert result.not_claimed is None


def test_autoreset_check_asks_for_an_end_it_can_look_at() -> None:
    with pytest.raises(AssertionError, match="no episode ended in 5 calls"):
        episodes.check_autoreset(making(BatchEnv), steps=5)


def test_snapshots_are_checked_also_where_episodes_are_shorter_than_the_check() -> None:
    make_env = partial(headrace.make, "cartpole", overrides={"episode_length": 4})
    (result,) = testing.check_env(make_env, only=("snapshot_round_trip",))
    assert result.not_claimed is None
