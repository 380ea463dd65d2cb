"""Soft actor-critic (Haarnoja et al., 2018) from states in one file, over our replay buffer.

  python examples/sac_from_states.py                              train on cartpole, judge on held-out episodes
  python examples/sac_from_states.py --peer --seeds 0 1 2         a table with stable-baselines3's SAC, same settings

Both learners get the same environments, frames, networks and updates: one per frame. The peer needs 'headrace[sb3]'.
Returns of 50 held-out episodes after 6,000 frames, 300 at most, for the seeds 0, 1 and 2: 267.5, 248.2 and 283.2 here,
282.9, 200.9 and 276.1 with stable-baselines3.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import headrace
from headrace.replay import ReplayBuffer

NUM_ENVS, BATCH, START = 4, 128, 1_000
GAMMA, TAU, RATE, HIDDEN = 0.99, 0.005, 1e-3, 64
HELD_OUT = 1_000_003
Act = Callable[[Tensor], Tensor]


def network(inputs: int, outputs: int) -> nn.Sequential:
    """Return two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, outputs)
    )


def draw(actor: nn.Module, obs: Tensor) -> tuple[Tensor, Tensor]:
    """Return actions within -1 to 1, (B, A), and their log-probabilities, (B,)."""
    mean, log_std = actor(obs).chunk(2, -1)
    normal = torch.distributions.Normal(mean, log_std.clamp(-20, 2).exp())
    raw = normal.rsample()
    # log(1 - tanh(x)²), in a form that does not cancel
    log_slope = 2 * (np.log(2) - raw - F.softplus(-2 * raw))
    return raw.tanh(), (normal.log_prob(raw) - log_slope).sum(-1)


def train(task: str, frames: int, seed: int) -> Act:
    """Learn, and return the policy without noise."""
    torch.manual_seed(seed)
    env = headrace.make(task, NUM_ENVS, seed=seed, threads=1)
    space, size = env.single_observation_space["policy"], env.single_action_space.shape[0]
    low, high = (torch.from_numpy(bound) for bound in (env.single_action_space.low, env.single_action_space.high))
    buffer = ReplayBuffer(frames, NUM_ENVS, env.single_observation_space, env.single_action_space, seed=seed)

    actor = network(space.shape[0], 2 * size)
    critics = nn.ModuleList(network(space.shape[0] + size, 1) for _ in range(2))
    targets = copy.deepcopy(critics).requires_grad_(False)
    log_alpha = torch.zeros((), requires_grad=True)
    actor_step, critic_step = (torch.optim.Adam(part.parameters(), RATE) for part in (actor, critics))
    alpha_step = torch.optim.Adam([log_alpha], RATE)

    def values(parts: nn.ModuleList, obs: Tensor, action: Tensor) -> Tensor:
        return torch.stack([part(torch.cat((obs, action), -1))[:, 0] for part in parts])

    def improve() -> None:
        batch = buffer.sample(BATCH)
        obs, action = batch["observation", "policy"], batch["action"]
        following, reward = batch["next", "observation", "policy"], batch["next", "reward"][:, 0]
        alpha = log_alpha.detach().exp()
        with torch.no_grad():
            chosen, log_prob = draw(actor, following)
            value = values(targets, following, chosen).amin(0) - alpha * log_prob
            # truncated and cut transitions have a true next observation: only terminated ones do not bootstrap
            goal = reward + GAMMA * value * ~batch["next", "terminated"][:, 0]
        critic_loss = (values(critics, obs, action) - goal).square().mean(-1).sum() / 2
        critic_step.zero_grad()
        critic_loss.backward()
        critic_step.step()

        chosen, log_prob = draw(actor, obs)
        actor_loss = (alpha * log_prob - values(critics, obs, chosen).amin(0)).mean()
        actor_step.zero_grad()
        actor_loss.backward()
        actor_step.step()
        alpha_loss = -(log_alpha * (log_prob.detach() - size)).mean()
        alpha_step.zero_grad()
        alpha_loss.backward()
        alpha_step.step()
        with torch.no_grad():
            for target, critic in zip(targets.parameters(), critics.parameters(), strict=True):
                target.lerp_(critic, TAU)

    obs, _ = env.reset(seed=seed)
    for count in range(0, frames, NUM_ENVS):
        with torch.no_grad():
            unit = draw(actor, obs["policy"])[0] if count >= START else torch.rand(NUM_ENVS, size) * 2 - 1
        step = env.step(low + (unit + 1) / 2 * (high - low))
        buffer.extend(obs, unit, step)
        obs = step.obs
        for _ in range(NUM_ENVS if count >= START else 0):
            improve()
    env.close()
    return lambda obs: low + (actor(obs).chunk(2, -1)[0].tanh() + 1) / 2 * (high - low)


def train_peer(task: str, frames: int, seed: int) -> Act:
    """Learn the same with stable-baselines3's SAC and its own buffer."""
    from stable_baselines3 import SAC

    from headrace.libraries.learner import LearnerEnv
    from headrace.libraries.sb3 import Sb3Env

    env = headrace.make(task, NUM_ENVS, seed=seed, threads=1)
    model = SAC(
        "MlpPolicy",
        Sb3Env(LearnerEnv(env)),
        learning_rate=RATE,
        buffer_size=frames,
        learning_starts=START,
        batch_size=BATCH,
        gamma=GAMMA,
        tau=TAU,
        gradient_steps=-1,
        policy_kwargs={"net_arch": [HIDDEN, HIDDEN]},
        seed=seed,
        device="cpu",
    )
    model.learn(frames)
    env.close()
    low, high = (torch.from_numpy(bound) for bound in (env.single_action_space.low, env.single_action_space.high))
    return lambda obs: (
        low + (torch.from_numpy(model.predict(obs.numpy(), deterministic=True)[0]) + 1) / 2 * (high - low)
    )


@torch.no_grad()
def judge(task: str, act: Act, episodes: int = 50) -> float:
    """Return the mean return of held-out episodes."""
    env = headrace.make(task, episodes, seed=HELD_OUT, threads=1, autoreset="disabled")
    obs, _ = env.reset(seed=HELD_OUT)
    returns = torch.zeros(episodes)
    while env.active.any():
        step = env.step(act(obs["policy"]))
        obs, returns = step.obs, returns + step.reward
    env.close()
    return float(returns.mean())


def main() -> None:
    """Train once per seed and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="cartpole", help="a task with a continuous action and a group 'policy'")
    parser.add_argument("--frames", type=int, default=6_000, help="environment steps (default: 6,000)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--peer", action="store_true", help="train stable-baselines3's SAC as well")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| learner | seed | return of 50 held-out episodes | time |\n|---|---:|---:|---:|")
    for seed in arguments.seeds:
        for name, learner in (("this file", train), ("SB3", train_peer))[: 1 + arguments.peer]:
            begun = time.perf_counter()
            act = learner(arguments.task, arguments.frames, seed)
            spent = time.perf_counter() - begun
            print(f"| {name} | {seed} | {judge(arguments.task, act):.1f} | {spent:.0f} s |", flush=True)


if __name__ == "__main__":
    main()
