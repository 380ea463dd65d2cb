"""skrl's environment, and its agents, an iteration at a time.

The learner takes the steps of the trainer's loop, with the true last observations handed over.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypedDict, cast

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from skrl import logger
from skrl.agents.torch.ppo import PPO, PPO_CFG
from skrl.envs.wrappers.torch import Wrapper
from skrl.memories.torch import RandomMemory
from skrl.models.torch import DeterministicMixin, GaussianMixin, Model
from skrl.resources.preprocessors.torch import RunningStandardScaler
from skrl.utils.runner.torch import Runner
from skrl.utils.spaces.torch import flatten_tensorized_space, unflatten_tensorized_space
from torch import Tensor, nn

from headrace.errors import ConfigError
from headrace.learning.actor_critic import GroupEncoder, Shapes
from headrace.learning.ppo import PPOCfg
from headrace.libraries.learner import (
    AnyEnv,
    InferencePolicy,
    Learner,
    LearnerEnv,
    LearnerStep,
    MemoryState,
    true_next,
)
from headrace.libraries.training import META_KEY, CheckpointMeta, Times
from headrace.types import Obs, StateDict


class SkrlEnv(Wrapper):
    """Columns (N, 1) for reward and flags; ``state()`` is what the critic reads, None where the actor
    reads the same.

    Several groups are one flat row, images float32 with channels first, as skrl keeps every observation. ``infos``
    has the true last observations of ended episodes as ``final_observations`` and ``final_states``. skrl's trainer
    leaves them unused; our learner bootstraps from them.
    """

    def __init__(self, core: LearnerEnv) -> None:
        super().__init__(core.env)
        self.core = core
        self.has_state = core.read.critic_only
        self._observation_space, self._state_space = core.space(core.read.actor), core.space(core.read.critic)
        none = torch.zeros(core.num_envs, 1, dtype=torch.bool, device=core.device)
        self._no_flags = none, none
        # with a seed: agents that begin at random draw from it
        self._action_space = spaces.Box(-1.0, 1.0, (core.action_dim,), np.float32, seed=core.env.seed)

    @property
    def observation_space(self) -> spaces.Box | spaces.Dict:
        """Of the actor."""
        return self._observation_space

    @property
    def state_space(self) -> spaces.Box | spaces.Dict | None:
        """Of the critic; None where it reads what the actor reads."""
        return self._state_space if self.has_state else None

    @property
    def action_space(self) -> spaces.Box:
        """From -1 to 1."""
        return self._action_space

    def observation(self, obs: Obs) -> Tensor:
        """Return what the actor reads, (N, features)."""
        return self._flat(obs, self.core.read.actor)

    def state(self) -> Tensor | None:
        """Return what the critic reads, (N, features); None where it is what the actor reads."""
        return self._flat(self.core.obs, self.core.read.critic) if self.has_state else None

    def reset(self) -> tuple[Tensor, dict[str, Any]]:
        """Begin episodes everywhere."""
        return self.observation(self.core.reset()), {}

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Observation, reward, terminated, truncated, infos. skrl adds to the reward in place: it is a fresh tensor."""
        step = self.core.step(actions)
        infos = self._last(step) if step.any_ended else {}
        flags = self._no_flags
        if step.any_ended:
            flags = step.terminated.unsqueeze(1), step.truncated.unsqueeze(1)
        return self.observation(step.obs), step.reward.unsqueeze(1), *flags, infos

    def render(self, *_: object, **__: object) -> NDArray[np.uint8] | None:
        """One tiled image."""
        return self.core.env.render()

    def close(self) -> None:
        """Do nothing: the maker of the environment closes it."""

    def _last(self, step: LearnerStep) -> dict[str, Any]:
        last = true_next(step)
        return {
            "final_observations": self._flat(last, self.core.read.actor),
            "final_states": self._flat(last, self.core.read.critic) if self.has_state else None,
        }

    def _flat(self, obs: Obs, groups: Shapes) -> Tensor:
        """Rows of all groups, as skrl keeps every observation: flat, in the order of their names."""
        rows = self.core.rows(obs, groups)
        return cast("Tensor", flatten_tensorized_space(rows if len(rows) > 1 else next(iter(rows.values()))))


class SkrlLearner(Learner):
    """skrl's PPO, or the agent that a configuration of its ``Runner`` says."""

    library = "skrl"

    def __init__(self, env: AnyEnv, settings: PPOCfg, agent: dict[str, Any] | None = None) -> None:
        super().__init__(env, settings)
        self._env = SkrlEnv(self.core)
        if agent is None:
            settings.minibatch_size(env.num_envs)  # must divide
            self.agent: Any = self._make_ppo(settings)
        else:
            level = logger.level
            logger.setLevel(logging.WARNING)  # it tells its seed
            self.agent = _Runner(self._env, _complete(agent, settings.seed)).agent
            logger.setLevel(level)
            self.algorithm = type(self.agent).__name__
            self.settings = replace(settings, steps=getattr(self.agent.cfg, "rollouts", settings.steps))
        self.agent.init()
        self._obs, _ = self._env.reset()
        self._steps = 0

    def _make_ppo(self, settings: PPOCfg) -> PPO:
        env = self.core.env
        between = Interface(
            observation_space=self._env.observation_space,
            state_space=self._env.state_space,
            action_space=self._env.action_space,
            device=env.device,
        )
        return PPO(
            models={"policy": Actor(between, settings), "value": Critic(between, settings)},
            memory=RandomMemory(memory_size=settings.steps, num_envs=env.num_envs, device=env.device),
            **between,
            cfg=agent_config(settings, self._env),
        )

    def iterate(self) -> Times:
        """``settings.steps`` turns of the trainer's loop; PPO learns in the last, others in each."""
        agent, env, begin, learning = self.agent, self._env, time.perf_counter(), 0.0
        agent.enable_training_mode(True)
        states = env.state()
        for _ in range(self.settings.steps):
            states = self._turn(states)
            between = time.perf_counter()
            agent.post_interaction(timestep=self._steps, timesteps=0)
            learning += time.perf_counter() - between
        agent.tracking_data.clear()  # it is written to no file, and only grows
        for name, seen in (("policy", "observations"), ("value", "states" if env.has_state else "observations")):
            update_statistics(agent.models.get(name), agent.memory.get_tensor_by_name(seen))
        return Times(time.perf_counter() - begin - learning, learning)

    def _turn(self, states: Tensor | None) -> Tensor | None:
        agent, env, now = self.agent, self._env, {"timestep": self._steps, "timesteps": 0}
        with torch.no_grad():
            agent.pre_interaction(**now)
            actions, _ = agent.act(self._obs, states, **now)
            seen, rewards, terminated, truncated, infos = env.step(actions)
            next_states = env.state()
            # the value of a truncated episode's last observation is added to its reward; the trainer of skrl gives the
            # first of the next episode here
            agent.record_transition(
                observations=self._obs,
                states=cast("Tensor", states),
                actions=actions,
                rewards=rewards,
                next_observations=infos.get("final_observations", seen),
                next_states=infos.get("final_states", next_states),
                terminated=terminated,
                truncated=truncated,
                infos=infos,
                **now,
            )
        self._obs = seen
        self._steps += 1
        return next_states

    def content(self, meta: CheckpointMeta) -> dict[str, Any]:
        """Return the modules that ``agent.save`` writes, and our description, which ``agent.load`` skips."""
        modules = {name: module.state_dict() for name, module in self.agent.checkpoint_modules.items()}
        return {**modules, META_KEY: meta.plain()}

    def load_content(self, content: dict[str, Any]) -> None:
        """Every module: networks, statistics, optimizer."""
        for name, module in self.agent.checkpoint_modules.items():
            module.load_state_dict(content[name])

    def state_dict(self) -> StateDict:
        """Environment, random streams, and what a checkpoint of skrl leaves out: schedulers, entropy, the replay."""
        agent = self.agent
        rest: StateDict = {"steps": self._steps}
        rest["schedulers"] = {name: scheduler.state_dict() for name, scheduler in _schedulers(agent)}
        if (entropy := getattr(agent, "log_entropy_coefficient", None)) is not None:
            rest["entropy"] = entropy.detach()
        if not isinstance(agent, PPO):  # whose memory is empty between iterations
            memory = agent.memory
            rest["memory"] = [dict(memory.tensors), memory.filled, memory.env_index, memory.memory_index]
        return {**super().state_dict(), **rest}

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from :meth:`state_dict`."""
        super().load_state_dict(state)
        self._obs = self._env.observation(self.core.obs)
        self._steps = int(state["steps"])
        agent = self.agent
        for name, scheduler in _schedulers(agent):
            scheduler.load_state_dict(state["schedulers"][name])
        if "entropy" in state:
            agent.log_entropy_coefficient.data.copy_(state["entropy"])
            agent._entropy_coefficient = agent.log_entropy_coefficient.exp().detach()
        if "memory" in state:
            tensors, agent.memory.filled, agent.memory.env_index, agent.memory.memory_index = state["memory"]
            for name, values in tensors.items():
                agent.memory.tensors[name].copy_(values)

    def policy(self, *, deterministic: bool = True) -> InferencePolicy:
        """Return the actor."""
        self.agent.enable_training_mode(False, apply_to_models=True)

        def act(obs: Obs, _: MemoryState | None) -> tuple[Tensor, None]:
            # it draws an action also where the mean is taken
            with torch.random.fork_rng(devices=(), enabled=deterministic):
                chosen, more = self.agent.act(self._env.observation(obs), None, timestep=_TRAINED, timesteps=0)
            return self.core.rescale_actions(more.get("mean_actions", chosen) if deterministic else chosen), None

        return InferencePolicy(act)


_TRAINED = 2**62
"""A step after those in which an agent acts at random."""


class _Runner(Runner):
    """Makes models, memory and agent of a configuration; the trainer is ours."""

    def _generate_trainer(self, *_: object, **__: object) -> Any:
        return None


def _complete(agent: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return a configuration of ``Runner`` with the seed of the run, and without files of its own."""
    quiet = {"write_interval": 0, "checkpoint_interval": 0}
    agent["agent"] = {**agent["agent"], "experiment": {**(agent["agent"].get("experiment") or {}), **quiet}}
    if str(agent["agent"].get("class", "")).lower() not in _AGENTS:
        raise ConfigError(f"agent (--agent): expected one of {', '.join(_AGENTS)} as agent.class of skrl")
    return {**agent, "seed": seed}


_AGENTS = ("ppo", "sac")


def _schedulers(agent: Any) -> list[tuple[str, Any]]:
    names = ("scheduler", "policy_scheduler", "critic_scheduler")
    return [(name, found) for name in names if (found := getattr(agent, name, None)) is not None]


def agent_config(settings: PPOCfg, env: SkrlEnv) -> PPO_CFG:
    """Return the shared settings as the configuration of skrl's PPO, which writes nothing."""
    more: dict[str, Any] = {}
    for name, space in (("observation", env.observation_space), ("state", env.state_space)):
        if settings.normalize_obs and isinstance(space, spaces.Box) and len(space.shape) == 1:
            more[f"{name}_preprocessor"] = RunningStandardScaler
            more[f"{name}_preprocessor_kwargs"] = {"size": space, "device": env.device, "clip_threshold": 10.0}
    return PPO_CFG(
        rollouts=settings.steps,
        learning_epochs=settings.epochs,
        mini_batches=settings.minibatches,
        discount_factor=settings.gamma,
        gae_lambda=settings.lam,
        learning_rate=settings.learning_rate,
        grad_norm_clip=settings.max_grad_norm,
        ratio_clip=settings.clip,
        value_clip=0.0,
        entropy_loss_scale=settings.entropy_weight,
        value_loss_scale=settings.value_weight,
        time_limit_bootstrap=True,
        experiment=cast("Any", {"write_interval": 0, "checkpoint_interval": 0}),
        **more,
    )


class Interface(TypedDict):
    """What a model of skrl is between, and its agent."""

    observation_space: spaces.Box | spaces.Dict
    state_space: spaces.Box | spaces.Dict | None
    action_space: spaces.Box
    device: torch.device


class Actor(GaussianMixin, Model):
    """A Gaussian around the network's output, its spread learned and the same in every state."""

    def __init__(self, interface: Interface, settings: PPOCfg) -> None:
        Model.__init__(self, **interface)
        GaussianMixin.__init__(self)
        actions = interface["action_space"].shape
        self.net = network(interface["observation_space"], settings, actions[0])
        self.log_std = nn.Parameter(torch.full(actions, math.log(settings.initial_std)))

    def compute(  # pyright: ignore[reportIncompatibleMethodOverride]  # its mixins pass the role by position
        self, inputs: dict[str, Tensor], role: str = ""
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean actions (n, A) and the logarithm of their spread."""
        del role
        return self.net(inputs["observations"]), {"log_std": self.log_std}


class Critic(DeterministicMixin, Model):
    """The value of states, or of observations where a task has no states."""

    def __init__(self, interface: Interface, settings: PPOCfg) -> None:
        Model.__init__(self, **interface)
        DeterministicMixin.__init__(self)
        states = interface["state_space"]
        self._read = "observations" if states is None else "states"
        self.net = network(states or interface["observation_space"], settings, 1)

    def compute(  # pyright: ignore[reportIncompatibleMethodOverride]  # its mixins pass the role by position
        self, inputs: dict[str, Tensor], role: str = ""
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Values (n, 1)."""
        del role
        return self.net(inputs[self._read]), {}


def network(space: spaces.Box | spaces.Dict, settings: PPOCfg, out: int) -> nn.Sequential:
    """Layers over flat rows; images go through two convolutions first, several groups through our encoder."""
    before: list[nn.Module] = []
    if isinstance(space, spaces.Dict):
        groups = _Groups(space, settings)
        before.append(groups)
        width = groups.encoder.width
    else:
        width = space.shape[0]
        if len(space.shape) == 3:
            encoder = GroupEncoder({"image": space.shape}, normalize=False).encoders[0]
            before = [nn.Unflatten(1, space.shape), *cast("nn.Sequential", encoder)]
            with torch.no_grad():
                width = int(nn.Sequential(*before)(torch.zeros(1, math.prod(space.shape))).shape[1])
    sizes = (width, *settings.hidden)
    layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ELU())]
    return nn.Sequential(*before, *layers, nn.Linear(sizes[-1], out))


class _Groups(nn.Module):
    """Flat rows taken apart into groups, and encoded."""

    def __init__(self, space: spaces.Dict, settings: PPOCfg) -> None:
        super().__init__()
        self._space = space
        shapes = {name: cast("tuple[int, ...]", group.shape) for name, group in space.spaces.items()}
        self.encoder = GroupEncoder(shapes, normalize=settings.normalize_obs)

    def forward(self, rows: Tensor) -> Tensor:
        return self.encoder(unflatten_tensorized_space(self._space, rows))

    def update(self, rows: Tensor) -> None:
        """Let the statistics take in flat rows (n, features)."""
        groups = cast("dict[str, Tensor]", unflatten_tensorized_space(self._space, rows))
        self.encoder.update(groups, torch.ones(len(rows), dtype=torch.bool, device=rows.device))


def update_statistics(model: Model | None, rows: Tensor) -> None:
    """Let our encoder in a model, where there is one, take in flat rows (T, N, features) of what it reads."""
    first = model.net[0] if isinstance(model, (Actor, Critic)) else None
    if isinstance(first, _Groups):
        first.update(rows.flatten(0, 1))
