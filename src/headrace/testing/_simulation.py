"""The ``Simulation`` protocol: any subset steps, resets and is read, and the others do not notice."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import TypeAlias

import torch
from torch import Tensor

from headrace import rng
from headrace.sim import Simulation
from headrace.testing._contract import (
    EXACT,
    CheckResult,
    Tolerance,
    fail,
    require,
    require_equal,
    require_rows_equal,
    require_same_tensors,
)

MakeSim: TypeAlias = Callable[..., Simulation]
"""``make_sim(num_envs=…)`` gives a new simulation of one model that has at least one actuator."""

_STATE = ("qpos", "qvel", "ctrl")


def check_simulation(
    make_sim: MakeSim,
    *,
    num_envs: int = 5,
    derived: Sequence[str] = ("xpos", "cvel"),
    tolerance: Tolerance = EXACT,
) -> CheckResult:
    """Run every check of the :class:`~headrace.sim.Simulation` protocol.

    Untouched simulations are compared bit for bit always. ``tolerance`` is for what two different calls compute for the
    same simulation, where a simulator's bits depend on which others are stepped with it.

    Args:
        make_sim: ``make_sim(num_envs=…)`` gives a new simulation.
        num_envs: at least 4.
        derived: MjData fields that are bound before the first forward and compared.
        tolerance: of everything that is computed twice.
    """
    with ExitStack() as stack:
        probe = _Probe(make_sim, num_envs, tuple(derived), tolerance, stack)
        probe.check_subset_calls_leave_the_others_alone()
        probe.check_subsets_compute_what_all_would()
        probe.check_substeps_add_up()
        probe.check_states_round_trip()
        probe.check_state_dict()
        probe.check_model_fields()
        probe.check_failing_physics_is_reported()
    return CheckResult(check="simulation")


class _Probe:
    """Makes simulations that have all left the same start in a different direction each."""

    def __init__(
        self, make_sim: MakeSim, num_envs: int, derived: tuple[str, ...], tolerance: Tolerance, stack: ExitStack
    ) -> None:
        """Make the simulations, which are closed with ``stack``."""
        self._make_sim, self._num_envs, self._stack = make_sim, num_envs, stack
        self._derived, self._tolerance = derived, tolerance

    def check_subset_calls_leave_the_others_alone(self) -> None:
        for chosen in ([], [2], [0, self._num_envs - 1], list(range(1, self._num_envs))):
            sim = self._start()
            ids = self._ids(sim, chosen)
            others = torch.tensor([i for i in range(self._num_envs) if i not in chosen], dtype=torch.int64)
            calls: dict[str, Callable[[], object]] = {
                "step": lambda sim=sim, ids=ids: sim.step(ids, 2),
                "reset": lambda sim=sim, ids=ids: sim.reset(ids),
                "forward": lambda sim=sim, ids=ids: sim.forward(ids),
                "set_states": lambda sim=sim, ids=ids: sim.set_states(ids, sim.states(ids) * 0.5),
            }
            for name, call in calls.items():
                # derived fields now lag behind the state, so that refreshing the wrong ones shows
                sim.field("qpos").mul_(0.99)
                before = self._read_fields(sim)
                call()
                after = self._read_fields(sim)
                for field, values in before.items():
                    rows = others.to(sim.device)
                    require_rows_equal(after[field], values, rows, f"{name} of simulations {chosen}", field)

    def check_subsets_compute_what_all_would(self) -> None:
        whole, parts = self._start(), self._start()
        odd = [i for i in range(self._num_envs) if i % 2]
        even = [i for i in range(self._num_envs) if i % 2 == 0]
        for count in range(3):
            for name in ("step", "forward"):
                for sim, groups in ((whole, (None,)), (parts, (self._ids(parts, odd), self._ids(parts, even)))):
                    for ids in groups:
                        sim.step(ids, 2) if name == "step" else sim.forward(ids)
                for field, values in self._read_fields(whole).items():
                    sentence = f"{name} {count} of odd and then even simulations: {field}"
                    require_equal(self._read_fields(parts)[field], values, sentence, self._tolerance)

    def check_substeps_add_up(self) -> None:
        once, twice = self._start(), self._start()
        once.step(None, 2)
        twice.step(None, 1)
        twice.step(None, 1)
        require_equal(once.states(None), twice.states(None), "states after step(2) and two step(1)", self._tolerance)

    def check_states_round_trip(self) -> None:
        sim = self._start()
        start = sim.states(None)
        copy_of_start = start.clone()
        sim.step(None, 3)
        sim.forward(None)
        first = self._read_fields(sim)
        require_equal(start, copy_of_start, "what states() returned, after a step")
        sim.set_states(None, start)
        require_equal(sim.states(None), start, "states() after set_states()")
        sim.forward(None)
        sim.step(None, 3)
        sim.forward(None)
        self._require_same(self._read_fields(sim), first, "a step repeated from its states")
        ids = self._ids(sim, [1, 3])
        sim.set_states(ids, start[ids])
        require_equal(sim.states(ids), start[ids], "states(ids) after set_states(ids)")

    def check_state_dict(self) -> None:
        sim, other = self._start(), self._start()
        sim.step(None, 2)
        state = sim.state_dict()
        kept = copy.deepcopy(state)
        other.step(self._ids(other, [0, 1]), 5)
        other.load_state_dict(state)
        self._require_same(self._read_fields(other), self._read_fields(sim), "right after load_state_dict", EXACT)
        for count in range(3):
            for each in (sim, other):
                each.step(None, 2)
            self._require_same(self._read_fields(other), self._read_fields(sim), f"step {count} after load_state_dict")
        require_same_tensors(state, kept, "what state_dict() returned, after later steps")

    def check_model_fields(self) -> None:
        name, sim, plain = "body_mass", self._new(), self._new()
        values = sim.model_field(name)
        nominal = values.clone()
        ids, rows = self._ids(sim, [1, 2]), torch.tensor([1, 2])
        for each in (sim, plain):
            each.reset(None)
        values[ids] *= 1.5
        # what is derived for some must not become that of the others
        self._move(sim, plain, ids)
        others = torch.tensor([i for i in range(self._num_envs) if i not in (1, 2)], device=sim.device)
        for field, expected in self._read_fields(plain).items():
            got = self._read_fields(sim)[field]
            when = f"{name} of simulations 1 and 2 changed"
            require_rows_equal(got, expected, others, when, field, self._tolerance)
        require(
            not torch.equal(sim.field("qvel")[rows], plain.field("qvel")[rows]),
            f"{name} of simulations 1 and 2 changed: expected another qvel after 3 steps, got the same",
        )
        sim.reset(self._ids(sim, [1]))
        expected = nominal.clone()
        expected[2] *= 1.5
        require_equal(sim.model_field(name), expected, f"model_field({name!r}) after reset of simulation 1 alone")
        sim.reset(None)
        require_equal(sim.model_field(name), nominal, f"model_field({name!r}) after reset of all")
        plain.reset(None)
        self._move(sim, plain, ids[:0])
        self._require_same(
            self._read_fields(sim), self._read_fields(plain), f"3 steps after a reset made {name} nominal again"
        )
        values[ids] *= 1.5
        sim.load_state_dict(plain.state_dict())
        never = f"model_field({name!r}) after load_state_dict of a simulation that never gave it values of its own"
        require_equal(sim.model_field(name), nominal, never)

    def check_failing_physics_is_reported(self) -> None:
        sim, healthy = self._start(), self._start()
        bad = 1
        others = torch.tensor([i for i in range(self._num_envs) if i != bad], device=sim.device)
        sim.field("qvel")[bad] = 1e20
        for count, ids in enumerate((None, self._ids(sim, list(range(self._num_envs))))):
            failed = sim.step(ids, 2)
            expected = healthy.step(ids, 2)
            require(_has_none(expected), f"step {count} of healthy simulations: expected none to fail, got {expected}")
            if count == 0:
                if failed is None:
                    fail(f"simulation {bad} with qvel 1e20: expected step to report it, got None")
                require(
                    failed.dtype == torch.bool and failed.nonzero().flatten().tolist() == [bad],
                    f"simulation {bad} with qvel 1e20: expected step to report a bool mask of [{bad}], got {failed}",
                )
            for field, values in self._read_fields(healthy).items():
                when = f"step {count} beside a failing simulation"
                require_rows_equal(self._read_fields(sim)[field], values, others, when, field, self._tolerance)
        sim.reset(self._ids(sim, [bad]))
        sim.forward(self._ids(sim, [bad]))
        failed = sim.step(None, 2)
        require(_has_none(failed), f"step after the failed simulation was reset: expected none to fail, got {failed}")

    def _new(self) -> Simulation:
        sim = self._stack.enter_context(closing(self._make_sim(num_envs=self._num_envs)))
        for name in (*_STATE, *self._derived):
            sim.field(name)
        return sim

    def _start(self) -> Simulation:
        sim = self._new()
        sim.reset(None)
        self._disturb(sim)
        sim.forward(None)
        sim.step(None, 1)
        return sim

    def _move(self, sim: Simulation, other: Simulation, ids: Tensor) -> None:
        """Give both the same push and three steps, with a further forward of some."""
        for each in (sim, other):
            self._disturb(each)
            each.forward(None)
            each.forward(ids)
            each.step(None, 3)

    def _disturb(self, sim: Simulation) -> None:
        """Give each simulation a velocity and a control of its own."""
        for name, size in (("qvel", 0.1), ("ctrl", 0.3)):
            field = sim.field(name)
            noise = rng.uniform(1, torch.arange(self._num_envs), name, field.shape[1], low=-size, high=size)
            field.copy_(noise.to(device=field.device, dtype=field.dtype))

    def _read_fields(self, sim: Simulation) -> dict[str, Tensor]:
        fields = {f"field({name!r})": sim.field(name).clone() for name in (*_STATE, *self._derived)}
        return fields | {"states()": sim.states(None)}

    def _require_same(
        self, got: dict[str, Tensor], expected: dict[str, Tensor], when: str, tolerance: Tolerance | None = None
    ) -> None:
        for field, values in expected.items():
            rows = torch.arange(self._num_envs, device=values.device)
            chosen = self._tolerance if tolerance is None else tolerance
            require_rows_equal(got[field], values, rows, when, field, chosen)

    def _ids(self, sim: Simulation, ids: Sequence[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=sim.device)


def _has_none(failed: Tensor | None) -> bool:
    return failed is None or not bool(failed.any())
