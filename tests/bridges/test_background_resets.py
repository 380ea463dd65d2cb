"""Background resets: others step meanwhile, and every episode is the one of a reset that everyone waits for."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_native_bridge import _episodes
from torch import Tensor, nn
from toy_envs import DictEnv, PlainEnv

from flat import evaluate
from headrace.bridges import BridgeEnv
from headrace.bridges.make import bridge
from headrace.errors import EnvError, LifecycleError, UnsupportedError
from headrace.evaluation import Evaluation
from headrace.policies import as_chunk_policy
from headrace.policies.protocol import ChunkContext
from headrace.recording import DatasetInfo, EpisodeDataset, EpisodeRecorder
from headrace.types import Obs

TOY = Path(__file__).parent / "foreign" / "toy_simulator.py"
EXECUTORS: dict[str, dict[str, Any]] = {
    "threads": {"executor": "threads", "workers": 2},
    "one process": {"executor": "processes", "workers": 1},
    "two processes": {"executor": "processes", "workers": 2},
}


class SlowReset(DictEnv):
    """A reset takes up to 20 ms, depending on the episode; may fail, or end its process, in the second one."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault, self.resets = fault, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        assert seed is not None
        self.resets += 1
        if self.fault and self.resets == 2:
            if self.fault == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("the scene is gone")
        time.sleep((seed % 5) * 0.005)
        return super().reset(seed=seed)


class Gated(PlainEnv):
    """Its second reset waits until a neighbor has taken so many steps: for ever, if nobody steps meanwhile."""

    steps = 0
    resets = 0
    moved = threading.Event()

    def __init__(self, *, waits: bool) -> None:
        super().__init__(length=2 if waits else 2000)  # long enough on a busy machine
        self.waits = waits

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.resets += 1
        if self.waits and self.resets > 1 and not Gated.moved.wait(60.0):
            raise TimeoutError("nobody stepped during the reset")
        return super().reset(seed=seed)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not self.waits and self.count > 20:
            Gated.moved.set()
        return super().step(action)


class Planner(nn.Module):
    """Plans from observation and noise through a layer whose bits depend on the batch."""

    action_dim, obs_steps = 2, 1

    def __init__(self, horizon: int, obs_steps: int = 1) -> None:
        super().__init__()
        self.horizon, self.obs_steps = horizon, obs_steps
        torch.manual_seed(1)
        self.layer = nn.Linear(3 * obs_steps, 2 * horizon)

    def forward(self, obs: Obs, context: ChunkContext) -> Tensor:
        planned = self.layer(obs["policy"].flatten(1)).view(-1, self.horizon, 2)
        return torch.tanh(planned + context.noise(self.horizon, 2))


def _table(env: BridgeEnv, policy: Planner, episodes: int = 17, **more: Any) -> Evaluation:
    settings: dict[str, Any] = {"execute": policy.horizon, "progress": False, **more}
    return evaluate(env, as_chunk_policy(policy), episodes=episodes, seed=3, **settings)


@pytest.mark.parametrize(
    ("executor", "horizon", "obs_steps"),
    [
        ("threads", 1, 1),
        ("threads", 3, 1),
        ("threads", 3, 2),
        ("one process", 3, 1),
        ("two processes", 1, 1),
        ("two processes", 3, 2),
    ],
)
def test_tables_are_those_of_resets_that_everyone_waits_for(executor: str, horizon: int, obs_steps: int) -> None:
    policy = Planner(horizon, obs_steps)
    reference = bridge([SlowReset] * 4, autoreset="disabled")
    assert not reference.overlaps_resets
    expected = _table(reference, policy).episodes
    env = bridge([SlowReset] * 4, autoreset="disabled", **EXECUTORS[executor])
    found = [_table(env, policy) for _ in range(2)]  # once more, with what the first left behind
    assert env.overlaps_resets
    env.close()
    for each in found:
        assert each.episodes == expected
        assert each.counters.env_steps == sum(row.length for row in expected)
    if executor != "one process":  # whose other environments cannot act either
        assert found[0].counters.idle_steps > 0


def test_tables_of_other_interpreters_and_thread_engines_are_the_same() -> None:
    policy = Planner(3)
    where = {"python": sys.executable, "entry": f"{TOY}:SlowStart", "autoreset": "disabled"}
    tables = []
    for count, workers, engine in ((1, 1, "inline"), (3, 3, "inline"), (4, 2, "thread")):
        env = bridge(num_envs=count, workers=workers, **where)
        tables.append(_table(env, policy, 11, engine=engine).episodes)
        env.close()
    assert tables[0] == tables[1] == tables[2]
    assert tables[0][0].instruction.startswith("walk for")


def test_others_step_while_one_is_reset() -> None:
    Gated.moved.clear()
    makers = [functools.partial(Gated, waits=waits) for waits in (True, False)]
    env = bridge(makers, autoreset="disabled", executor="threads", workers=1)
    policy = as_chunk_policy(lambda obs: torch.zeros(len(obs["policy"]), 2, 1), horizon=2, action_dim=1)
    found = evaluate(env, policy, episodes=4, execute=2, progress=False)
    assert sorted(row.length for row in found.episodes) == [2, 2, 2, 2000]
    env.close()


def test_recordings_have_the_same_episodes(tmp_path: Path) -> None:
    contents = []
    for name, more in {"inline": {}, "threads": EXECUTORS["threads"]}.items():
        env = bridge([SlowReset] * 3, autoreset="disabled", **more)
        with EpisodeRecorder(tmp_path / name, info=DatasetInfo.of(env)) as recorder:
            env.attach(recorder)
            _table(env, Planner(3), 9)
        env.close()
        dataset = EpisodeDataset(tmp_path / name)
        contents.append(
            {each.meta.episode_id: {key: each.read(key).tobytes() for key in each.names} for each in dataset}
        )
    assert sorted(contents[0]) == list(range(9))
    assert all(content == contents[0] for content in contents)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_an_environment_is_inactive_until_it_is_taken_and_then_as_after_reset(executor: str) -> None:
    env, reference = (
        bridge([SlowReset] * 4, seed=7, autoreset="disabled", **more) for more in (EXECUTORS[executor], {})
    )
    mask = torch.tensor([True, False, True, False])
    options: dict[str, object] = {"reset_mask": mask, "episode_ids": torch.tensor([40, 50])}
    for one in (env, reference):
        one.reset()
        one.step(torch.ones(4, 2))
    shown = env.observe()["policy"]
    env.begin_reset(options)
    assert env.active.tolist() == [False, True, False, True]
    assert torch.equal(env.observe()["policy"], shown)
    if executor == "one process":
        assert env.resetting.all()
    for call in (lambda: env.begin_reset(options), lambda: env.reset(options={"reset_mask": mask}), env.state_dict):
        with pytest.raises(LifecycleError, match=r"environments \[0, 2\] are being reset; call finish_resets"):
            call()
    ready: list[int] = []
    while len(ready) < 2:
        ready += env.finish_resets(None).tolist()
    assert sorted(ready) == [0, 2]
    assert env.finish_resets(None).tolist() == []  # nothing is under way
    assert not env.resetting.any()
    reference.reset(options=options)
    assert env.episode_ids.tolist() == reference.episode_ids.tolist()
    for _ in range(4):
        ours, theirs = env.step(torch.ones(4, 2)), reference.step(torch.ones(4, 2))
        assert torch.equal(ours.obs["policy"], theirs.obs["policy"])
    env.close()


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_step_of_everyone_and_a_reset_of_all_wait_for_what_is_under_way(executor: str) -> None:
    wanted = set(range(5, 11))  # those after 2, 3 and 4
    expected = _episodes(bridge([DictEnv] * 6, seed=5), wanted, None)
    env = bridge([SlowReset] * 3, seed=5, **EXECUTORS[executor])
    env.reset()
    env.begin_reset({"reset_mask": torch.tensor([False, True, False])})
    assert env.step(torch.ones(3, 2)).reward[1] == 0  # it is not stepped
    env.begin_reset({"reset_mask": torch.tensor([True, False, False])})
    assert _episodes(env, wanted, np.random.default_rng(1)) == expected  # begins with a reset of all


def test_what_a_reset_raises_ends_the_evaluation_with_what_is_finished() -> None:
    for more in (EXECUTORS["threads"], EXECUTORS["two processes"]):
        env = bridge([functools.partial(SlowReset, fault="raise"), SlowReset], autoreset="disabled", **more)
        with pytest.raises(EnvError, match="OSError in reset: the scene is gone") as caught:
            _table(env, Planner(3))
        assert isinstance(caught.value.finished, Evaluation)
        assert caught.value.finished.episodes
        with pytest.raises(LifecycleError, match="failed halfway"):
            env.finish_resets()
        env.reset()  # the third is fine
        env.step(torch.ones(2, 2))
        env.close()


def test_a_process_that_dies_in_a_reset_is_an_error_at_once() -> None:
    env = bridge([functools.partial(SlowReset, fault="die")] * 2, autoreset="disabled", executor="processes", workers=2)
    with pytest.raises(EnvError, match=r"was ended by signal 9 \(SIGKILL\) during reset"):
        _table(env, Planner(3))
    env.close()


def test_a_reset_that_hangs_in_another_interpreter_has_a_time_limit() -> None:
    env = bridge(
        num_envs=2,
        workers=2,
        python=sys.executable,
        entry=f"{TOY}:SlowStart",
        env_kwargs={"hang": True},
        autoreset="disabled",
        timeout=1.0,
    )
    begun = time.monotonic()
    with pytest.raises(EnvError, match="gave no answer to reset within 1 s"):
        _table(env, Planner(3))
    assert time.monotonic() - begun < 30.0
    env.close()


def test_ctrl_c_during_a_reset_gives_what_is_finished() -> None:
    env = bridge([SlowReset] * 2, autoreset="disabled", executor="threads", workers=2)

    def press(rows: object) -> None:
        threading.Timer(0.002, os.kill, (os.getpid(), signal.SIGINT)).start()

    found = _table(env, Planner(3), 60, on_episodes=press)
    assert found.status == "interrupted"
    assert found.episodes
    again = _table(env, Planner(3), 5)
    assert again.episodes == _table(bridge([DictEnv] * 2, autoreset="disabled"), Planner(3), 5).episodes
    env.close()


def test_batches_that_decide_last_bits_wait_for_resets_so_that_a_run_repeats() -> None:
    tables = []
    for executor in ("inline", "threads", "threads"):
        env = bridge([SlowReset] * 3, autoreset="disabled", executor=executor)
        found = _table(env, Planner(3), batching="fast")
        tables.append((found.episodes, found.counters.batch_steps, found.counters.idle_steps))
        env.close()
    assert tables[0] == tables[1] == tables[2]


def test_environments_that_are_reset_where_they_are_stepped_say_so() -> None:
    env = bridge([DictEnv] * 2, autoreset="disabled")
    env.reset()
    with pytest.raises(UnsupportedError, match=r'begin_reset: .*executor="threads"'):
        env.begin_reset()
    assert env.finish_resets(None).tolist() == []
