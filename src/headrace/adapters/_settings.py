"""One PPO for every library: the settings that all of them are built from, and where one cannot follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from headrace.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from pydantic import JsonValue

LibraryName = Literal["headrace", "rl_games", "rsl_rl", "sb3", "skrl"]

LIBRARIES: tuple[LibraryName, ...] = ("headrace", "rl_games", "rsl_rl", "sb3", "skrl")
"""What ``--library`` takes; ``headrace`` is the small learner of :mod:`headrace.rollout._ppo`."""

EXTRAS: Mapping[LibraryName, tuple[str, str] | None] = {
    "headrace": None,
    "rl_games": ("rl_games", "rl-games"),
    "rsl_rl": ("rsl_rl", "rsl-rl"),
    "sb3": ("stable_baselines3", "sb3"),
    "skrl": ("skrl", "skrl"),
}
"""Library → the module it is imported as and the extra that installs it; None needs the core alone."""

DIFFERENCES: Mapping[LibraryName, tuple[str, ...]] = {
    "headrace": (
        "the learning rate adapts to the KL divergence of an epoch; learning_rate is where it begins",
        "minibatches are whole slices of environments, not shuffled steps",
        "value targets are normalized; reward_scale is not used",
        "pictures go through a layer of 128 features before the hidden layers",
    ),
    "rl_games": (
        "a truncated episode bootstraps from the value of the last observation but one",
        "minibatches are the same runs of steps in each epoch, not shuffled",
    ),
    "rsl_rl": (
        "a truncated episode bootstraps from the value of the last observation but one",
        "max_grad_norm holds for actor and critic apart",
    ),
    "sb3": (
        "advantages are normalized per minibatch",
        "no critic group: actor and critic both read the group 'policy'",
        "no recurrent policies",
    ),
    "skrl": ("no recurrent policies",),
}
"""Where a library cannot do what :class:`PPOSettings` say, or does it otherwise."""


@dataclass(frozen=True, kw_only=True)
class PPOSettings:
    """The same network, batch, epochs, learning rate, discount and λ for every library."""

    steps: int = 32
    """Steps of each environment in an iteration."""
    epochs: int = 5
    minibatches: int = 4
    """Into how many parts steps · num_envs are split; must divide it."""
    learning_rate: float = 1e-3
    """Constant, Adam."""
    gamma: float = 0.99
    lam: float = 0.95
    clip: float = 0.2
    value_weight: float = 0.5
    """Of the mean squared error of the value, which is not clipped."""
    entropy_weight: float = 0.0
    max_grad_norm: float = 1.0
    hidden: tuple[int, ...] = (64, 64)
    """Layers of actor and of critic, which share nothing; ELU between them."""
    memory: Literal["none", "gru"] = "none"
    """``gru`` puts a GRU of ``memory_size`` before the layers, where the library can."""
    memory_size: int = 64
    initial_std: float = 0.6
    """Of the Gaussian around the actor's mean, in actions from -1 to 1; learned, the same in every state."""
    normalize_obs: bool = True
    """Running mean and variance of vectors, saved with the weights; pictures are divided by 255."""
    reward_scale: float = 0.1
    """What rewards are multiplied with before a learner sees them. Returns that are reported are not scaled."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "epochs", "minibatches", "memory_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1, got {getattr(self, name)}")
        for name in ("learning_rate", "initial_std", "reward_scale", "max_grad_norm"):
            if not getattr(self, name) > 0.0:
                raise ConfigError(f"{name}: expected more than 0, got {getattr(self, name)}")
        for name in ("gamma", "lam"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name}: expected 0 to 1, got {getattr(self, name)}")

    def minibatch_size(self, num_envs: int) -> int:
        """Steps in a minibatch; raises where they do not come out even."""
        size, rest = divmod(self.steps * num_envs, self.minibatches)
        if rest or not size:
            raise ConfigError(
                f"minibatches: expected a divisor of steps · num_envs = {self.steps * num_envs}, got {self.minibatches}"
            )
        return size


def plain_settings(settings: PPOSettings) -> dict[str, JsonValue]:
    """The settings as numbers, words and lists, for files."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(settings).items()}


def checked_library(name: str) -> LibraryName:
    """``name`` if it is a library; an unknown one raises an error that suggests the nearest."""
    for library in LIBRARIES:
        if name == library:
            return library
    raise UnknownNameError("library", name, LIBRARIES)


def check_memory(settings: PPOSettings, library: LibraryName) -> None:
    """Refuse a recurrent policy where the library has none."""
    if settings.memory != "none":
        raise ConfigError(f"memory: {library} has no recurrent PPO here; use headrace, rl_games or rsl_rl, or none")
