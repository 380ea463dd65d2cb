"""rsl_rl's PPO, an iteration at a time, through its own ``OnPolicyRunner``."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any, cast

import torch
from rsl_rl.runners import OnPolicyRunner
from torch import Tensor

from headrace.adapters._checkpoint import META_KEY, checked_fit, describe, read_weights
from headrace.adapters._learner import AnyEnv, CheckpointMeta, Memory, Times
from headrace.adapters._stepping import LearnerEnv
from headrace.adapters._torch_state import load_random_state, random_state
from headrace.adapters.rsl_rl._env import RslRlEnv
from headrace.files import write_whole
from headrace.rollout import PPOCfg
from headrace.rollout._groups import Shapes, is_image
from headrace.types import EpisodeEnds, Obs, StateDict


class RslRlLearner:
    """A :class:`headrace.adapters.Learner`."""

    library = "rsl_rl"

    def __init__(self, env: AnyEnv, settings: PPOCfg) -> None:
        self.settings = settings
        settings.minibatch_size(env.num_envs)
        self._core = LearnerEnv.of(env, settings)
        self._env = RslRlEnv(self._core)
        with contextlib.redirect_stdout(io.StringIO()):  # prints its networks
            self.runner = OnPolicyRunner(self._env, runner_config(settings, self._core), device=str(env.device))
        self._watch = _Watch()
        self.runner.logger = self._watch  # pyright: ignore[reportAttributeAccessIssue]  # takes what the runner calls

    def iterate(self) -> Times:
        """One iteration of ``runner.learn``."""
        self.runner.learn(1)
        self.runner.current_learning_iteration += 1
        return self._watch.times

    def finished(self) -> EpisodeEnds:
        """The episodes that ended since the last call."""
        return self._core.finished()

    def save(self, path: Path, meta: CheckpointMeta) -> None:
        """As ``runner.save`` does, with our description among its ``infos``."""
        write_whole(path, lambda part: self.runner.save(str(part), infos={META_KEY: describe(meta)}))

    def load(self, path: Path, *, trust: bool = False) -> None:
        """Actor, critic, optimizer and iteration."""
        content = dict(read_weights(path, trust=trust))
        checked_fit(path, self.library, lambda: self.runner.alg.load(content, None, True))
        self.runner.current_learning_iteration = int(content["iter"])

    def state_dict(self) -> StateDict:
        """Environment and random streams. The memory of a recurrent policy begins anew."""
        return {"env": self._core.state_dict(), "random": random_state()}

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from :meth:`state_dict`."""
        self._core.load_state_dict(state["env"])
        load_random_state(state["random"])

    def policy(self, *, deterministic: bool = True) -> RslRlPolicy:
        """The actor; its own recurrent state, which training uses too."""
        return RslRlPolicy(self.runner, self._env, deterministic=deterministic)

    def close(self) -> None:
        """Nothing is left running."""


class RslRlPolicy:
    """rsl_rl's actor as an inference policy."""

    def __init__(self, runner: OnPolicyRunner, env: RslRlEnv, *, deterministic: bool) -> None:
        self._actor = runner.get_inference_policy(str(env.device))
        self._env, self._sampled = env, not deterministic
        self.recurrent = bool(self._actor.is_recurrent)
        self.memory: Memory | None = None

    @torch.no_grad()
    def __call__(self, obs: Obs) -> Tensor:
        """Actions (n, A) within the environment's bounds."""
        if self.recurrent:
            kept = self.memory
            state = kept[0] if kept is not None and len(kept) == 1 else kept
            self._actor.reset(hidden_state=cast("Any", state))  # a tensor of a GRU, two of an LSTM
        chosen = self._actor(self._env.grouped(obs), stochastic_output=self._sampled)
        if self.recurrent:
            state = self._actor.get_hidden_state()
            self.memory = state if isinstance(state, tuple) else (cast("Tensor", state),)
        return self._env.core.rescaled(cast("Tensor", chosen))


class _Watch:
    """Takes the place of the runner's logger: keeps the time split that it is told, writes nothing."""

    writer = None
    log_dir = None

    def __init__(self) -> None:
        self.times = Times(0.0, 0.0)

    def init_logging_writer(self) -> None:
        pass

    def process_env_step(self, *_: object) -> None:
        pass

    def log(self, *, collect_time: float, learn_time: float, **_: object) -> None:
        self.times = Times(collect_time, learn_time)

    def save_model(self, *_: object) -> None:
        pass


def runner_config(settings: PPOCfg, core: LearnerEnv) -> dict[str, Any]:
    """The shared settings as the configuration of ``OnPolicyRunner``."""
    return {
        "num_steps_per_env": settings.steps,
        "save_interval": 1,
        "obs_groups": {"actor": list(core.read.actor), "critic": list(core.read.critic)},
        "algorithm": {
            "class_name": "PPO",
            "num_learning_epochs": settings.epochs,
            "num_mini_batches": settings.minibatches,
            "clip_param": settings.clip,
            "gamma": settings.gamma,
            "lam": settings.lam,
            "value_loss_coef": settings.value_weight,
            "entropy_coef": settings.entropy_weight,
            "learning_rate": settings.learning_rate,
            "max_grad_norm": settings.max_grad_norm,
            "use_clipped_value_loss": False,
            "schedule": "fixed",
            "desired_kl": None,
        },
        "actor": _model(settings, core.read.actor)
        | {"distribution_cfg": {"class_name": "GaussianDistribution", "init_std": settings.initial_std}},
        "critic": _model(settings, core.read.critic),
    }


def _model(settings: PPOCfg, groups: Shapes) -> dict[str, Any]:
    layers: dict[str, Any] = {"hidden_dims": list(settings.hidden), "activation": "elu"}
    images = [name for name, shape in groups.items() if is_image(shape)]
    layers["obs_normalization"] = settings.normalize_obs and len(images) < len(groups)
    if images:
        convolutions = {"output_channels": [16, 32], "kernel_size": [8, 4], "stride": [4, 2], "activation": "elu"}
        return layers | {"class_name": "CNNModel", "cnn_cfg": convolutions}
    if settings.memory == "none":
        return layers | {"class_name": "MLPModel"}
    memory = {"rnn_type": settings.memory, "rnn_hidden_dim": settings.memory_size, "rnn_num_layers": 1}
    return layers | {"class_name": "RNNModel"} | memory
