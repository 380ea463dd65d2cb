"""The contract of every registered task, and a random walk of calls against separate single environments."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import headrace
from headrace import testing
from headrace.envs.batch_env import BatchEnv
from headrace.envs.registry import task_names
from headrace.testing._contract import MakeEnv, draw_actions, poison_actions, require_equal
from headrace.testing.episodes import check_episodes_do_not_depend_on_the_batch

# short enough that episodes end while somebody looks, long enough that random actions end some before
SHORT = {"episode_length": 17}
# the contract is that of any size of picture
SMALL = {task: {"width": 32, "height": 24} for task in ("aloha-insertion", "aloha-transfer-cube")}


def short(task: str) -> MakeEnv:
    return partial(headrace.make, task, overrides=SHORT | SMALL.get(task, {}))


@pytest.mark.parametrize("task", task_names())
def test_every_task_keeps_the_contract(task) -> None:
    episodes = "episodes_do_not_depend_on_the_batch"
    results = testing.check_env(partial(short(task), threads=1), steps=12, skip=(episodes,))
    assert [str(result) for result in results if result.not_claimed] == [
        f"{episodes}: not claimed: left out by the caller"
    ]


@pytest.mark.parametrize("task", task_names())
def test_an_episode_is_the_same_in_any_batch_slot_and_suspension_pattern_and_at_any_thread_count(task) -> None:
    check = check_episodes_do_not_depend_on_the_batch
    one, three = {"threads": 1}, {"threads": 3}
    assert check(short(task), sizes=(1, 7, 64), steps=8, variants=(one,)).not_claimed is None
    assert check(short(task), sizes=(64,), steps=8, variants=(three,)).not_claimed is None
    assert check(short(task), sizes=(7,), steps=17, variants=(three,)).not_claimed is None


@pytest.mark.slow
@pytest.mark.parametrize("task", task_names())
def test_long_episodes_are_the_same_in_any_batch(task) -> None:
    variants = ({"threads": 1}, {"threads": 2}, {"threads": 5})
    testing.check_env(
        partial(headrace.make, task, overrides={"episode_length": 120} | SMALL.get(task, {})),
        steps=120,
        variants=variants,
    )


class SingleEnvs:
    """The slow, obvious reference: a batch of one per slot, in which only the slot's own calls happen."""

    def __init__(self, task: str, num_envs: int, seed: int) -> None:
        self.num_envs = num_envs
        self.envs = [
            headrace.make(task, 1, seed=seed, threads=1, autoreset="disabled", overrides=SHORT) for _ in range(num_envs)
        ]
        self.next_ids = list(range(num_envs))
        self.suspended = [False] * num_envs
        self.rows: list[dict[str, Tensor]] = [{} for _ in range(num_envs)]

    def begin(self, slot: int, episode: int | None = None) -> None:
        chosen = self.next_ids[slot] if episode is None else episode
        self.next_ids[slot] = chosen + self.num_envs
        options = {"episode_ids": [chosen]}
        obs, _ = self.envs[slot].reset(options=options)
        self.rows[slot] = {name: values[0] for name, values in obs.items()}

    def step(self, slot: int) -> tuple[Tensor, bool, bool, dict[str, Tensor]]:
        env = self.envs[slot]
        step = env.step(draw_actions(env, env.episode_ids, env.episode_steps))
        last = {name: values[0] for name, values in step.obs.items()}
        self.rows[slot] = last
        terminated, truncated = bool(step.terminated[0]), bool(step.truncated[0])
        if terminated or truncated:
            self.begin(slot)
        return step.reward[0], terminated, truncated, last

    def close(self) -> None:
        for env in self.envs:
            env.close()


def step_both(env: BatchEnv, reference: SingleEnvs, when: str) -> None:
    acting = [slot for slot in range(env.num_envs) if not reference.suspended[slot]]
    assert env.active.nonzero().squeeze(1).tolist() == acting, when
    actions = draw_actions(env, env.episode_ids, env.episode_steps)
    step = env.step(poison_actions(env, actions, ~env.active))
    for slot in range(env.num_envs):
        if slot not in acting:
            assert float(step.reward[slot]) == 0.0
            assert not bool(step.terminated[slot] | step.truncated[slot])
            continue
        reward, terminated, truncated, last = reference.step(slot)
        where = f"{when}, env {slot}"
        require_equal(step.reward[slot], reward, f"{where}: reward")
        assert (bool(step.terminated[slot]), bool(step.truncated[slot])) == (terminated, truncated), where
        if terminated or truncated:
            for name, values in last.items():
                require_equal(step.info["final_obs"][name][slot], values, f"{where}: final_obs[{name!r}]")
    require_same(env, step.obs, reference, when)


def require_same(env: BatchEnv, obs: dict[str, Tensor], reference: SingleEnvs, when: str) -> None:
    for slot, row in enumerate(reference.rows):
        for name, values in row.items():
            require_equal(obs[name][slot], values, f"{when}, env {slot}: obs[{name!r}]")
        single = reference.envs[slot]
        assert int(env.episode_ids[slot]) == int(single.episode_ids[0]), when
        assert int(env.episode_steps[slot]) == int(single.episode_steps[0]), when


MASKS = st.lists(st.booleans(), min_size=4, max_size=4)
CALLS = st.one_of(
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("suspend"), MASKS),
    st.tuples(st.just("resume"), MASKS),
    st.tuples(st.just("reset"), MASKS),
    st.tuples(st.just("reset into"), st.tuples(MASKS, st.integers(0, 2**40))),
)


@pytest.mark.parametrize("task", ["cartpole", "pusher-goal", "ant", "cartpole-discrete"])
@settings(deadline=None, max_examples=12)
@given(seed=st.integers(0, 2**62), calls=st.lists(CALLS, min_size=3, max_size=12))
def test_any_sequence_of_calls_equals_separate_single_envs(task, seed, calls) -> None:
    num_envs = 4
    env = headrace.make(task, num_envs, seed=seed, threads=2, overrides=SHORT)
    reference = SingleEnvs(task, num_envs, seed)
    obs, _ = env.reset()
    for slot in range(num_envs):
        reference.begin(slot)
    require_same(env, obs, reference, "after reset")
    for number, (name, argument) in enumerate(calls):
        when = f"call {number} ({name} {argument})"
        if name == "step":
            for _ in range(argument):
                step_both(env, reference, when)
        elif name in ("suspend", "resume"):
            getattr(env, name)(torch.tensor(argument))
            for slot in range(num_envs):
                reference.suspended[slot] = (name == "suspend") if argument[slot] else reference.suspended[slot]
        else:
            mask, first = argument if name == "reset into" else (argument, None)
            options: dict[str, object] = {"reset_mask": torch.tensor(mask)}
            if first is not None:
                options["episode_ids"] = torch.arange(num_envs) * 3 + first
            env.reset(options=options)
            for slot in range(num_envs):
                if mask[slot]:
                    reference.begin(slot, None if first is None else first + 3 * slot)
        require_same(env, env.observe(), reference, when)
    env.close()
    reference.close()
