"""Batched physics on MuJoCo Warp, for CUDA users; runs on Warp's CPU device, too. Needs ``headrace[warp]``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headrace.errors import ConfigError, DataError, LifecycleError, require_extra
from headrace.sim import _mujoco_api as mujoco_api
from headrace.sim._mujoco_api import Model
from headrace.types import StateDict, as_device

# what the next step depends on, in the order of a packed state
_STATE = (
    *("time", "qpos", "qvel", "act", "qacc_warmstart", "ctrl"),
    *("qfrc_applied", "xfrc_applied", "mocap_pos", "mocap_quat"),
)
_SOLVERS = {1: "CG", 2: "Newton"}
# what set_const derives from the fields of a model that are its inputs
_CONSTANTS = (
    *("body_subtreemass", "body_invweight0", "dof_invweight0", "actuator_acc0", "geom_aabb", "geom_rbound", "eq_data"),
    *("tendon_length0", "tendon_invweight0", "cam_pos0", "cam_poscom0", "cam_mat0"),
    *("light_pos0", "light_poscom0", "light_dir0"),
)


class MujocoWarpSim:
    """MuJoCo Warp behind the :class:`~headrace.sim.Simulation` protocol.

    Owns two sets of worlds in float32: the N worlds that everybody sees, and a scratch set for subsets. MuJoCo Warp has
    no mask for a step, but it can step the first k worlds alone: a subset is copied to the front of the scratch worlds,
    stepped there and copied back. When all N step, nothing is copied and the captured graph of a step is replayed.
    """

    suspension_cost = (
        "no physics; while any world is suspended, the states of those that act are copied there and back each step, "
        "and results may differ from those of another batch size in the last float32 digits"
    )
    current_positions = False

    def __init__(self, model: Model, num_envs: int, *, device: torch.device | str = "cpu") -> None:
        if num_envs < 1:
            raise ConfigError(f"num_envs: expected at least 1, got {num_envs}")
        raw: Any = model
        if int(raw.opt.solver) not in _SOLVERS:
            raise ConfigError(
                'sim="warp": expected a model with the Newton or CG solver, got PGS, which MuJoCo Warp does not have; '
                'set <option solver="Newton"/> in its MJCF, or use sim="mujoco"'
            )
        self._warp: Any = require_extra("warp", extra="warp", purpose='sim="warp"')
        self._api: Any = require_extra("mujoco_warp", extra="warp", purpose='sim="warp"')
        self._warp.config.quiet = True
        self._warp.init()
        self.model = model
        self.num_envs = num_envs
        self.device = as_device(device)
        self._device = self._warp.device_from_torch(self.device)
        with self._warp.ScopedDevice(self._device):
            self._model: Any = self._api.put_model(model)
            self._data: Any = self._api.make_data(model, nworld=num_envs)
            self._scratch: Any = self._api.make_data(model, nworld=num_envs)
        self._fields: dict[str, Tensor] = {}
        self._model_fields: dict[str, Tensor] = {}
        self._nominal: dict[str, Tensor] = {}
        self._constants: dict[str, Tensor] = {}
        self._derives_constants = False
        self._graphs: dict[int, Any] = {}
        self._closed = False

    def field(self, name: str) -> Tensor:
        """See :meth:`Simulation.field`. float32; matrices are flat, as in MuJoCo."""
        self._check_open()
        if name not in self._fields:
            self._fields[name] = self._view(self._data, name)
        return self._fields[name]

    def seal(self) -> None:
        """See :meth:`Simulation.seal`. Warp computes every field, bound or not."""

    def model_field(self, name: str) -> Tensor:
        """See :meth:`Simulation.model_field`."""
        self._check_open()
        if name not in self._model_fields:
            shared = getattr(self._model, name, None)
            if shared is None or not hasattr(shared, "ndim"):
                raise ConfigError(f"model field {name!r}: expected an array of MuJoCo Warp's model, got no such name")
            self._nominal[name] = self._warp.to_torch(shared)[0].clone()
            # eq_data is an input and a constant; it may have its rows already
            known = self._constants.pop(name, None)
            self._model_fields[name] = self._expanded(name) if known is None else known
            if name in mujoco_api.setconst_inputs() and not self._derives_constants:
                # masses of its own call for constants of its own: shared ones would be those of the last to be reset
                self._derives_constants = True
                own = [constant for constant in _CONSTANTS if constant not in self._model_fields]
                self._constants = {constant: self._expanded(constant) for constant in own if self._has(constant)}
            self._graphs.clear()
        return self._model_fields[name]

    @property
    def expanded(self) -> Mapping[str, Tensor]:
        """See :attr:`Simulation.expanded`."""
        return self._model_fields

    def step(self, ids: Tensor | None, substeps: int) -> Tensor | None:
        """See :meth:`Simulation.step`. Looks for numbers that are not finite, which waits for the device."""
        self._check_open()
        if ids is None:
            self._step_all(substeps)
        else:
            self._on_subset(ids, functools.partial(self._substeps, substeps))
        qpos, qvel = self.field("qpos"), self.field("qvel")
        # a NaN or an infinity survives the sum; a finite sum of finite numbers is the common case
        broken = ~torch.isfinite(qpos.sum(dim=1) + qvel.sum(dim=1))
        if ids is not None:
            stepped = torch.zeros_like(broken)
            stepped[ids] = True
            broken &= stepped
        return broken.nonzero().squeeze(1) if bool(broken.any()) else None

    def reset(self, ids: Tensor | None) -> None:
        """See :meth:`Simulation.reset`."""
        self._check_open()
        mask = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        if ids is not None:
            mask.zero_()
            mask[ids] = True
        with self._warp.ScopedDevice(self._device):
            self._api.reset_data(self._model, self._data, self._warp.from_torch(mask))
        for name, values in self._model_fields.items():
            values[mask] = self._nominal[name]

    def forward(self, ids: Tensor | None) -> None:
        """See :meth:`Simulation.forward`."""
        self._check_open()

        def forward(model: Any, data: Any) -> None:
            if self._derives_constants:
                self._api.set_const(model, data)
            self._api.forward(model, data)

        if ids is None:
            with self._warp.ScopedDevice(self._device):
                forward(self._model, self._data)
        else:
            self._on_subset(ids, forward)

    def states(self, ids: Tensor | None) -> Tensor:
        """See :meth:`Simulation.states`; float32 numbers in float64."""
        parts = [self.field(name).reshape(self.num_envs, -1) for name in _STATE]
        whole = torch.cat(parts, dim=1).to(torch.float64)
        return whole if ids is None else whole.index_select(0, ids)

    def set_states(self, ids: Tensor | None, states: Tensor) -> None:
        """See :meth:`Simulation.set_states`."""
        rows = torch.arange(self.num_envs, device=self.device) if ids is None else ids
        at = 0
        for name in _STATE:
            field = self.field(name)
            width = field[0].numel()
            field[rows] = states[:, at : at + width].to(field.dtype).reshape(len(rows), *field.shape[1:])
            at += width

    def state_dict(self) -> StateDict:
        """See :meth:`Simulation.state_dict`."""
        return {
            "state": self.states(None),
            "fields": {name: values.clone() for name, values in self._fields.items()},
            "model_fields": {name: values.clone() for name, values in self._model_fields.items()},
        }

    def load_state_dict(self, state: StateDict) -> None:
        """See :meth:`Simulation.load_state_dict`."""
        width = self.states(None).shape
        if tuple(state["state"].shape) != tuple(width):
            raise DataError(f"snapshot: expected states of shape {tuple(width)}, got {tuple(state['state'].shape)}")
        for name, values in state["model_fields"].items():
            self.model_field(name).copy_(values)
        self.set_states(None, state["state"])
        self.forward(None)
        # the forward made everything consistent; the fields that were seen get back exactly what was seen
        self.set_states(None, state["state"])
        for name, values in state["fields"].items():
            self.field(name).copy_(values)

    def close(self) -> None:
        """See :meth:`Simulation.close`."""
        self._closed = True
        self._graphs.clear()
        self._fields.clear()
        self._model_fields.clear()
        self._constants.clear()

    def _substeps(self, count: int, model: Any, data: Any) -> None:
        for _ in range(count):
            self._api.step(model, data)

    def _step_all(self, substeps: int) -> None:
        """Replay the captured graph of a whole step; launching its kernels one by one would cost more than they do."""
        with self._warp.ScopedDevice(self._device):
            if substeps not in self._graphs:
                # once without capture, so that kernels are compiled; from a copy, so that it leaves no trace
                before = self.states(None)
                self._api.step(self._model, self._data)
                self.set_states(None, before)
                with self._warp.ScopedCapture() as capture:
                    self._substeps(substeps, self._model, self._data)
                self.set_states(None, before)
                self._graphs[substeps] = capture.graph
            self._warp.capture_launch(self._graphs[substeps])

    def _on_subset(self, ids: Tensor, run: Any) -> None:
        """Run something on some worlds: copied to the front of the scratch worlds, and back with all that was seen."""
        count = int(ids.shape[0])
        if count == 0:
            return
        with self._warp.ScopedDevice(self._device):
            for name in _STATE:
                self._view(self._scratch, name)[:count] = self.field(name).index_select(0, ids)
            model = self._model
            chosen = {
                name: values.index_select(0, ids) for name, values in (self._model_fields | self._constants).items()
            }
            if chosen:
                arrays = {
                    name: self._warp.from_torch(values, dtype=getattr(model, name).dtype)
                    for name, values in chosen.items()
                }
                model = dataclasses.replace(model, **arrays)
            run(model, dataclasses.replace(self._scratch, nworld=count))
            for name, values in self._constants.items():
                values[ids] = chosen[name]
            for name in {*_STATE, *self._fields}:
                self.field(name)[ids] = self._view(self._scratch, name)[:count]

    def _has(self, name: str) -> bool:
        shared = getattr(self._model, name, None)
        return shared is not None and shared.size > 0

    def _expanded(self, name: str) -> Tensor:
        """Give each world its own row of a model's array, (N, …)."""
        shared = getattr(self._model, name)
        first = self._warp.to_torch(shared)[0]
        values = first.expand(self.num_envs, *first.shape).clone()
        setattr(self._model, name, self._warp.from_torch(values, dtype=shared.dtype))
        return values

    def _view(self, data: Any, name: str) -> Tensor:
        array = getattr(data, name, None)
        if array is None:
            raise ConfigError(f"field {name!r}: expected an array of MuJoCo Warp's data, got none by that name")
        view: Tensor = self._warp.to_torch(array)
        # MuJoCo keeps 3×3 matrices as nine numbers
        return view.flatten(2) if view.dim() == 4 and view.shape[2:] == (3, 3) else view

    def _check_open(self) -> None:
        if self._closed:
            raise LifecycleError("the simulation is closed; create a new environment")
