"""rl_games' environment, and its PPO, an iteration at a time.

The learner calls ``train_epoch`` itself, without the runner, which changes global settings.
"""

from __future__ import annotations

import contextlib
import io
import math
import tempfile
import warnings
from collections.abc import Generator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from headrace.errors import ConfigError
from headrace.learning.actor_critic import GroupEncoder, Shapes, is_image
from headrace.learning.ppo import PPOCfg
from headrace.libraries.learner import AnyEnv, InferencePolicy, Learner, LearnerEnv, MemoryState
from headrace.libraries.training import META_KEY, CheckpointMeta, Times
from headrace.types import Obs, StateDict

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # it imports parts of torch.jit, which warn
    from rl_games.algos_torch.a2c_continuous import A2CAgent
    from rl_games.algos_torch.model_builder import register_network
    from rl_games.algos_torch.network_builder import A2CBuilder
    from rl_games.common.algo_observer import AlgoObserver
    from rl_games.common.ivecenv import IVecEnv
    from rl_games.common.tr_helpers import DefaultRewardsShaper


class RlGamesEnv(IVecEnv):
    """``obs`` for the actor; ``states`` for the central value, where the critic reads other groups.

    Each is a tensor where one group is read, else a dict of them. Images are float32, channels first. ``time_outs``
    marks truncations.
    """

    def __init__(self, core: LearnerEnv) -> None:
        self.core = core
        self.has_states = core.read.critic_only

    def grouped(self, obs: Obs) -> dict[str, Tensor | Obs]:
        """Return the observation of rl_games, from the groups."""
        read = {"obs": self._rows(obs, self.core.read.actor)}
        return read | {"states": self._rows(obs, self.core.read.critic)} if self.has_states else read

    def _rows(self, obs: Obs, groups: Shapes) -> Tensor | Obs:
        rows = self.core.rows(obs, groups)
        return rows if len(rows) > 1 else next(iter(rows.values()))

    def reset(self) -> dict[str, Tensor | Obs]:
        """Begin episodes everywhere."""
        return self.grouped(self.core.reset())

    def step(self, actions: Tensor) -> tuple[dict[str, Tensor | Obs], Tensor, Tensor, dict[str, Any]]:
        """Observation, reward (N,), dones (N,), and ``time_outs`` (N,) where an episode was cut off: rl_games
        bootstraps only where this says so."""
        turn = self.core.step(actions)
        infos = {"time_outs": turn.truncated} if turn.any_truncated else {}
        return self.grouped(turn.obs), turn.reward, turn.ended, infos

    def get_env_info(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]  # the base gives nothing
        """Spaces of one environment."""
        found = {
            "observation_space": self.core.space(self.core.read.actor),
            "action_space": spaces.Box(-1.0, 1.0, (self.core.action_dim,), np.float32),
            "agents": 1,
            "value_size": 1,
        }
        return found | {"state_space": self.core.space(self.core.read.critic)} if self.has_states else found


_NETWORK = "headrace_groups"
"""The name that our network over several observation groups is registered under in rl_games."""
_PREFIX = "_orig_mod."
"""What torch.compile puts before the names of weights; rl_games' own runner compiles."""


class RlGamesLearner(Learner):
    """rl_games' PPO, from the shared settings or from the ``params`` of its own file in ``agent``."""

    library = "rl_games"

    def __init__(self, env: AnyEnv, settings: PPOCfg, agent: dict[str, Any] | None = None) -> None:
        super().__init__(env, settings, scale_rewards=False)
        self._env = RlGamesEnv(self.core)
        params = agent_params(settings, self._env) if agent is None else _complete(agent, self._env)
        self.settings = replace(settings, steps=params["config"]["horizon_length"])
        # it prints as it builds, makes folders, and opens an event file with a thread of its own
        with tempfile.TemporaryDirectory() as folder, _quiet():
            params["config"]["train_dir"] = folder
            self.agent: Any = A2CAgent("run", params)
            self.agent.writer.close()
        self.agent.writer = None
        if self.agent.has_central_value:
            self.agent.central_value_net.writter = None
        self.agent.init_tensors()
        self.agent.obs = self.agent.env_reset()

    def iterate(self) -> Times:
        """One turn of ``agent.train``'s loop."""
        agent = self.agent
        agent.update_epoch()
        _, play_time, update_time, *_ = agent.train_epoch()
        self._update_statistics()
        agent.dataset.update_values_dict(None)
        agent.frame += agent.curr_frames
        return Times(play_time, update_time)

    def _update_statistics(self) -> None:
        """Show the rollout to our encoders, where they are in use: their statistics are not rl_games' own."""
        seen = self.agent.experience_buffer.tensor_dict
        networks = [(self.agent.model.a2c_network, seen["obses"])]
        if self.agent.has_central_value:
            networks.append((self.agent.central_value_net.model.a2c_network, seen["states"]))
        for network, obs in networks:
            for encoder in (network.actor_cnn, network.critic_cnn):
                if isinstance(encoder, GroupEncoder):
                    encoder.update(obs, torch.ones(seen["dones"].shape[:2], dtype=torch.bool, device=self.core.device))

    def content(self, meta: CheckpointMeta) -> dict[str, Any]:
        """Return what ``agent.save`` writes, and our description, which ``agent.restore`` leaves alone."""
        return self.agent.get_full_state_weights() | {META_KEY: meta.plain()}

    def load_content(self, content: dict[str, Any]) -> None:
        """Networks, statistics, optimizer, epoch."""
        content["model"] = {name.removeprefix(_PREFIX): weight for name, weight in content["model"].items()}
        self.agent.set_full_state_weights(content)

    def state_dict(self) -> StateDict:
        """Environment, random streams, and the memory of a recurrent policy."""
        states = [state.clone() for state in self.agent.rnn_states] if self.agent.is_rnn else []
        rates = [float(self.agent.last_lr), float(self.agent.entropy_coef)]
        return {**super().state_dict(), "memory": states, "dones": self.agent.dones.to(torch.uint8), "rates": rates}

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from :meth:`state_dict`."""
        super().load_state_dict(state)
        self.agent.obs = self.agent.obs_to_tensors(self._env.grouped(self.core.obs))
        self.agent.dones = state["dones"].clone()
        if "rates" in state:
            self.agent.last_lr, self.agent.entropy_coef = state["rates"]
        if self.agent.is_rnn:
            self.agent.rnn_states = [memory.clone() for memory in state["memory"]]

    def policy(self, *, deterministic: bool = True) -> InferencePolicy:
        """Return the actor, with a memory of its own."""
        model, recurrent = self.agent.model, bool(self.agent.is_rnn)

        def act(obs: Obs, memory: MemoryState | None) -> tuple[Tensor, MemoryState | None]:
            model.eval()
            if recurrent and memory is None:
                count = len(next(iter(obs.values())))
                # its default state has a row per environment of the learner
                default = cast("tuple[Tensor, ...]", model.get_default_rnn_state())
                memory = tuple(torch.zeros_like(state[:, :1]).repeat(1, count, 1) for state in default)
            rows = self._env.grouped(obs)["obs"]
            # it draws an action also where the mean is taken
            with torch.random.fork_rng(devices=(), enabled=deterministic):
                found = model({"is_train": False, "prev_actions": None, "obs": rows, "rnn_states": memory})
            actions = self.core.rescale_actions(cast("Tensor", found["mus" if deterministic else "actions"]))
            return actions, tuple(found["rnn_states"]) if recurrent else None

        return InferencePolicy(act, recurrent=recurrent)


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Without its prints, and without the warnings of torch.jit, which it uses."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _complete(agent: dict[str, Any], env: RlGamesEnv) -> dict[str, Any]:
    """Return the ``params`` of a file of rl_games, with what comes from the environment."""
    params: dict[str, Any] = agent.get("params", agent)
    if params["algo"]["name"] != "a2c_continuous":
        raise ConfigError(f"agent (--agent): expected a2c_continuous of rl_games, got {params['algo']['name']!r}")
    config = params["config"]
    shaper = config.get("reward_shaper") or {}
    named = {"name": "headrace", "max_epochs": -1, **config, "reward_shaper": DefaultRewardsShaper(**shaper)}
    return {**params, "torch_threads": 0, "config": named | _of_env(env)}


def _of_env(env: RlGamesEnv) -> dict[str, Any]:
    device = str(env.core.device)
    return {
        "full_experiment_name": "headrace",
        "env_name": "headrace",
        "env_info": env.get_env_info(),
        "vec_env": env,
        "device": device,
        "device_name": device,
        "features": {"observer": AlgoObserver()},
        "num_actors": env.core.num_envs,
        "clip_actions": False,  # the environment's side cuts and scales them in one go
        "torch_compile": False,
        "print_stats": False,
    }


def agent_params(settings: PPOCfg, env: RlGamesEnv) -> dict[str, Any]:
    """Return the shared settings as the ``params`` of rl_games."""
    core = env.core
    size = settings.minibatch_size(core.num_envs)
    shared: dict[str, Any] = {
        "normalize_input": settings.normalize_obs and _one_vector(core.read.actor),
        "minibatch_size": size,
        "mini_epochs": settings.epochs,
        "learning_rate": settings.learning_rate,
        "clip_value": False,
        "truncate_grads": True,
        "grad_norm": settings.max_grad_norm,
    }
    config = shared | {
        **_of_env(env),
        "name": "headrace",
        "reward_shaper": DefaultRewardsShaper(cast("int", settings.reward_scale)),  # its default makes it look like one
        "horizon_length": settings.steps,
        "seq_length": settings.steps if settings.memory != "none" else 1,
        "gamma": settings.gamma,
        "tau": settings.lam,
        "lr_schedule": None,
        "e_clip": settings.clip,
        "critic_coef": 2.0 * settings.value_weight,  # it halves the squared error
        "entropy_coef": settings.entropy_weight,
        "bounds_loss_coef": 0.0,
        "normalize_advantage": True,
        "normalize_value": False,
        "value_bootstrap": True,
        "max_epochs": -1,
    }
    if env.has_states:
        network = _network(settings, core.read.critic, actor=False) | {"central_value": True}
        config["central_value_config"] = shared | {
            "network": network,
            "normalize_input": settings.normalize_obs and _one_vector(core.read.critic),
        }
    return {
        "algo": {"name": "a2c_continuous"},
        "model": {"name": "continuous_a2c_logstd"},
        "network": _network(settings, core.read.actor, actor=True),
        "torch_threads": 0,
        "config": config,
    }


def _one_vector(groups: Shapes) -> bool:
    """Whether rl_games' own normalization is used; our encoder has one per group."""
    return len(groups) == 1 and not any(map(is_image, groups.values()))


def _network(settings: PPOCfg, groups: Shapes, *, actor: bool) -> dict[str, Any]:
    network: dict[str, Any] = {
        "name": "actor_critic" if len(groups) == 1 else _NETWORK,
        "separate": actor,
        "mlp": {"units": list(settings.hidden), "activation": "elu", "initializer": {"name": "default"}},
    }
    if actor:
        network["space"] = {
            "continuous": {
                "mu_activation": "None",
                "sigma_activation": "None",
                "mu_init": {"name": "default"},
                "sigma_init": {"name": "const_initializer", "val": math.log(settings.initial_std)},
                "fixed_sigma": True,
            }
        }
    several = len(groups) > 1
    if several or any(map(is_image, groups.values())):
        convolutions = [
            {"filters": 16, "kernel_size": 8, "strides": 4, "padding": 0},
            {"filters": 32, "kernel_size": 4, "strides": 2, "padding": 0},
        ]
        network["cnn"] = {
            "type": "groups" if several else "conv2d",
            "activation": "elu",
            "initializer": {"name": "default"},
            "permute_input": False,
            "convs": [] if several else convolutions,
            "normalize": settings.normalize_obs,  # read by our network of several groups alone
        }
    if settings.memory != "none":
        network["rnn"] = {"name": "gru", "units": settings.memory_size, "layers": 1, "before_mlp": True}
    return network


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
        """Return the network of an agent, or of its central value."""
        del name
        return GroupNetwork(self.params, **kwargs)


register_network(_NETWORK, GroupNetworkBuilder)
