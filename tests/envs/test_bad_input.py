"""Bad input raises an error that says what to do, and changes nothing."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import headrace
from headrace import errors
from headrace.envs.batch_env import BatchEnv
from headrace.testing._contract import draw_actions, next_actions, require_same_tensors

N = 4


@pytest.fixture
def env() -> BatchEnv:
    """Cartpole, three steps on, with environment 2 suspended."""
    env = headrace.make("cartpole", N, seed=1, threads=1, overrides={"episode_length": 9})
    env.reset()
    for _ in range(3):
        env.step(next_actions(env))
    env.suspend([2])
    return env


def good(env: BatchEnv) -> torch.Tensor:
    return draw_actions(env, env.episode_ids, env.episode_steps)


def changed(actions: torch.Tensor, row: int, value: float) -> torch.Tensor:
    actions = actions.clone()
    actions[row] = value
    return actions


STEPS = {
    "NaN": (lambda e: changed(good(e), 1, float("nan")), errors.ActionError, "for environment 1 .*nothing was stepped"),
    "infinite": (lambda e: changed(good(e), 3, float("inf")), errors.ActionError, "for environment 3"),
    "short": (lambda e: good(e)[:3], errors.ShapeError, r"expected \(4, 1\), got \(3, 1\)"),
    "flat": (lambda e: good(e)[:, 0], errors.ShapeError, r"expected \(4, 1\), got \(4,\)"),
    "wide": (lambda e: good(e).expand(N, 2), errors.ShapeError, r"got \(4, 2\)"),
    "half": (lambda e: good(e).half(), errors.DtypeError, "expected float32 or float64, got torch.float16"),
    "integers": (lambda e: good(e).long(), errors.DtypeError, "got torch.int64; use actions.float"),
    "numpy": (lambda e: good(e).numpy(), errors.DtypeError, "expected a torch tensor, got ndarray"),
    "None": (lambda e: None, errors.DtypeError, "got NoneType"),
    "meta": (lambda e: good(e).to("meta"), errors.DeviceError, "expected device cpu, got meta"),
}


@pytest.mark.parametrize(("make", "error", "message"), STEPS.values(), ids=STEPS)
def test_bad_actions_are_refused_before_anything_steps(env, make, error, message) -> None:
    before = copy.deepcopy(env.state_dict())
    with pytest.raises(error, match=message):
        env.step(make(env))
    require_same_tensors(env.state_dict(), before, "state after bad actions")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_actions_of_a_suspended_env_are_ignored_whatever_they_are(env, value) -> None:
    twin = headrace.make("cartpole", N, threads=1, overrides={"episode_length": 9})
    twin.load_state_dict(env.state_dict())
    for _ in range(8):
        step, expected = env.step(changed(good(env), 2, value)), twin.step(changed(good(twin), 2, 0.0))
        require_same_tensors(step, expected, "a step with a bad action of a suspended env")


def test_actions_whose_sum_overflows_are_fine_if_each_is_finite(env) -> None:
    big = torch.full((N, 1), 3e38)
    assert bool(torch.isfinite(env.step(big).obs["policy"]).all())


def test_choices_that_do_not_exist_are_refused_unless_suspended() -> None:
    env = headrace.make("cartpole-discrete", 3, threads=1)
    env.reset()
    for bad in (2, -1):
        with pytest.raises(errors.ActionError, match=r"a choice in \[0, 2\), got .* for environment 1"):
            env.step(torch.tensor([0, bad, 1]))
    with pytest.raises(errors.DtypeError, match=r"int64 choices, got torch\.float32"):
        env.step(torch.zeros(3))
    env.suspend([1])
    env.step(torch.tensor([0, 7, 1]))
    assert env.episode_steps.tolist() == [1, 0, 1]


IDS = {
    "too large": ([0, 4], errors.IdError, r"expected ids in \[0, 4\), got 4"),
    "negative": ([-1], errors.IdError, r"expected ids in \[0, 4\), got -1"),
    "repeated": ([3, 1, 3], errors.IdError, "got 3 more than once"),
    "floats": (torch.tensor([1.0]), errors.DtypeError, "expected integers or a bool mask, got torch.float32"),
    "float list": ([0.5], errors.DtypeError, "expected integers or a bool mask"),
    "short mask": (torch.ones(3, dtype=torch.bool), errors.ShapeError, r"mask of shape \(4,\), got \(3,\)"),
    "list mask": ([True, False], errors.ShapeError, r"mask of shape \(4,\), got \(2,\)"),
    "matrix": (torch.zeros((2, 2), dtype=torch.int64), errors.ShapeError, "expected one dimension"),
    "scalar": (torch.tensor(1), errors.ShapeError, "expected one dimension"),
    "float array": (np.array([1.0]), errors.DtypeError, "expected integers or a bool mask"),
    "int": (1, errors.DtypeError, "got int"),
    "text": (["1"], errors.DtypeError, "expected integers or a bool mask"),
    "meta": (torch.zeros(1, dtype=torch.int64, device="meta"), errors.DeviceError, "device meta"),
}


@pytest.mark.parametrize("call", ["suspend", "resume", "observe"])
@pytest.mark.parametrize(("ids", "error", "message"), IDS.values(), ids=IDS)
def test_bad_ids_are_refused_and_change_nothing(env, call, ids, error, message) -> None:
    before = copy.deepcopy(env.state_dict())
    with pytest.raises(error, match=message):
        getattr(env, call)(ids)
    require_same_tensors(env.state_dict(), before, f"state after {call} of bad ids")
    assert env.active.tolist() == [True, True, False, True]


@pytest.mark.parametrize("ids", [[], range(0), torch.zeros(4, dtype=torch.bool), torch.empty(0, dtype=torch.int64)])
def test_no_ids_are_fine(env, ids) -> None:
    env.suspend(ids)
    env.resume(ids)
    assert env.observe(ids)["policy"].shape == (0, 4)
    assert env.active.tolist() == [True, True, False, True]


@pytest.mark.parametrize(
    "ids", [[3, 0], range(0, 4, 3), torch.tensor([3, 0], dtype=torch.int32), [True, False, False, True]]
)
def test_ids_come_in_many_forms_and_any_order(env, ids) -> None:
    env.suspend(ids)
    assert env.active.tolist() == [False, True, False, False]
    env.suspend_envs(ids)
    env.resume_envs(ids)
    assert env.active.tolist() == [True, True, False, True]


MASK = torch.tensor([True, False, False, True])
OPTIONS = {
    "unknown": ({"mask": MASK}, errors.ConfigError, r"expected .*'observe', 'reset_mask'\], got \['mask'\]"),
    "int mask": ({"reset_mask": MASK.long()}, errors.DtypeError, r"reset_mask: expected bool \(4,\), got torch.int64"),
    "short mask": ({"reset_mask": MASK[:2]}, errors.ShapeError, r"reset_mask: .* \(4,\), got \(2,\)"),
    "float ids": ({"episode_ids": torch.ones(4)}, errors.DtypeError, "episode_ids: expected int64, got torch.float32"),
    "bool ids": ({"episode_ids": MASK}, errors.DtypeError, "episode_ids: expected int64, got torch.bool"),
    "negative ids": ({"episode_ids": [1, 2, -3, 4]}, errors.IdError, "at least 0, got -3"),
    "three ids for two": (
        {"reset_mask": MASK, "episode_ids": [1, 2, 3]},
        errors.ShapeError,
        r"one per reset environment \(2,\) or one per environment \(4,\), got \(3,\)",
    ),
}


@pytest.mark.parametrize(("options", "error", "message"), OPTIONS.values(), ids=OPTIONS)
def test_bad_reset_options_are_refused_and_change_nothing(env, options, error, message) -> None:
    before = copy.deepcopy(env.state_dict())
    with pytest.raises(error, match=message):
        env.reset(seed=99, options=options)
    require_same_tensors(env.state_dict(), before, "state after bad reset options")
    assert env.seed == 1


@pytest.mark.parametrize("seed", [1.5, "1", True])
def test_a_seed_that_is_no_integer_is_refused_and_changes_nothing(env, seed) -> None:
    before = copy.deepcopy(env.state_dict())
    with pytest.raises(errors.DtypeError, match="seed: expected an integer"):
        env.reset(seed=seed)
    require_same_tensors(env.state_dict(), before, "state after a bad seed")
    assert env.seed == 1


def test_a_numpy_integer_is_a_seed(env) -> None:
    obs, _ = env.reset(seed=np.int64(5))
    expected, _ = env.reset(seed=5)
    assert torch.equal(obs["policy"], expected["policy"])


def test_a_new_seed_for_some_envs_only_is_refused_since_it_would_change_the_streams_of_the_others(env) -> None:
    before = copy.deepcopy(env.state_dict())
    with pytest.raises(errors.ConfigError, match="seed: expected a reset of all environments with it"):
        env.reset(seed=5, options={"reset_mask": MASK})
    require_same_tensors(env.state_dict(), before, "state after a seed with a mask")
    env.reset(seed=5, options={"reset_mask": torch.ones(4, dtype=torch.bool)})
    assert env.seed == 5


def test_episode_ids_are_given_per_reset_env_or_per_env(env) -> None:
    env.reset(options={"reset_mask": MASK, "episode_ids": [70, 71]})
    assert env.episode_ids.tolist() == [70, 1, 2, 71]
    env.reset(options={"reset_mask": MASK.numpy(), "episode_ids": np.array([80, 81, 82, 83])})
    assert env.episode_ids.tolist() == [80, 1, 2, 83]


def test_a_reset_of_nobody_changes_nothing(env) -> None:
    before = copy.deepcopy(env.state_dict())
    env.reset(options={"reset_mask": torch.zeros(4, dtype=torch.bool)})
    require_same_tensors(env.state_dict(), before, "state after a reset of nobody")


def test_nothing_but_a_full_reset_comes_first() -> None:
    env = headrace.make("cartpole", N, threads=1)
    for call in (lambda: env.step(torch.zeros(N, 1)), env.observe, env.state_dict):
        with pytest.raises(errors.LifecycleError, match="reset"):
            call()
    with pytest.raises(errors.LifecycleError, match="first reset must be of all"):
        env.reset(options={"reset_mask": MASK})
    env.reset()
    env.step(torch.zeros(N, 1))


def test_nothing_comes_after_close_but_close(env) -> None:
    state = env.state_dict()
    env.close()
    env.close()
    calls = {
        "step": lambda: env.step(torch.zeros(N, 1)),
        "reset": env.reset,
        "suspend": lambda: env.suspend([0]),
        "resume": lambda: env.resume([0]),
        "observe": env.observe,
        "state_dict": env.state_dict,
        "load_state_dict": lambda: env.load_state_dict(state),
    }
    for name, call in calls.items():
        with pytest.raises(errors.LifecycleError, match="closed"):
            call()
        assert name


def test_resume_of_a_parked_env_says_to_reset_it() -> None:
    env = headrace.make("cartpole", 2, threads=1, autoreset="disabled", overrides={"episode_length": 2})
    env.reset()
    env.suspend([1])
    for _ in range(2):
        env.step(torch.zeros(2, 1))
    assert env.active.tolist() == [False, False]
    before = copy.deepcopy(env.state_dict())
    with pytest.raises(errors.IdError, match=r"environment 0 has ended its episode .*reset_mask"):
        env.resume([0, 1])
    require_same_tensors(env.state_dict(), before, "state after resume of a parked env")
    env.resume([1])
    assert env.active.tolist() == [False, True]


def test_a_bad_observe_mask_is_refused_before_anything_steps(env) -> None:
    before = copy.deepcopy(env.state_dict())
    with pytest.raises(errors.ShapeError, match="observe"):
        env.step(good(env), observe=torch.ones(3, dtype=torch.bool))
    require_same_tensors(env.state_dict(), before, "state after a bad observe mask")


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"num_envs": 0}, errors.ConfigError, "num_envs: expected at least 1, got 0"),
        ({"num_envs": 1.5}, errors.ConfigError, r"num_envs: expected an integer, got 1\.5"),
        ({"num_envs": 10**9}, errors.ConfigError, "num_envs: expected at most"),
        ({"threads": 0}, errors.ConfigError, "threads: expected at least 1"),
        ({"threads": 10**9}, errors.ConfigError, "threads: expected at most 4,096"),
        ({"threads": 1.5}, errors.ConfigError, r"threads: expected an integer, got 1\.5"),
        ({"episode_stride": 0}, errors.ConfigError, "episode_stride: expected at least 1"),
        ({"autoreset": "next_step"}, errors.UnknownNameError, "unknown autoreset mode 'next_step'"),
        ({"sim": "mujocoo"}, errors.UnknownNameError, "unknown sim 'mujocoo'"),
        ({"device": "cuda:0"}, errors.DeviceError, 'expected "cpu" for sim="mujoco"'),
        ({"overrides": {"episode_lenght": 3}}, errors.UnknownNameError, "did you mean 'episode_length'"),
        ({"overrides": {"episode_length": 0}}, errors.ConfigError, "episode_length: expected at least 1"),
        ({"overrides": {"episode_length": "3"}}, errors.ConfigError, "expected int like 300, got str"),
    ],
)
def test_settings_that_cannot_work_are_refused_when_the_env_is_made(kwargs, error, message) -> None:
    with pytest.raises(error, match=message):
        headrace.make("cartpole", **kwargs)


def test_an_unknown_task_suggests_the_nearest() -> None:
    with pytest.raises(errors.UnknownNameError, match="did you mean 'humanoid'"):
        headrace.make("humanoids")
