"""Lesson: action chunks without escalation.

Run it with ``python docs/tutorials/action_chunks.py``. Everything it says is asserted.

ACT, Diffusion Policy, π0 and GR00T predict a chunk of actions per call, 16 to 64 of them, because a call is slow. In a
batch whose episodes end at different times the usual loop asks "does any environment need a chunk?" and then runs the
model for all of them: nearly every step. This lesson counts.
"""

from __future__ import annotations

import torch
from rich.console import Console
from torch import Tensor

import headrace
from headrace import evaluate
from headrace.evaluation import PlayCfg
from headrace.policies import Batching, as_chunk_policy
from headrace.policies.protocol import ChunkContext

# A policy maps rows of observations to (n, horizon, action). A module, a function, or anything with LeRobot's
# `predict_action_chunk` fits. It keeps no state per environment; its noise is keyed by (seed, episode, chunk), so
# that the order of a batch does not matter.


def sway(obs: dict[str, Tensor], context: ChunkContext) -> Tensor:
    """Push against the lean of the pole, and a little at random."""
    push = 2.0 * obs["policy"][:, 1:2] + 0.5 * obs["policy"][:, 3:4]
    return (push[:, None] + 0.3 * context.noise(16, 1)).clamp(-1, 1)


policy = as_chunk_policy(sway, horizon=16, action_dim=1)
env = headrace.make("cartpole", num_envs=16, seed=0, autoreset="disabled", final_obs=False)

# The naive rule: as soon as one environment runs dry, all of them get a new chunk. `greedy` infers exactly those that
# wait, and *suspends* them until their chunk is there: no physics runs for who waits, no zero action is played.

naive = evaluate(
    env, policy, episodes=48, play=PlayCfg(execute=16, admission="whole-batch-on-any"), seed=3, progress=False
)
ours = evaluate(env, policy, episodes=48, play=PlayCfg(execute=16, admission="greedy"), seed=3, progress=False)
naive_rows, our_rows = naive.counters.rows_inferred, ours.counters.rows_inferred
print(f"rows inferred: {naive_rows:,} when any triggers all, {our_rows:,} when each has its own")
assert ours.counters.rows_inferred < naive.counters.rows_inferred

# Each environment was inferred once per 16 steps or end of an episode, and without a wasted row:

needed = sum(-(-episode.length // 16) for episode in ours.episodes)
assert ours.counters.rows_inferred == needed

# The other cure that people use is a common clock, on which early environments play a hold action: physics that no
# policy asked for, which changes the episode. Here those who are early are suspended, under every rule: the rows are
# the same, and only how long they wait differs.

clock = evaluate(env, policy, episodes=48, play=PlayCfg(execute=16, admission="synchronized"), seed=3, progress=False)
assert clock.episodes == ours.episodes
print(f"{clock.idle_share:.0%} of the slots wait while others step")

# Results do not depend on the batch. An episode is a function of (task, seed, episode id, policy); `strict` batching
# also removes the last bits in which a matrix product depends on its neighbors. The table of episodes is identical
# for one environment, for five, inline, or with the model in a thread beside the physics.

strict = Batching(mode="strict", size=8)
tables = []
for num_envs, engine in ((1, "inline"), (5, "inline"), (16, "thread")):
    env = headrace.make("cartpole", num_envs, autoreset="disabled", final_obs=False)
    result = evaluate(
        env, policy, episodes=12, play=PlayCfg(execute=16, batching=strict, engine=engine), seed=3, progress=False
    )
    tables.append(result.episodes)
assert tables[0] == tables[1] == tables[2]

# Statistics come with their intervals, over episodes that were each played once and to their end.

print(ours.mean_reward, ours.success_rate)
Console().print(ours.summary())

# A model that answers late: the old chunk plays for three more steps, then the new one takes over at its fourth row.
# The delay is a number of steps from the configuration, never the wall clock, so that this is reproducible as well.

late = evaluate(env, policy, episodes=8, play=PlayCfg(execute=8, latency=3), seed=3, progress=False)
again = evaluate(env, policy, episodes=8, play=PlayCfg(execute=8, latency=3), seed=3, progress=False)
assert late.episodes == again.episodes
assert torch.tensor([episode.length for episode in late.episodes]).min() > 0
