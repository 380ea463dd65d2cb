"""What stands before SB3's layers, so that its networks are those of the other libraries.

SB3 writes the names of these classes and of their module into its checkpoints: they stay where they are.
"""

from __future__ import annotations

from typing import cast

import torch
from gymnasium import spaces
from stable_baselines3.common.policies import MultiInputActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, MlpExtractor
from torch import Tensor

from headrace.learning.actor_critic import GroupEncoder, Normalizer, Shapes


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
    """Two convolutions over images (n, C, H, W), which SB3 has divided by 255."""

    def __init__(self, observation_space: spaces.Box) -> None:
        encoder = GroupEncoder({"image": observation_space.shape}, normalize=False)
        super().__init__(observation_space, encoder.width)
        self.layers = encoder.encoders[0]

    def forward(self, observations: Tensor) -> Tensor:
        """Features (n, …)."""
        return cast("Tensor", self.layers(observations))


class GroupFeatures(BaseFeaturesExtractor):
    """Several observation groups through our encoder."""

    def __init__(self, observation_space: spaces.Dict, groups: Shapes, normalize: bool) -> None:
        encoder = GroupEncoder(groups, normalize=normalize)
        super().__init__(observation_space, encoder.width)
        self.encoder = encoder

    def forward(self, observations: dict[str, Tensor]) -> Tensor:
        """Features (n, …)."""
        return self.encoder(observations)

    def update(self, observations: dict[str, Tensor]) -> None:
        """Let the statistics take in rows (n, …) of each group."""
        rows = len(observations[self.encoder.names[0]])
        self.encoder.update(observations, torch.ones(rows, dtype=torch.bool))


class GroupPolicy(MultiInputActorCriticPolicy):
    """SB3's ``MultiInputPolicy`` whose actor and critic each read their own groups.

    ``features_extractor_kwargs`` has ``actor_groups`` and ``critic_groups`` (name → shape), and ``normalize``.
    """

    def make_features_extractor(self) -> GroupFeatures:
        """Return the features of the actor, then those of the critic: the order in which SB3 reads them."""
        options = self.features_extractor_kwargs
        groups = options["critic_groups" if "pi_features_extractor" in self._modules else "actor_groups"]
        return GroupFeatures(cast("spaces.Dict", self.observation_space), groups, options["normalize"])

    def _build_mlp_extractor(self) -> None:
        super()._build_mlp_extractor()
        width = cast("GroupFeatures", self.vf_features_extractor).features_dim
        # the actor's has the size of the actor's features on both sides
        critic = MlpExtractor(width, self.net_arch, self.activation_fn, device=self.device)
        self.mlp_extractor.value_net = critic.value_net
