"""An episode is a function of (task, seed, episode id, actions), and ends as the autoreset mode says.

Suspended means frozen, and resumed means as if nothing had been. A snapshot goes on bit for bit, in another environment
and after a trip through a file.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping, Sequence
from contextlib import closing

import torch
from torch import Tensor

from headrace.envs.recipe import AnyEnv
from headrace.errors import IdError
from headrace.testing._contract import (
    EXACT,
    NO_VARIANTS,
    CheckResult,
    MakeEnv,
    SuspensionPattern,
    Tolerance,
    Trajectory,
    draw_actions,
    explain_no_identity,
    fail,
    next_actions,
    play,
    poison_actions,
    require,
    require_equal,
    require_rows_equal,
    require_same_tensors,
    require_same_trajectories,
    reset_some,
    take_snapshot,
    tensors_in,
)
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
    """Check that an episode is the same in a batch of any size, in any slot, beside any neighbors, paused or not.

    Each of a few episodes is played alone, in a batch of one; then in each of ``sizes``, in another slot each time,
    among neighbors that run other episodes, without a pause, under a random suspension pattern and after a long pause,
    and made with each of ``variants``, for example ``({"threads": 1}, {"threads": 2})``.
    """
    # far from the ids that environments get by themselves when their episodes end
    chosen = [700_001 + 100_003 * k for k in range(episodes)]
    expected: dict[int, Trajectory] = {}
    with closing(make_env(num_envs=1, seed=seed, autoreset="disabled")) as alone:
        if (reason := explain_no_identity(alone)) is not None:
            return CheckResult(check="episodes_do_not_depend_on_the_batch", not_claimed=reason)
        for episode in chosen:
            obs, _ = alone.reset(options={"episode_ids": torch.tensor([episode])})
            require(
                alone.episode_ids.tolist() == [episode],
                f"reset with episode_ids [{episode}]: expected that episode, got {alone.episode_ids.tolist()}",
            )
            expected |= play(alone, obs, steps, watch=[episode])
    for variant in variants:
        for size in sizes:
            with closing(make_env(num_envs=size, seed=seed, autoreset="same_step", **variant)) as env:
                _check_in_batch(env, expected, steps, variant, tolerance)
    return CheckResult(check="episodes_do_not_depend_on_the_batch")


def _check_in_batch(
    env: AnyEnv,
    expected: Mapping[int, Trajectory],
    steps: int,
    variant: Mapping[str, object],
    tolerance: Tolerance,
) -> None:
    chosen, size = list(expected), env.num_envs
    # a batch of one plays them one after the other
    groups = [chosen] if size >= len(chosen) else [[episode] for episode in chosen]
    made = f" made with {dict(variant)}" if variant else ""
    for turn in range(2):
        for group in groups:
            ids = _neighbors_and(group, size, turn)
            obs, _ = env.reset(options={"episode_ids": ids.to(env.device)})
            pattern = SuspensionPattern(env, size) if turn else None
            got = play(env, obs, steps, watch=group, pattern=pattern)
            if pattern is not None:
                pattern.lift()
            how = " with suspensions" if turn else ""
            situation = f"in slots {_find_slots(ids, group)} of {size}{how}{made}"
            require_same_trajectories(got, {e: expected[e] for e in group}, steps, situation, tolerance)
    if size > 1:
        situation = f"after a pause of {steps} calls in a batch of {size}{made}"
        _check_long_pause(env, chosen[0], expected[chosen[0]], steps, situation, tolerance)


def _neighbors_and(group: Sequence[int], size: int, turn: int) -> Tensor:
    """Return int64 (size,): other ids, with ``group`` spread over slots that differ from turn to turn."""
    ids = 10_000_000 + 31 * torch.arange(size)
    for k, episode in enumerate(group):
        ids[(k * max(1, size // len(group)) + 3 * turn + size // 2) % size] = episode
    return ids


def _find_slots(ids: Tensor, group: Sequence[int]) -> list[int]:
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
            return CheckResult(check="autoreset", not_claimed=refusal or explain_no_identity(same))
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
    env: AnyEnv,
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
    if explain_no_identity(env) is not None:
        return
    with closing(make_env(num_envs=env.num_envs, seed=seed, autoreset="same_step")) as fresh:
        obs, _ = fresh.reset(options={"episode_ids": env.episode_ids})
        for name, values in obs.items():
            require_rows_equal(step.obs[name], values, ended, f"call {call}", f"obs[{name!r}] after its end", tolerance)


def _check_parking(env: AnyEnv, step: Step, ended: Tensor, call: int) -> str | None:
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


def check_suspend_is_exact(make_env: MakeEnv, *, num_envs: int = 6, steps: int = 20, seed: int = 11) -> CheckResult:
    """Nothing of a suspended environment changes by one bit, whatever its neighbors do.

    The neighbors step, end, and are reset in subsets. Compared after each call: held observation, episode id, step
    count and every per-environment tensor of the snapshot. Rewards are 0 and flags
    False; actions of suspended environments are NaN (or a choice that does not exist). Also: suspending twice and
    resuming an active environment do nothing, and a suspended environment that is reset stays suspended.
    """
    with closing(make_env(num_envs=num_envs, seed=seed, autoreset="same_step")) as env:
        refusal: str | None = None
        env.reset()
        for _ in range(3):
            env.step(next_actions(env))
        resting = torch.arange(num_envs, device=env.device) % 3 == 1
        env.resume(resting)
        require(bool(env.active.all()), "resume of active environments: expected no effect, got env.active changed")
        env.suspend(resting)
        frozen = _copy_frozen(env)
        env.suspend(resting)
        require(
            bool((env.active == ~resting).all()),
            f"suspend: expected active {(~resting).tolist()}, got {env.active.tolist()}",
        )
        _require_frozen(env, frozen, resting, "after suspend")
        for call in range(steps):
            if call % 5 == 4:
                neighbors = ~resting & (torch.arange(num_envs, device=env.device) % 2 == call % 2)
                refusal = reset_some(env, neighbors)
                _require_frozen(env, frozen, resting, f"after the reset of neighbors before call {call}")
            step = env.step(next_actions(env))
            when = f"call {call} while suspended"
            rows = resting.nonzero().squeeze(1)
            require_rows_equal(step.reward, torch.zeros_like(step.reward), rows, when, "reward")
            for flag, values in (("terminated", step.terminated), ("truncated", step.truncated)):
                require_rows_equal(values, torch.zeros_like(values), rows, when, flag)
            for name, values in step.obs.items():
                require_rows_equal(values, frozen[f"observe()[{name!r}]"], rows, when, f"obs[{name!r}]")
            _require_frozen(env, frozen, resting, when)
        _check_all_suspended(env)
        if reset_some(env, torch.zeros_like(resting)) is None:
            _check_reset_while_suspended(env)
    return CheckResult(check="suspend_is_exact", not_claimed=refusal)


def _check_long_pause(
    env: AnyEnv, episode: int, expected: Trajectory, steps: int, situation: str, tolerance: Tolerance
) -> None:
    """Check an episode that pauses while the others take many steps and then goes on alone."""
    watched = env.num_envs // 2
    ids = _neighbors_and([episode], env.num_envs, 0)
    ids[(ids == episode).nonzero()[0]], ids[watched] = ids[watched].clone(), episode
    others = torch.arange(env.num_envs, device=env.device) != watched
    obs, _ = env.reset(options={"episode_ids": ids.to(env.device)})
    env.suspend([watched])
    for _ in range(steps):
        env.step(next_actions(env))
    env.suspend(others)
    env.resume([watched])
    got = play(env, obs, steps, watch=[episode])
    env.resume(others)
    require_same_trajectories(got, {episode: expected}, steps, situation, tolerance)


def _check_all_suspended(env: AnyEnv) -> None:
    all_rows = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
    env.suspend(all_rows)
    frozen = _copy_frozen(env)
    for call in range(2):
        actions = draw_actions(env, env.episode_ids, env.episode_steps)
        env.step(poison_actions(env, actions, all_rows))
        _require_frozen(env, frozen, all_rows, f"call {call} with all environments suspended")
    env.resume(all_rows)
    require(bool(env.active.all()), f"resume of all environments: expected all active, got {env.active.tolist()}")


def _check_reset_while_suspended(env: AnyEnv) -> None:
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


def _copy_frozen(env: AnyEnv) -> dict[str, Tensor]:
    """Return every tensor with a row per environment that the environment shows, as copies."""
    shown: dict[str, Tensor] = {"episode_ids": env.episode_ids, "episode_steps": env.episode_steps}
    shown |= {f"observe(){name}": values for name, values in tensors_in(env.observe())}
    state = take_snapshot(env)
    for name, values in tensors_in(state):
        if values.dim() and values.shape[0] == env.num_envs:
            shown[f"state_dict(){name}"] = values
    return {name: values.clone() for name, values in shown.items()}


def _require_frozen(env: AnyEnv, frozen: dict[str, Tensor], resting: Tensor, when: str) -> None:
    now = _copy_frozen(env)
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
            if take_snapshot(env) is None:
                reason = f"{type(env).__name__}.state_dict() says that it cannot be saved"
                return CheckResult(check="snapshot_round_trip", not_claimed=reason)
            others[1].reset()
            others[1].step(next_actions(others[1]))
            _walk(env, steps // 2)
            env.suspend((torch.arange(num_envs, device=env.device) == 1) & env.active)  # it may have ended
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


def _walk(env: AnyEnv, steps: int) -> list[object]:
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
