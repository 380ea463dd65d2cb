"""An episode is a function of (task, seed, episode id, actions), and ends as the autoreset mode says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing

import torch
from torch import Tensor

from headrace.errors import IdError
from headrace.testing._contract import (
    EXACT,
    NO_VARIANTS,
    CheckResult,
    ContractEnv,
    MakeEnv,
    Tolerance,
    fail,
    no_identity_of,
    require,
    require_equal,
    require_rows_equal,
    reset_some,
)
from headrace.testing._playing import SuspensionPattern, Trajectory, next_actions, play, require_same_trajectories
from headrace.testing._suspension import HOLD_REASON
from headrace.types import Step

# rewards are shown as float32 and summed by us; returns are summed in float64 by the environment
_RETURN_RTOL = 1e-5


def check_episodes_do_not_depend_on_the_batch(
    make_env: MakeEnv,
    *,
    sizes: Sequence[int] = (1, 7, 64),
    episodes: int = 3,
    steps: int = 20,
    seed: int = 7,
    variants: Sequence[Mapping[str, object]] = NO_VARIANTS,
    tolerance: Tolerance = EXACT,
) -> CheckResult:
    """Return the same episode is the same in a batch of any size, in any slot, beside any neighbors.

    Each of a few episodes is played alone, in a batch of one; then in each of ``sizes``, in another slot each time,
    among neighbors that run other episodes, with and without a random suspension pattern (without only, where the
    fidelity is ``hold``), and made with each of ``variants``, for example ``({"threads": 1}, {"threads": 2})``.
    """
    # far from the ids that environments get by themselves when their episodes end
    chosen = [700_001 + 100_003 * k for k in range(episodes)]
    expected: dict[int, Trajectory] = {}
    with closing(make_env(num_envs=1, seed=seed, autoreset="disabled")) as alone:
        if (reason := no_identity_of(alone)) is not None:
            return CheckResult(check="episodes_do_not_depend_on_the_batch", not_claimed=reason)
        for episode in chosen:
            obs, _ = alone.reset(options={"episode_ids": torch.tensor([episode])})
            require(
                alone.episode_ids.tolist() == [episode],
                f"reset with episode_ids [{episode}]: expected that episode, got {alone.episode_ids.tolist()}",
            )
            expected |= play(alone, obs, steps, watch=[episode])
    exact_suspension = True
    for variant in variants:
        for size in sizes:
            with closing(make_env(num_envs=size, seed=seed, autoreset="same_step", **variant)) as env:
                exact_suspension = env.fidelity != "hold"
                _check_in_batch(env, expected, steps, variant, tolerance)
    reason = None if exact_suspension else f"suspension patterns: {HOLD_REASON}"
    return CheckResult(check="episodes_do_not_depend_on_the_batch", not_claimed=reason)


def _check_in_batch(
    env: ContractEnv,
    expected: Mapping[int, Trajectory],
    steps: int,
    variant: Mapping[str, object],
    tolerance: Tolerance,
) -> None:
    chosen, size = list(expected), env.num_envs
    # a batch of one plays them one after the other
    groups = [chosen] if size >= len(chosen) else [[episode] for episode in chosen]
    rounds = 1 if env.fidelity == "hold" else 2
    for turn in range(rounds):
        for group in groups:
            ids = _neighbors_and(group, size, turn)
            obs, _ = env.reset(options={"episode_ids": ids.to(env.device)})
            pattern = SuspensionPattern(env, size) if turn else None
            got = play(env, obs, steps, watch=group, pattern=pattern)
            if pattern is not None:
                pattern.lift()
            how = " with suspensions" if turn else ""
            made = f" made with {dict(variant)}" if variant else ""
            situation = f"in slots {_slots_of(ids, group)} of {size}{how}{made}"
            require_same_trajectories(got, {e: expected[e] for e in group}, steps, situation, tolerance)


def _neighbors_and(group: Sequence[int], size: int, turn: int) -> Tensor:
    """Return int64 (size,): other ids, with ``group`` spread over slots that differ from turn to turn."""
    ids = 10_000_000 + 31 * torch.arange(size)
    for k, episode in enumerate(group):
        ids[(k * max(1, size // len(group)) + 3 * turn + size // 2) % size] = episode
    return ids


def _slots_of(ids: Tensor, group: Sequence[int]) -> list[int]:
    return [int((ids == episode).nonzero()[0]) for episode in group]


def check_autoreset(
    make_env: MakeEnv, *, num_envs: int = 4, steps: int = 300, seed: int = 3, tolerance: Tolerance = EXACT
) -> CheckResult:
    """Episodes end and begin as the autoreset mode says; random actions must end one within ``steps`` calls.

    ``same_step``: ``obs`` is the first of the next episode (equal to that of a reset into the same episode id),
    ``info["final_obs"]`` the true last one (equal to what ``disabled`` shows), ids go on in steps of ``num_envs``, and
    ``ends`` agrees with what was seen. ``disabled``: an ended environment parks, does not change while others step,
    refuses ``resume``, and ``reset_mask`` lets it act again.
    """
    with (
        closing(make_env(num_envs=num_envs, seed=seed, autoreset="same_step")) as same,
        closing(make_env(num_envs=num_envs, seed=seed, autoreset="disabled")) as parking,
    ):
        same.reset()
        parking.reset()
        require_equal(same.episode_ids.cpu(), torch.arange(num_envs), "first reset: episode_ids, one per slot from 0")
        returns = torch.zeros(num_envs, dtype=torch.float64)
        lengths = torch.zeros(num_envs, dtype=torch.int64)
        for call in range(steps):
            episodes = same.episode_ids
            step, parked_step = same.step(next_actions(same)), parking.step(next_actions(parking))
            returns += step.reward.cpu()
            lengths += 1
            ended = (step.terminated | step.truncated).nonzero().squeeze(1)
            if not len(ended):
                for key in ("final_obs", "ends", "episode"):
                    require(key not in step.info, f"call {call}: expected no info[{key!r}] while no episode ended")
                continue
            _check_ends(step, ended, episodes, returns, lengths, call)
            for name, values in parked_step.obs.items():
                got = step.info.get("final_obs", {})[name]
                require_rows_equal(got, values, ended, f"call {call}", f"info['final_obs'][{name!r}]", tolerance)
            _check_next_episodes(make_env, seed, same, step, ended, episodes, call, tolerance)
            refusal = _check_parking(parking, parked_step, ended, call)
            return CheckResult(check="autoreset", not_claimed=refusal or no_identity_of(same))
    raise AssertionError(
        f"no episode ended in {steps} calls with random actions, so that nothing could be checked; "
        "give make_env shorter episodes or this check more steps"
    )


def _check_ends(step: Step, ended: Tensor, episodes: Tensor, returns: Tensor, lengths: Tensor, call: int) -> None:
    info = step.info
    if "final_obs" not in info or "_final_obs" not in info:
        fail(f"call {call}: expected info['final_obs'] and info['_final_obs'], since an episode ended")
    if "ends" not in info or "episode" not in info or "_episode" not in info:
        fail(f"call {call}: expected info['ends'], info['episode'] and info['_episode'], since an episode ended")
    mask = step.terminated | step.truncated
    require_equal(info["_final_obs"], mask, f"call {call}: info['_final_obs']")
    require_equal(info["_episode"], mask, f"call {call}: info['_episode']")
    ends = info["ends"]
    require_equal(ends.env_ids, ended, f"call {call}: ends.env_ids")
    require_equal(ends.episode_ids, episodes[ended], f"call {call}: ends.episode_ids")
    require_equal(ends.lengths.cpu(), lengths[ended.cpu()], f"call {call}: ends.lengths")
    near = Tolerance(rtol=_RETURN_RTOL, atol=_RETURN_RTOL)
    require_equal(ends.returns.cpu(), returns[ended.cpu()], f"call {call}: ends.returns", near)
    require_equal(info["episode"]["r"][ended], ends.returns, f"call {call}: info['episode']['r']")
    require_equal(info["episode"]["l"][ended], ends.lengths, f"call {call}: info['episode']['l']")


def _check_next_episodes(
    make_env: MakeEnv,
    seed: int,
    env: ContractEnv,
    step: Step,
    ended: Tensor,
    episodes: Tensor,
    call: int,
    tolerance: Tolerance,
) -> None:
    following = episodes[ended] + env.num_envs
    require_equal(env.episode_ids[ended], following, f"envs {ended.tolist()}, call {call}: the next episode's id")
    steps = env.episode_steps[ended]
    require_equal(steps, torch.zeros_like(steps), f"envs {ended.tolist()}, call {call}: episode_steps of a new episode")
    require(bool(env.active.all()), f"call {call}: expected all active after same_step, got {env.active.tolist()}")
    if no_identity_of(env) is not None:
        return
    with closing(make_env(num_envs=env.num_envs, seed=seed, autoreset="same_step")) as fresh:
        obs, _ = fresh.reset(options={"episode_ids": env.episode_ids})
        for name, values in obs.items():
            require_rows_equal(step.obs[name], values, ended, f"call {call}", f"obs[{name!r}] after its end", tolerance)


def _check_parking(env: ContractEnv, step: Step, ended: Tensor, call: int) -> str | None:
    """Return what the environment says if it cannot reset some without all."""
    parked = torch.zeros(env.num_envs, dtype=torch.bool, device=env.device)
    parked[ended] = True
    when = f"call {call} with autoreset disabled"
    require_equal(env.active, ~parked, f"{when}: active")
    held = env.observe()
    for name, values in held.items():
        require_rows_equal(values, step.obs[name], ended, when, f"observe()[{name!r}]")
    again = env.step(next_actions(env))
    when = f"call {call + 1} while parked"
    require_rows_equal(again.reward, torch.zeros_like(again.reward), ended, when, "reward")
    for flag, values in (("terminated", again.terminated), ("truncated", again.truncated)):
        require_rows_equal(values, torch.zeros_like(values), ended, when, flag)
    for name, values in held.items():
        require_rows_equal(again.obs[name], values, ended, when, f"obs[{name!r}]")
    try:
        env.resume(ended)
    except IdError:
        pass
    else:
        fail(f"env {int(ended[0])}, resume after its episode ended: expected IdError, got no error")
    still_parked = ~env.active
    before = env.observe()
    refusal = reset_some(env, still_parked)
    if refusal is not None:
        return refusal
    require(bool(env.active.all()), f"reset of parked environments: expected all active, got {env.active.tolist()}")
    for name, values in env.observe().items():
        others = (~still_parked).nonzero().squeeze(1)
        require_rows_equal(values, before[name], others, "reset of parked neighbors", f"observe()[{name!r}]")
    return None
