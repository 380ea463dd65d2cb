"""A snapshot goes on bit for bit, in another environment and after a trip through a file."""

from __future__ import annotations

import copy
import io

import torch

from headrace.testing._comparing import require_same_tensors
from headrace.testing._contract import EXACT, CheckResult, ContractEnv, MakeEnv, Tolerance, snapshot_of
from headrace.testing._playing import next_actions


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
