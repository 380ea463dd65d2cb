"""The protocol between batched physics and everything above it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

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
