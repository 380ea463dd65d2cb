"""What crosses the boundary: bad input is refused, good output is the caller's own and fits the declared spaces."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import cast

import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor

from headrace.envs.recipe import AnyEnv
from headrace.errors import (
    ActionError,
    ConfigError,
    DeviceError,
    DtypeError,
    HeadraceError,
    IdError,
    LifecycleError,
    ShapeError,
    UnknownNameError,
)
from headrace.testing._contract import (
    EXACT,
    NO_VARIANTS,
    CheckResult,
    MakeEnv,
    Tolerance,
    draw_actions,
    fail,
    next_actions,
    poison_actions,
    require,
    require_equal,
    require_same_tensors,
    take_snapshot,
    tensors_in,
)
from headrace.testing.episodes import (
    check_autoreset,
    check_episodes_do_not_depend_on_the_batch,
    check_snapshot_round_trip,
    check_suspend_is_exact,
)
from headrace.types import Obs, Step

BadCall = tuple[str, type[HeadraceError], Callable[[], object]]
"""What is wrong, the error it must raise, and the call."""


def bad_calls(env: AnyEnv) -> Iterator[BadCall]:
    """List calls that an environment must refuse: it has been reset, with environment 1 suspended and 0 active."""
    n, device = env.num_envs, env.device
    good = draw_actions(env, env.episode_ids, env.episode_steps)
    wrong_dtype = good.to(torch.float16) if good.is_floating_point() else good.to(torch.float32)
    yield (
        "an action of environment 0 that must not be used",
        ActionError,
        lambda: env.step(poison_actions(env, good, _only(env, 0))),
    )
    yield "actions for one environment too few", ShapeError, lambda: env.step(good[1:])
    yield "actions with an axis too many", ShapeError, lambda: env.step(good[None])
    yield f"actions as {wrong_dtype.dtype}", DtypeError, lambda: env.step(wrong_dtype)
    yield "actions as a list", DtypeError, lambda: env.step(cast("Tensor", good.tolist()))
    yield "actions on the meta device", DeviceError, lambda: env.step(good.to("meta"))
    for name, call in (("suspend", env.suspend), ("resume", env.resume)):
        yield f"{name} of id {n}", IdError, lambda call=call: call([0, n])
        yield f"{name} of id -1", IdError, lambda call=call: call([-1])
        yield f"{name} of id 1 twice", IdError, lambda call=call: call([1, 0, 1])
        yield f"{name} of float ids", DtypeError, lambda call=call: call(torch.tensor([0.0, 1.0], device=device))
        yield f"{name} of a short mask", ShapeError, lambda call=call: call(torch.ones(n - 1, dtype=torch.bool))
        yield f"{name} of a matrix of ids", ShapeError, lambda call=call: call(torch.zeros((1, 1), dtype=torch.int64))
    yield "observe of id N", IdError, lambda: env.observe([n])
    some, ids = _only(env, 0), torch.arange(n, device=device)
    yield "an unknown reset option", ConfigError, lambda: env.reset(options={"mask": some})
    yield "a seed for some environments only", ConfigError, lambda: env.reset(seed=3, options={"reset_mask": some})
    yield "a short reset_mask", ShapeError, lambda: env.reset(options={"reset_mask": some[1:]})
    yield "a reset_mask of integers", DtypeError, lambda: env.reset(options={"reset_mask": some.to(torch.int64)})
    yield "float episode_ids", DtypeError, lambda: env.reset(options={"episode_ids": ids.to(torch.float32)})
    yield "a negative episode id", IdError, lambda: env.reset(options={"episode_ids": -ids - 1})
    yield "too few episode_ids", ShapeError, lambda: env.reset(options={"episode_ids": ids[1:]})


def check_bad_input_changes_nothing(make_env: MakeEnv, *, num_envs: int = 4, seed: int = 5) -> CheckResult:
    """Bad actions, ids and options raise an error of :mod:`headrace.errors` and leave every bit as it was.

    Also: a NaN action of an active environment is refused naming it; ``step`` before ``reset`` and after ``close`` are
    refused. Everything that the environment shows, and its snapshot, is compared before and after.
    """
    with closing(make_env(num_envs=num_envs, seed=seed, autoreset="same_step")) as env:
        first = torch.zeros(num_envs, dtype=torch.int64, device=env.device)
        _require_refused("step before reset", LifecycleError, lambda: env.step(draw_actions(env, first, first)))
        env.reset()
        for _ in range(3):
            env.step(next_actions(env))
        env.suspend([1])
        for what, error, call in bad_calls(env):
            before = _everything(env)
            message = _require_refused(what, error, call)
            if error is ActionError:
                require("0" in message, f"{what}: expected the error to name environment 0, got {message!r}")
            require_same_tensors(_everything(env), before, f"{what}: expected no change")
        env.step(next_actions(env))
    _require_refused("step after close", LifecycleError, lambda: env.step(draw_actions(env, first, first)))
    return CheckResult(check="bad_input_changes_nothing")


def check_returned_tensors_are_owned(
    make_env: MakeEnv, *, num_envs: int = 4, steps: int = 12, seed: int = 5
) -> CheckResult:
    """Check that ``step``, ``reset`` and ``observe`` return memory of the caller.

    No later call writes to it, and writing to it does not change the environment. Actions are only read, and only
    during the call.
    """
    with (
        closing(make_env(num_envs=num_envs, seed=seed, autoreset="same_step")) as env,
        closing(make_env(num_envs=num_envs, seed=seed, autoreset="same_step")) as twin,
    ):
        kept: list[tuple[str, Tensor, Tensor]] = []
        obs, twin_obs = env.reset()[0], twin.reset()[0]
        _keep_and_compare(obs, twin_obs, "reset", kept)
        for call in range(steps):
            if call == steps // 2:
                env.suspend([0])
                twin.suspend([0])
            actions = next_actions(twin)
            given, untouched = actions.clone(), actions.clone()
            step, twin_step = env.step(given), twin.step(actions)
            require_equal(given, untouched, f"call {call}: the caller's actions after step")
            _require_no_shared_memory(step, f"call {call}")
            _keep_and_compare(step, twin_step, f"call {call}", kept)
            # what the caller does with its own must not reach the environment
            _scribble(step.obs | env.observe())
            _scribble({"actions": given, "reward": step.reward, "active": env.active, "ids": env.episode_ids})
            for name, values in env.observe().items():
                require_equal(values, twin.observe()[name], f"call {call}: observe()[{name!r}] after writing to obs")
        for name, tensor, copy in kept:
            require_equal(tensor, copy, f"{name} after later steps")
    return CheckResult(check="returned_tensors_are_owned")


def check_gymnasium_spaces(make_env: MakeEnv, *, num_envs: int = 3, steps: int = 5, seed: int = 5) -> CheckResult:
    """Check that it is a ``gymnasium.vector.VectorEnv`` whose observations and actions fit its declared spaces."""
    for mode, gym_mode in (("same_step", AutoresetMode.SAME_STEP), ("disabled", AutoresetMode.DISABLED)):
        with closing(make_env(num_envs=num_envs, seed=seed, autoreset=mode)) as env:
            is_vector = isinstance(cast("object", env), VectorEnv)
            require(is_vector, f"expected a gymnasium.vector.VectorEnv, got {type(env).__name__}")
            declared = env.metadata.get("autoreset_mode")
            require(declared == gym_mode, f"metadata['autoreset_mode']: expected {gym_mode}, got {declared}")
            for what in ("observation", "action"):
                single, batch = getattr(env, f"single_{what}_space"), getattr(env, f"{what}_space")
                require(
                    batch == batch_space(single, num_envs),
                    f"{what}_space: expected single_{what}_space batched {num_envs} times, got {batch}",
                )
            space = env.single_observation_space
            if not isinstance(space, spaces.Dict):
                fail(f"single_observation_space: expected a Dict of observation groups, got {space}")
            obs, _ = env.reset(seed=seed)
            _require_in_space(obs, space, num_envs, "reset")
            env.action_space.seed(seed)
            for call in range(steps):
                step = env.step(torch.as_tensor(env.action_space.sample(), device=env.device))
                _require_in_space(step.obs, space, num_envs, f"call {call}")
                for name, dtype in (("reward", torch.float32), ("terminated", torch.bool), ("truncated", torch.bool)):
                    _require_kind(getattr(step, name), dtype, num_envs, f"call {call}: {name}")
    return CheckResult(check="gymnasium_spaces")


def _only(env: AnyEnv, slot: int) -> Tensor:
    return torch.arange(env.num_envs, device=env.device) == slot


def _require_refused(what: str, error: type[HeadraceError], call: Callable[[], object]) -> str:
    """Return the error's message."""
    try:
        call()
    except error as refusal:
        return str(refusal)
    # whatever it is, it is not the refusal that the contract asks for
    except Exception as other:
        raise AssertionError(f"{what}: expected {error.__name__}, got {type(other).__name__}: {other}") from other
    raise AssertionError(f"{what}: expected {error.__name__}, got no error")


def _everything(env: AnyEnv) -> dict[str, object]:
    """Return all that can be seen of an environment, as copies."""
    shown = {
        "active": env.active,
        "suspended": env.suspended,
        "episode_ids": env.episode_ids,
        "episode_steps": env.episode_steps,
        "observe()": env.observe(),
        "state_dict()": take_snapshot(env),
    }
    return {f"{name}{path}": values.clone() for name, entry in shown.items() for path, values in tensors_in(entry)}


def _keep_and_compare(value: object, twin: object, when: str, kept: list[tuple[str, Tensor, Tensor]]) -> None:
    require_same_tensors(value, twin, f"{when}, beside a twin whose tensors were not written to")
    # the ones that are written to below are kept as the twin's
    kept.extend((f"{when}: {name}", tensor, tensor.clone()) for name, tensor in tensors_in(twin))


def _scribble(tensors: dict[str, Tensor]) -> None:
    for tensor in tensors.values():
        tensor.fill_(float("nan") if tensor.is_floating_point() else 1)


def _require_no_shared_memory(step: Step, when: str) -> None:
    owners: dict[int, str] = {}
    for name, tensor in tensors_in(step):
        if not tensor.numel():
            continue
        place = tensor.untyped_storage().data_ptr()
        require(place not in owners, f"{when}: {name} shares memory with {owners.get(place)}")
        owners[place] = name


def _require_in_space(obs: Obs, space: spaces.Dict, num_envs: int, when: str) -> None:
    require(set(obs) == set(space.spaces), f"{when}: expected the groups {sorted(space.spaces)}, got {sorted(obs)}")
    for name, part in space.spaces.items():
        values = obs[name]
        shape = (num_envs, *(part.shape or ()))
        require(
            tuple(values.shape) == shape, f"{when}: obs[{name!r}]: expected shape {shape}, got {tuple(values.shape)}"
        )
        for env_id, row in enumerate(values.cpu().numpy()):
            require(part.contains(row), f"env {env_id}, {when}: obs[{name!r}]: expected a member of {part}, got {row}")


def _require_kind(values: Tensor, dtype: torch.dtype, num_envs: int, what: str) -> None:
    got = (values.dtype, tuple(values.shape))
    require(got == (dtype, (num_envs,)), f"{what}: expected {dtype} ({num_envs},), got {got[0]} {got[1]}")


def check_env(
    make_env: MakeEnv,
    *,
    sizes: Sequence[int] = (1, 7, 64),
    steps: int = 20,
    variants: Sequence[Mapping[str, object]] = NO_VARIANTS,
    tolerance: Tolerance = EXACT,
    skip: Collection[str] = (),
    only: Collection[str] | None = None,
) -> list[CheckResult]:
    """Run every check; the first broken claim raises an AssertionError that names environment, step and field.

    Args:
        make_env: ``make_env(num_envs=…, seed=…, autoreset=…, **variant)`` gives a new environment.
        sizes: the batch sizes in which an episode must be the same.
        steps: how long to watch each episode; the end of an episode is waited for as long as it takes, up to 300 steps.
        variants: further keywords of ``make_env`` that must not change an episode, for example thread counts.
        tolerance: for physics whose bits depend on the size of the batch.
        skip: names of checks to leave out (``gymnasium_spaces``, ``returned_tensors_are_owned``,
            ``bad_input_changes_nothing``, ``suspend_is_exact``, ``episodes_do_not_depend_on_the_batch``, ``autoreset``,
            ``snapshot_round_trip``); the results say that they were.
        only: names of the checks to run; None for all.

    Returns:
        One result per check, in order; ``not_claimed`` says what was left out and why.
    """
    checks = {
        "gymnasium_spaces": partial(check_gymnasium_spaces, make_env),
        "returned_tensors_are_owned": partial(check_returned_tensors_are_owned, make_env),
        "bad_input_changes_nothing": partial(check_bad_input_changes_nothing, make_env),
        "suspend_is_exact": partial(check_suspend_is_exact, make_env, steps=steps),
        "episodes_do_not_depend_on_the_batch": partial(
            check_episodes_do_not_depend_on_the_batch,
            make_env,
            sizes=sizes,
            steps=steps,
            variants=variants,
            tolerance=tolerance,
        ),
        "autoreset": partial(check_autoreset, make_env, tolerance=tolerance),
        "snapshot_round_trip": partial(check_snapshot_round_trip, make_env, tolerance=tolerance),
    }
    for name in (*skip, *(only or ())):
        if name not in checks:
            raise UnknownNameError("check", name, checks)
    left_out = "left out by the caller"
    return [
        CheckResult(check=name, not_claimed=left_out) if name in skip else run()
        for name, run in checks.items()
        if only is None or name in only
    ]
