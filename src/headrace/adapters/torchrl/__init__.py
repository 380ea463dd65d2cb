"""TorchRL: an ``EnvBase`` over ``BatchEnv``, and a ``Storage`` over the replay buffer."""

from headrace.adapters.torchrl._env import TorchRLEnv
from headrace.adapters.torchrl._storage import ReplayStorage

__all__ = ["ReplayStorage", "TorchRLEnv"]
