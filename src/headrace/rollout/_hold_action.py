"""What environments play while they wait in a hold form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.envs._recipe import AnyEnv
from headrace.errors import ConfigError
from headrace.types import Obs

HoldAction: TypeAlias = "Literal['last', 'zero'] | Callable[[Obs, Tensor], Tensor]"
"""What environments play while they wait in a hold form: their last action, zeros, or a function of the current
observation rows (n, …) and their last actions (n, A) that gives (n, A)."""


def hold(env: AnyEnv, slots: NDArray[np.int64], actions: Tensor, choice: HoldAction) -> None:
    """Write the actions of ``slots`` (n,), which act without one of the policy's, over their last ones in (N, A)."""
    ids = torch.from_numpy(slots).to(env.device)
    if not callable(choice):
        if choice == "zero":
            actions.index_fill_(0, ids, 0.0)
        return
    last = actions.index_select(0, ids)
    chosen = choice(env.observe(ids), last)
    if chosen.shape != last.shape:
        raise ConfigError(f"hold_action: expected actions {tuple(last.shape)}, got {tuple(chosen.shape)}")
    actions.index_copy_(0, ids, chosen.to(actions))
