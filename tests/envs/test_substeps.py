"""The hook per physics substep: the same physics, masked like the rest."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.envs.registry import make
from headrace.errors import ConfigError, UnsupportedError
from headrace.recording import DatasetInfo, EpisodeDataset, EpisodeRecorder, RecorderCfg
from headrace.types import Need, ResetRecord, StepRecord, SubstepRecord


class Watcher:
    def __init__(self, needs: frozenset[Need]) -> None:
        self.needs = needs
        self.substeps: list[SubstepRecord] = []
        self.steps: list[StepRecord] = []
        self.order: list[str] = []

    def after_reset(self, record: ResetRecord) -> None:
        self.order.append("reset")

    def after_substep(self, record: SubstepRecord) -> None:
        self.substeps.append(record)
        self.order.append("substep")

    def after_step(self, record: StepRecord) -> None:
        self.steps.append(record)
        self.order.append("step")


def play(task: str, needs: frozenset[Need] | None, steps: int = 12) -> tuple[list[torch.Tensor], Watcher | None]:
    env = make(task, 5, seed=3, overrides={"episode_length": 7})
    watcher = None if needs is None else Watcher(needs)
    if watcher is not None:
        env.attach(watcher)
    env.reset(seed=3)
    seen = []
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        if step == 4:
            env.suspend([1, 3])
        if step == 8:
            env.resume([3])
        result = env.step(torch.rand((5, *env.single_action_space.shape), generator=generator) * 2 - 1)
        seen += [result.obs["policy"].clone(), result.reward.clone(), env.sim.states(None)]
    env.close()
    return seen, watcher


@pytest.mark.parametrize("task", ["ant", "pusher"])
def test_physics_is_the_same_to_the_last_bit_with_the_hook(task: str) -> None:
    plain, _ = play(task, None)
    watched, watcher = play(task, frozenset({"substeps", "states"}))
    assert watcher is not None
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def test_every_substep_of_those_who_act_is_shown_before_its_step() -> None:
    _, watcher = play("ant", frozenset({"substeps", "states"}))
    assert watcher is not None
    count = watcher.substeps[0].count
    assert count == 5
    assert watcher.order[: 1 + 2 * (count + 1)] == ["reset", *(["substep"] * count + ["step"]) * 2]
    for number, step in enumerate(watcher.steps):
        records = watcher.substeps[number * count : (number + 1) * count]
        assert [record.index for record in records] == list(range(count))
        for record in records:
            assert torch.equal(record.env_ids, step.env_ids)
            assert torch.equal(record.episode_ids, step.episode_ids)
        assert torch.equal(records[-1].states, step.states)
        assert not torch.equal(records[0].states, records[1].states)
    acting = [step.env_ids.tolist() for step in watcher.steps]
    assert acting[3] == [0, 1, 2, 3, 4]
    assert acting[4] == [0, 2, 4]
    assert acting[8] == [0, 2, 3, 4]


def test_an_observer_that_does_not_ask_sees_none() -> None:
    _, watcher = play("ant", frozenset({"states"}), steps=2)
    assert watcher is not None
    assert watcher.substeps == []


def test_substeps_are_recorded_whoever_is_suspended(tmp_path) -> None:
    def record(path, suspended: bool) -> None:
        env = make("ant", 3, overrides={"episode_length": 6})
        cfg = RecorderCfg(fields=("actions", "states", "substeps"))
        with EpisodeRecorder(path, cfg, DatasetInfo.of(env)) as recorder:
            env.attach(recorder)
            env.reset(seed=2)
            taken = torch.zeros(3, dtype=torch.int64)
            turn = 0
            while bool((taken < 6).any()):
                active = taken < 6
                if suspended:
                    active &= torch.arange(3) % 2 == turn % 2
                turn += 1
                env.suspend(~active)
                env.resume(active)
                env.step(torch.sin(taken.to(torch.float32)[:, None] * torch.arange(1, 9)))
                taken += active
        env.close()

    record(tmp_path / "plain", suspended=False)
    record(tmp_path / "masked", suspended=True)
    for one, other in zip(EpisodeDataset(tmp_path / "plain"), EpisodeDataset(tmp_path / "masked"), strict=True):
        assert one.entry.directory_sha256 == other.entry.directory_sha256
        states, substeps = one.read("states"), one.read("substeps")
        assert substeps.shape == (6, 5, states.shape[1])
        np.testing.assert_array_equal(substeps[:, -1], states[1:])


def test_an_observer_without_the_method_is_refused() -> None:
    class Deaf:
        needs: frozenset[Need] = frozenset({"substeps"})

        def after_reset(self, record: ResetRecord) -> None:
            """Nothing."""

        def after_step(self, record: StepRecord) -> None:
            """Nothing."""

    env = make("cartpole", 1)
    with pytest.raises(ConfigError, match="no method after_substep"):
        env.attach(Deaf())
    env.close()


def test_a_bridged_environment_refuses_the_hook() -> None:
    from headrace import bridge

    env = bridge("CartPole-v1", 1)
    with pytest.raises(UnsupportedError, match="does not show"):
        env.attach(Watcher(frozenset({"substeps"})))
    env.close()
