"""rl_games' network over several observation groups: its own layers behind our encoder."""

from __future__ import annotations

from typing import Any

from rl_games.algos_torch.model_builder import register_network
from rl_games.algos_torch.network_builder import A2CBuilder
from torch import nn

from headrace.rollout._encoder import GroupEncoder

NETWORK = "headrace_groups"
"""The name that it is registered under in rl_games."""


class GroupNetwork(A2CBuilder.Network):
    """``actor_critic`` of rl_games whose convolutions are a :class:`GroupEncoder`, which takes a dict of groups."""

    cnn: dict[str, Any]

    def _build_conv(  # pyright: ignore[reportIncompatibleMethodOverride]  # called with these names only
        self, *, input_shape: dict[str, tuple[int, ...]], **_: object
    ) -> nn.Module:
        return GroupEncoder(input_shape, normalize=self.cnn["normalize"])

    def _calc_input_size(self, input_shape: object, cnn_layers: Any = None) -> int:
        del input_shape
        return cnn_layers.width


class GroupNetworkBuilder(A2CBuilder):
    """What rl_games makes the network with."""

    params: dict[str, Any]

    def build(self, name: str, **kwargs: Any) -> GroupNetwork:
        """The network of an agent, or of its central value."""
        del name
        return GroupNetwork(self.params, **kwargs)


register_network(NETWORK, GroupNetworkBuilder)
