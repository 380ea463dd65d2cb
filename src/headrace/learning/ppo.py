"""A small PPO (Schulman et al., 2017): the reference learner of the tutorials and benchmarks.

Built from parts that any learner can use: a ``BatchEnv`` is stepped into a ``RolloutBuffer``, ``rollout_values`` and
``gae`` give advantages that are exact at truncations and blind to suspended steps, and a policy with or without memory,
on vectors or images, is improved on whole slices of a few environments at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, cast, get_args

import torch
from gymnasium import spaces
from torch import Tensor, nn

from headrace.bridges.bridge_env import BridgeEnv
from headrace.envs.batch_env import BatchEnv
from headrace.errors import ConfigError, LifecycleError, UnknownNameError
from headrace.learning._returns import Estimate, gae
from headrace.learning._values import rollout_values
from headrace.learning.actor_critic import MemoryKind, NetworkCfg, Policy, read_groups
from headrace.learning.ranks import average_gradients, moments, read_ranks, sum_ranks
from headrace.replay import ArraySpec
from headrace.replay.rollout import Rollout, RolloutBuffer
from headrace.types import EpisodeEnds, StackSpec, StateDict, Step, StepInfo


@dataclass(frozen=True, kw_only=True)
class PPOCfg(NetworkCfg):
    """Settings of PPO and sizes of its networks, for our own learner and for every library.

    A library refuses a setting that it cannot honor: ``headrace.libraries.LibrarySpec`` has the list of each.
    """

    steps: int = 32
    """Steps of each environment per iteration."""
    epochs: int = 5
    minibatches: int = 4
    """Into how many parts the steps · num_envs of a rollout are split."""
    learning_rate: float = 1e-3
    """Of Adam. Constant, except in our own learner, where it is the value that adaptation begins with."""
    gamma: float = 0.99
    lam: float = 0.95
    clip: float = 0.2
    value_weight: float = 0.5
    """Of the mean squared error of the value, which is not clipped."""
    entropy_weight: float = 0.0
    max_grad_norm: float = 1.0
    reward_scale: float = 0.1
    """Factor on the rewards that a learner sees. Reported returns are not scaled."""
    target_kl: float = 0.01
    """How far an epoch may move the policy: beyond twice this the learning rate falls, below half of it it rises."""
    max_learning_rate: float = 1e-2
    """Upper limit of the adapted learning rate; use 1e-3 for images."""
    guess_weight: float = 1.0
    """Of the error in ``Policy.guess``, where there is one."""
    actor_groups: tuple[str, ...] | None = None
    """Observation groups that the actor reads; None for all but ``critic``."""
    critic_groups: tuple[str, ...] | None = None
    """Observation groups that the critic reads; None for ``critic`` where the task has it, else the actor's."""
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
        if self.memory not in get_args(MemoryKind):
            raise UnknownNameError("memory", self.memory, get_args(MemoryKind))

    def minibatch_size(self, num_envs: int) -> int:
        """Return steps per minibatch; raises where they do not divide evenly."""
        size, rest = divmod(self.steps * num_envs, self.minibatches)
        if rest or not size:
            raise ConfigError(
                f"minibatches: expected a divisor of steps · num_envs = {self.steps * num_envs}, got {self.minibatches}"
            )
        return size


class Report(NamedTuple):
    """One iteration: steps taken so far, episodes that ended in it, their mean return (NaN if none), and learning."""

    steps: int
    episodes: int
    mean_return: float
    kl: float
    value_loss: float


class PPO:
    """Steps an environment and improves a policy on what it saw. Owns the policy, its memory and the rollout buffer."""

    def __init__(self, env: BatchEnv | BridgeEnv, cfg: PPOCfg | None = None) -> None:
        self.env, self.cfg = env, cfg or PPOCfg()
        space, seen = env.single_action_space, env.single_observation_space
        if not isinstance(space, spaces.Box) or len(space.shape) != 1:
            raise ConfigError(f"PPO: expected a task with continuous actions (a flat Box), got {space}")
        if env.num_envs < self.cfg.minibatches:
            raise ConfigError(f"PPO: expected num_envs >= {self.cfg.minibatches} minibatches, got {env.num_envs}")
        self._read = read = read_groups(seen, self.cfg.actor_groups, self.cfg.critic_groups)
        critic_groups = read.critic if read.critic_only else None
        none = torch.zeros(env.num_envs, dtype=torch.bool, device=env.device)
        self._observe = (none,) if read.images_unread else ()
        self._random = torch.Generator(env.device).manual_seed(self.cfg.seed + read_ranks()[0])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.cfg.seed)
            bounds = space.low.tolist(), space.high.tolist()
            self.policy = Policy(read.actor, *bounds, self.cfg, critic_groups).to(env.device)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=self.cfg.learning_rate)
        log_prob = {"log_prob": ArraySpec((), torch.float32)}
        kept = spaces.Dict({name: cast("spaces.Dict", seen)[name] for name in read.all})
        stack = {name: spec for name, spec in _stacks_of(env).items() if name in read.all}
        self.buffer = RolloutBuffer(self.cfg.steps, env.num_envs, kept, space, stack=stack, extras=log_prob)
        self.steps, self._state = 0, self.policy.initial_state(env.num_envs)
        self._fresh = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
        self._begun = self._state, self._fresh
        """The policy's memory when the rollout began, and where an episode was new."""
        self._obs = read.of(env.reset(seed=env.seed)[0])
        rank, ranks = read_ranks()
        if ranks > 1:  # the environments of all processes are those of one
            ids = torch.arange(env.num_envs, device=env.device) + rank * env.num_envs
            self._obs = read.of(env.reset(options={"episode_ids": ids})[0])

    def learn(self, iterations: int) -> Iterator[Report]:
        """Collect and improve, ``iterations`` times, with a report after each."""
        for _ in range(iterations):
            returns = self.collect().returns
            mean = float(returns.mean()) if len(returns) else math.nan
            yield Report(self.steps, len(returns), mean, *self.improve())

    @torch.no_grad()
    def collect(self) -> EpisodeEnds:
        """Fill the buffer; gives the episodes that ended."""
        self.buffer.clear()
        self._begun = self._state, self._fresh
        ends: list[EpisodeEnds] = []
        for _ in range(self.cfg.steps):
            active = self.env.active
            seen, _, self._state = self.policy.features(self._obs, self._state, self._fresh, active)
            chosen = self.policy.distribution(seen)
            action = torch.normal(chosen.mean, chosen.stddev, generator=self._random)
            step = self._step(action.clamp(self.policy.low, self.policy.high))
            self.buffer.extend(self._obs, action, step, active, {"log_prob": chosen.log_prob(action).sum(-1)})
            self._obs = step.obs
            self._fresh = torch.where(active, step.terminated | step.truncated, self._fresh)
            self.steps += int(active.sum())
            ends += [step.info["ends"]] if "ends" in step.info else []
        return EpisodeEnds.join(ends)

    def _step(self, action: Tensor) -> Step:
        """Return a step, with the groups that are read."""
        step = self.env.step(action, *self._observe)
        if not self._read.unread:
            return step
        info = step.info
        if "final_obs" in info:
            info = cast("StepInfo", {**info, "final_obs": self._read.of(info["final_obs"])})
        return step._replace(obs=self._read.of(step.obs), info=info)

    def improve(self) -> tuple[float, float]:
        """Learn from what was collected; gives the last epoch's KL and value loss."""
        rollout, (state, fresh) = self.buffer.rollout(observations=False), self._begun
        if not bool(rollout.active.any()):
            raise LifecycleError("PPO: expected active environments, got none in a whole rollout; resume() some")
        ended = rollout.terminated | rollout.truncated | rollout.cut
        resets = torch.cat((fresh[None], ended[:-1]))
        goal = self._estimate(rollout, state, resets, ended)
        kl = value_loss = math.nan
        for _ in range(self.cfg.epochs):
            sums = torch.zeros(3)
            order = torch.randperm(self.env.num_envs, generator=self._random, device=self.env.device)
            for envs in order.tensor_split(self.cfg.minibatches):
                sums += self._update(rollout, state, resets, goal, envs)
            sums = sum_ranks(sums)
            kl, value_loss = float(sums[0] / sums[2]), float(sums[1] / sums[2])
            factor = 1 / 1.5 if kl > 2 * self.cfg.target_kl else 1.5 if kl < self.cfg.target_kl / 2 else 1.0
            for group in self.optimizer.param_groups:
                group["lr"] = min(max(group["lr"] * factor, 1e-5), self.cfg.max_learning_rate)
        # after learning, so that the policy that is compared with itself is the same function
        for envs in self._parts():
            if bool((live := rollout.active[:, envs]).any()):
                self.policy.update_normalizers(self.buffer.observations(envs), live)
        return kl, value_loss

    def _parts(self) -> tuple[Tensor, ...]:
        """Return all environments in as many parts as minibatches: stacks are written out for one part at a time."""
        return torch.arange(self.env.num_envs, device=self.env.device).tensor_split(self.cfg.minibatches)

    def state_dict(self) -> StateDict:
        """Return the state besides weights and environment: the random stream and the policy's memory."""
        memory = {"memory": self._state.clone(), "fresh": self._fresh.clone()}
        return {"random": self._random.get_state(), **memory, "steps": self.steps}

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from :meth:`state_dict`, on an environment that was put back already."""
        self._random.set_state(state["random"])
        self._state, self._fresh = state["memory"].clone(), state["fresh"].clone()
        self.steps = int(state["steps"])
        self._obs = self._read.of(self.env.observe())

    @torch.no_grad()
    def _estimate(self, rollout: Rollout, state: Tensor, resets: Tensor, ended: Tensor) -> Estimate:
        """Advantages, normalized over active steps, and value targets."""
        policy = self.policy
        parts = [
            policy.features(self.buffer.observations(envs), state[:, envs], resets[:, envs], rollout.active[:, envs])
            for envs in self._parts()
        ]
        seen, watched, after = (torch.cat(part, 1) for part in zip(*parts, strict=True))
        _, last, _ = policy.features(rollout.last_obs, after, ended[-1])
        # the memory after a step is what the step put out
        at_end = state if policy.memory is None else seen[rollout.final_step, rollout.final_env][None]
        _, final, _ = policy.features(rollout.final_obs, at_end)
        value, next_value = rollout_values(
            lambda rows: policy.value_scale.denormalize(policy.critic(rows)), watched, last,
            final_obs=final, final_step=rollout.final_step, final_env=rollout.final_env, active=rollout.active,
        )  # fmt: skip
        advantage, target = gae(
            rollout.reward, value, next_value, rollout.terminated, rollout.truncated | rollout.cut,
            gamma=self.cfg.gamma, lam=self.cfg.lam, active=rollout.active,
        )  # fmt: skip
        policy.value_scale.update(target[rollout.active][:, None])
        _, mean, variance = moments(advantage[rollout.active])
        return Estimate((advantage - mean) / (variance.sqrt() + 1e-8), target)

    def _update(self, rollout: Rollout, state: Tensor, resets: Tensor, goal: Estimate, envs: Tensor) -> Tensor:
        """Return one gradient step on all steps of some environments.

        Gives the sums of KL and value loss, and the count.
        """
        policy, live = self.policy, rollout.active[:, envs]
        if not bool(live.any()):
            return torch.zeros(3)
        obs = self.buffer.observations(envs)
        seen, watched, _ = policy.features(obs, state[:, envs], resets[:, envs], live)
        chosen = policy.distribution(seen[live])
        log_ratio = chosen.log_prob(rollout.action[:, envs][live]).sum(-1) - rollout.extras["log_prob"][:, envs][live]
        ratio, gain = log_ratio.exp(), goal.advantage[:, envs][live]
        objective = torch.min(ratio * gain, ratio.clamp(1 - self.cfg.clip, 1 + self.cfg.clip) * gain)
        wanted = policy.value_scale(goal.value_target[:, envs][live][:, None])
        value_error = (policy.critic(watched[live]) - wanted).square()
        loss = self.cfg.value_weight * value_error.mean() - objective.mean()
        loss = loss - self.cfg.entropy_weight * chosen.entropy().sum(-1).mean()
        if policy.guess is not None:
            loss = loss + self.cfg.guess_weight * (policy.guess(seen[live]) - watched[live]).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        average_gradients(policy.parameters(), live.sum())
        nn.utils.clip_grad_norm_(policy.parameters(), self.cfg.max_grad_norm)
        self.optimizer.step()
        # the first is an estimate of the KL divergence that is never negative
        return torch.stack((((ratio - 1) - log_ratio).sum(), value_error.sum(), live.sum())).detach().cpu()


def _stacks_of(env: BatchEnv | BridgeEnv) -> dict[str, StackSpec]:
    """Return how images are stacked of frames, by group, as far as the environment declares it."""
    images = {} if isinstance(env, BridgeEnv) else env.task.images
    return {name: image.stack for name, image in images.items() if image.frames > 1}
