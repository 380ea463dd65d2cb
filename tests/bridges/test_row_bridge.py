"""Batched simulators of the row protocol: suspension, seeds and devices, in this process and in another interpreter."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flat import evaluate
from headrace.bridges import BridgeEnv
from headrace.bridges.interpreter import CHILD_FILE
from headrace.bridges.make import bridge
from headrace.errors import ConfigError, EnvError, ShapeError
from headrace.evaluation import Evaluation
from headrace.policies import as_chunk_policy
from headrace.recording import DatasetInfo, EpisodeDataset, EpisodeRecorder, RecorderCfg
from headrace.testing import check_env
from pretend_cuda import pretend_cuda

sys.path.insert(0, str(Path(__file__).parent / "foreign"))
import toy_rows

TOY = Path(__file__).parent / "foreign" / "toy_rows.py"
EVERYTHING: set[str] = set()


def _not_claimed(make_sim: Callable[..., Any], **settings: Any) -> set[str]:
    def make(num_envs: int, **more: Any) -> BridgeEnv:
        return bridge(make_sim(num_envs), **more)

    return {result.check for result in check_env(make, sizes=(1, 7), steps=12, **settings) if result.not_claimed}


def _foreign(name: str, num_envs: int = 3, **settings: Any) -> BridgeEnv:
    settings = {"workers": 1} | settings
    return bridge(python=sys.executable, entry=f"{TOY}:{name}", num_envs=num_envs, **settings)


@pytest.mark.parametrize("kind", [toy_rows.SavedRows, toy_rows.SelectedRows, toy_rows.torch_rows])
def test_rows_that_are_put_back_or_selected_keep_the_whole_contract(kind: Any) -> None:
    assert _not_claimed(kind) == EVERYTHING


def test_rows_without_identity_keep_all_that_they_claim() -> None:
    not_claimed = _not_claimed(toy_rows.UnseededRows)
    assert not_claimed == {"episodes_do_not_depend_on_the_batch", "autoreset"}


def test_state_that_is_not_saved_is_found_by_the_checks() -> None:
    with pytest.raises(AssertionError, match=r"with suspensions|after a pause"):
        _not_claimed(toy_rows.ForgetfulRows, skip=("suspend_is_exact",))


def test_a_step_saves_and_restores_in_one_call_each_and_only_when_somebody_rests() -> None:
    sim = toy_rows.SavedRows(5)
    env = bridge(sim, seed=2)
    assert env.fidelity == "restore"
    env.reset()
    sim.calls.clear()
    env.step(torch.zeros(5, 2))
    assert sim.calls == ["step"]
    env.suspend([1, 3])
    sim.calls.clear()
    env.step(torch.zeros(5, 2))
    assert sim.calls == ["save", "step", "restore"]
    env.step(torch.zeros(5, 2))
    # who rests is where it was: nothing to save again
    assert sim.calls == ["save", "step", "restore", "step", "restore"]
    env.close()
    assert sim.calls[-1] == "close"


def test_a_simulator_that_selects_is_never_put_back() -> None:
    sim = toy_rows.SelectedRows(4)
    env = bridge(sim, seed=2)
    assert env.fidelity == "native"
    env.reset()
    env.suspend([0])
    sim.calls.clear()
    env.step(torch.zeros(4, 2))
    assert sim.calls == ["step_rows"]


def test_some_rows_start_in_one_call_and_their_neighbors_do_not_notice() -> None:
    sim = toy_rows.SavedRows(4)
    env = bridge(sim, autoreset="disabled")
    env.reset()
    before = {name: values.copy() for name, values in sim.state.items()}
    sim.calls.clear()
    env.reset(options={"reset_mask": torch.tensor([True, False, True, False]), "episode_ids": torch.tensor([70, 71])})
    assert sim.calls == ["reset 2"]
    for name, values in before.items():
        assert np.array_equal(sim.state[name][[1, 3]], values[[1, 3]])
    assert env.instructions()[0].startswith("walk ")


def test_tensors_stay_where_the_simulator_has_them() -> None:
    sim = toy_rows.torch_rows(3)
    env = bridge(sim)
    obs, _ = env.reset()
    step = env.step(torch.zeros(3, 2))
    assert isinstance(sim.seen[0], torch.Tensor)
    assert {values.device for values in (*obs.values(), *step.obs.values(), step.reward)} == {torch.device("cpu")}
    assert env.device == torch.device("cpu")
    # what the caller has is no view of the simulator's memory
    step.obs["policy"].fill_(7.0)
    assert not (sim.state["place"] == 7.0).any()


def test_rows_on_a_gpu_stay_there_and_play_the_same_episodes() -> None:
    def played(device: str) -> list[dict[str, torch.Tensor]]:
        env = bridge(toy_rows.torch_rows(4, device=device), seed=5)
        obs, _ = env.reset()
        assert env.device.type == device
        seen = [dict(obs)]
        for k in range(16):
            if k == 3:
                env.suspend([1, 2])
            if k == 9:
                env.resume([2])
            step = env.step(torch.full((4, 2), 0.1 * k, device=device))
            found = {"reward": step.reward, "ended": step.terminated | step.truncated, **step.obs}
            if "ends" in step.info:
                found |= step.info["final_obs"] | {"ids": step.info["ends"].episode_ids}
            assert {values.device.type for values in found.values()} == {device}
            seen.append(found)
        assert {values.device.type for values in env.observe([0, 3]).values()} == {device}
        saved = env.state_dict()["sim"]["envs"][0]["saved"]
        assert {values.device.type for values in saved.values()} == {device}
        env.load_state_dict(env.state_dict())
        env.close()
        return [{name: values.cpu() for name, values in found.items()} for found in seen]

    expected = played("cpu")
    with pretend_cuda():
        got = played("cuda")
        for ours, theirs in zip(got, expected, strict=True):
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_success_and_time_outs_are_told_apart() -> None:
    env = bridge(toy_rows.SavedRows(8), autoreset="disabled")
    env.reset()
    terminated = truncated = 0
    for _ in range(14):
        step = env.step(torch.zeros(8, 2))
        terminated, truncated = terminated + int(step.terminated.sum()), truncated + int(step.truncated.sum())
        if "ends" in step.info:
            assert step.info["ends"].success is not None
            reached = env.observe(step.info["ends"].env_ids)["policy"][:, 0] > 0
            assert step.info["ends"].success.tolist() == reached.tolist()
    assert truncated > 0
    assert terminated + truncated == 8


@pytest.mark.parametrize("name", ["SavedRows", "SelectedRows", "torch_rows"])
def test_a_batch_in_another_interpreter_gives_the_same_episodes(name: str) -> None:
    wanted = set(range(7))
    here = _episodes(bridge(getattr(toy_rows, name)(7), seed=5), wanted, None)
    for workers, pauses in ((1, None), (2, np.random.default_rng(3))):
        there = _foreign(name, 4, seed=5, workers=workers)
        assert (there.fidelity, there.reseeds) == ("native" if name == "SelectedRows" else "restore", True)
        assert _episodes(there, wanted, pauses) == here


def test_a_batch_in_another_interpreter_keeps_the_whole_contract() -> None:
    def make(num_envs: int, **more: Any) -> BridgeEnv:
        return _foreign("SavedRows", num_envs, **more)

    assert {result.check for result in check_env(make, sizes=(1, 3), steps=8) if result.not_claimed} == set()


def test_what_a_simulator_in_another_interpreter_cannot_do_is_reported() -> None:
    env = _foreign("UnseededRows")
    assert (env.fidelity, env.reseeds) == ("native", False)
    env.close()


def _episodes(env: BridgeEnv, wanted: set[int], pauses: np.random.Generator | None) -> dict[int, Any]:
    """Every observation and reward of some episodes, under actions that are a function of episode and step."""
    env.reset()
    steps: dict[int, list[Any]] = {}
    done: dict[int, Any] = {}
    while not wanted <= done.keys():
        ids = env.episode_ids.tolist()
        turn = [len(steps.get(id, ())) for id in ids]
        actions = torch.tensor([[np.sin(id + t), np.cos(3.0 * id - t)] for id, t in zip(ids, turn, strict=True)])
        if pauses is not None:
            resting = pauses.random(env.num_envs) < 0.4
            env.resume(torch.from_numpy(~resting))
            env.suspend(torch.from_numpy(resting))
        acting = env.active
        step = env.step(actions.float())
        final, ended = step.info.get("final_obs", step.obs), step.terminated | step.truncated
        for i in torch.nonzero(acting).flatten().tolist():
            source = final if ended[i] else step.obs
            seen = {group: rows[i].numpy().tobytes() for group, rows in source.items()}
            steps.setdefault(ids[i], []).append((seen, float(step.reward[i])))
            if ended[i]:
                done[ids[i]] = steps[ids[i]]
    env.close()
    return {id: done[id] for id in wanted}


def _chunks(obs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Four actions from the last two observations."""
    stacked = obs["policy"]
    push = torch.tanh(stacked[:, -1, :2] - 0.5 * stacked[:, 0, :2])
    return push[:, None, :] * torch.tensor([1.0, 0.5, 0.25, 0.1])[None, :, None]


def _evaluated(env: Any, **settings: Any) -> Evaluation:
    policy = as_chunk_policy(_chunks, horizon=4, action_dim=2, obs_steps=2)
    try:
        return evaluate(env, policy, episodes=9, execute=3, progress=False, **settings)
    finally:
        env.close()


@pytest.mark.parametrize("kind", [toy_rows.SavedRows, toy_rows.SelectedRows, toy_rows.torch_rows])
def test_a_strict_table_does_not_depend_on_the_number_of_rows(kind: Any) -> None:
    tables = [_evaluated(bridge(kind(count), autoreset="disabled")) for count in (1, 4, 9)]
    assert tables[0].episodes == tables[1].episodes == tables[2].episodes
    assert tables[0].fidelity == ("native" if kind is toy_rows.SelectedRows else "restore")
    assert tables[1].counters.idle_steps > 0
    assert tables[0].seeded


def test_evaluate_refuses_what_a_simulator_cannot_do_right(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it has no save_rows, restore_rows"):
        bridge(toy_rows.NumpyRows(4), autoreset="disabled")
    with pytest.raises(ConfigError, match="batching='fast'"):
        _evaluated(bridge(toy_rows.UnseededRows(4), autoreset="disabled"))
    with pytest.raises(ConfigError, match="resumed or merged"):
        _evaluated(
            bridge(toy_rows.UnseededRows(4), autoreset="disabled"), batching="fast", journal=tmp_path / "j.jsonl"
        )
    sample = _evaluated(bridge(toy_rows.UnseededRows(4), autoreset="disabled"), batching="fast")
    assert not sample.seeded
    assert len(sample.episodes) == 9
    sample.save(tmp_path / "sample.json")
    assert Evaluation.load(tmp_path / "sample.json") == sample


def test_recording_sees_whole_episodes_of_rows(tmp_path: Path) -> None:
    env = bridge(toy_rows.SavedRows(3), autoreset="disabled")
    with EpisodeRecorder(tmp_path / "data", RecorderCfg(fields=("obs", "actions")), DatasetInfo.of(env)) as recorder:
        env.attach(recorder)
        result = evaluate(
            env, as_chunk_policy(_chunks, horizon=4, action_dim=2, obs_steps=2), episodes=4, execute=3, progress=False
        )
    env.close()
    lengths = {row.episode_id: row.length for row in result.episodes}
    dataset = EpisodeDataset(tmp_path / "data")
    assert {episode.meta.episode_id: episode.meta.length for episode in dataset} == lengths


def test_settings_that_belong_to_single_environments_are_refused() -> None:
    sim = toy_rows.SavedRows(2)
    for name, value in (("num_envs", 2), ("executor", "threads"), ("workers", 2), ("env_kwargs", {"ends_at": 3})):
        with pytest.raises(ConfigError, match=name):
            bridge(sim, **{name: value})


def test_half_a_protocol_is_refused() -> None:
    class OnlySaves(toy_rows.NumpyRows):
        def save_rows(self, mask: Any) -> Any: ...

    with pytest.raises(ConfigError, match="restore_rows"):
        bridge(OnlySaves(2))

    class NoStep:
        num_envs = 2
        observation_space = action_space = None

        def reset_rows(self, ids: Any, seeds: Any) -> Any: ...

    with pytest.raises(ConfigError, match="step"):
        bridge(NoStep())  # type: ignore[arg-type]  # what is refused


def test_bad_answers_of_a_simulator_are_named() -> None:
    class Short(toy_rows.SavedRows):
        def step(self, actions: Any) -> Any:
            obs, reward, *others = super().step(actions)
            return {**obs, "policy": obs["policy"][:1]}, reward, *others

    env = bridge(Short(3))
    env.reset()
    with pytest.raises(ShapeError, match=r"'policy': expected shape \(3, 3\), got \(1, 3\)"):
        env.step(torch.zeros(3, 2))

    class Breaks(toy_rows.SavedRows):
        def step(self, actions: Any) -> Any:
            raise OSError("the cable is loose")

    env = bridge(Breaks(2))
    env.reset()
    with pytest.raises(EnvError, match="the cable is loose"):
        env.step(torch.zeros(2, 2))
    env.reset()


def test_rows_that_diverge_end_and_their_neighbors_go_on() -> None:
    class Explodes(toy_rows.SavedRows):
        def step(self, actions: Any) -> Any:
            obs, reward, *others = super().step(actions)
            if self.state["count"][1] == 3:
                obs["policy"][1] = np.nan
            return obs, reward, *others

    env = bridge(Explodes(3))
    env.reset()
    for _ in range(3):
        step = env.step(torch.zeros(3, 2))
    assert step.info["ends"].env_ids.tolist() == [1]
    assert step.info["ends"].diverged.tolist() == [True]
    assert torch.isfinite(step.info["final_obs"]["policy"]).all()
    assert not step.terminated.any()


def test_a_batch_at_an_address_gives_the_same_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_TOKEN", "secret")
    command = [sys.executable, str(CHILD_FILE), "--listen", "127.0.0.1:0", "--entry", f"{TOY}:SavedRows", "--once"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        port = child.stdout.readline().split()[-1]
        env = bridge(address=f"tcp://127.0.0.1:{port}", num_envs=3, seed=5)
        assert env.fidelity == "restore"
        wanted = set(range(5))
        there = _episodes(env, wanted, np.random.default_rng(1))
        assert there == _episodes(bridge(toy_rows.SavedRows(5), seed=5), wanted, None)
        child.wait(10)
    finally:
        child.kill()
        child.communicate()


def test_an_entry_that_takes_num_envs_must_give_a_batch() -> None:
    with pytest.raises(ConfigError, match="reset_rows"):
        _foreign("no_rows")
    with pytest.raises(ConfigError, match="expected a simulator of 3 rows, got 1"):
        _foreign("one_row")
