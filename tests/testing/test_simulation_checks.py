"""The check of simulations fails on each way to break the protocol."""

from __future__ import annotations

import pytest
import torch

from headrace.envs.registry import make_task
from headrace.sim import MujocoSim
from headrace.testing import Tolerance, check_simulation

MODEL = make_task("inverted-pendulum").model


class StepsEverybody(MujocoSim):
    def step(self, ids, substeps):
        return super().step(None, substeps)


class RefreshesEverybody(MujocoSim):
    def forward(self, ids):
        super().forward(None)


class StepRefreshesEverybody(MujocoSim):
    def step(self, ids, substeps):
        failed = super().step(ids, substeps)
        super().forward(None)
        return failed


class ResetsTheNext(MujocoSim):
    def reset(self, ids):
        super().reset(ids if ids is None or not len(ids) else torch.cat((ids, (ids[-1:] + 1) % self.num_envs)).unique())


class SetsStatesOfEverybody(MujocoSim):
    def set_states(self, ids, states):
        super().set_states(ids, states)
        self.field("qvel").add_(1e-15)


class StepsOnceMore(MujocoSim):
    def step(self, ids, substeps):
        return super().step(ids, substeps + 1)


class SubsetsTakeAnotherPath(MujocoSim):
    def step(self, ids, substeps):
        failed = super().step(ids, substeps)
        if ids is not None:
            self.field("qvel")[ids] += 1e-12
        return failed


class ForgetsStates(MujocoSim):
    def states(self, ids):
        return super().states(ids).to(torch.float32).to(torch.float64)


class LosesDerivedFields(MujocoSim):
    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.field("xpos").zero_()


class LosesStates(MujocoSim):
    def load_state_dict(self, state):
        super().load_state_dict({**state, "state": state["state"] * 0.5})


class GivesItsOwnMemory(MujocoSim):
    def state_dict(self):
        return {**super().state_dict(), "live": self.field("qpos")}


class KeepsModelFields(MujocoSim):
    def reset(self, ids):
        kept = self.model_field("body_mass").clone()
        super().reset(ids)
        self.model_field("body_mass").copy_(kept)


class KeepsFieldsThatASnapshotLacks(MujocoSim):
    def load_state_dict(self, state):
        own = self.state_dict()["model_fields"]
        super().load_state_dict({**state, "model_fields": {**own, **state["model_fields"]}})


class IgnoresModelFields(MujocoSim):
    def model_field(self, name):
        return super().model_field(name).clone()


class HidesFailures(MujocoSim):
    def step(self, ids, substeps):
        super().step(ids, substeps)


class BlamesEverybody(MujocoSim):
    def step(self, ids, substeps):
        failed = super().step(ids, substeps)
        return failed if failed is None else torch.ones(self.num_envs, dtype=torch.bool)


class FailureSpreads(MujocoSim):
    def step(self, ids, substeps):
        failed = super().step(ids, substeps)
        if failed is not None:
            self.field("qpos")[0] += 1e-15
        return failed


BROKEN = [
    (StepsEverybody, r"env 0, step of simulations \[\]: field\('qpos'\)"),
    (RefreshesEverybody, r"forward of simulations \[\]: field"),
    (StepRefreshesEverybody, r"field\('xpos'\)|field\('cvel'\)"),
    (ResetsTheNext, r"env 3, reset of simulations \[2\]"),
    (SetsStatesOfEverybody, r"set_states of simulations \[\]: field\('qvel'\)"),
    (StepsOnceMore, r"states after step\(2\) and two step\(1\)"),
    (SubsetsTakeAnotherPath, r"step 0 of odd and then even simulations: field\('qvel'\)"),
    (ForgetsStates, r"states repeated|a step repeated from its states"),
    (LosesDerivedFields, r"right after load_state_dict: field\('xpos'\)"),
    (LosesStates, r"right after load_state_dict: field\('qpos'\)"),
    (GivesItsOwnMemory, r"what state_dict\(\) returned, after later steps: \['live'\]"),
    (KeepsModelFields, r"model_field\('body_mass'\) after reset of simulation 1 alone"),
    (KeepsFieldsThatASnapshotLacks, r"after load_state_dict of a simulation that never gave it values of its own"),
    (IgnoresModelFields, r"expected another qvel after 3 steps"),
    (HidesFailures, r"simulation 1 with qvel 1e20: expected step to report it, got None"),
    (BlamesEverybody, r"expected step to report a bool mask of \[1\]"),
    (FailureSpreads, r"env 0, step 0 beside a failing simulation: field\('qpos'\)"),
]


@pytest.mark.parametrize(("sim_class", "sentence"), BROKEN, ids=[case[0].__name__ for case in BROKEN])
def test_check_fails_on_a_simulation_that_breaks_the_protocol(sim_class, sentence) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check_simulation(lambda num_envs: sim_class(MODEL, num_envs, threads=1))


def test_a_tolerance_lets_pass_what_another_path_through_the_physics_computes() -> None:
    result = check_simulation(
        lambda num_envs: SubsetsTakeAnotherPath(MODEL, num_envs, threads=1), tolerance=Tolerance(atol=1e-9)
    )
    assert result.not_claimed is None
