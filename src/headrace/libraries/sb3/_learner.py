"""Stable-Baselines3's environment, and its learners, an iteration at a time: ``collect_rollouts`` and ``train``.

The algorithms are made from the shared settings or from their own keyword arguments; those that learn from a replay
are saved with it.

What stands before SB3's layers, so that its networks are those of the other libraries.

SB3 writes the names of these classes and of their module into its checkpoints: they stay where they are.
"""

from __future__ import annotations

import io
import json
import math
import time
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3 import DQN, PPO, SAC, TD3
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.policies import MultiInputActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, MlpExtractor
from stable_baselines3.common.type_aliases import TrainFreq, TrainFrequencyUnit
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices
from torch import Tensor, nn

from headrace.errors import ConfigError
from headrace.files import open_archive, write_whole
from headrace.learning.actor_critic import GroupEncoder, Normalizer, ReadGroups, Shapes, channels_first, is_image
from headrace.learning.ppo import PPOCfg
from headrace.libraries.learner import AnyEnv, InferencePolicy, Learner, LearnerEnv, LearnerStep, MemoryState
from headrace.libraries.training import META_KEY, CheckpointMeta, Times, check_fit
from headrace.types import Obs, StateDict


class NormalizedVector(BaseFeaturesExtractor):
    """Running mean and variance of a vector, part of the policy's weights: they travel with every checkpoint."""

    def __init__(self, observation_space: spaces.Box) -> None:
        size = observation_space.shape[0]
        super().__init__(observation_space, size)
        self.normalizer = Normalizer(size)

    def forward(self, observations: Tensor) -> Tensor:
        """Zero mean and unit variance."""
        return self.normalizer(observations)


class Convolutions(BaseFeaturesExtractor):
    """Two convolutions over images (n, C, H, W), which SB3 has divided by 255."""

    def __init__(self, observation_space: spaces.Box) -> None:
        encoder = GroupEncoder({"image": observation_space.shape}, normalize=False)
        super().__init__(observation_space, encoder.width)
        self.layers = encoder.encoders[0]

    def forward(self, observations: Tensor) -> Tensor:
        """Features (n, …)."""
        return cast("Tensor", self.layers(observations))


class GroupFeatures(BaseFeaturesExtractor):
    """Several observation groups through our encoder."""

    def __init__(self, observation_space: spaces.Dict, groups: Shapes, normalize: bool) -> None:
        encoder = GroupEncoder(groups, normalize=normalize)
        super().__init__(observation_space, encoder.width)
        self.encoder = encoder

    def forward(self, observations: dict[str, Tensor]) -> Tensor:
        """Features (n, …)."""
        return self.encoder(observations)

    def update(self, observations: dict[str, Tensor]) -> None:
        """Let the statistics take in rows (n, …) of each group."""
        rows = len(observations[self.encoder.names[0]])
        self.encoder.update(observations, torch.ones(rows, dtype=torch.bool))


class GroupPolicy(MultiInputActorCriticPolicy):
    """SB3's ``MultiInputPolicy`` whose actor and critic each read their own groups.

    ``features_extractor_kwargs`` has ``actor_groups`` and ``critic_groups`` (name → shape), and ``normalize``.
    """

    def make_features_extractor(self) -> GroupFeatures:
        """Return the features of the actor, then those of the critic: the order in which SB3 reads them."""
        options = self.features_extractor_kwargs
        groups = options["critic_groups" if "pi_features_extractor" in self._modules else "actor_groups"]
        return GroupFeatures(cast("spaces.Dict", self.observation_space), groups, options["normalize"])

    def _build_mlp_extractor(self) -> None:
        super()._build_mlp_extractor()
        width = cast("GroupFeatures", self.vf_features_extractor).features_dim
        # the actor's has the size of the actor's features on both sides
        critic = MlpExtractor(width, self.net_arch, self.activation_fn, device=self.device)
        self.mlp_extractor.value_net = critic.value_net


Array = NDArray[Any]
Arrays: TypeAlias = "Array | dict[str, Array]"


class Sb3Env(VecEnv):
    """One array where actor and critic read one group, else a dict of arrays, one per group that is read.

    Images keep their dtype, channels first. An ended environment's info has ``terminal_observation`` (the true last
    one), ``TimeLimit.truncated`` and ``episode``.
    """

    def __init__(self, core: LearnerEnv) -> None:
        self.core = core
        groups = core.read.all
        seen = {name: _space(core, name, shape) for name, shape in groups.items()}
        self._single = next(iter(groups)) if len(groups) == 1 else None
        space: spaces.Space[Any] = spaces.Dict(cast("Any", seen)) if self._single is None else seen[self._single]
        self.render_mode = "rgb_array"  # needed by the constructor below
        actions: spaces.Space[Any] = spaces.Box(-1.0, 1.0, (core.action_dim,), np.float32)
        if core.discrete:
            actions = spaces.Discrete(int(cast("spaces.Discrete", core.env.single_action_space).n))
        super().__init__(core.num_envs, space, actions)
        self._actions: Array | None = None
        self._on_cpu = core.device.type == "cpu"
        # most infos say nothing, and making hundreds of them costs more than the rest of a step does here
        self._blank: list[dict[str, Any]] = [{} for _ in range(core.num_envs)]

    def arrays(self, obs: Obs) -> Arrays:
        """Return the observation of SB3, from the groups."""
        if self._single is not None:
            return self._array(obs[self._single])
        return {name: self._array(obs[name]) for name in self.core.read.all}

    def _array(self, rows: Tensor) -> Array:
        if rows.dim() == 4 and rows.shape[-1] < rows.shape[1]:
            rows = rows.movedim(-1, 1).contiguous()
        return self._numpy(rows)

    def reset(self) -> Arrays:
        """Begin episodes everywhere; with the seed given to ``seed()`` before, where there was one."""
        seed = self._seeds[0]
        self._reset_seeds()
        return self.arrays(self.core.reset(seed))

    def step_async(self, actions: Array) -> None:
        """Take the actions of the coming step, within -1 to 1."""
        self._actions = actions

    def step_wait(self) -> tuple[Arrays, Array, Array, list[dict[str, Any]]]:
        """Observation, reward, dones, infos."""
        # SB3 cuts actions to the space it was given, and makes a new array of them at every step
        actions = torch.from_numpy(cast("Array", self._actions))
        step = self.core.step(actions if self._on_cpu else actions.to(self.core.device), within=True)
        if any(self._blank):  # the info of an earlier step was written to
            self._blank = [{} for _ in range(self.num_envs)]
        obs, reward = self.arrays(step.obs), self._numpy(step.reward)
        if step.any_ended:
            return obs, reward, self._numpy(step.ended), self._make_infos(step)
        return obs, reward, np.zeros(self.num_envs, dtype=bool), list(self._blank)

    def _numpy(self, rows: Tensor) -> Array:
        return rows.numpy() if self._on_cpu else rows.cpu().numpy()

    def _make_infos(self, step: LearnerStep) -> list[dict[str, Any]]:
        infos, ends = list(self._blank), step.info.get("ends")
        assert ends is not None
        final = self.arrays(step.info["final_obs"]) if "final_obs" in step.info else None
        for place, slot in enumerate(ends.env_ids.tolist()):
            info = infos[slot] = {
                "episode": {"r": float(ends.returns[place]), "l": int(ends.lengths[place])},
                "TimeLimit.truncated": bool(step.truncated[slot]),
            }
            if final is not None:
                info["terminal_observation"] = _row(final, slot)
            if ends.success is not None:
                info["is_success"] = bool(ends.success[place])
        return infos

    def close(self) -> None:
        """Do nothing: the maker of the environment closes it."""

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """Return an attribute that all environments share, once per environment."""
        value = getattr(self if attr_name == "render_mode" else self.core.env, attr_name)
        return [value] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: object, indices: VecEnvIndices = None) -> None:
        """Not possible for one environment of a batch."""
        del value, indices
        raise AttributeError(f"Sb3Env: {attr_name!r} cannot be set per environment; set it on the BatchEnv")

    def env_method(
        self, method_name: str, *method_args: object, indices: VecEnvIndices = None, **method_kwargs: object
    ) -> list[Any]:
        """Not possible for one environment of a batch."""
        del method_args, indices, method_kwargs
        raise AttributeError(f"Sb3Env: {method_name!r} cannot be called per environment; call it on the BatchEnv")

    def env_is_wrapped(self, wrapper_class: type, indices: VecEnvIndices = None) -> list[bool]:
        """No Gymnasium wrapper is inside."""
        del wrapper_class
        return [False] * len(list(self._get_indices(indices)))

    def get_images(self) -> Sequence[Array | None]:
        """Return an image of each environment."""
        return list(self.core.env.render_each() or ())


def _row(rows: Arrays, slot: int) -> Arrays:
    return {name: values[slot] for name, values in rows.items()} if isinstance(rows, dict) else rows[slot]


def _space(core: LearnerEnv, name: str, shape: tuple[int, ...]) -> spaces.Space[Any]:
    space = cast("spaces.Dict", core.env.single_observation_space)[name]
    if not is_image(shape):
        return space
    low, high = (0, 255) if space.dtype == np.uint8 else (-np.inf, np.inf)
    return spaces.Box(low, high, channels_first(shape), cast("Any", space.dtype))


_LEFT_OUT = ("system_info.txt",)
"""Says what machine a checkpoint is from, and is never read."""


class Sb3Learner(Learner):
    """Stable-Baselines3's PPO, or what its keyword arguments in ``agent`` say."""

    library = "sb3"

    def __init__(self, env: AnyEnv, settings: PPOCfg, agent: dict[str, Any] | None = None) -> None:
        super().__init__(env, settings, discrete=agent is not None)
        self._env = Sb3Env(self.core)
        total = 1
        if agent is None:
            self.model = self._make_ppo(settings)
        else:
            total = int(agent.pop("total_timesteps", 1))
            self.model = make_model(agent, self._env, device=str(env.device), seed=settings.seed)
            self.algorithm = type(self.model).__name__
            self.settings = replace(settings, steps=steps_of(self.model, settings.steps))
        # without a folder: SB3's own would leave an empty one in the temporary directory
        self.model.set_logger(Logger(folder=None, output_formats=[]))
        # what learn() does before its loop: it resets the environment
        _, self._callback = self.model._setup_learn(total_timesteps=total)  # pyright: ignore[reportPrivateUsage]

    def _make_ppo(self, settings: PPOCfg) -> PPO:
        return PPO(
            GroupPolicy if len(self.core.read.all) > 1 else "MlpPolicy",
            self._env,
            learning_rate=settings.learning_rate,
            n_steps=settings.steps,
            batch_size=settings.minibatch_size(self.core.num_envs),
            n_epochs=settings.epochs,
            gamma=settings.gamma,
            gae_lambda=settings.lam,
            clip_range=settings.clip,
            ent_coef=settings.entropy_weight,
            vf_coef=settings.value_weight,
            max_grad_norm=settings.max_grad_norm,
            policy_kwargs=_policy(settings, self.core.read),
            device=str(self.core.device),
        )

    def iterate(self) -> Times:
        """One turn of ``learn``'s loop."""
        model, begin = self.model, time.perf_counter()
        if isinstance(model, OffPolicyAlgorithm):
            return learn_off_policy(model, self._env, self._callback, self.settings.steps)
        model.collect_rollouts(self._env, self._callback, model.rollout_buffer, self.settings.steps)
        between = time.perf_counter()
        model.train()
        self._update_statistics(model)
        return Times(between - begin, time.perf_counter() - between)

    def _update_statistics(self, model: PPO) -> None:
        """Show the rollout, which training has left flat, to the normalizers, which are ours and not SB3's."""
        seen: Any = model.rollout_buffer.observations
        policy = model.policy
        for features in {policy.pi_features_extractor, policy.vf_features_extractor}:
            if isinstance(features, NormalizedVector):
                rows = torch.as_tensor(seen, device=self.core.device)
                features.normalizer.update(rows.reshape(-1, rows.shape[-1]))
            elif isinstance(features, GroupFeatures):
                features.update({name: torch.as_tensor(seen[name]) for name in features.encoder.names})

    def save(self, path: Path, meta: CheckpointMeta) -> None:
        """As ``model.save`` does, with our description as one more member of the archive."""
        whole = io.BytesIO()
        self.model.save(whole)

        def write(part: Path) -> None:
            with zipfile.ZipFile(whole) as given, zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as kept:
                for name in given.namelist():
                    if name not in _LEFT_OUT:
                        kept.writestr(name, given.read(name))
                kept.writestr(f"{META_KEY}.json", json.dumps(meta.plain()))

        write_whole(path, write)

    def load(self, path: Path, *, trust: bool = False) -> None:
        """Policy, statistics and optimizer. What SB3 pickles with them is not read: nothing needs trust."""
        del trust
        names, tensors = self.model._get_torch_save_params()  # pyright: ignore[reportPrivateUsage]
        with open_archive(path) as archive:
            members = [*names, *(["pytorch_variables"] if tensors else [])]
            files = {name: io.BytesIO(archive.read(f"{name}.pth")) for name in members}
            states = {
                name: torch.load(file, map_location=self.core.device, weights_only=True) for name, file in files.items()
            }
        loose = states.pop("pytorch_variables", {})
        check_fit(path, self.library, lambda: self.model.set_parameters(states, device=self.core.device))
        for name in tensors:
            getattr(self.model, name).data.copy_(loose[name].data)

    def state_dict(self) -> StateDict:
        """Environment, random streams, and the replay where there is one."""
        more: StateDict = {"replay": off_policy_state(self.model)} if isinstance(self.model, OffPolicyAlgorithm) else {}
        return {**super().state_dict(), **more}

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from :meth:`state_dict`."""
        super().load_state_dict(state)
        if isinstance(self.model, OffPolicyAlgorithm):
            load_off_policy_state(self.model, state["replay"])
        self.model._last_obs = self._env.arrays(self.core.obs)  # pyright: ignore[reportPrivateUsage]  # where learn() goes on

    def policy(self, *, deterministic: bool = True) -> InferencePolicy:
        """SB3's ``predict``."""

        def act(obs: Obs, _: MemoryState | None) -> tuple[Tensor, None]:
            chosen = self.model.predict(self._env.arrays(obs), deterministic=deterministic)[0]
            return self.core.rescale_actions(torch.from_numpy(chosen).to(self.core.device)), None

        return InferencePolicy(act)


def _policy(settings: PPOCfg, read: ReadGroups) -> dict[str, Any]:
    chosen: dict[str, Any] = {
        "net_arch": {"pi": list(settings.hidden), "vf": list(settings.hidden)},
        "activation_fn": nn.ELU,
        "log_std_init": math.log(settings.initial_std),
        "ortho_init": False,
        "optimizer_kwargs": {"eps": 1e-8},
    }
    if len(read.all) > 1:
        groups = {"actor_groups": read.actor, "critic_groups": read.critic, "normalize": settings.normalize_obs}
        return chosen | {"features_extractor_kwargs": groups, "share_features_extractor": False}
    if any(map(is_image, read.all.values())):
        return chosen | {"features_extractor_class": Convolutions, "share_features_extractor": False}
    return chosen | ({"features_extractor_class": NormalizedVector} if settings.normalize_obs else {})


ALGORITHMS = {"PPO": PPO, "SAC": SAC, "TD3": TD3, "DQN": DQN}
_COUNTERS = ("num_timesteps", "_n_updates", "_n_calls", "exploration_rate")
"""TD3 delays its policy by the second, DQN its target by the third."""
_ROWS = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")


def make_model(agent: dict[str, Any], env: VecEnv, **known: Any) -> PPO | OffPolicyAlgorithm:
    """Return the model that keyword arguments describe; ``algorithm`` names its class.

    Args:
        agent: of the constructor; the policy is chosen for the observations where none is named, and a layer of
            ``torch.nn`` may be named in ``policy_kwargs``.
        env: to learn on.
        **known: more arguments, where the agent does not have them.
    """
    name = agent.pop("algorithm", "PPO")
    if name not in ALGORITHMS:
        raise ConfigError(f"agent (--agent): expected one of {', '.join(ALGORITHMS)} as algorithm of sb3, got {name!r}")
    seen = env.observation_space
    several, image = isinstance(seen, spaces.Dict), len(seen.shape or ()) == 3
    policy = agent.pop("policy", "MultiInputPolicy" if several else "CnnPolicy" if image else "MlpPolicy")
    layers = agent.get("policy_kwargs")
    if isinstance(layers, dict) and isinstance(activation := cast("dict[str, Any]", layers).get("activation_fn"), str):
        layers["activation_fn"] = getattr(nn, activation.rpartition(".")[2])
    if isinstance(agent.get("train_freq"), list):
        agent["train_freq"] = tuple(agent["train_freq"])
    model = ALGORITHMS[name](policy, env, **(known | agent))
    if isinstance(model, OffPolicyAlgorithm) and _frequency(model).unit != TrainFrequencyUnit.STEP:
        raise ConfigError("agent (--agent): train_freq: expected a number of steps, got episodes")
    return model


def steps_of(model: PPO | OffPolicyAlgorithm, steps: int) -> int:
    """Return the steps of an iteration: a rollout, or at least ``steps`` in whole turns of collecting and learning."""
    if isinstance(model, PPO):
        return model.n_steps
    every = _frequency(model).frequency
    return -(-steps // every) * every


def learn_off_policy(model: OffPolicyAlgorithm, env: VecEnv, callback: BaseCallback, steps: int) -> Times:
    """Take turns of ``learn``'s loop until ``steps`` steps of each environment are collected."""
    every, collect, learn = _frequency(model), 0.0, 0.0
    for _ in range(steps // every.frequency):
        begin = time.perf_counter()
        model.collect_rollouts(
            env,
            callback,
            every,
            cast("Any", model.replay_buffer),
            action_noise=model.action_noise,
            learning_starts=model.learning_starts,
            log_interval=None,
        )
        between = time.perf_counter()
        turns = model.gradient_steps if model.gradient_steps >= 0 else every.frequency
        if model.num_timesteps > model.learning_starts and turns:
            model.train(gradient_steps=turns, batch_size=model.batch_size)
        collect, learn = collect + between - begin, learn + time.perf_counter() - between
    return Times(collect, learn)


def off_policy_state(model: OffPolicyAlgorithm) -> StateDict:
    """Return the replay, its counters and the stream of random first actions, sharing the memory of the replay."""
    buffer: Any = model.replay_buffer
    kept = min(buffer.size() + 1, buffer.buffer_size)  # SB3 may keep the newest next observation one row ahead

    def rows(values: Any) -> Any:
        return {k: rows(v) for k, v in values.items()} if isinstance(values, dict) else torch.from_numpy(values[:kept])

    return {
        "rows": {name: rows(getattr(buffer, name)) for name in _ROWS if hasattr(buffer, name)},
        "counters": [buffer.pos, buffer.full, *(getattr(model, name, None) for name in _COUNTERS)],
        "sampling": model.action_space.np_random.bit_generator.state,
    }


def load_off_policy_state(model: OffPolicyAlgorithm, state: StateDict) -> None:
    """Go on from :func:`off_policy_state`."""
    buffer: Any = model.replay_buffer

    def fill(target: Any, values: Any) -> None:
        if isinstance(values, dict):
            for name, each in cast("dict[str, Any]", values).items():
                fill(target[name], each)
        else:
            target[: len(values)] = values.numpy()

    for name, values in state["rows"].items():
        fill(getattr(buffer, name), values)
    buffer.pos, buffer.full, *counters = state["counters"]
    for name, value in zip(_COUNTERS, counters, strict=False):  # DQN's came later
        if value is not None:
            setattr(model, name, value)
    model.action_space.np_random.bit_generator.state = state["sampling"]


def _frequency(model: OffPolicyAlgorithm) -> TrainFreq:
    return cast("TrainFreq", model.train_freq)
