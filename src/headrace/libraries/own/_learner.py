"""The small PPO of :mod:`headrace.learning.ppo` behind the interface of the libraries."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from torch import Tensor

from headrace.learning.actor_critic import Policy, actor_critic_content, load_actor_critic
from headrace.learning.ppo import PPO, PPOCfg
from headrace.libraries.checkpoint import META_KEY, CheckpointMeta
from headrace.libraries.learner import AnyEnv, InferencePolicy, Learner, MemoryState, Times
from headrace.types import Obs, StateDict


class OwnLearner(Learner):
    """Our own small PPO, which steps the environment itself."""

    library = "headrace"

    def __init__(self, env: AnyEnv, settings: PPOCfg) -> None:
        super().__init__(env, settings)
        self.ppo = PPO(env, settings)

    def iterate(self) -> Times:
        """One turn of ``PPO.learn``."""
        begin = time.perf_counter()
        self.core.ended.append(self.ppo.collect())
        between = time.perf_counter()
        self.ppo.improve()
        return Times(between - begin, time.perf_counter() - between)

    def content(self, meta: CheckpointMeta) -> dict[str, Any]:
        """Return what ``save_actor_critic`` writes, the optimizer, and our description."""
        more = {"optimizer": self.ppo.optimizer.state_dict(), META_KEY: meta.plain()}
        return actor_critic_content(self.ppo.policy, meta.task, meta.overrides) | more

    def load_content(self, content: dict[str, Any]) -> None:
        """Networks, statistics, and the optimizer where the file has it."""
        self.ppo.policy.load_state_dict(content["state_dict"])
        if "optimizer" in content:
            self.ppo.optimizer.load_state_dict(content["optimizer"])

    def state_dict(self) -> StateDict:
        """Environment, random stream, and the policy's memory."""
        return {"env": self.core.state_dict(), "learner": self.ppo.state_dict()}

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from :meth:`state_dict`."""
        self.core.load_state_dict(state["env"])
        self.ppo.load_state_dict(state["learner"])

    def policy(self, *, deterministic: bool = True) -> InferencePolicy:
        """Return the actor, with a memory of its own."""
        return _inference(self.ppo.policy, deterministic=deterministic)


def read_policy(path: Path, *, deterministic: bool, trust: bool = False) -> InferencePolicy:
    """Return a policy from a file, without a learner. Nothing in it is executed, unless ``trust``."""
    return _inference(load_actor_critic(path, trust=trust).policy, deterministic=deterministic)


def _inference(policy: Policy, *, deterministic: bool) -> InferencePolicy:
    recurrent = policy.memory is not None

    def act(obs: Obs, memory: MemoryState | None) -> tuple[Tensor, MemoryState | None]:
        state = policy.initial_state(len(obs[policy.encoder.names[0]])) if memory is None else memory[0]
        if deterministic:
            action, state = policy.act(obs, state)
        else:
            seen, state = policy.actor_features(obs, state)
            action = policy.distribution(seen).sample().clamp(policy.low, policy.high)
        return action, (state,) if recurrent else None

    return InferencePolicy(act, recurrent=recurrent)
