"""A user's policies: their source is part of the identity of journals in this directory, so it must not change."""

import torch


class Lean:
    """Pushes the cart to where the pole leans."""

    horizon, action_dim = 4, 1

    def __init__(self, gain: float = 2.0) -> None:
        self.gain = gain

    def __call__(self, obs):
        """Plan the same action four times."""
        return (self.gain * obs["policy"][:, 1:2]).clamp(-1.0, 1.0)[:, None].expand(-1, 4, -1).contiguous()


def rest(obs):
    """Plan one action that does nothing."""
    return torch.zeros(len(obs["policy"]), 1, 1)
