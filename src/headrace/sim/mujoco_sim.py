"""Batched physics on MuJoCo's native batch: the default simulation.

The protocol between batched physics and everything above it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace._kernels.threads import available_cores
from headrace.errors import ConfigError, DataError, LifecycleError
from headrace.sim import mujoco_api
from headrace.sim.mujoco_api import Model
from headrace.types import StateDict


class Simulation(Protocol):
    """N simulations of one MuJoCo model that can be stepped, reset and read in any subset.

    ``ids`` is int64 (n,), ascending and unique, on ``device``; None means all. A call with ids leaves every other
    simulation untouched to the last bit, derived fields included. Ids are trusted: the environment checks them once,
    at its boundary.
    """

    model: Model
    """Sizes, names and nominal parameters."""
    num_envs: int
    device: torch.device
    suspension_cost: str
    """What a simulation that is left out of ``step`` still costs here, in words for the user."""
    current_positions: bool
    """Whether what follows from positions (``xpos``, contacts, …) is that of the new state after ``step``."""

    def field(self, name: str) -> Tensor:
        """MjData field ``name`` of all simulations, (N, …), live, without a copy.

        State fields (``qpos``, ``ctrl``, …) may be written. Derived fields (``xpos``, ``sensordata``, …) are refreshed
        by each call for the simulations it touches; after ``step`` they belong to the state before the last substep, as
        with ``mj_step``, unless ``current_positions``. Bind a derived field before the first ``forward`` that should
        fill it.
        """
        ...

    def seal(self) -> None:
        """Refuse derived fields that were not bound before: from now on another one is an error, not zeros."""
        ...

    def model_field(self, name: str) -> Tensor:
        """MjModel field ``name`` with a value per simulation, (N, …), live, writable; ``reset`` makes it nominal."""
        ...

    @property
    def expanded(self) -> Mapping[str, Tensor]:
        """The model fields that have a value per simulation by now: name → (N, …), live."""
        ...

    def step(self, ids: Tensor | None, substeps: int) -> Tensor | None:
        """Advance by ``substeps`` of ``mj_step``.

        Returns:
            bool (N,), fresh: the simulations of ``ids`` whose physics failed or went bad (their state is not usable);
            None where it is known that there are none.
        """
        ...

    def explain(self, ids: Tensor) -> str:
        """Why the physics of ``ids`` (m,) failed, and what to do about it; "" where there is nothing to do."""
        ...

    def reset(self, ids: Tensor | None) -> None:
        """Put state and model fields back to the model's defaults. Derived fields wait for ``forward``."""
        ...

    def forward(self, ids: Tensor | None) -> None:
        """Compute the derived fields at the current state, after ``reset`` and writes. Applies model-field writes."""
        ...

    def states(self, ids: Tensor | None) -> Tensor:
        """Return a copy of the full integration states, float64 (n, S): restoring one continues bit-identically."""
        ...

    def set_states(self, ids: Tensor | None, states: Tensor) -> None:
        """Write full integration states, float64 (n, S). Derived fields wait for ``forward``."""
        ...

    def state_dict(self) -> StateDict:
        """Return everything that the next step depends on, as copies; derived fields included."""
        ...

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict()`` of a simulation of the same model and size."""
        ...

    def close(self) -> None:
        """Release threads and memory. Views handed out before are invalid afterwards."""
        ...


class MujocoSim:
    """``mujoco.batch.Batch`` behind the :class:`~headrace.sim.Simulation` protocol.

    Owns the state rows, float64 (N, S), and one array per bound derived field; all tensors it hands
    out are views of them. Physics runs on ``threads`` native threads without the GIL. Results do not depend on the
    number of threads.
    """

    suspension_cost = "nothing: suspended simulations are skipped, at a cost of 8 bytes per state number"

    def __init__(
        self,
        model: Model,
        num_envs: int,
        *,
        threads: int | None = None,
        current_positions: bool = False,
        controlled: bool = False,
    ) -> None:
        """Make a batch.

        Args:
            model: of all simulations.
            num_envs: how many.
            threads: of the physics; None for all cores.
            current_positions: compute what follows from positions (``xpos``, contacts, …) once more after a step, at
                the new state; by default it is one substep behind, as after ``mj_step``. The states are the same.
            controlled: :meth:`refresh` comes before every physics step. Each simulation then has memory of its own, so
                that a step continues from what was computed instead of computing it again.
        """
        if num_envs < 1:
            raise ConfigError(f"num_envs: expected at least 1, got {num_envs}")
        if threads is not None and threads < 1:
            raise ConfigError(f"threads: expected at least 1, or None for all cores, got {threads}")
        mujoco_api.silence_log()
        self.model = model
        self.num_envs = num_envs
        self.device = torch.device("cpu")
        self.threads = threads if threads is not None else available_cores()
        self._batch: mujoco_api.NativeBatch | None = mujoco_api.new_batch(
            model, num_envs, self.threads, persistent=controlled
        )
        self._bad = mujoco_api.bad_state_counts(self._batch)
        # a new batch holds the model's defaults; writing this row back is what mj_resetData does to the state, for less
        self._default_state = self._batch.state[0].copy()
        self._fields: dict[str, Tensor] = {}
        self.expanded: dict[str, Tensor] = {}
        """See :attr:`Simulation.expanded`."""
        self._nominal: dict[str, Tensor] = {}
        self._derives_constants = False
        self._sealed = False
        self.current_positions = current_positions
        stages = mujoco_api.mujoco.mjtStage
        self._stage = int(stages.mjSTAGE_POS if current_positions else stages.mjSTAGE_NONE)

    def field(self, name: str) -> Tensor:
        """See :meth:`Simulation.field`."""
        if name not in self._fields:
            if self._sealed and name not in mujoco_api.STATE_FIELDS:
                raise LifecycleError(
                    f"field {name!r}: expected it to be read when the environment was made, got a first read now, when "
                    "its values are unknown; read it unconditionally in observe, reward, terminated or success"
                )
            array = self._open().bind(name)
            # outputs are marked read-only because a write is lost at the next call; torch has no such mark, and
            # loading a snapshot must put them back
            array.flags.writeable = True
            self._fields[name] = torch.from_numpy(array)
        return self._fields[name]

    def seal(self) -> None:
        """See :meth:`Simulation.seal`."""
        self._sealed = True

    def model_field(self, name: str) -> Tensor:
        """See :meth:`Simulation.model_field`. Fields are named as in MjModel, options as ``opt.gravity``."""
        if name not in self.expanded:
            values = torch.from_numpy(self._open().expand(name))
            self.expanded[name] = values
            self._nominal[name] = values[0].clone()
            self._derives_constants |= name in mujoco_api.setconst_inputs() or name.startswith("opt.")
        return self.expanded[name]

    def step(self, ids: Tensor | None, substeps: int) -> Tensor | None:
        """See :meth:`Simulation.step`."""
        rows, failed = _rows(ids), None
        try:
            self._open().step(rows, nstep=substeps, stage=self._stage)
        except mujoco_api.simulation_error() as error:
            failed = mujoco_api.failed_ids(error)
        bad = self._bad if rows is None else self._bad[rows]
        if failed is None and not bad.any():
            return None
        lost = np.zeros(self.num_envs, np.bool_)
        lost[slice(None) if rows is None else rows] = bad.any(axis=1)
        if failed is not None:
            lost[failed] = True
        return torch.from_numpy(lost)

    def explain(self, ids: Tensor) -> str:
        """See :meth:`Simulation.explain`."""
        del ids  # a bad state or action: MuJoCo has no size that would be too small
        return ""

    def reset(self, ids: Tensor | None) -> None:
        """See :meth:`Simulation.reset`."""
        batch, rows = self._open(), slice(None) if ids is None else ids.numpy()
        batch.state[rows], batch.warning[rows] = self._default_state, 0
        for name, values in self.expanded.items():
            values[rows] = self._nominal[name]

    def forward(self, ids: Tensor | None) -> None:
        """See :meth:`Simulation.forward`."""
        batch, rows = self._open(), _rows(ids)
        if self._derives_constants:
            batch.set_const(rows)
        batch.forward(rows)

    def refresh(self, ids: Tensor | None) -> None:
        """Compute what follows from positions and velocities at the current state, for controls between steps."""
        with contextlib.suppress(mujoco_api.simulation_error()):  # the step that follows raises it again
            self._open().forward(_rows(ids), stage=int(mujoco_api.mujoco.mjtStage.mjSTAGE_VEL))

    def states(self, ids: Tensor | None) -> Tensor:
        """See :meth:`Simulation.states`."""
        states = torch.from_numpy(self._open().state)
        return states.clone() if ids is None else states.index_select(0, ids)

    def set_states(self, ids: Tensor | None, states: Tensor) -> None:
        """See :meth:`Simulation.set_states`."""
        self._open().state[slice(None) if ids is None else ids.numpy()] = states.numpy()

    def state_dict(self) -> StateDict:
        """See :meth:`Simulation.state_dict`."""
        batch = self._open()
        return {
            "state": torch.from_numpy(batch.state.copy()),
            "warning": torch.from_numpy(batch.warning.copy()),
            "fields": {
                name: values.clone() for name, values in self._fields.items() if name not in mujoco_api.STATE_FIELDS
            },
            "model_fields": {name: values.clone() for name, values in self.expanded.items()},
        }

    def load_state_dict(self, state: StateDict) -> None:
        """See :meth:`Simulation.load_state_dict`."""
        batch = self._open()
        if tuple(state["state"].shape) != batch.state.shape:
            raise DataError(
                f"snapshot: expected states of shape {batch.state.shape}, got {tuple(state['state'].shape)}; "
                "load it into an environment of the same task and num_envs"
            )
        # constants first: set_const computes what follows from model fields, and the derived fields come after it
        for name, values in state["model_fields"].items():
            self.model_field(name).copy_(values)
        # a simulation that never gave a field a value per environment has the nominal one
        for name in self.expanded.keys() - state["model_fields"].keys():
            self.expanded[name].copy_(self._nominal[name].expand_as(self.expanded[name]))
        if self._derives_constants:
            batch.set_const(None)
        batch.state[:] = state["state"].numpy()
        batch.warning[:] = state["warning"].numpy()
        for name, values in state["fields"].items():
            self.field(name).copy_(values)

    def close(self) -> None:
        """See :meth:`Simulation.close`."""
        self._batch = None
        self._fields.clear()
        self.expanded.clear()

    def _open(self) -> mujoco_api.NativeBatch:
        if self._batch is None:
            raise LifecycleError("the simulation is closed; create a new environment")
        return self._batch


def _rows(ids: Tensor | None) -> NDArray[np.int32] | None:
    return None if ids is None else ids.numpy().astype(np.int32)
