"""What stands before SB3's layers, so that its networks are those of the other libraries."""

from __future__ import annotations

from typing import cast

import torch
from gymnasium import spaces
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import Tensor, nn

from headrace.rollout._actor_critic import Normalizer


class NormalizedVector(BaseFeaturesExtractor):
    """Running mean and variance of a vector, part of the policy's weights: they travel with every checkpoint."""

    def __init__(self, observation_space: spaces.Box) -> None:
        size = observation_space.shape[0]
        super().__init__(observation_space, size)
        self.normalizer = Normalizer(size)

    def forward(self, observations: Tensor) -> Tensor:
        """Zero mean and unit variance."""
        return self.normalizer(observations)


class Convolutions(BaseFeaturesExtractor):
    """Two convolutions over pictures (n, C, H, W), which SB3 has divided by 255."""

    def __init__(self, observation_space: spaces.Box) -> None:
        channels = observation_space.shape[0]
        layers = nn.Sequential(nn.Conv2d(channels, 16, 8, 4), nn.ELU(), nn.Conv2d(16, 32, 4, 2), nn.ELU(), nn.Flatten())
        with torch.no_grad():
            width = layers(torch.zeros(1, *observation_space.shape)).shape[1]
        super().__init__(observation_space, width)
        self.layers = layers

    def forward(self, observations: Tensor) -> Tensor:
        """Features (n, …)."""
        return cast("Tensor", self.layers(observations))
