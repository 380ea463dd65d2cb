"""The small PPO of :mod:`headrace.rollout._ppo` behind the interface of the libraries."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from headrace.adapters._checkpoint import META_KEY, checked_fit, describe, read_weights
from headrace.adapters._learner import AnyEnv, CheckpointMeta, Memory, Times
from headrace.files import write_whole
from headrace.rollout._actor_critic import Policy, load_actor_critic, save_actor_critic
from headrace.rollout._ppo import PPO, PPOCfg
from headrace.types import EpisodeEnds, Obs, ResetRecord, StateDict, StepRecord


class OwnLearner:
    """A :class:`headrace.adapters.Learner`."""

    library = "headrace"

    def __init__(self, env: AnyEnv, settings: PPOCfg) -> None:
        self.settings = settings
        self._env, self._tally = env, _Tally()
        env.attach(self._tally)
        self.ppo = _Resumable(env, settings)

    def iterate(self) -> Times:
        """One turn of ``PPO.learn``."""
        begin = time.perf_counter()
        before = self.ppo.memory()
        self.ppo.collect()
        between = time.perf_counter()
        self.ppo.improve(self.ppo.buffer.rollout(), *before)
        return Times(between - begin, time.perf_counter() - between)

    def finished(self) -> EpisodeEnds:
        """The episodes that ended since the last call."""
        return self._tally.take()

    def save(self, path: Path, meta: CheckpointMeta) -> None:
        """What ``save_actor_critic`` writes, the optimizer, and our description."""
        more = {"optimizer": self.ppo.optimizer.state_dict(), META_KEY: describe(meta)}

        def write(part: Path) -> None:
            save_actor_critic(self.ppo.policy, part, task=meta.task, overrides=meta.overrides)
            torch.save({**read_weights(part, trust=False), **more}, part)

        write_whole(path, write)

    def load(self, path: Path, *, trust: bool = False) -> None:
        """Networks, statistics, and the optimizer where the file has it."""
        content = read_weights(path, trust=trust)
        checked_fit(path, self.library, lambda: self.ppo.policy.load_state_dict(content["state_dict"]))
        if "optimizer" in content:
            checked_fit(path, self.library, lambda: self.ppo.optimizer.load_state_dict(content["optimizer"]))

    def state_dict(self) -> StateDict:
        """Environment, random stream, and the policy's memory."""
        return {"env": self._env.state_dict(), "learner": self.ppo.state()}

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from :meth:`state_dict`."""
        self._env.load_state_dict(state["env"])
        self.ppo.load_state(state["learner"])

    def policy(self, *, deterministic: bool = True) -> OwnPolicy:
        """The actor, with a memory of its own."""
        return OwnPolicy(self.ppo.policy, deterministic=deterministic)

    def close(self) -> None:
        """Let go of the environment."""
        self._env.detach(self._tally)


class OwnPolicy:
    """A :class:`headrace.rollout._ppo.Policy` as an inference policy."""

    def __init__(self, policy: Policy, *, deterministic: bool) -> None:
        self._policy, self._deterministic = policy, deterministic
        self.recurrent = policy.memory is not None
        self.memory: Memory | None = None

    @torch.no_grad()
    def __call__(self, obs: Obs) -> Tensor:
        """Actions (n, A) within the environment's bounds."""
        policy = self._policy
        state = policy.initial_state(len(obs[policy.encoder.names[0]])) if self.memory is None else self.memory[0]
        if self._deterministic:
            action, state = policy.act(obs, state)
        else:
            seen, state = policy.actor_features(obs, state)
            action = policy.distribution(seen).sample().clamp(policy.low, policy.high)
        if self.recurrent:
            self.memory = (state,)
        return action


def read_policy(path: Path, *, deterministic: bool, trust: bool = False) -> OwnPolicy:
    """A policy from a file, without a learner. Nothing in it is executed, unless ``trust``."""
    return OwnPolicy(load_actor_critic(path, trust=trust).policy, deterministic=deterministic)


class _Tally:
    """Watches an environment for episodes that end."""

    needs = frozenset[Literal["states", "frames"]]()

    def __init__(self) -> None:
        self._ends: list[EpisodeEnds] = []

    def after_reset(self, record: ResetRecord) -> None:
        pass

    def after_step(self, record: StepRecord) -> None:
        if "ends" in record.step.info:
            self._ends.append(record.step.info["ends"])

    def take(self) -> EpisodeEnds:
        ends, self._ends = self._ends, []
        return EpisodeEnds.join(ends)


class _Resumable(PPO):
    """The learner with its inner state laid open, for :meth:`OwnLearner.state_dict`."""

    def memory(self) -> tuple[Tensor, Tensor]:
        """The policy's memory, and where an episode is new."""
        return self._state, self._fresh

    def state(self) -> StateDict:
        return {
            "random": self._random.get_state(),
            "memory": self._state.clone(),
            "fresh": self._fresh.clone(),
            "steps": self.steps,
        }

    def load_state(self, state: StateDict) -> None:
        self._random.set_state(state["random"])
        self._state, self._fresh = state["memory"].clone(), state["fresh"].clone()
        self.steps = int(state["steps"])
        self._obs = self._read.of(self.env.observe())
