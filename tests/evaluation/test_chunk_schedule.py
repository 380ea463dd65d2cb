"""Whatever the rule, the engine and the batch: an episode plays the same rows of the same chunks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from chunk_policies import AtLeast, Every
from hypothesis import example, given, settings
from hypothesis import strategies as st
from script_env import LateEngine, Planner, ScriptEnv, expected_plays, length_of

from flat import evaluate
from headrace.errors import ConfigError, LifecycleError
from headrace.evaluation.scheduling import (
    Admission,
    Greedy,
    Immediate,
    QueueState,
    Synchronized,
    WholeBatchOnAny,
    make_admission,
)

SUSPENDING = [
    Greedy(),
    Immediate(),
    WholeBatchOnAny(),
    Synchronized(),
    Every(1),
    Every(5),
    AtLeast(2),
    AtLeast(99),
]


@st.composite
def _lengths(draw: st.DrawFn) -> dict[str, int]:
    execute = draw(st.integers(1, 9))
    offset = draw(st.integers(0, 3))
    latency = draw(st.integers(0, execute - 1))
    spare = draw(st.integers(0, 4))
    return {"horizon": offset + execute + latency + spare, "execute": execute, "offset": offset, "latency": latency}


@settings(deadline=None, max_examples=120)
@given(
    num_envs=st.integers(1, 6),
    ends=st.lists(st.integers(1, 30), min_size=1, max_size=14),
    lengths=_lengths(),
    rule=st.sampled_from(SUSPENDING),
    delays=st.lists(st.integers(0, 12), max_size=5),
    obs_steps=st.integers(1, 3),
    inline=st.booleans(),
)
@example(
    # an answer that is under way when its episode ends, and the slot begins another
    num_envs=2,
    ends=[5, 9, 9, 9],
    lengths={"horizon": 8, "execute": 4, "offset": 0, "latency": 3},
    rule=Greedy(),
    delays=[0, 12, 12],
    obs_steps=1,
    inline=False,
)
@example(
    # one action per chunk: everyone plays in step, without cursors, also when the plan runs out
    num_envs=3,
    ends=[5, 1, 9, 2, 3],
    lengths={"horizon": 1, "execute": 1, "offset": 0, "latency": 0},
    rule=Greedy(),
    delays=[],
    obs_steps=1,
    inline=True,
)
def test_every_episode_plays_its_own_chunks_whatever_the_rule_and_the_engine(
    num_envs: int,
    ends: list[int],
    lengths: dict[str, int],
    rule: Admission,
    delays: list[int],
    obs_steps: int,
    inline: bool,
) -> None:
    env = ScriptEnv(num_envs, lambda episode: ends[episode])
    # rows that WholeBatchOnAny infers for nothing are in the middle of a chunk: what they are told is not checked
    planner = Planner(obs_steps=obs_steps, check=not isinstance(rule, WholeBatchOnAny), **lengths)
    engine = "inline" if inline else LateEngine(planner, delays)
    rest = {name: lengths[name] for name in ("execute", "offset", "latency")}
    found = evaluate(env, planner, episodes=len(ends), admission=rule, engine=engine, progress=False, **rest)

    assert [episode.episode_id for episode in found.episodes] == list(range(len(ends))), "each once, in order"
    assert [episode.length for episode in found.episodes] == ends
    for episode, end in enumerate(ends):
        assert env.played[episode] == expected_plays(end, **rest)
    asked = [(e, c, c * rest["execute"]) for e, end in enumerate(ends) for c in range(math.ceil(end / rest["execute"]))]
    counters = found.counters
    if not isinstance(rule, WholeBatchOnAny):
        assert sorted(set(planner.asked)) == asked, "once per execute steps or episode end, and nobody else"
        assert counters.rows_wasted == 0
    assert counters.rows_inferred - counters.rows_wasted == len(asked)
    assert counters.env_steps == sum(ends)
    # an answer is thrown away only if its episode ended before it took over
    if not rest["latency"]:
        assert counters.rows_discarded == 0
    if obs_steps == 1 and not isinstance(rule, WholeBatchOnAny):
        assert sorted(env.observed_steps) == sorted((e, s) for e, _, s in asked), "only what the model reads"
    assert not env.suspended.any(), "nothing is left suspended"


@settings(deadline=None, max_examples=40)
@given(obs_steps=st.integers(2, 5), lengths=_lengths(), count=st.integers(1, 4), delays=st.lists(st.integers(0, 9)))
def test_with_a_history_only_the_observations_that_the_model_reads_are_asked_for(
    obs_steps: int, lengths: dict[str, int], count: int, delays: list[int]
) -> None:
    env = ScriptEnv(count)
    planner = Planner(obs_steps=obs_steps, **lengths)
    rest = {name: lengths[name] for name in ("execute", "offset", "latency")}
    engine = LateEngine(planner, delays) if delays else "inline"
    evaluate(env, planner, episodes=9, engine=engine, progress=False, **rest)
    read = {(e, max(0, step - age)) for e, _, step in planner.asked for age in range(obs_steps)}
    assert len(env.observed_steps) == len(set(env.observed_steps)), "none twice"
    # the last chunk of an episode may never be asked for: then up to obs_steps - 1 observations before it are idle
    unread = set(env.observed_steps) - read
    assert read <= set(env.observed_steps)
    assert all(length_of(e) - step < obs_steps for e, step in unread)


def test_an_episode_plays_the_same_beside_others() -> None:
    def played(num_envs: int, rule: Admission) -> dict[int, list[tuple[int, int]]]:
        env = ScriptEnv(num_envs, lambda episode: 10 + 3 * episode)
        evaluate(env, Planner(6, 6, check=False), episodes=4, execute=6, admission=rule, progress=False)
        return env.played

    for rule in (Synchronized(), Every(6), Greedy()):
        assert played(2, rule) == played(1, rule)


def test_greedy_breaks_up_a_convoy_so_that_model_and_physics_overlap() -> None:
    """All wait at the start: half is inferred, and plays while the other half is. Inline nothing can overlap."""
    env, planner = ScriptEnv(8, lambda episode: 40), Planner(4, 4)
    engine = LateEngine(planner, [0, 3])
    evaluate(env, planner, episodes=8, execute=4, engine=engine, progress=False)
    assert engine.sizes[:2] == [4, 4]
    assert max(engine.sizes) == 4, "the two groups stay out of phase"
    inline = evaluate(ScriptEnv(8, lambda episode: 40), Planner(4, 4), episodes=8, execute=4, progress=False)
    assert inline.counters.model_calls == 10
    assert inline.counters.idle_steps == 0


def test_greedy_takes_the_step_that_brings_the_many_before_it_asks_for_the_few() -> None:
    """Episode 0 ends a step before the first chunks of the others do: nobody is asked for until those are dry."""

    def queue(waiting: list[int], due_next: list[int]) -> QueueState:
        masks = [np.isin(np.arange(8), slots) for slots in (waiting, due_next)]
        return QueueState(
            running=np.ones(8, np.bool_),
            waiting=masks[0],
            can_act=~masks[0],
            due_next=masks[1],
            engine_overlaps=True,
            steps=3,
        )

    assert np.flatnonzero(Greedy().infer(queue([0], [1, 2]))).tolist() == []
    assert np.flatnonzero(Greedy().infer(queue([0], [1]))).tolist() == [0]
    env, planner = ScriptEnv(8, lambda episode: 3 if episode == 0 else 40), Planner(4, 4)
    engine = LateEngine(planner, [0])
    evaluate(env, planner, episodes=9, execute=4, engine=engine, progress=False)
    # the first half and the second; then, of the first half, the one that ended waits a step for its three fellows
    assert engine.sizes[:3] == [4, 4, 4]


def test_greedy_inline_asks_once_for_all_who_have_run_dry() -> None:
    """Seven episodes of 4 steps and one of 2: its slot's next episode waits for the others' chunks to run dry."""
    env = ScriptEnv(8, lambda episode: 2 if episode == 0 else 4)
    found = evaluate(env, Planner(4, 4), episodes=9, execute=4, progress=False)
    assert found.counters.model_calls == 2
    assert found.counters.idle_steps == 2


def test_a_slot_without_an_episode_never_acts_and_is_never_inferred() -> None:
    env = ScriptEnv(7)
    planner = Planner(4, 4)
    found = evaluate(env, planner, episodes=[5, 11, 2], execute=4, progress=False)
    assert [episode.episode_id for episode in found.episodes] == [2, 5, 11]
    assert {episode for episode, _, _ in planner.asked} == {2, 5, 11}
    assert found.counters.env_steps == length_of(2) + length_of(5) + length_of(11)


def test_an_environment_can_be_evaluated_again_whatever_was_suspended() -> None:
    env = ScriptEnv(3)
    env.interrupt_after = 7
    evaluate(env, Planner(4, 4), episodes=9, execute=4, progress=False)
    env.interrupt_after = None
    env.suspended[:] = True
    again = evaluate(env, Planner(4, 4), episodes=9, execute=4, progress=False)
    assert len(again.episodes) == 9


def test_ctrl_c_returns_what_is_finished() -> None:
    env = ScriptEnv(3)
    env.interrupt_after = 12
    found = evaluate(env, Planner(4, 4), episodes=30, execute=4, progress=False)
    assert found.status == "interrupted"
    assert found.planned == 30
    assert 0 < len(found.episodes) < 30
    assert all(episode.length == length_of(episode.episode_id) for episode in found.episodes)


def test_a_rule_that_never_infers_is_an_error_and_not_a_hang() -> None:
    class Never:
        def infer(self, queue: QueueState) -> np.ndarray:
            return queue.nobody

    with pytest.raises(LifecycleError, match="a rule must infer when no environment can act"):
        evaluate(ScriptEnv(2), Planner(4, 4), episodes=2, execute=4, admission=Never(), progress=False)


def test_a_rule_that_stops_in_the_middle_leaves_nobody_suspended() -> None:
    class Once:
        """Infers the first environment, once."""

        def infer(self, queue: QueueState) -> np.ndarray:
            return queue.waiting & (np.arange(2) == 0) if queue.steps == 0 else queue.nobody

    env = ScriptEnv(2, lambda episode: 9)
    with pytest.raises(LifecycleError, match="a rule must infer when no environment can act"):
        evaluate(env, Planner(4, 4), episodes=2, execute=4, admission=Once(), progress=False)
    assert not env.suspended.any()


@pytest.mark.parametrize(
    "episodes",
    [3, np.int64(3), [0, 1, 2], np.arange(3), range(3), iter((2, 0, 1))],
    ids=["number", "numpy", "list", "array", "range", "iterator"],
)
def test_a_plan_is_a_number_or_ids(episodes: object) -> None:
    found = evaluate(ScriptEnv(2), Planner(4, 4), episodes=episodes, execute=4, progress=False)  # type: ignore[arg-type]  # any of them
    assert [episode.episode_id for episode in found.episodes] == [0, 1, 2]


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"execute": 5}, r"horizon: expected at least offset \+ execute \+ latency = 5 rows, got 4"),
        ({"execute": 3, "offset": 2}, "= 5 rows, got 4"),
        ({"execute": 0}, "expected at least 1, 1, 0 and 0"),
        ({"execute": 2, "latency": 2}, "latency: expected less than execute = 2"),
        ({"execute": 2, "ensemble_decay": 0.01}, "ensemble_decay: expected execute=1"),
        ({"execute": 1, "ensemble_decay": float("inf")}, "ensemble_decay: expected a number, or None, got inf"),
        ({"execute": 2, "timeout": 0.0}, "timeout: expected a number of seconds above 0"),
        ({"execute": 2, "timeout": float("inf")}, "timeout: expected a number of seconds above 0"),
        ({"execute": 2, "batching": "strictly"}, "batching mode: expected 'fast' or 'strict', got 'strictly'"),
        ({"execute": 2, "seed": 2**63}, "expected a number of 64 bits"),
        ({"execute": 2, "engine": "threads"}, "unknown engine 'threads'; did you mean 'thread'"),
        ({"execute": 2, "episodes": 0}, "episodes: expected at least one"),
        ({"execute": 2, "episodes": [1, 1]}, "each once"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_is_stepped(
    settings_: dict[str, object], message: str
) -> None:
    env = ScriptEnv(2)
    with pytest.raises(ConfigError, match=message):
        evaluate(env, Planner(4, 4), **{"episodes": 2, "progress": False, **settings_})  # type: ignore[arg-type]  # bad on purpose
    assert env.played == {}


def test_the_environment_must_not_reset_itself_and_must_take_the_policys_actions() -> None:
    env = ScriptEnv(2)
    env.autoreset = "same_step"
    with pytest.raises(ConfigError, match='expected an environment with autoreset="disabled"'):
        evaluate(env, Planner(4, 4), episodes=1, execute=4, progress=False)
    with pytest.raises(ConfigError, match="action_dim: expected 4, got a policy with action_dim 3"):
        evaluate(ScriptEnv(2), Planner(4, 4, action_dim=3), episodes=1, execute=4, progress=False)


def test_a_rule_of_0_2_that_holds_is_refused() -> None:
    class Holds(Every):
        holds = True

    with pytest.raises(ConfigError, match="rules that hold are gone"):
        make_admission(Holds(4))
