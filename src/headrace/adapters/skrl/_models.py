"""The networks of the shared settings as skrl's models."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple, cast

import torch
from gymnasium import spaces
from skrl.models.torch import DeterministicMixin, GaussianMixin, Model
from skrl.utils.spaces.torch import unflatten_tensorized_space
from torch import Tensor, nn

from headrace.rollout import PPOCfg
from headrace.rollout._encoder import GroupEncoder


class Interface(NamedTuple):
    """What a model of skrl is between."""

    seen: spaces.Box | spaces.Dict
    states: spaces.Box | spaces.Dict | None
    actions: spaces.Box
    device: torch.device

    def init(self, model: Model) -> None:
        """Begin a model, before its mixin does."""
        Model.__init__(
            model,
            observation_space=self.seen,
            state_space=self.states,
            action_space=self.actions,
            device=self.device,
        )


class Actor(GaussianMixin, Model):
    """A Gaussian around the network's output, its spread learned and the same in every state."""

    def __init__(self, interface: Interface, settings: PPOCfg) -> None:
        interface.init(self)
        GaussianMixin.__init__(self)
        self.net = network(interface.seen, settings, interface.actions.shape[0])
        self.log_std = nn.Parameter(torch.full(interface.actions.shape, math.log(settings.initial_std)))

    def compute(  # pyright: ignore[reportIncompatibleMethodOverride]  # its mixins pass the role by position
        self, inputs: dict[str, Tensor], role: str = ""
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean actions (n, A) and the logarithm of their spread."""
        del role
        return self.net(inputs["observations"]), {"log_std": self.log_std}


class Critic(DeterministicMixin, Model):
    """The value of states, or of observations where a task has no states."""

    def __init__(self, interface: Interface, settings: PPOCfg) -> None:
        interface.init(self)
        DeterministicMixin.__init__(self)
        self._read = "observations" if interface.states is None else "states"
        self.net = network(interface.states or interface.seen, settings, 1)

    def compute(  # pyright: ignore[reportIncompatibleMethodOverride]  # its mixins pass the role by position
        self, inputs: dict[str, Tensor], role: str = ""
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Values (n, 1)."""
        del role
        return self.net(inputs[self._read]), {}


def network(space: spaces.Box | spaces.Dict, settings: PPOCfg, out: int) -> nn.Sequential:
    """Layers over flat rows; images go through two convolutions first, several groups through our encoder."""
    before: list[nn.Module] = []
    if isinstance(space, spaces.Dict):
        groups = _Groups(space, settings)
        before.append(groups)
        width = groups.encoder.width
    else:
        width = space.shape[0]
        if len(space.shape) == 3:
            encoder = GroupEncoder({"image": space.shape}, normalize=False).encoders[0]
            before = [nn.Unflatten(1, space.shape), *cast("nn.Sequential", encoder)]
            with torch.no_grad():
                width = int(nn.Sequential(*before)(torch.zeros(1, math.prod(space.shape))).shape[1])
    sizes = (width, *settings.hidden)
    layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ELU())]
    return nn.Sequential(*before, *layers, nn.Linear(sizes[-1], out))


class _Groups(nn.Module):
    """Flat rows taken apart into groups, and encoded."""

    def __init__(self, space: spaces.Dict, settings: PPOCfg) -> None:
        super().__init__()
        self._space = space
        shapes = {name: cast("tuple[int, ...]", group.shape) for name, group in space.spaces.items()}
        self.encoder = GroupEncoder(shapes, normalize=settings.normalize_obs)

    def forward(self, rows: Tensor) -> Tensor:
        return self.encoder(unflatten_tensorized_space(self._space, rows))

    def update(self, rows: Tensor) -> None:
        """Let the statistics take in flat rows (n, features)."""
        groups = cast("dict[str, Tensor]", unflatten_tensorized_space(self._space, rows))
        self.encoder.update(groups, torch.ones(len(rows), dtype=torch.bool, device=rows.device))


def update_statistics(model: Model, rows: Tensor) -> None:
    """Let our encoder in a model, where there is one, take in flat rows (T, N, features) of what it reads."""
    first = cast("Actor | Critic", model).net[0]
    if isinstance(first, _Groups):
        first.update(rows.flatten(0, 1))
