"""rsl_rl's PPO, an iteration at a time, through its own ``OnPolicyRunner``."""

from __future__ import annotations

import contextlib
import io
from typing import Any, cast

from rsl_rl.runners import OnPolicyRunner
from torch import Tensor

from headrace.adapters._checkpoint import META_KEY, CheckpointMeta
from headrace.adapters._learner import AnyEnv, InferencePolicy, Learner, LearnerEnv, Memory, Times
from headrace.adapters.rsl_rl._env import RslRlEnv
from headrace.rollout import PPOCfg
from headrace.rollout._groups import Shapes, is_image
from headrace.types import Obs


class RslRlLearner(Learner):
    """rsl_rl's PPO. The memory of a recurrent policy begins anew where a training is resumed."""

    library = "rsl_rl"

    def __init__(self, env: AnyEnv, settings: PPOCfg) -> None:
        super().__init__(env, settings)
        settings.minibatch_size(env.num_envs)  # must divide
        self._env = RslRlEnv(self.core)
        with contextlib.redirect_stdout(io.StringIO()):  # prints its networks
            self.runner = OnPolicyRunner(self._env, runner_config(settings, self.core), device=str(env.device))
        self._watch = _Watch()
        self.runner.logger = self._watch  # pyright: ignore[reportAttributeAccessIssue]  # takes what the runner calls

    def iterate(self) -> Times:
        """One iteration of ``runner.learn``."""
        self.runner.learn(1)
        self.runner.current_learning_iteration += 1
        return self._watch.times

    def content(self, meta: CheckpointMeta) -> dict[str, Any]:
        """What ``runner.save`` writes, with our description among its ``infos``."""
        infos = {META_KEY: meta.plain()}
        return {**self.runner.alg.save(), "iter": self.runner.current_learning_iteration, "infos": infos}

    def load_content(self, content: dict[str, Any]) -> None:
        """Actor, critic, optimizer and iteration."""
        self.runner.alg.load(content, None, True)
        self.runner.current_learning_iteration = int(content["iter"])

    def policy(self, *, deterministic: bool = True) -> InferencePolicy:
        """The actor; its own recurrent state, which training uses too."""
        actor = self.runner.get_inference_policy(str(self.core.device))
        recurrent = bool(actor.is_recurrent)

        def act(obs: Obs, memory: Memory | None) -> tuple[Tensor, Memory | None]:
            if recurrent:
                state = memory[0] if memory is not None and len(memory) == 1 else memory
                actor.reset(hidden_state=cast("Any", state))  # a tensor of a GRU, two of an LSTM
            chosen = self.core.rescaled(
                cast("Tensor", actor(self._env.grouped(obs), stochastic_output=not deterministic))
            )
            if not recurrent:
                return chosen, None
            state = actor.get_hidden_state()
            return chosen, state if isinstance(state, tuple) else (cast("Tensor", state),)

        return InferencePolicy(act, recurrent=recurrent)


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
