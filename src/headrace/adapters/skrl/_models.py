"""The networks of the shared settings as skrl's models."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from gymnasium import spaces
from skrl.models.torch import DeterministicMixin, GaussianMixin, Model
from torch import Tensor, nn

from headrace.adapters._settings import PPOSettings


class Interface(NamedTuple):
    """What a model of skrl is between."""

    seen: spaces.Box
    states: spaces.Box | None
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

    def __init__(self, interface: Interface, settings: PPOSettings) -> None:
        interface.init(self)
        GaussianMixin.__init__(self)
        self.net = network(interface.seen.shape, settings.hidden, interface.actions.shape[0])
        self.log_std = nn.Parameter(torch.full(interface.actions.shape, math.log(settings.initial_std)))

    def compute(  # pyright: ignore[reportIncompatibleMethodOverride]  # its mixins pass the role by position
        self, inputs: dict[str, Tensor], role: str = ""
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean actions (n, A) and the logarithm of their spread."""
        del role
        return self.net(inputs["observations"]), {"log_std": self.log_std}


class Critic(DeterministicMixin, Model):
    """The value of states, or of observations where a task has no states."""

    def __init__(self, interface: Interface, settings: PPOSettings) -> None:
        interface.init(self)
        DeterministicMixin.__init__(self)
        self._read = "observations" if interface.states is None else "states"
        self.net = network((interface.states or interface.seen).shape, settings.hidden, 1)

    def compute(  # pyright: ignore[reportIncompatibleMethodOverride]  # its mixins pass the role by position
        self, inputs: dict[str, Tensor], role: str = ""
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Values (n, 1)."""
        del role
        return self.net(inputs[self._read]), {}


def network(shape: tuple[int, ...], hidden: tuple[int, ...], out: int) -> nn.Sequential:
    """Layers over flat rows; rows of a picture of this shape (C, H, W) go through two convolutions first."""
    before: list[nn.Module] = []
    width = shape[0]
    if len(shape) == 3:
        before = [nn.Unflatten(1, shape), nn.Conv2d(shape[0], 16, 8, 4), nn.ELU(), nn.Conv2d(16, 32, 4, 2), nn.ELU()]
        before.append(nn.Flatten())
        with torch.no_grad():
            width = int(nn.Sequential(*before)(torch.zeros(1, math.prod(shape))).shape[1])
    sizes = (width, *hidden)
    layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ELU())]
    return nn.Sequential(*before, *layers, nn.Linear(sizes[-1], out))
