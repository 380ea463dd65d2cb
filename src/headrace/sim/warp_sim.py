"""Batched physics on MuJoCo Warp, for CUDA users; runs on Warp's CPU device, too. Needs ``headrace[warp]``.

A set of MuJoCo Warp's worlds: one model, one data, and the graphs that were captured of what runs on them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from headrace._device import warp_launches
from headrace.errors import ConfigError, DataError, LifecycleError, require_extra
from headrace.sim import mujoco_api
from headrace.sim.mujoco_api import Model, mujoco
from headrace.types import StateDict, as_device

Run = Callable[[Any, Any], None]
"""What to run, given Warp's model and data."""


class Worlds:
    """Owns a data of N worlds and its graphs; ``model`` may share arrays with that of other worlds.

    MuJoCo Warp has no mask for a step, but the first n worlds can run alone, by a data that says ``nworld=n``.
    """

    def __init__(self, warp: Any, device: torch.device, model: Any, data: Any) -> None:
        self._warp = warp
        self._device = device
        self.model = model
        self.data = data
        self._views: dict[str, Tensor] = {}
        self._graphs: dict[Hashable, Any] = {}

    def view(self, name: str) -> Tensor:
        """Return field ``name`` of the data, (N, …), live; matrices are flat, as in MuJoCo."""
        if name not in self._views:
            array = getattr(self.data, name, None)
            if not hasattr(array, "ptr"):
                raise ConfigError(f"field {name!r}: expected an array of MuJoCo Warp's data, got none by that name")
            view: Tensor = self._warp.to_torch(array)
            # MuJoCo keeps 3×3 matrices as nine numbers
            self._views[name] = view.flatten(2) if view.dim() == 4 and view.shape[2:] == (3, 3) else view
        return self._views[name]

    def expand(self, name: str, rows: int) -> Tensor:
        """Give each of ``rows`` worlds its own row of a model's array, (rows, …), live; graphs start anew."""
        shared = getattr(self.model, name)
        first = self._warp.to_torch(shared)[0]
        values = first.expand(rows, *first.shape).clone()
        setattr(self.model, name, self._warp.from_torch(values, dtype=shared.dtype))
        self._graphs.clear()
        return values

    def replay(self, name: Hashable, count: int, run: Run, changed: Iterable[Tensor]) -> None:
        """Run the captured graph of ``run`` on the first ``count`` worlds; the first time, capture it.

        Kernel by kernel a step would cost more than its kernels do, and the host would wait for every iteration of the
        solver.

        Args:
            name: of the graph, with ``count``.
            count: how many worlds.
            run: what is captured.
            changed: what ``run`` writes and may be read: put back after the trial run that compiles kernels.
        """
        key = (name, count)
        if key not in self._graphs:
            self._graphs[key] = self._capture(count, run, list(changed))
        with warp_launches(self._device):
            self._warp.capture_launch(self._graphs[key])

    def _capture(self, count: int, run: Run, changed: list[Tensor]) -> Any:
        data = dataclasses.replace(self.data, nworld=count)
        before = [values.clone() for values in changed]
        with warp_launches(self._device):
            run(self.model, data)
        # CUDA cannot capture the default stream, which torch's current one mostly is: a stream that runs nothing else
        stream = self._warp.Stream(self._warp.device_from_torch(self._device)) if self._device.type == "cuda" else None
        scope = self._warp.ScopedStream(stream) if stream else self._warp.ScopedDevice("cpu")
        with scope, self._warp.ScopedCapture(stream=stream) as capture:
            run(self.model, data)
        for values, saved in zip(changed, before, strict=True):
            values.copy_(saved)
        return capture.graph


# what the next step depends on, in the order of a packed state
_STATE = (
    *("time", "qpos", "qvel", "act", "history", "plastic", "qacc_warmstart", "ctrl", "qfrc_applied", "xfrc_applied"),
    *("eq_active", "mocap_pos", "mocap_quat", "userdata"),
)
_SOLVERS = {1: "CG", 2: "Newton"}
# what set_const derives from the fields of a model that are its inputs
_CONSTANTS = (
    *("body_subtreemass", "body_invweight0", "dof_invweight0", "actuator_acc0", "geom_aabb", "geom_rbound", "eq_data"),
    *("tendon_length0", "tendon_invweight0", "cam_pos0", "cam_poscom0", "cam_mat0"),
    *("light_pos0", "light_poscom0", "light_dir0"),
)
_GEOM_CONTACTS = 2
"""Contacts per moving geom that there is room for, unless sizes are given."""
_CONTACT_ROWS = 4
"""Constraint rows of a contact with friction in two directions, in a pyramidal cone."""
_SMALLEST_SHARE = 64
"""Subsets are rounded up to a power of two of worlds, and to N/64 at least: that many graphs are captured."""


class MujocoWarpSim:
    """MuJoCo Warp behind the :class:`~headrace.sim.Simulation` protocol.

    Owns two sets of worlds in float32: the N visible worlds, and, from the first subset on, a scratch set.
    Whatever runs is a captured graph. All N run in place. A subset is copied to the front of the scratch worlds, padded
    to a power of two with copies of its last world, run there and copied back, so that it costs about its share.

    A world that has more contacts or constraints than there is room for computes wrong physics; ``step`` reports it as
    failed, and ``explain`` says which size to raise.

    Args:
        model: the model; with the Newton or CG solver, without soft bodies (flex) and sleeping.
        num_envs: N.
        device: a CUDA device, or ``cpu``.
        njmax: constraint rows per world that there is room for; None: ``<size njmax>`` of the model, or an estimate.
        nconmax: contacts per world, on the average of all; None as for ``njmax``.
    """

    suspension_cost = (
        "at most as much physics again as the worlds that act take, and two copies of their states: those that act run "
        "as a captured graph of the next power of two of worlds; results may differ from those of another number of "
        "worlds in the last float32 digits"
    )
    current_positions = False

    def __init__(
        self,
        model: Model,
        num_envs: int,
        *,
        device: torch.device | str = "cpu",
        njmax: int | None = None,
        nconmax: int | None = None,
    ) -> None:
        if num_envs < 1:
            raise ConfigError(f"num_envs: expected at least 1, got {num_envs}")
        for name, size in (("njmax", njmax), ("nconmax", nconmax)):
            if size is not None and size < 1:
                raise ConfigError(f"{name}: expected at least 1, or None for an estimate, got {size}")
        _refuse_unsupported(model)
        self._warp: Any = require_extra("warp", extra="warp", purpose='sim="warp"')
        self._api: Any = require_extra("mujoco_warp", extra="warp", purpose='sim="warp"')
        self._warp.config.quiet = True
        self._warp.init()
        self.model = model
        self.num_envs = num_envs
        self.device = as_device(device)
        self._room = _room(model, njmax, nconmax)
        with warp_launches(self.device):
            kernel_model: Any = self._api.put_model(model)
            # the same bits from run to run, at the price of ordered sums; we report overflows ourselves
            kernel_model.opt.deterministic = int(self._api.DeterminismType.ALL)
            kernel_model.opt.warn_overflow = 0
            self._worlds = self._new_worlds(kernel_model)
        self._scratch: Worlds | None = None
        kinds = self._api.OverflowType
        self._fatal = int(kinds.ALL & ~(kinds.ITERATIONS | kinds.LS_ITERATIONS))
        self._state = [name for name in _STATE if self._worlds.view(name)[0].numel()]
        self._bound: dict[str, Tensor] = {name: self._worlds.view(name) for name in (*self._state, "overflow")}
        self.expanded: dict[str, Tensor] = {}
        """See :attr:`Simulation.expanded`."""
        self._nominal: dict[str, Tensor] = {}
        self._constants: dict[str, Tensor] = {}
        self._derives_constants = False
        self._reset_mask = torch.zeros(num_envs, dtype=torch.bool, device=self.device)
        self._padding = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self._closed = False

    def field(self, name: str) -> Tensor:
        """See :meth:`Simulation.field`. float32; matrices are flat, as in MuJoCo."""
        self._check_open()
        if name not in self._bound:
            self._bound[name] = self._worlds.view(name)
        return self._bound[name]

    def seal(self) -> None:
        """See :meth:`Simulation.seal`. Warp computes every field, bound or not."""

    def model_field(self, name: str) -> Tensor:
        """See :meth:`Simulation.model_field`."""
        self._check_open()
        if name not in self.expanded:
            shared = getattr(self._worlds.model, name, None)
            if shared is None or not hasattr(shared, "ndim"):
                raise ConfigError(f"model field {name!r}: expected an array of MuJoCo Warp's model, got no such name")
            self._nominal[name] = self._warp.to_torch(shared)[0].clone()
            # eq_data is an input and a constant; it may have its rows already
            known = self._constants.pop(name, None)
            self.expanded[name] = self._worlds.expand(name, self.num_envs) if known is None else known
            if name in mujoco_api.setconst_inputs() and not self._derives_constants:
                # masses of its own call for constants of its own: shared ones would be those of the last to be reset
                self._derives_constants = True
                own = [constant for constant in _CONSTANTS if constant not in self.expanded]
                self._constants = {
                    constant: self._worlds.expand(constant, self.num_envs) for constant in own if self._has(constant)
                }
            self._scratch = None
        return self.expanded[name]

    def step(self, ids: Tensor | None, substeps: int) -> Tensor:
        """See :meth:`Simulation.step`. Does not wait for the device."""

        def substeps_of(model: Any, data: Any) -> None:
            for _ in range(substeps):
                self._api.step(model, data)

        self._run(substeps, ids, substeps_of)
        # a NaN or an infinity survives the sum; a finite sum of finite numbers is the common case
        sums = self.field("qpos").sum(dim=1) + self.field("qvel").sum(dim=1)
        broken = ~torch.isfinite(sums) | ((self._bound["overflow"] & self._fatal) != 0)
        if ids is None:
            return broken
        return torch.zeros_like(broken).index_copy_(0, ids, broken.index_select(0, ids))

    def explain(self, ids: Tensor) -> str:
        """See :meth:`Simulation.explain`."""
        flags = self._bound["overflow"].index_select(0, ids).cpu()
        found = 0
        for value in flags.tolist():
            found |= int(value) & self._fatal
        if not found:
            return ""
        names = ", ".join(str(kind.name) for kind in self._api.OverflowType if found & int(kind) == int(kind) and kind)
        njmax, nconmax = self._room
        return (
            f'sim="warp" ran out of room ({names}): njmax={njmax} constraint rows and nconmax={nconmax} contacts per '
            "environment; raise the task settings njmax and nconmax (--set njmax=…, or overrides={'njmax': …})"
        )

    def reset(self, ids: Tensor | None) -> None:
        """See :meth:`Simulation.reset`."""
        self._check_open()
        self._reset_mask.fill_(ids is None)
        if ids is not None:
            self._reset_mask.index_fill_(0, ids, True)
        mask = self._warp.from_torch(self._reset_mask)
        changed = [self._worlds.view(name) for name in self._bound]
        reset = self._api.reset_data
        self._worlds.replay("reset", self.num_envs, lambda model, data: reset(model, data, mask), changed)
        for name, values in self.expanded.items():
            values[slice(None) if ids is None else ids] = self._nominal[name]

    def forward(self, ids: Tensor | None) -> None:
        """See :meth:`Simulation.forward`."""

        def forward(model: Any, data: Any) -> None:
            if self._derives_constants:
                self._api.set_const(model, data)
            self._api.forward(model, data)

        self._run("forward", ids, forward)

    def states(self, ids: Tensor | None) -> Tensor:
        """See :meth:`Simulation.states`; float32 numbers in float64."""
        parts = [self.field(name).reshape(self.num_envs, -1).to(torch.float64) for name in self._state]
        whole = torch.cat(parts, dim=1)
        return whole if ids is None else whole.index_select(0, ids)

    def set_states(self, ids: Tensor | None, states: Tensor) -> None:
        """See :meth:`Simulation.set_states`."""
        at = 0
        for name in self._state:
            field = self.field(name)
            width = field[0].numel()
            rows = states[:, at : at + width].to(field.dtype).reshape(-1, *field.shape[1:])
            field[slice(None) if ids is None else ids] = rows
            at += width

    def state_dict(self) -> StateDict:
        """See :meth:`Simulation.state_dict`."""
        return {
            "state": self.states(None),
            "fields": {name: values.clone() for name, values in self._bound.items() if name not in self._state},
            "model_fields": {name: values.clone() for name, values in self.expanded.items()},
        }

    def load_state_dict(self, state: StateDict) -> None:
        """See :meth:`Simulation.load_state_dict`."""
        width = self.states(None).shape
        if tuple(state["state"].shape) != tuple(width):
            raise DataError(f"snapshot: expected states of shape {tuple(width)}, got {tuple(state['state'].shape)}")
        for name, values in state["model_fields"].items():
            self.model_field(name).copy_(values)
        # a simulation that never gave a field a value per environment has the nominal one
        for name in self.expanded.keys() - state["model_fields"].keys():
            self.expanded[name].copy_(self._nominal[name].expand_as(self.expanded[name]))
        self.set_states(None, state["state"])
        self.forward(None)
        # the forward made everything consistent; the fields that were seen get back exactly what was seen
        self.set_states(None, state["state"])
        for name, values in state["fields"].items():
            self.field(name).copy_(values)

    def close(self) -> None:
        """See :meth:`Simulation.close`."""
        self._closed = True
        self._scratch = None
        self._bound.clear()
        self.expanded.clear()
        self._constants.clear()

    def _run(self, name: str | int, ids: Tensor | None, run: Run) -> None:
        """Run something on some worlds (None: all), as a captured graph; every other one stays as it is."""
        self._check_open()
        if ids is None:
            changed = [*self._bound.values(), *self._constants.values()]
            self._worlds.replay(name, self.num_envs, run, changed)
            return
        count = int(ids.shape[0])
        if count == 0:
            return
        size = self._round_up(count)
        padded = self._padding[:size]
        padded.copy_(ids[-1:].expand(size))
        padded[:count] = ids
        if self._scratch is None:
            self._scratch = self._new_worlds(copy.copy(self._worlds.model))
            self._scratch_rows = {
                name: self._scratch.expand(name, self.num_envs) for name in (*self.expanded, *self._constants)
            }
        scratch, rows = self._scratch, self._scratch_rows
        pairs = [(values, scratch.view(field)) for field, values in self._bound.items()]
        constants = [(values, rows[field]) for field, values in self._constants.items()]
        inputs = [(values, rows[field]) for field, values in self.expanded.items()]
        for values, there in (*pairs, *constants, *inputs):
            torch.index_select(values, 0, padded, out=there[:size])
        changed = [there[:size] for _, there in (*pairs, *constants)]
        scratch.replay(name, size, run, changed)
        for values, there in (*pairs, *constants):
            values.index_copy_(0, ids, there[:count])

    def _round_up(self, count: int) -> int:
        """Return the number of worlds that run for a subset of ``count``."""
        return min(self.num_envs, max(1 << (count - 1).bit_length(), self.num_envs // _SMALLEST_SHARE))

    def _new_worlds(self, kernel_model: Any) -> Worlds:
        njmax, nconmax = self._room
        with warp_launches(self.device):
            data = self._api.make_data(self.model, nworld=self.num_envs, njmax=njmax, nconmax=nconmax)
        return Worlds(self._warp, self.device, kernel_model, data)

    def _has(self, name: str) -> bool:
        shared = getattr(self._worlds.model, name, None)
        return shared is not None and shared.size > 0

    def _check_open(self) -> None:
        if self._closed:
            raise LifecycleError("the simulation is closed; create a new environment")


def _refuse_unsupported(model: Model) -> None:
    if int(model.opt.solver) not in _SOLVERS:
        raise ConfigError(
            'sim="warp": expected a model with the Newton or CG solver, got PGS, which MuJoCo Warp does not have; '
            'set <option solver="Newton"/> in its MJCF, or use sim="mujoco"'
        )
    sleeps = bool(model.opt.enableflags & int(mujoco.mjtEnableBit.mjENBL_SLEEP))
    if model.nflex or sleeps:
        what = "soft bodies (flex)" if model.nflex else "sleeping (<flag sleep>)"
        raise ConfigError(
            f'sim="warp": expected a model without {what}, whose caches between steps a subset of worlds cannot have; '
            'use sim="mujoco"'
        )


def _room(model: Model, njmax: int | None, nconmax: int | None) -> tuple[int, int]:
    """Constraint rows and contacts per world that there is room for."""
    collides = (model.geom_contype != 0) | (model.geom_conaffinity != 0)
    moving = int((collides & (model.body_weldid[model.geom_bodyid] != 0)).sum())
    contacts = nconmax or (int(model.nconmax) if model.nconmax > 0 else max(16, _GEOM_CONTACTS * moving))
    others = int(model.neq) * 6 + int(model.jnt_limited.sum()) + int(model.tendon_limited.sum()) + int(model.nv)
    rows = njmax or (int(model.njmax) if model.njmax > 0 else contacts * _CONTACT_ROWS + others)
    return rows, contacts
