"""TorchRL: an ``EnvBase`` over ``BatchEnv``, and a ``Storage`` over the replay buffer."""

from headrace.libraries.torchrl._env import TorchRLEnv
from headrace.libraries.torchrl._storage import ReplayStorage

__all__ = ["ReplayStorage", "TorchRLEnv"]
