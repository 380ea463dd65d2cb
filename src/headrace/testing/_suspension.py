"""Suspended means frozen, and resumed means as if nothing had been.

A snapshot goes on bit for bit, in another environment and after a trip through a file.
"""

from __future__ import annotations

import copy
import io
from contextlib import closing

import torch
from torch import Tensor

from headrace.testing._contract import (
    EXACT,
    CheckResult,
    ContractEnv,
    MakeEnv,
    Tolerance,
    no_identity_of,
    require,
    require_rows_equal,
    require_same_tensors,
    reset_some,
    snapshot_of,
    tensors_in,
)
from headrace.testing._playing import (
    SuspensionPattern,
    actions_of,
    next_actions,
    play,
    poisoned,
    require_same_trajectories,
)

HOLD_REASON = "fidelity 'hold' keeps the last observation of a suspended environment, not its state"


def check_suspend_is_exact(make_env: MakeEnv, *, num_envs: int = 6, steps: int = 20, seed: int = 11) -> CheckResult:
    """Nothing of a suspended environment changes by one bit, whatever its neighbors do.

    The neighbors step, end, and are reset in subsets. Compared after each call: held observation, episode id, step
    count and, unless the fidelity is ``hold``, every per-environment tensor of the snapshot. Rewards are 0 and flags
    False; actions of suspended environments are NaN (or a choice that does not exist). Also: suspending twice and
    resuming an active environment do nothing, and a suspended environment that is reset stays suspended.
    """
    with closing(make_env(num_envs=num_envs, seed=seed, autoreset="same_step")) as env:
        exact = env.fidelity != "hold"
        left_out = [] if exact else [HOLD_REASON]
        env.reset()
        for _ in range(3):
            env.step(next_actions(env))
        resting = torch.arange(num_envs, device=env.device) % 3 == 1
        env.resume(resting)
        require(bool(env.active.all()), "resume of active environments: expected no effect, got env.active changed")
        env.suspend(resting)
        frozen = _frozen_tensors(env, exact)
        env.suspend(resting)
        require(
            bool((env.active == ~resting).all()),
            f"suspend: expected active {(~resting).tolist()}, got {env.active.tolist()}",
        )
        _require_frozen(env, frozen, resting, "after suspend", exact)
        for call in range(steps):
            if call % 5 == 4:
                neighbors = ~resting & (torch.arange(num_envs, device=env.device) % 2 == call % 2)
                refusal = reset_some(env, neighbors)
                left_out += [] if refusal is None or refusal in left_out else [refusal]
                _require_frozen(env, frozen, resting, f"after the reset of neighbors before call {call}", exact)
            step = env.step(next_actions(env))
            when = f"call {call} while suspended"
            rows = resting.nonzero().squeeze(1)
            require_rows_equal(step.reward, torch.zeros_like(step.reward), rows, when, "reward")
            for flag, values in (("terminated", step.terminated), ("truncated", step.truncated)):
                require_rows_equal(values, torch.zeros_like(values), rows, when, flag)
            for name, values in step.obs.items():
                require_rows_equal(values, frozen[f"observe()[{name!r}]"], rows, when, f"obs[{name!r}]")
            _require_frozen(env, frozen, resting, when, exact)
        _check_all_suspended(env, exact)
        if reset_some(env, torch.zeros_like(resting)) is None:
            _check_reset_while_suspended(env)
    return CheckResult(check="suspend_is_exact", not_claimed="; ".join(left_out) or None)


def check_resume_continues_exactly(
    make_env: MakeEnv,
    *,
    num_envs: int = 6,
    steps: int = 20,
    seed: int = 11,
    patterns: int = 2,
    tolerance: Tolerance = EXACT,
) -> CheckResult:
    """After ``resume`` an episode goes on as if it had never been paused.

    Plays the same episodes without a pause and under ``patterns`` random suspension patterns; ``tolerance`` is for
    physics whose bits depend on how many simulations are stepped together.
    """
    with closing(make_env(num_envs=num_envs, seed=seed, autoreset="same_step")) as env:
        reason = HOLD_REASON if env.fidelity == "hold" else no_identity_of(env)
        if reason is not None:  # also where no episode can be played twice
            return CheckResult(check="resume_continues_exactly", not_claimed=reason)
        obs, _ = env.reset(seed=seed)
        watch = env.episode_ids.tolist()
        expected = play(env, obs, steps, watch=watch)
        for number in range(patterns):
            obs, _ = env.reset(seed=seed)
            pattern = SuspensionPattern(env, number)
            got = play(env, obs, steps, watch=watch, pattern=pattern)
            pattern.lift()
            situation = f"under suspension pattern {number}"
            require_same_trajectories(got, expected, steps, situation, tolerance)
        _check_long_pause(env, seed, steps, tolerance)
    return CheckResult(check="resume_continues_exactly")


def _check_long_pause(env: ContractEnv, seed: int, steps: int, tolerance: Tolerance) -> None:
    """Check an environment that pauses while the others take many steps and then acts alone."""
    watched = env.num_envs // 2
    obs, _ = env.reset(seed=seed)
    episode = int(env.episode_ids[watched])
    others = torch.arange(env.num_envs, device=env.device) != watched
    expected = play(env, obs, steps, watch=[episode])
    obs, _ = env.reset(seed=seed)
    env.suspend([watched])
    for _ in range(steps):
        env.step(next_actions(env))
    env.suspend(others)
    env.resume([watched])
    got = play(env, obs, steps, watch=[episode])
    env.resume(others)
    require_same_trajectories(got, expected, steps, f"after a pause of {steps} calls", tolerance)


def _check_all_suspended(env: ContractEnv, exact: bool) -> None:
    all_rows = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
    env.suspend(all_rows)
    frozen = _frozen_tensors(env, exact)
    for call in range(2):
        actions = actions_of(env, env.episode_ids, env.episode_steps)
        env.step(poisoned(env, actions, all_rows))
        _require_frozen(env, frozen, all_rows, f"call {call} with all environments suspended", exact)
    env.resume(all_rows)
    require(bool(env.active.all()), f"resume of all environments: expected all active, got {env.active.tolist()}")


def _check_reset_while_suspended(env: ContractEnv) -> None:
    ids = torch.arange(env.num_envs, device=env.device)
    chosen = ids == env.num_envs - 1
    env.suspend(chosen)
    before = env.episode_ids
    others = (~chosen).nonzero().squeeze(1)
    held = env.observe()
    env.reset(options={"reset_mask": chosen})
    last = env.num_envs - 1
    require(not bool(env.active[last]), f"env {last}, reset while suspended: expected it to stay suspended, got active")
    require(int(env.episode_steps[last]) == 0, f"env {last}, reset while suspended: expected episode_steps 0")
    require(
        int(env.episode_ids[last]) == int(before[last]) + env.num_envs,
        f"env {last}, reset while suspended: expected its next episode {int(before[last]) + env.num_envs}, "
        f"got {int(env.episode_ids[last])}",
    )
    for name, values in env.observe().items():
        require_rows_equal(values, held[name], others, "reset of another one", f"observe()[{name!r}]")
    env.resume(chosen)


def _frozen_tensors(env: ContractEnv, exact: bool) -> dict[str, Tensor]:
    """Return every tensor with a row per environment that the environment shows, as copies."""
    shown: dict[str, Tensor] = {"episode_ids": env.episode_ids, "episode_steps": env.episode_steps}
    shown |= {f"observe(){name}": values for name, values in tensors_in(env.observe())}
    state = snapshot_of(env) if exact else None
    for name, values in tensors_in(state):
        if values.dim() and values.shape[0] == env.num_envs:
            shown[f"state_dict(){name}"] = values
    return {name: values.clone() for name, values in shown.items()}


def _require_frozen(env: ContractEnv, frozen: dict[str, Tensor], resting: Tensor, when: str, exact: bool) -> None:
    now = _frozen_tensors(env, exact)
    for name, values in frozen.items():
        require_rows_equal(now[name], values, resting.nonzero().squeeze(1), when, name)


def check_snapshot_round_trip(
    make_env: MakeEnv, *, num_envs: int = 4, steps: int = 12, seed: int = 9, tolerance: Tolerance = EXACT
) -> CheckResult:
    """``state_dict`` through ``torch.save`` and ``torch.load(weights_only=True)`` continues as the original does.

    Both autoreset modes, with a suspended environment; loaded into an environment that was never reset, and into one
    that has been elsewhere. The snapshot itself is not changed by later steps.
    """
    for mode in ("same_step", "disabled"):
        env = make_env(num_envs=num_envs, seed=seed, autoreset=mode)
        others = [make_env(num_envs=num_envs, seed=seed + 1, autoreset=mode) for _ in range(2)]
        try:
            env.reset()
            if snapshot_of(env) is None:
                reason = f"{type(env).__name__}.state_dict() says that it cannot be saved"
                return CheckResult(check="snapshot_round_trip", not_claimed=reason)
            others[1].reset()
            others[1].step(next_actions(others[1]))
            _walk(env, steps // 2)
            env.suspend([1])
            state = env.state_dict()
            file = io.BytesIO()
            torch.save(state, file)
            kept = copy.deepcopy(state)
            steps_of_original = _walk(env, steps)
            require_same_tensors(state, kept, "snapshot after later steps of its environment")
            for number, other in enumerate(others):
                file.seek(0)
                other.load_state_dict(torch.load(file, weights_only=True))
                kind = ("a new", "a used")[number]
                require_same_tensors(
                    other.state_dict(), kept, f"state_dict() of {kind} environment that loaded a snapshot"
                )
                for call, (step, expected) in enumerate(zip(_walk(other, steps), steps_of_original, strict=True)):
                    sentence = f"call {call} after loading a snapshot into {kind} environment, autoreset {mode}"
                    require_same_tensors(step, expected, sentence, tolerance)
        finally:
            for each in (env, *others):
                each.close()
    return CheckResult(check="snapshot_round_trip")


def _walk(env: ContractEnv, steps: int) -> list[object]:
    """Step with another environment resting in each call; environment 1, if suspended, rests for half the time."""
    walked: list[object] = []
    for call in range(steps):
        if call == steps // 2:
            env.resume(env.suspended)
        resting = (torch.arange(env.num_envs, device=env.device) == call % env.num_envs) & env.active
        env.suspend(resting)
        walked.append(env.step(next_actions(env)))
        env.resume(resting)
    return walked
