"""How evaluations end: a plan that is not completed gives no rates, whatever raised, and nothing waits for ever."""

from __future__ import annotations

import io
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from chunk_policies import Broken, SlowStart
from rich.console import Console
from script_env import Planner, ScriptEnv, length_of
from torch import Tensor

import headrace
from flat import evaluate
from headrace.errors import EnvError, EvaluationError, HeadraceError, PolicyError
from headrace.evaluation import Evaluation
from headrace.policies import engines as _engines
from headrace.policies.protocol import ChunkContext
from headrace.types import Obs


def _shown(found: Evaluation) -> str:
    text = io.StringIO()
    Console(file=text, width=120).print(found.summary())
    return text.getvalue()


def test_a_plan_that_is_not_completed_gives_no_rates_and_says_how_many_are_missing() -> None:
    env = ScriptEnv(4)
    env.interrupt_after = 12
    found = evaluate(env, Planner(4, 4), episodes=40, execute=4, progress=False)
    assert found.status == "interrupted"
    assert 0 < len(found.episodes) < 40
    assert found.unfinished == 40 - len(found.episodes)
    assert found.success_rate is found.mean_reward is found.iqm_reward is found.mean_length is None
    assert f"{found.unfinished}: no rates, since short episodes finish first" in _shown(found)
    whole = evaluate(ScriptEnv(4), Planner(4, 4), episodes=40, execute=4, progress=False)
    assert whole.unfinished == 0
    assert whole.success_rate is not None
    assert "no rates" not in _shown(whole)


class Breaking(ScriptEnv):
    """Raises in its eleventh step."""

    def __init__(self, error: Exception) -> None:
        super().__init__(3)
        self.left, self.error = 11, error

    def step(self, actions: Tensor, observe: Tensor | None = None) -> object:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return super().step(actions, observe)


@pytest.mark.parametrize(
    ("raised", "seen"),
    [(RuntimeError("disk full"), EvaluationError), (EnvError("a worker died"), EnvError), (OSError(), EvaluationError)],
    ids=["observer", "environment", "system"],
)
def test_finished_episodes_are_kept_whatever_raises(raised: Exception, seen: type[HeadraceError]) -> None:
    env = Breaking(raised)
    with pytest.raises(seen) as caught:
        evaluate(env, Planner(4, 4), episodes=12, execute=4, progress=False)  # type: ignore[arg-type]  # a step that raises
    assert caught.value is raised or caught.value.__cause__ is raised
    finished = caught.value.finished
    assert isinstance(finished, Evaluation)
    assert finished.status == "failed"
    assert finished.episodes
    assert all(episode.length == length_of(episode.episode_id) for episode in finished.episodes)
    assert not env.suspended.any(), "no environment is left suspended"


def test_the_table_does_not_depend_on_num_envs_by_default_and_fast_says_so() -> None:
    policy = headrace.load_policy("pusher-solid")
    tables, fast = [], None
    for num_envs in (1, 6):
        env = headrace.make("pusher-solid", num_envs, threads=1, autoreset="disabled", final_obs=False)
        found = evaluate(env, policy, episodes=6, execute=16, progress=False)
        assert found.strict_size == 16
        tables.append(found.episodes)
        fast = evaluate(env, policy, episodes=2, execute=16, batching="fast", progress=False)
        env.close()
    assert tables[0] == tables[1]
    assert fast is not None
    assert fast.strict_size is None
    assert "fast: last bits depend on the batch" in _shown(fast)


@pytest.mark.parametrize("engine", ["inline", "thread", "process"])
def test_a_stuck_policy_is_given_up_after_the_time_out(engine: str, tmp_path: Path) -> None:
    begin = time.perf_counter()
    # a process needs some seconds to import torch before it can answer at all
    seconds = 20.0 if engine == "process" else 1.0
    policy = Broken("sleeps", at=2, sign=str(tmp_path / "asked"))
    env = ScriptEnv(3, holds=True)
    with pytest.raises(PolicyError, match=r"expected an answer within .* s, got none; it was asked for") as caught:
        evaluate(env, policy, episodes=9, execute=4, engine=engine, timeout=seconds, progress=False)
    assert isinstance(caught.value.finished, Evaluation)
    assert caught.value.finished.episodes
    assert time.perf_counter() - begin < 50, "the call takes a minute"


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_ctrl_c_on_a_stuck_policy_returns_what_is_finished(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os
    import signal

    monkeypatch.setattr(_engines, "SECONDS_TO_END", 0.2)
    sign = tmp_path / "asked"

    def press() -> None:
        while not sign.exists():
            time.sleep(0.01)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    presses = threading.Thread(target=press)
    presses.start()
    policy = Broken("sleeps", at=2, sign=str(sign))
    found = evaluate(ScriptEnv(3, holds=True), policy, episodes=9, execute=4, engine=engine, progress=False)
    presses.join()
    assert found.status == "interrupted"
    assert found.episodes


def test_a_policy_in_time_is_not_disturbed_by_a_time_out(tmp_path: Path) -> None:
    for engine in ("inline", "thread"):
        policy = SlowStart(str(tmp_path / engine), at=1)
        found = evaluate(ScriptEnv(3), policy, episodes=9, execute=4, engine=engine, timeout=30.0, progress=False)
        assert found.status == "completed"


def test_a_process_keeps_the_policys_traceback() -> None:
    with pytest.raises(PolicyError, match=r"out of memory(.|\n)*in the policy's process:(.|\n)*chunk_policies.py"):
        evaluate(ScriptEnv(3, holds=True), Broken("raises"), episodes=9, execute=4, engine="process", progress=False)


def test_numpy_answers_are_taken() -> None:
    def plan(obs: Obs, context: ChunkContext) -> np.ndarray:
        return Planner(4, 4, check=False)(obs, context).numpy().astype(np.float64)

    plan.horizon, plan.action_dim = 4, 4  # type: ignore[attr-defined]  # as a policy says them
    assert len(evaluate(ScriptEnv(3), plan, episodes=7, execute=4, progress=False).episodes) == 7  # type: ignore[arg-type]
