"""Lesson: memory-efficient RL.

Run it with ``python docs/tutorials/memory_efficient_rl.py``. Everything it says is asserted, and every number it
prints is counted from real tensors.

A replay buffer usually keeps each observation twice, as ``obs`` and as ``next_obs``, and each frame of a stack of
four four times more. A million transitions of 84 × 84 pictures are then 56 GB. The walk: where the bytes go, how to
keep every frame once and lose nothing, the older ways to save and what they cost, NaN, n-step, disk, slices,
recurrent networks without padding, and one pipeline of all of it at the end.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor

import headrace
from headrace.learning import GRU, gae, repair_next_obs, rollout_values
from headrace.replay import (
    ArraySpec,
    ReplayBuffer,
    RolloutBuffer,
    SliceSampler,
    estimate,
    from_delta,
    reconstruct_next,
    to_delta,
)
from headrace.rollout import collect
from headrace.types import StackSpec

torch.manual_seed(0)


def size(batch: TensorDict) -> int:
    """Bytes of all tensors of a batch."""
    return sum(leaf.element_size() * leaf.nelement() for leaf in batch.values(True, True))


# ## Where the bytes go
#
# Four environments, pictures of 48 × 48 in stacks of two, 60 steps, kept as most libraries keep them.

pixels = {"frame_stack": 2, "pixels": 48, "episode_length": 25}
env = headrace.make("cartpole-camera", num_envs=4, seed=0, overrides=pixels)


def lean(obs: dict[str, Tensor]) -> Tensor:
    """A policy that reads the state, to have something to act with."""
    return torch.sign(obs["critic"][:, 1:2])


naive = collect(env, lean, 60, seed=0)
transitions = naive.numel()
per_observation = naive["observation", "policy"][0, 0].nelement()
print(f"naive: {size(naive) / transitions:,.0f} bytes per transition, of which {2 * per_observation:,} are pictures")
assert size(naive) / transitions > 2 * per_observation

# The picture of a step is in it four times: as the newer half of `obs`, the older half of the following `obs`, and
# both again in `next`. Everything but one copy is index arithmetic.
#
# ## Keep every frame once
#
# Say how the stack is made, and only its newest frame is stored. The true last observation of an episode goes to a
# side table, since the next stored frame belongs to the next episode.

buffer = ReplayBuffer(
    400,
    4,
    env.single_observation_space,
    env.single_action_space,
    stack={"policy": StackSpec(frames=2)},
)


def fill(buffer: ReplayBuffer, steps: int) -> list[tuple[dict[str, Tensor], headrace.Step]]:
    """Run the policy into a buffer; returns what was seen, to compare with."""
    seen = []
    obs, _ = env.reset(seed=0)
    for _ in range(steps):
        active, action = env.active, lean(obs)
        step = env.step(action)
        buffer.extend(obs, action, step, active)
        seen.append((obs, step))
        obs = step.obs
    return seen


seen = fill(buffer, 60)
print(f"once:  {buffer.bytes_per_transition:,.0f} bytes per transition, next observations exact everywhere")
assert buffer.bytes_per_transition < 0.4 * size(naive) / transitions

# Exact means exact. Every sample is compared with what the environment returned, also where an episode ended.

batch = buffer.sample(200)
ends = batch["next", "done"][:, 0]
assert ends.any()
finals = [step.info["final_obs"]["policy"] for _, step in seen if "final_obs" in step.info]
known = torch.cat([torch.cat([obs["policy"] for obs, _ in seen]), *finals])
shown = batch["next", "observation", "policy"][ends]
assert all((known == picture).flatten(1).all(1).any() for picture in shown)

# ## Two older ways to save
#
# *Compact* drops the next observations and takes them from the following entry. That halves the store, and loses the
# last observation of every trajectory: exactly the one that a truncated episode bootstraps from. It needs whole
# sequences, so no random batches and no n-step.

state = headrace.make("cartpole", num_envs=4, seed=0, overrides={"episode_length": 25})


def push(obs: dict[str, Tensor]) -> Tensor:
    """The same policy, from the state."""
    return torch.sign(obs["policy"][:, 1:2])


full = collect(state, push, 60, seed=0)
compact = collect(state, push, 60, seed=0, compact=True)
restored = reconstruct_next(compact)
missing = restored["next", "observation", "policy"].isnan().any(-1)
print(f"compact: {size(compact) / size(full):.2f} of the bytes, {int(missing.sum())} of {missing.numel()} are lost")
assert missing.any()

# *Delta* keeps the difference to the next observation as float16. It is small for states and lossy; for uint8
# pictures a difference needs int16 and is larger than the picture. Use it for float states when a slice sampler is
# all you need, and the buffer above otherwise.

delta = to_delta(full)
error = (from_delta(delta)["next", "observation", "policy"] - full["next", "observation", "policy"]).abs().max()
print(f"delta: {size(delta) / size(full):.2f} of the bytes, wrong by up to {error:.1e}")
assert 0 < error < 1e-2

# ## NaN safety
#
# A network turns a missing (NaN) next observation into NaN, and 0 · NaN is NaN: one terminated row poisons the loss.
# `repair_next_obs` puts the row's own observation there. Terminated rows are then exact, as nothing reads their next
# value; the others are an approximation, marked and counted, never silent.

flat = restored.reshape(-1)
repaired = repair_next_obs(
    flat["observation", "policy"], flat["next", "observation", "policy"], flat["next", "terminated"][:, 0]
)
assert not repaired.next_obs.isnan().any()
print(repaired.approximate_count, "rows bootstrap V(s) in the place of V(s')")

# ## n-step
#
# Sums of rewards and the observation n steps on are index arithmetic as well. At an end, a cut or the newest write
# there are fewer steps; the sample says how many, and the discount that belongs to them.

n_step = ReplayBuffer(400, 4, state.single_observation_space, state.single_action_space, n_step=3, gamma=0.99)
obs, _ = state.reset(seed=0)
for _ in range(60):
    active, action = state.active, push(obs)
    step = state.step(action)
    n_step.extend(obs, action, step, active)
    obs = step.obs
batch = n_step.sample(128)
assert set(batch["steps_to_next_obs"].unique().tolist()) == {1, 2, 3}
assert torch.allclose(batch["gamma"], 0.99 ** batch["steps_to_next_obs"].float())

# ## Disk
#
# The same store in files may be larger than memory, and survives a kill: it goes on after the last whole
# write. What a buffer will take is known before it is made.

folder = Path(tempfile.mkdtemp())
stored = ReplayBuffer(
    400,
    4,
    env.single_observation_space,
    env.single_action_space,
    stack={"policy": StackSpec(frames=2)},
    directory=folder / "store",
)
fill(stored, 40)
del stored
again = ReplayBuffer.open(folder / "store")
assert len(again) == 160
atari = ArraySpec((4, 84, 84), torch.uint8)
once = estimate(1_000_000, 20, atari, ArraySpec((), torch.int64), stack=StackSpec(frames=4, dim=0), episode_length=200)
twice = 2 * 4 * 84 * 84 * 1_000_000
print(f"a million transitions of 84 × 84 × 4: {once.nbytes / 2**30:.1f} GiB here, {twice / 2**30:.1f} GiB stored twice")

# ## Slices, and recurrent training without padding
#
# A slice never crosses an end. A recurrent network takes slices as they are, with resets inside: `packed` splits at
# the resets and packs, so that no step is computed for padding.

slices = ReplayBuffer(400, 4, state.single_observation_space, state.single_action_space, sampler=SliceSampler(8))
obs, _ = state.reset(seed=0)
for _ in range(60):
    active, action = state.active, push(obs)
    step = state.step(action)
    slices.extend(obs, action, step, active)
    obs = step.obs
batch = slices.sample(16)
assert batch.shape == (16, 8)
assert (batch["collector", "traj_ids"] == batch["collector", "traj_ids"][:, :1]).all()
gru = GRU(input_size=4, hidden_size=32)
x = batch["observation", "policy"].transpose(0, 1).contiguous()
resets = torch.zeros(8, 16, dtype=torch.bool)
resets[0] = True
features, _ = gru(x, None, resets)
assert features.shape == (8, 16, 32)

# A rollout has resets inside. Padding would split it there and make every piece as long as the longest.

x, done = (full["observation", "policy"].transpose(0, 1), full["next", "done"][..., 0].transpose(0, 1))
resets = torch.cat([torch.ones_like(done[:1]), done[:-1]])
features, _ = gru(x.contiguous(), None, resets.contiguous())
starts = [[*torch.nonzero(resets[:, env]).flatten().tolist(), len(resets)] for env in range(resets.shape[1])]
pieces = [end - start for of_env in starts for start, end in itertools.pairwise(of_env)]
padded = len(pieces) * max(pieces)
print(f"recurrent: {sum(pieces)} steps computed, {padded} with padding")
assert sum(pieces) == resets.numel() < padded

# ## One pipeline
#
# On-policy: a rollout that keeps every observation once; V(s) and V(s') in one forward over the distinct observations
# instead of two over all; advantages that bootstrap truncated episodes from their true last observation.

rollout = RolloutBuffer(32, 4, state.single_observation_space, state.single_action_space)
obs, _ = state.reset(seed=1)
while not rollout.full:
    active, action = state.active, push(obs)
    step = state.step(action)
    rollout.extend(obs, action, step, active)
    obs = step.obs
critic = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
data = rollout.rollout()
evaluated = 0


def value_of(rows: dict[str, Tensor]) -> Tensor:
    """The critic, with a count of the rows that it reads."""
    global evaluated
    evaluated += len(rows["policy"])
    return critic(rows["policy"])


with torch.no_grad():
    values = rollout_values(
        value_of,
        data.obs,
        data.last_obs,
        final_obs=data.final_obs,
        final_step=data.final_step,
        final_env=data.final_env,
        active=data.active,
    )
estimated = gae(
    data.reward,
    values.value,
    values.next_value,
    data.terminated,
    data.truncated | data.cut,
    active=data.active,
    gamma=0.99,
    lam=0.95,
)
assert estimated.advantage.isfinite().all()
print(f"the critic read {evaluated} observations; two passes would read {2 * 32 * 4}")
assert evaluated < 2 * 32 * 4
shutil.rmtree(folder)  # nothing is left behind
