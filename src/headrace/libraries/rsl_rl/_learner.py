"""rsl_rl's environment, and its PPO, an iteration at a time, through its own ``OnPolicyRunner``."""

from __future__ import annotations

import contextlib
import io
from typing import Any, cast

import torch
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict
from torch import Tensor

from headrace.envs.batch_env import BatchEnv
from headrace.learning.groups import Shapes, is_image
from headrace.learning.ppo import PPOCfg
from headrace.libraries.checkpoint import META_KEY, CheckpointMeta
from headrace.libraries.learner import AnyEnv, InferencePolicy, Learner, LearnerEnv, MemoryState, Times
from headrace.types import Obs

_UNKNOWN = 2**31 - 1
"""What a bridge says of the length of its episodes: nothing."""


class RslRlEnv(VecEnv):
    """Observation groups as a ``TensorDict``, images as float32 (N, C, H, W); ``time_outs`` marks truncations.

    rsl_rl never resets an environment: the first episodes begin here.
    """

    def __init__(self, core: LearnerEnv) -> None:
        self.core = core
        self.num_envs = core.num_envs
        self.num_actions = core.action_dim
        # rsl_rl reads it only to spread the first episodes' lengths, which our learner does not ask for
        self.max_episode_length = core.env.task.cfg.episode_length if isinstance(core.env, BatchEnv) else _UNKNOWN
        self.device = core.device
        self.cfg = {}
        self._outside = torch.inference_mode(False)
        self._no_dones = torch.zeros(core.num_envs, dtype=torch.int64, device=core.device)
        self._size = torch.Size([core.num_envs])
        core.reset()

    @property
    def episode_length_buf(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]  # read from the env
        """int64 (N,): steps taken in each episode."""
        return self.core.env.episode_steps

    def get_observations(self) -> TensorDict:
        """Return the newest observation."""
        return self.grouped(self.core.obs)

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        """Observation, reward (N,), dones int64 (N,), and ``time_outs`` bool (N,) where an episode was cut off."""
        # rsl_rl collects in inference mode, whose tensors cannot be changed in place later: the environment's must not
        # be such
        with self._outside:
            torch.set_grad_enabled(False)  # until the block ends
            turn = self.core.step(actions)
            dones = turn.ended.long() if turn.any_ended else self._no_dones
            extras = {"time_outs": turn.truncated} if turn.any_truncated else {}  # bootstraps only where it is told to
            return self.grouped(turn.obs), turn.reward, dones, extras

    def grouped(self, obs: dict[str, Tensor]) -> TensorDict:
        """Return the groups that actor and critic read."""
        chosen = self.core.rows(obs, self.core.read.all)
        # the constructor checks and copies what is known to fit, which takes 3 % of a step
        count = len(next(iter(chosen.values())))
        size = self._size if count == self.num_envs else torch.Size([count])
        return TensorDict._new_unsafe(chosen, size, device=self.device)  # pyright: ignore[reportPrivateUsage]


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
        """Return what ``runner.save`` writes, with our description among its ``infos``."""
        infos = {META_KEY: meta.plain()}
        return {**self.runner.alg.save(), "iter": self.runner.current_learning_iteration, "infos": infos}

    def load_content(self, content: dict[str, Any]) -> None:
        """Actor, critic, optimizer and iteration."""
        self.runner.alg.load(content, None, True)
        self.runner.current_learning_iteration = int(content["iter"])

    def policy(self, *, deterministic: bool = True) -> InferencePolicy:
        """Return the actor, with its own recurrent state, which training uses, too."""
        actor = self.runner.get_inference_policy(str(self.core.device))
        recurrent = bool(actor.is_recurrent)

        def act(obs: Obs, memory: MemoryState | None) -> tuple[Tensor, MemoryState | None]:
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
    """Return the shared settings as the configuration of ``OnPolicyRunner``."""
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
