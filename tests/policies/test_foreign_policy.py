"""Policies in another interpreter: equal tables and identity, its faults in our errors, and no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import foreign_policies
import pytest

import headrace
from headrace.errors import ConfigError, PolicyError
from headrace.evaluation import Evaluation, PlayCfg
from headrace.policies import ObservationMap

HERE = Path(__file__).parent
MODULE = "foreign_policies"


@pytest.fixture(autouse=True)
def found_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))


def named(policy: str) -> str:
    return f"python:{sys.executable}:{MODULE}:{policy}"


def play(policy: object, num_envs: int, **play: object) -> Evaluation:
    return headrace.evaluate(
        "cartpole-camera",
        policy,  # type: ignore[arg-type]  # anything
        episodes=5,
        num_envs=num_envs,
        overrides={"episode_length": 18},
        play=PlayCfg(**play),  # type: ignore[arg-type]  # fields by name
        progress=False,
    )


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_the_table_and_its_identity_are_those_of_the_same_policy_in_this_process(tmp_path: Path) -> None:
    mapping = ObservationMap(keys={"policy": "policy"}, negated=(0,))
    there = headrace.evaluate(
        "cartpole-camera",
        named("Seeing"),
        episodes=5,
        num_envs=3,
        overrides={"episode_length": 18},
        play=PlayCfg(mapping=mapping),
        journal=tmp_path / "journal",
        progress=False,
    )
    here = headrace.evaluate(
        "cartpole-camera",
        foreign_policies.Seeing(),
        episodes=5,
        num_envs=1,
        overrides={"episode_length": 18},
        play=PlayCfg(mapping=mapping),
        journal=tmp_path / "here",
        progress=False,
    )
    assert there.episodes == here.episodes
    assert there.identity == here.identity
    assert there.counters.rows_verified >= 8
    assert (there.strict_size, here.strict_size) == (1, 1)


def test_memory_is_told_of_ends_and_a_hidden_generator_is_caught_over_there() -> None:
    assert play(named("Remembers"), 2).episodes == play(foreign_policies.Remembers(), 3).episodes
    with pytest.raises(PolicyError, match="draws from torch's global random generator"):
        play(named("Draws"), 2)


def test_what_it_raises_and_prints_is_in_our_error_and_bad_names_are_refused() -> None:
    with pytest.raises(
        PolicyError, match=r"raised ValueError: no such action(.|\n)*in the policy's interpreter"
    ) as failed:
        play(named("Fails"), 2)
    assert failed.value.finished is not None
    with pytest.raises(PolicyError, match=r"ended with exit code 3, after printing:\nthe model ran out of luck"):
        play(named("Exits"), 2)
    with pytest.raises(ConfigError, match="foreign_policies for --policy: 'Missing'"):
        play(named("Missing"), 1)
    with pytest.raises(ConfigError, match="expected the path of a Python interpreter, got '/nowhere'"):
        play("python:/nowhere:module:name", 1)
    with pytest.raises(ConfigError, match="expected python:PATH/bin/python:module:name"):
        play("python:module", 1)
    with pytest.raises(ConfigError, match="engine: expected none with"):
        play(named("Seeing"), 1, engine="thread")


def test_a_killed_interpreter_and_a_late_answer_are_errors() -> None:
    env = headrace.make("cartpole-camera", 2, autoreset="disabled", final_obs=False)
    policy = headrace.load_policy(named("Seeing"), env)
    engine = policy.engine  # type: ignore[attr-defined]  # as of a server's policy
    with closing(engine):
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(PolicyError, match=r"was ended by signal 9 \(SIGKILL\) while it was asked for environments"):
            headrace.evaluate(env, policy, episodes=2, progress=False)
    with pytest.raises(PolicyError, match=r"expected an answer within 0\.5 s"):
        play(named("Sleeps"), 1, timeout=0.5)


def test_kill_9_of_this_process_ends_the_interpreter_also_in_the_middle_of_a_call() -> None:
    program = f"""
import headrace
from headrace.policies.engines import Request
from headrace.policies.protocol import one_row
env = headrace.make("cartpole-camera", 1, autoreset="disabled", final_obs=False)
policy = headrace.load_policy({named("Sleeps")!r}, env)
env.reset()
policy.engine.submit(Request(obs=env.observe([0]), context=one_row("", chunk_index=1, size=(6, 1))))
print(policy.engine.pid, flush=True)
input()
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert not gone(child)
    parent.kill()
    parent.communicate()
    until(lambda: gone(child), "the interpreter outlived its parent")
