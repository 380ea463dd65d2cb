"""rsl_rl's environment, and its PPO, an iteration at a time, through its own ``OnPolicyRunner``."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict
from torch import Tensor

from headrace.envs.batch_env import BatchEnv
from headrace.errors import ConfigError
from headrace.learning.actor_critic import Shapes, is_image
from headrace.learning.ppo import PPOCfg
from headrace.libraries.learner import AnyEnv, InferencePolicy, Learner, LearnerEnv, MemoryState
from headrace.libraries.training import META_KEY, CheckpointMeta, Times
from headrace.types import Obs, StateDict

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

    @property
    def unwrapped(self) -> RslRlEnv:
        """Itself: rsl_rl asks it for :attr:`step_dt`."""
        return self

    @property
    def step_dt(self) -> float:
        """Seconds of a step, by which rsl_rl multiplies the weight of curiosity; 1.0 for bridged environments."""
        return self.core.env.task.dt if isinstance(self.core.env, BatchEnv) else 1.0

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
            extras = {"time_outs": turn.truncated} if turn.any_truncated else {}  # bootstraps nowhere else
            return self.grouped(turn.obs), turn.reward, dones, extras

    def grouped(self, obs: dict[str, Tensor]) -> TensorDict:
        """Return the groups that actor and critic read."""
        chosen = self.core.rows(obs, self.core.read.all)
        # the constructor checks and copies what is known to fit, which takes 3 % of a step
        count = len(next(iter(chosen.values())))
        size = self._size if count == self.num_envs else torch.Size([count])
        return TensorDict._new_unsafe(chosen, size, device=self.device)  # pyright: ignore[reportPrivateUsage]


class RslRlLearner(Learner):
    """rsl_rl's PPO, or what the configuration of a runner in ``agent`` says.

    The memory of a recurrent policy begins anew where a training is resumed.
    """

    library = "rsl_rl"

    def __init__(self, env: AnyEnv, settings: PPOCfg, agent: dict[str, Any] | None = None) -> None:
        if agent is None:
            settings.minibatch_size(env.num_envs)  # must divide
        else:
            settings = agent_settings(settings, agent)
        super().__init__(env, settings)
        self._env = RslRlEnv(self.core)
        if agent is not None:
            groups = {"actor": list(self.core.read.actor), "critic": list(self.core.read.critic)}
            if agent["algorithm"].get("rnd_cfg"):
                groups["rnd_state"] = groups["actor"]
            config: dict[str, Any] = {"save_interval": 1, **agent, "obs_groups": groups | agent.get("obs_groups", {})}
            self.algorithm = str(config["algorithm"]["class_name"])
        else:
            config = runner_config(settings, self.core)
        with contextlib.redirect_stdout(io.StringIO()):  # prints its networks
            self.runner = OnPolicyRunner(self._env, config, device=str(env.device))
        # takes what the runner calls, and writes nothing
        quiet = dict.fromkeys(("init_logging_writer", "process_env_step", "save_model"), _nothing)
        self.runner.logger = cast("Any", SimpleNamespace(writer=None, log_dir=None, log=self._note, **quiet))
        self._times = Times(0.0, 0.0)

    def _note(self, *, collect_time: float, learn_time: float, **_: object) -> None:
        self._times = Times(collect_time, learn_time)

    def iterate(self) -> Times:
        """One iteration of ``runner.learn``."""
        self.runner.learn(1)
        self.runner.current_learning_iteration += 1
        return self._times

    def content(self, meta: CheckpointMeta) -> dict[str, Any]:
        """Return what ``runner.save`` writes, with our description among its ``infos``."""
        infos = {META_KEY: meta.plain()}
        return {**self.runner.alg.save(), "iter": self.runner.current_learning_iteration, "infos": infos}

    def load_content(self, content: dict[str, Any]) -> None:
        """Actor, critic, optimizer and iteration."""
        self.runner.alg.load(content, None, True)
        self.runner.current_learning_iteration = int(content["iter"])

    def state_dict(self) -> StateDict:
        """Environment, random streams, and what rsl_rl does not save of its curiosity."""
        rnd = self.runner.alg.rnd
        if rnd is None:
            return super().state_dict()
        average = getattr(rnd.reward_normalizer, "disc_avg", None)
        return {**super().state_dict(), "rnd": [rnd.update_counter, average and average.avg]}

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from :meth:`state_dict`."""
        super().load_state_dict(state)
        rnd = self.runner.alg.rnd
        if rnd is not None:
            rnd.update_counter, average = state["rnd"]
            if average is not None:
                cast("Any", rnd.reward_normalizer).disc_avg.avg = average

    def policy(self, *, deterministic: bool = True) -> InferencePolicy:
        """Return the actor, with its own recurrent state, which training uses, too."""
        actor = self.runner.get_inference_policy(str(self.core.device))
        recurrent = bool(actor.is_recurrent)

        def act(obs: Obs, memory: MemoryState | None) -> tuple[Tensor, MemoryState | None]:
            if recurrent:
                state = memory[0] if memory is not None and len(memory) == 1 else memory
                actor.reset(hidden_state=cast("Any", state))  # a tensor of a GRU, two of an LSTM
            chosen = self.core.rescale_actions(
                cast("Tensor", actor(self._env.grouped(obs), stochastic_output=not deterministic))
            )
            if not recurrent:
                return chosen, None
            state = actor.get_hidden_state()
            return chosen, state if isinstance(state, tuple) else (cast("Tensor", state),)

        return InferencePolicy(act, recurrent=recurrent)


def _nothing(*_: object) -> None:
    pass


def agent_settings(settings: PPOCfg, agent: Mapping[str, Any]) -> PPOCfg:
    """Return the settings with the steps and the observation groups of a runner's configuration."""
    if agent.get("class_name", "OnPolicyRunner") != "OnPolicyRunner":
        raise ConfigError(f"agent (--agent): expected an OnPolicyRunner of rsl_rl, got {agent['class_name']!r}")
    groups = {f"{name}_groups": tuple(read) for name, read in agent.get("obs_groups", {}).items()}
    chosen = {name: groups[name] for name in ("actor_groups", "critic_groups") if name in groups}
    return replace(settings, steps=agent["num_steps_per_env"], **chosen)


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
