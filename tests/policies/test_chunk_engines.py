"""What goes wrong in a policy is told with its environments; nothing hangs, nothing is left running."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from chunk_policies import Attention, Broken, CannotBeMade, SlowStart, Stubborn
from script_env import Planner, ScriptEnv, length_of

from flat import evaluate
from headrace import _device
from headrace.errors import ConfigError, LifecycleError, PolicyError
from headrace.evaluation import Evaluation
from headrace.policies import Batching, as_chunk_policy
from headrace.policies import engines as _engines
from headrace.policies.engines import Request, ThreadEngine, make_engine
from headrace.policies.foreign import ProcessEngine
from headrace.policies.protocol import ChunkContext


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before
    assert multiprocessing.active_children() == []


def _fails(engine: object, policy: object, **more: object) -> PolicyError:
    # no ScriptEnv check: the broken policy plans zeros
    env = ScriptEnv(3, holds=True)
    with pytest.raises(PolicyError) as caught:
        evaluate(env, policy, episodes=12, execute=4, engine=engine, progress=False, **more)  # type: ignore[arg-type]  # names
    return caught.value


FAULTS = {
    "raises": "policy raised RuntimeError: the model is out of memory; it was asked for environments",
    "nan": "expected finite actions, got NaN or infinity, for environments",
    "infinite": "expected finite actions, got NaN or infinity, for environments",
    "rows": r"expected actions \(\d+, 4, 4\) \(rows, horizon, size\), got \(\d+, 4, 4\), for environments",
    "horizon": r"got \(\d+, 3, 4\), for environments",
    "width": r"got \(\d+, 4, 2\), for environments",
    "list": r"expected a tensor or array \(\d+, 4, 4\) of real numbers, got list, for environments",
    "complex": r"of real numbers, got torch.complex64 values, for environments",
    "complex array": r"of real numbers, got complex128 values, for environments",
    "text array": r"of real numbers, got <U1 values, for environments",
}


@pytest.mark.parametrize("engine", ["inline", "thread"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_answer_names_the_environments_and_keeps_the_finished_episodes(engine: str, fault: str) -> None:
    error = _fails(engine, Broken(fault))
    assert error.args
    with pytest.raises(PolicyError, match=FAULTS[fault]):
        raise error
    finished = error.finished
    assert isinstance(finished, Evaluation)
    assert finished.status == "failed"
    assert finished.episodes, "episodes that ended before are not lost"
    assert all(episode.length == length_of(episode.episode_id) for episode in finished.episodes)


def test_only_the_rows_with_nan_are_named() -> None:
    message = str(_fails("inline", Broken("nan", at=0)))
    assert "environments 1 (episode 1)" in message
    assert "episode 0" not in message


def test_padding_may_hold_anything() -> None:
    def plan(obs: dict, context: ChunkContext) -> torch.Tensor:
        out = Planner(4, 4, check=False)(obs, context)
        padding = obs["policy"][:, 0] == 0  # zeros; the plan below has no episode 0
        out[padding] = float("nan")
        return out

    policy = as_chunk_policy(plan, horizon=4, action_dim=4)
    found = evaluate(
        ScriptEnv(3), policy, episodes=range(1, 9), execute=4, batching=Batching(mode="strict", size=5), progress=False
    )
    assert len(found.episodes) == 8
    assert found.counters.rows_padded == found.counters.model_calls * 5 - found.counters.rows_inferred


@pytest.mark.parametrize("engine", ["thread", "inline with a time-out"])
def test_a_thread_runs_the_model_on_the_stream_of_the_caller(monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    """A thread's own current stream is the default one: it would not wait for what ``torch.cuda.stream(s)`` queued."""
    used: dict[int, object] = {}

    @contextmanager
    def on_stream(stream: object) -> Iterator[None]:
        used[threading.get_ident()] = stream
        yield
        del used[threading.get_ident()]

    monkeypatch.setattr(_device, "current_stream", lambda device: f"the caller's, {device}")
    monkeypatch.setattr(_device, "on_stream", on_stream)
    seen: list[object] = []

    def plan(obs: dict, context: ChunkContext) -> torch.Tensor:
        seen.append(used[threading.get_ident()])
        return Planner(4, 4, check=False)(obs, context)

    policy = as_chunk_policy(plan, horizon=4, action_dim=4)
    timeout = None if engine == "thread" else 60.0
    evaluate(ScriptEnv(3), policy, episodes=4, execute=4, engine=engine.split()[0], timeout=timeout, progress=False)
    assert set(seen) == {"the caller's, cpu"}


def test_a_thread_whose_policy_exits_is_reported() -> None:
    assert "policy raised SystemExit: 3; it was asked for environments" in str(_fails("thread", Broken("exits")))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raises", "policy raised RuntimeError: the model is out of memory; it was asked for environments"),
        ("killed", r"its process was ended by signal 9 \(SIGKILL\) while it was asked for environments"),
    ],
)
def test_a_process_that_fails_or_is_killed_is_reported(fault: str, message: str) -> None:
    error = _fails("process", Broken(fault))
    with pytest.raises(PolicyError, match=message):
        raise error
    assert isinstance(error.finished, Evaluation)
    assert error.finished.episodes


def test_a_process_whose_policy_cannot_be_made_says_why() -> None:
    assert "policy raised FileNotFoundError: no weights here" in str(_fails("process", CannotBeMade()))


def test_a_policy_that_cannot_be_sent_to_a_process_is_refused_with_advice() -> None:
    lock = threading.Lock()
    policy = as_chunk_policy(lambda obs: (lock, obs["policy"])[1], horizon=4, action_dim=4)
    with pytest.raises(ConfigError, match=r"expected a policy that can be pickled.*pass ProcessEngine"):
        make_engine("process", policy, Batching())


def test_ctrl_c_ends_a_process_in_the_middle_of_a_call(tmp_path: Path) -> None:
    sleeping = tmp_path / "sleeping"

    def interrupt() -> None:
        while not sleeping.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    begin = time.perf_counter()
    # the first call is for an odd episode and sleeps for a minute
    policy = Broken("sleeps", at=0, sign=str(sleeping))
    found = evaluate(ScriptEnv(2), policy, episodes=(1, 3, 5), execute=4, engine="process", progress=False)
    thread.join()
    assert found.status == "interrupted"
    assert found.episodes == []
    assert time.perf_counter() - begin < 55


def _interrupts(sign: Path) -> threading.Thread:
    """Presses Ctrl-C as soon as ``sign`` is there: the policy has been asked, and the caller waits for it."""

    def press() -> None:
        while not sign.exists():
            time.sleep(0.01)
        time.sleep(0.05)  # for the caller to go from handing over to waiting
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    return thread


@pytest.mark.parametrize("engine", ["inline", "thread"])
def test_ctrl_c_while_the_model_thinks_returns_what_is_finished(engine: str, tmp_path: Path) -> None:
    """Inline the call is cut off; a thread's call is waited for, and the thread is gone."""
    presses = _interrupts(tmp_path / "asked")
    policy = SlowStart(str(tmp_path / "asked"), at=2)
    found = evaluate(ScriptEnv(3), policy, episodes=12, execute=4, engine=engine, progress=False)  # type: ignore[arg-type]  # a name
    presses.join()
    assert found.status == "interrupted"
    assert found.episodes, "episode 0 has one step only"


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_an_answer_that_ctrl_c_left_under_way_is_not_taken_for_the_next(kind: str, tmp_path: Path) -> None:
    policy = SlowStart(str(tmp_path / "asked"), at=0)
    make = partial(SlowStart, str(tmp_path / "asked"), at=0)
    engine = ThreadEngine(policy, Batching()) if kind == "thread" else ProcessEngine(make, Batching())
    presses = _interrupts(tmp_path / "asked")
    first = evaluate(ScriptEnv(2), policy, episodes=[3, 4], execute=4, engine=engine, progress=False)
    presses.join()
    assert first.status == "interrupted"
    assert engine.busy, "the answer is still to come"
    # actions of episodes 3 and 4 played in 10 and 11 would be an error of the environment
    again = evaluate(ScriptEnv(2), policy, episodes=[10, 11], execute=4, engine=engine, progress=False)
    engine.close()
    assert [episode.episode_id for episode in again.episodes] == [10, 11]


def test_a_process_that_dies_between_two_calls_is_reported() -> None:
    engine = ProcessEngine(partial(Broken, "none"), Batching())
    engine.submit(_request())
    assert engine.poll(wait=True) is not None
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(
        PolicyError, match=r"its process was ended by signal 9 \(SIGKILL\) while it was asked for environments 0"
    ):
        _answer(engine)
    assert not engine.busy
    engine.close()


def test_a_process_that_ignores_the_polite_signal_is_ended_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(_engines, "SECONDS_TO_END", 0.2)
    engine = ProcessEngine(partial(Stubborn, str(tmp_path / "asked")), Batching())
    engine.submit(_request())
    while not (tmp_path / "asked").exists():
        time.sleep(0.01)
    begin = time.perf_counter()
    engine.close()  # the fixture sees whether it is gone
    assert time.perf_counter() - begin < 30, "the call takes a minute"


def test_a_process_makes_its_policy_once() -> None:
    engine = ProcessEngine(Stubborn, Batching(mode="fast"))
    answers = []
    for _ in range(2):
        engine.submit(_request())
        reply = engine.poll(wait=True)
        assert reply is not None
        answers.append(float(reply.answer.actions[0, 0, 0]))
    engine.close()
    assert answers == [1.0, 2.0], "calls of the same policy"


def test_an_observation_that_cannot_be_sent_leaves_nothing_under_way() -> None:
    engine = ProcessEngine(partial(Broken, "none"), Batching())
    request = _request()
    with pytest.raises(ConfigError, match="bfloat16"):
        engine.submit(replace(request, obs={name: rows.bfloat16() for name, rows in request.obs.items()}))
    assert not engine.busy
    engine.submit(request)
    assert engine.poll(wait=True) is not None
    engine.close()


def _answer(engine: ProcessEngine) -> None:
    """A death may be seen when the request is sent, or when its reply does not come."""
    engine.submit(_request())
    engine.poll(wait=True)


def _request(count: int = 2) -> Request:
    ids = torch.arange(count)
    zeros = torch.zeros(count, dtype=torch.int64)
    context = ChunkContext(
        seeds=zeros,
        env_ids=ids,
        episode_ids=ids,
        chunk_index=zeros,
        instructions=("",) * count,
        left_over=torch.zeros(count, 12, 2),
        left_over_length=zeros,
        delay=zeros,
    )
    return Request(obs={"policy": torch.randn(count, 5)}, context=context)


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_engines_give_the_same_answer_and_refuse_a_second_request(kind: str) -> None:
    policy = as_chunk_policy(Attention(5, 2))
    strict = Batching(mode="strict", size=4)
    request = _request()
    inline = make_engine("inline", policy, strict)
    inline.submit(request)
    expected = inline.poll(wait=True)
    engine = (
        ThreadEngine(policy, strict)
        if kind == "thread"
        else ProcessEngine(partial(as_chunk_policy, Attention(5, 2)), strict)
    )
    engine.submit(request)
    with pytest.raises(LifecycleError, match="a request is under way, or the engine is closed"):
        engine.submit(request)
    reply = engine.poll(wait=True)
    assert reply is not None
    assert expected is not None
    assert torch.equal(reply.answer.actions, expected.answer.actions)
    assert not engine.busy
    assert engine.poll(wait=True) is None
    engine.close()
    with pytest.raises(LifecycleError, match="a request is under way, or the engine is closed"):
        engine.submit(request)


def test_an_engine_of_the_callers_own_forgets_what_an_interrupted_evaluation_left() -> None:
    planner = Planner(4, 4)
    engine = ThreadEngine(as_chunk_policy(planner), Batching())
    env = ScriptEnv(5)
    env.interrupt_after = 3
    assert evaluate(env, planner, episodes=9, execute=4, engine=engine, progress=False).status == "interrupted"
    smaller = ScriptEnv(2)
    assert len(evaluate(smaller, planner, episodes=9, execute=4, engine=engine, progress=False).episodes) == 9
    engine.close()
    with pytest.raises(ConfigError, match="which has its own"):
        evaluate(smaller, planner, episodes=9, execute=4, engine=engine, batching=Batching(), progress=False)


def test_an_engine_that_runs_another_policy_than_the_one_evaluated_is_reported() -> None:
    engine = ThreadEngine(as_chunk_policy(Planner(6, 4, check=False)), Batching())
    with pytest.raises(PolicyError, match=r"expected chunks \(2, 4, 4\).*got \(2, 6, 4\); give evaluate the policy"):
        evaluate(ScriptEnv(4), Planner(4, 4), episodes=4, execute=4, engine=engine, progress=False)
    engine.close()
