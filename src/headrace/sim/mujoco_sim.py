"""Batched physics on MuJoCo's native batch: the default simulation."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace._kernels.compiled import kernel
from headrace._kernels.threads import available_cores
from headrace.errors import ConfigError, DataError, LifecycleError
from headrace.sim import mujoco_api
from headrace.sim.mujoco_api import Model
from headrace.types import StateDict

ResetArrays: TypeAlias = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int32]]

# a call for so few simulations is over before the threads of a batch are awake; twice as many of small models
_FEW, _SMALL_MODEL = 4, 4


@kernel()
def any_nonzero(counts: NDArray[np.int32]) -> bool:
    """Return whether some of ``counts`` (n, k) is not zero."""
    for row in range(counts.shape[0]):
        for column in range(counts.shape[1]):
            if counts[row, column] != 0:
                return True
    return False


@kernel()
def restore_rows(
    ids: NDArray[np.int64], default: NDArray[np.float64], state: NDArray[np.float64], warning: NDArray[np.int32]
) -> None:
    """Put the simulations ``ids`` (m,) back to ``default`` (S,): rows of ``state`` (N, S) and ``warning`` (N, …, 2)."""
    for row in range(ids.shape[0]):
        env = ids[row]
        for column in range(default.shape[0]):
            state[env, column] = default[column]
        for kind in range(warning.shape[1]):
            for column in range(warning.shape[2]):
                warning[env, kind, column] = 0


@kernel()
def gather_rows(ids: NDArray[np.int32], source: NDArray[np.float64], target: NDArray[np.float64]) -> None:
    """Copy rows ``ids`` (m,) of ``source`` (N, k) to ``target`` (m, k)."""
    for row in range(ids.shape[0]):
        for column in range(source.shape[1]):
            target[row, column] = source[ids[row], column]


@kernel()
def scatter_rows(
    ids: NDArray[Any], sources: tuple[NDArray[np.float64], ...], targets: tuple[NDArray[Any], ...]
) -> None:
    """Copy every array of ``sources``, (m, k), to the rows ``ids`` (m,) of its partner in ``targets``, (N, k)."""
    for part in range(len(sources)):
        for row in range(ids.shape[0]):
            for column in range(sources[part].shape[1]):
                targets[part][ids[row], column] = sources[part][row, column]


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
        self._few = 2 * _FEW if model.nv <= _SMALL_MODEL else _FEW
        # a new batch holds the model's defaults; writing this row back is what mj_resetData does to the state, for less
        self._default_state = self._batch.state[0].copy()
        # as the batch, which has its own copy: the caller's model may be edited later
        self._frozen_model = copy.copy(model)
        self._small: dict[int, _Small] = {}
        self._fields: dict[str, Tensor] = {}
        self._model_fields: dict[str, Tensor] = {}
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
            self._small.clear()
        return self._fields[name]

    def seal(self) -> None:
        """See :meth:`Simulation.seal`."""
        self._sealed = True

    def model_field(self, name: str) -> Tensor:
        """See :meth:`Simulation.model_field`. Fields are named as in MjModel, options as ``opt.gravity``."""
        if name not in self._model_fields:
            values = torch.from_numpy(self._open().expand(name))
            self._model_fields[name] = values
            self._nominal[name] = values[0].clone()
            self._derives_constants |= name in mujoco_api.setconst_inputs() or name.startswith("opt.")
        return self._model_fields[name]

    @property
    def expanded(self) -> Mapping[str, Tensor]:
        """See :attr:`Simulation.expanded`."""
        return self._model_fields

    def step(self, ids: Tensor | None, substeps: int) -> Tensor | None:
        """See :meth:`Simulation.step`."""
        rows = _rows(ids)
        failed = self.advance(rows, substeps)
        if failed is None and not any_nonzero(self._bad):
            return None
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

    @property
    def bad_counts(self) -> NDArray[np.int32]:
        """int32 (N, k), a view: not zero where a simulation has gone bad since its reset."""
        return self._bad

    @property
    def reset_arrays(self) -> ResetArrays | None:
        """For callers that reset by kernel: the state (S,) to write, and the states (N, S) and warnings to write to.

        None where :meth:`reset` does more: with model fields that have a value per environment.
        """
        if self._model_fields:
            return None
        batch = self._open()
        return self._default_state, batch.state, batch.warning

    def advance(self, rows: NDArray[np.int32] | None, substeps: int) -> NDArray[np.int64] | None:
        """As :meth:`step`, without a look at ``bad_counts``; the simulations that raised, or None."""
        try:
            self._open().step(rows, nstep=substeps, stage=self._stage)
        except mujoco_api.simulation_error() as error:
            return mujoco_api.failed_ids(error)
        return None

    def reset(self, ids: Tensor | None) -> None:
        """See :meth:`Simulation.reset`."""
        batch = self._open()
        if ids is None:
            batch.state[:] = self._default_state
            batch.warning[:] = 0
        else:
            restore_rows(ids.numpy(), self._default_state, batch.state, batch.warning)
        for name, values in self._model_fields.items():
            if ids is None:
                values.copy_(self._nominal[name].expand_as(values))
            else:
                values[ids] = self._nominal[name]

    def forward(self, ids: Tensor | None) -> None:
        """See :meth:`Simulation.forward`."""
        batch, rows = self._open(), _rows(ids)
        if self._derives_constants:
            batch.set_const(rows)
        if rows is None or len(rows) > self._few or not len(rows) or self._model_fields or not self._forward_few(rows):
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
        rows = torch.from_numpy(self._open().state)
        if ids is None:
            rows.copy_(states)
        else:
            rows.index_copy_(0, ids, states)

    def state_dict(self) -> StateDict:
        """See :meth:`Simulation.state_dict`."""
        batch = self._open()
        return {
            "state": torch.from_numpy(batch.state.copy()),
            "warning": torch.from_numpy(batch.warning.copy()),
            "fields": {
                name: values.clone() for name, values in self._fields.items() if name not in mujoco_api.STATE_FIELDS
            },
            "model_fields": {name: values.clone() for name, values in self._model_fields.items()},
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
        for name in self._model_fields.keys() - state["model_fields"].keys():
            self._model_fields[name].copy_(self._nominal[name].expand_as(self._model_fields[name]))
        if self._derives_constants:
            batch.set_const(None)
        batch.state[:] = state["state"].numpy()
        batch.warning[:] = state["warning"].numpy()
        for name, values in state["fields"].items():
            self.field(name).copy_(values)

    def close(self) -> None:
        """See :meth:`Simulation.close`."""
        self._batch = None
        self._small.clear()
        self._fields.clear()
        self._model_fields.clear()

    def _forward_few(self, rows: NDArray[np.int32]) -> bool:
        """Compute the derived fields of a few simulations on the calling thread; False if one of them raised."""
        count, state = len(rows), self._open().state
        if count not in self._small:
            derived = {name: values.numpy() for name, values in self._fields.items()}
            self._small[count] = _Small(self._frozen_model, count, state, derived)
        small = self._small[count]
        gather_rows(rows, state, small.state)
        try:
            small.forward()
        except mujoco_api.simulation_error():
            return False
        for sources, targets in small.outputs:
            scatter_rows(rows, sources, targets)
        return True

    def _open(self) -> mujoco_api.NativeBatch:
        if self._batch is None:
            raise LifecycleError("the simulation is closed; create a new environment")
        return self._batch


class _Small:
    """A batch of a few simulations on the calling thread, and the arrays that its outputs are copied to and from."""

    def __init__(
        self, model: Model, count: int, states: NDArray[np.float64], fields: dict[str, NDArray[np.float64]]
    ) -> None:
        batch = mujoco_api.new_batch(model, count, 1)
        self.state, self.forward = batch.state, batch.forward
        # a forward leaves the constraint solver's start for the next step in the state
        pairs = [(batch.state, states)]
        for name in fields.keys() - mujoco_api.STATE_FIELDS:
            output = batch.bind(name)
            output.flags.writeable = True  # as in :meth:`MujocoSim.field`: arrays of one type for the kernel
            pairs.append((_flat(output), _flat(fields[name])))
        kinds = {source.dtype for source, _ in pairs}
        alike = [[pair for pair in pairs if pair[0].dtype == kind] for kind in kinds]
        self.outputs = [(tuple(s for s, _ in group), tuple(t for _, t in group)) for group in alike]
        """Sources and targets, one group per dtype: one call of a kernel each."""


def _flat(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """(n, …) as (n, k), a view."""
    return values.reshape(values.shape[0], -1, copy=False)


def _rows(ids: Tensor | None) -> NDArray[np.int32] | None:
    return None if ids is None else ids.numpy().astype(np.int32)
