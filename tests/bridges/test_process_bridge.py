"""Worker processes: the same numbers, clear errors, nobody left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from test_native_bridge import _episodes
from toy_envs import DictEnv, PlainEnv

from headrace.bridges import BridgeEnv
from headrace.bridges.make import bridge
from headrace.errors import ConfigError, EnvError, LifecycleError, UnsupportedError


def _pids(env: BridgeEnv) -> list[int]:
    backend: Any = env.backend
    return backend.pids


def _gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) for pid in pids)


def test_episodes_in_workers_are_those_of_one_thread_and_close_leaves_nobody() -> None:
    wanted = set(range(6))
    reference = _episodes(bridge([DictEnv] * 6, seed=5), wanted, None)
    env = bridge([DictEnv] * 3, seed=5, executor="processes", workers=2)
    pids = _pids(env)
    assert len(pids) == 2
    assert _episodes(env, wanted, np.random.default_rng(1)) == reference
    assert _gone(pids)


def test_a_snapshot_crosses_from_workers_to_one_thread() -> None:
    env, other = bridge([DictEnv] * 2, seed=4, executor="processes", workers=1), bridge([DictEnv] * 2)
    env.reset()
    env.step(torch.ones(2, 2))
    other.load_state_dict(env.state_dict())
    env.load_state_dict(other.state_dict())
    for _ in range(20):
        ours, theirs = env.step(torch.ones(2, 2)), other.step(torch.ones(2, 2))
        assert torch.equal(ours.obs["policy"], theirs.obs["policy"])
    env.close()
    other.close()


@pytest.mark.slow
def test_a_killed_worker_is_an_error_at_once_and_the_others_are_ended() -> None:
    env = bridge([PlainEnv] * 4, executor="processes", workers=2)
    pids = _pids(env)
    env.reset()
    env.step(torch.zeros(4, dtype=torch.int64))
    os.kill(pids[1], signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(EnvError, match=r"environments 1, 3 was ended by signal 9 \(SIGKILL\) during step"):
        env.step(torch.zeros(4, dtype=torch.int64))
    # generous: joining a dead process and closing its neighbor takes milliseconds
    assert time.monotonic() - started < 20
    assert _gone(pids)
    with pytest.raises(LifecycleError):
        env.step(torch.zeros(4, dtype=torch.int64))
    with pytest.raises(LifecycleError):
        env.reset()
    env.close()


def test_a_worker_that_dies_in_the_middle_of_a_step_and_one_that_raises_are_told_apart() -> None:
    env = bridge([lambda: PlainEnv(raise_at=1), lambda: PlainEnv(die_at=2)], executor="processes", workers=2)
    pids = _pids(env)
    env.reset()
    with pytest.raises(EnvError, match=r"environment 0 raised ValueError in step: the gripper is stuck[\s\S]*toy_envs"):
        env.step(torch.zeros(2, dtype=torch.int64))
    env.reset()
    env.suspend([0])
    env.step(torch.zeros(2, dtype=torch.int64))
    with pytest.raises(EnvError, match="SIGKILL"):
        env.step(torch.zeros(2, dtype=torch.int64))
    assert _gone(pids)
    for call in (lambda: env.step(torch.zeros(2, dtype=torch.int64)), env.observe, env.reset):
        with pytest.raises(LifecycleError, match=r"SIGKILL|its workers are gone") as caught:
            call()
        assert "before reset" not in str(caught.value)


def _explode() -> Any:
    raise OSError("no such robot")


def test_a_factory_that_raises_in_a_worker_is_heard_and_leaves_nobody() -> None:
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(EnvError, match="no such robot"):
        bridge([PlainEnv, _explode], executor="processes", workers=1)
    left = [child for child in psutil.Process().children() if child.pid not in before]
    # the interpreter's own tracker of shared resources may have been started by the first worker
    assert all("resource_tracker" in " ".join(child.cmdline()) for child in left)


@pytest.mark.slow
def test_environments_of_two_kinds_are_refused_in_workers() -> None:
    with pytest.raises(ConfigError, match="expected one kind"):
        bridge([PlainEnv, DictEnv], executor="processes", workers=2)


@pytest.mark.slow
def test_a_worker_that_does_not_close_is_ended() -> None:
    parent = os.getpid()
    env = bridge([lambda: PlainEnv(stuck_close=os.getpid() != parent)], executor="processes")
    pids = _pids(env)
    env.reset()
    env.close()
    assert _gone(pids)


@pytest.mark.slow
def test_snapshots_that_cannot_be_had_keep_their_error_across_the_pipe() -> None:
    env = bridge([_Holder], executor="processes")
    env.reset()
    with pytest.raises(UnsupportedError, match=r"_Holder\.handle"):
        env.state_dict()
    env.close()


class _Holder(PlainEnv):
    handle: Any = None

    def reset(self, **kwargs: Any) -> Any:
        self.handle = self.handle or open(os.devnull)  # noqa: SIM115  (something that does not pickle)
        return super().reset(**kwargs)

    def close(self) -> None:
        if self.handle is not None:
            self.handle.close()


def test_a_worker_imports_what_it_needs_and_no_more() -> None:
    program = (
        "import sys, headrace.bridges.executors; "
        "print([name for name in ('torch', 'mujoco', 'numba') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_neighbors_are_dealt_out_to_all_workers_and_saved_in_order() -> None:
    env, alone = bridge("CartPole-v1", 5, executor="processes", workers=2), bridge("CartPole-v1", 5)
    env.reset(seed=1)
    alone.reset(seed=2)
    assert [list(worker.env_ids) for worker in env.backend.workers] == [[0, 2, 4], [1, 3]]
    alone.load_state_dict(env.state_dict())
    actions = torch.tensor([0, 1, 1, 0, 1])
    assert torch.equal(env.step(actions).obs["policy"], alone.step(actions).obs["policy"])
    env.close()
