"""Lesson: memory-efficient RL.

Run it with ``python docs/tutorials/memory_efficient_rl.py``. Everything it says is asserted, and every number it
prints is counted from real tensors.

A replay buffer usually keeps each observation twice, as ``obs`` and as ``next_obs``, and each frame of a stack of
four four times more. A million transitions of 84 × 84 pictures are then 56 GB. The walk: why it is so, where the bytes
go, how to keep every frame once and lose nothing, the smaller forms of batches and what they cost, NaN, n-step, disk,
several samplers over one store, recurrent networks (stored states, behavior log-probabilities, backends without
padding), nested tensors, devices, value networks a chunk at a time, and two pipelines that learn: one on-policy, one
off-policy.
"""

from __future__ import annotations

import copy
import itertools
import shutil
import tempfile
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor

import headrace
from headrace.learning import GRU, collect, compact_values, gae, repair_next_obs, rollout_values, vtrace
from headrace.replay import (
    ArraySpec,
    PrioritizedSampler,
    ReplayBuffer,
    RolloutBuffer,
    SliceSampler,
    TrajectorySampler,
    estimate,
)
from headrace.replay.forms import from_delta, reconstruct_next, to_delta
from headrace.types import StackSpec

torch.manual_seed(0)
torch.set_num_threads(1)  # small networks: more threads only wait for each other


def size(batch: TensorDict) -> int:
    """Bytes of all tensors of a batch."""
    return sum(leaf.element_size() * leaf.nelement() for leaf in batch.values(True, True))


# ## Why `next` is stored at all
#
# A learner needs s' next to s. In a random batch the following entry is somewhere else; at the end of an episode it
# belongs to another one; with automatic resets the true last observation is nowhere but in `info`. Storing the pair is
# the simple way to be right, and every library does it by default. The price:
#
# ## Where the bytes go
#
# Four environments, pictures of 48 × 48 in stacks of two, 60 steps, kept as most libraries keep them.

pixels = {"frame_stack": 2, "pixels": 48, "episode_length": 25}
env = headrace.make("cartpole-camera", num_envs=4, seed=0, threads=1, overrides=pixels)


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
    stack={"policy": StackSpec(frames=2, dim=-1)},
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

# ## Two smaller forms of batches
#
# *Compact* drops the next observations where they are made, and takes them from the following entry. That halves the
# batch, and loses the last observation of every trajectory: exactly the one that a truncated episode bootstraps from.

state = headrace.make("cartpole", num_envs=4, seed=0, threads=1, overrides={"episode_length": 25})


def push(obs: dict[str, Tensor]) -> Tensor:
    """The same policy, from the state."""
    return torch.sign(obs["policy"][:, 1:2])


full = collect(state, push, 60, seed=0)
compact = collect(state, push, 60, seed=0, compact=True)
pair = size(full.select("observation", ("next", "observation")))
print(f"compact: {size(compact.select('observation')) / pair:.2f} of the bytes of observations")
assert size(compact.select("observation")) == pair / 2

restored = reconstruct_next(compact)
missing = restored["next", "observation", "policy"].isnan().any(-1)
done = full["next", "done"][..., 0]
boundary = done.clone()
boundary[:, -1] = True
assert torch.equal(missing, boundary), "NaN rows are the boundary rows: ends, and the last entry"
assert torch.equal(restored["next", "observation", "policy"][~missing], full["next", "observation", "policy"][~missing])

# A store takes the batch as it is and puts the pieces together: a trajectory goes on from one batch into the next.

small = ReplayBuffer(400, 4, state.single_observation_space, state.single_action_space)
state.reset(seed=0)
for _ in range(3):
    small.extend(collect(state, push, 20, reset=False, compact=True))
rows = small.get(small.indices())
edge = (rows["next", "done"] | rows["next", "cut"])[:, 0]
assert torch.equal(rows["next", "observation", "policy"].isnan().any(-1), edge)
print(f"compact into a store: {int(edge.sum())} of {len(small)} next observations are not known")

# *Delta* keeps the difference to the next observation as float16: three quarters of the pair, finite everywhere, and
# rounded at the ends only, as the store has the exact frame of everything else.

delta = collect(state, push, 60, seed=0, delta=torch.float16)
kept = size(delta.select("observation", ("next", "delta")))
assert kept == 0.75 * pair
rounded = ReplayBuffer(400, 4, state.single_observation_space, state.single_action_space)
rounded.extend(delta)
exact = ReplayBuffer(400, 4, state.single_observation_space, state.single_action_space)
exact.extend(full)
key = ("next", "observation", "policy")
error = (rounded.get(rounded.indices())[key] - exact.get(exact.indices())[key]).abs()
print(f"delta: {kept / pair:.2f} of the bytes, wrong by up to {error.max():.1e} at ends and nowhere else")
rows = rounded.get(rounded.indices())
edge = (rows["next", "done"] | rows["next", "cut"])[:, 0]
assert (error[~edge] == 0).all()
assert error.isfinite().all()
assert torch.equal(from_delta(to_delta(full))[key][0, 0], from_delta(delta)[key][0, 0])

# When not to use them: compact gives no n-step targets in random batches and no bootstrap at truncations; delta is
# larger than the original on uint8 pictures (a difference needs int16). They are for batches on their way. What stays
# belongs into a store.
#
# ## NaN safety
#
# A network turns a missing (NaN) next observation into NaN, and 0 · NaN is NaN: one terminated row poisons the loss.
# Three ways out. `gae` itself reads no next value where a step terminated:

critic = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
with torch.no_grad():
    v = critic(full["observation", "policy"])[..., 0]
    v_next = critic(restored[key])[..., 0]
reward, terminated = full["next", "reward"][..., 0], full["next", "terminated"][..., 0]
truncated = full["next", "truncated"][..., 0]
assert v_next.isnan().any()
safe = gae(reward, v, v_next, terminated, truncated | boundary, gamma=0.99, lam=0.95, batch_first=True)
assert safe.advantage.isfinite().all(), "at truncations and cuts whose V(s') is not known, V(s) stands for it"

# `compact_values` needs no next observation: one forward, shifted; at truncations it bootstraps V(s) for V(s').

with torch.no_grad():
    shifted = compact_values(lambda rows: critic(rows["policy"]), {"policy": compact["observation", "policy"]}, done)
estimated = gae(
    reward, shifted.value, shifted.next_value, terminated, truncated | boundary, gamma=0.99, lam=0.95, batch_first=True
)
assert estimated.advantage.isfinite().all()

# `repair_next_obs` puts the row's own observation there. Terminated rows are then exact, as nothing reads their next
# value; the others are an approximation, marked and counted, never silent.

repaired = repair_next_obs(restored["observation"], restored["next", "observation"], restored["next", "terminated"])
assert not repaired.next_obs["policy"].isnan().any()
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

# Deltas and n-step meet in a store: it takes a delta batch, and n-step targets are index arithmetic over what it keeps.
# Rewards, discounts and flags are those of the full batch, and so are the observations n steps on, but at ends, where
# the delta was rounded.

three = {"n_step": 3, "gamma": 0.99}
spaces_of_state = state.single_observation_space, state.single_action_space
from_deltas, from_full = (ReplayBuffer(400, 4, *spaces_of_state, **three) for _ in range(2))
from_deltas.extend(delta)
from_full.extend(full)
one, other = (each.get(each.indices()) for each in (from_deltas, from_full))
for name in (("next", "reward"), ("next", "done"), "gamma", "steps_to_next_obs"):
    assert torch.equal(one[name], other[name])
gap = (one[key] - other[key]).abs().amax(-1)
inside = ~(one["next", "done"] | one["next", "cut"])[:, 0]
assert (gap[inside] == 0).all()
assert gap.max() < 1e-3
print(f"n-step from deltas: {int(inside.sum())} of {len(one)} targets exact, the rest within {gap.max():.1e}")

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
    stack={"policy": StackSpec(frames=2, dim=-1)},
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

# ## Several samplers over one store, and recurrent networks
#
# One store, any number of samplers. Here a recurrent policy acts, and the store keeps with every step the state that
# the network had before it (R2D2) and the log-probability of what was done (V-trace).

gru = GRU(input_size=4, hidden_size=16)
head = torch.nn.Linear(16, 2)
moves = torch.tensor([[-1.0], [1.0]])
slices = ReplayBuffer(
    400,
    4,
    state.single_observation_space,
    state.single_action_space,
    extras={"hidden": ArraySpec((16,), torch.float32), "log_prob": ArraySpec((), torch.float32)},
)
runs = slices.with_sampler(SliceSampler(8, burn_in=2), "runs")
favored = slices.with_sampler(PrioritizedSampler(8, burn_in=2), "favored")
obs, _ = state.reset(seed=0)
hidden = gru.initial_state(4)
with torch.no_grad():
    for _ in range(60):
        active, before = state.active, hidden[0].clone()
        features, hidden = gru.step(obs["policy"], hidden)
        chosen = torch.distributions.Categorical(logits=head(features))
        choice = chosen.sample()
        step = state.step(moves[choice])
        extras = {"hidden": before, "log_prob": chosen.log_prob(choice)}
        slices.extend(obs, moves[choice], step, active, extras)
        obs, hidden = step.obs, hidden * ~(step.terminated | step.truncated)[None, :, None]

batch = runs.sample(16)
assert batch.shape == (16, 10), "two steps of burn-in, eight to learn from; never across an end"
assert (batch["collector", "traj_ids"] == batch["collector", "traj_ids"][:, :1]).all()

# A slice begins with the stored state, so the network sees what it saw when it acted, bit for bit nearly.

x = batch["observation", "policy"].transpose(0, 1).contiguous()
none = torch.zeros(10, 16, dtype=torch.bool)
features, _ = gru(x, batch["hidden"][:, 0][None].contiguous(), none)
logits = torch.distributions.Categorical(logits=head(features))
log_prob = logits.log_prob((batch["action"][..., 0] > 0).long().transpose(0, 1))
assert torch.allclose(log_prob, batch["log_prob"].transpose(0, 1), atol=1e-5), "the weights are those that acted"

# Later the policy has changed, and the stored log-probabilities correct for it: V-trace. With an unchanged policy it is
# what `gae` gives without decay.

next_reward, ends, stops = (
    batch["next", name][..., 0].transpose(0, 1) for name in ("reward", "terminated", "truncated")
)
zeros = torch.zeros(10, 16)
log_ratio = (log_prob - batch["log_prob"].transpose(0, 1)).detach()
traced = vtrace(next_reward, zeros, zeros, ends, stops, log_ratio, gamma=0.99)
untraced = gae(next_reward, zeros, zeros, ends, stops, gamma=0.99, lam=1.0)
assert torch.allclose(traced.value_target, untraced.value_target, atol=1e-3)
changed = vtrace(next_reward, zeros, zeros, ends, stops, log_ratio - 0.5, gamma=0.99)
assert (changed.value_target < traced.value_target).all(), "what the policy would do less often now counts less"

# Priorities of whole runs, from the errors of their steps; `beta`, priorities and draws are saved with the store.

batch = favored.sample(16)
favored.update_priorities(batch["index"], torch.rand(16, 10))
assert batch["_weight"].shape == (16, 10)

# The backends of a recurrent layer give the same numbers: `packed` splits at resets and packs, `scan` goes step by step
# and compiles. `auto` is `packed`, and `scan` inside a compiled region.

answers = {}
for backend in ("packed", "scan"):
    twin = GRU(input_size=4, hidden_size=16, backend=backend)
    twin.load_state_dict(gru.state_dict())
    answers[backend] = twin(x, batch["hidden"][:, 0][None].contiguous(), none)[0]
assert torch.allclose(answers["packed"], answers["scan"], atol=1e-6)

# A rollout has resets inside. Padding would split it there and make every piece as long as the longest.

x, done = (full["observation", "policy"].transpose(0, 1), full["next", "done"][..., 0].transpose(0, 1))
resets = torch.cat([torch.ones_like(done[:1]), done[:-1]])
features, _ = gru(x.contiguous(), None, resets.contiguous())
assert features.shape == (60, 4, 16)
starts = [[*torch.nonzero(resets[:, env]).flatten().tolist(), len(resets)] for env in range(resets.shape[1])]
pieces = [end - start for of_env in starts for start, end in itertools.pairwise(of_env)]
padded = len(pieces) * max(pieces)
print(f"recurrent: {sum(pieces)} steps computed, {padded} with padding")
assert sum(pieces) == resets.numel() < padded

# Code that wants one ragged tensor of whole episodes gets it as torch's nested tensor: a sampler gives the trajectories
# one after another, and their lengths split them. Nothing is padded.

whole = slices.with_sampler(TrajectorySampler(), "whole").sample(5)
starts = (whole["step_count"][:, 0] == 0).nonzero()[:, 0]
bounds = torch.cat([starts, torch.tensor([len(whole)])])
longest = int(bounds.diff().max())
flat = whole["observation", "policy"].contiguous()
ragged = torch.nested.nested_tensor_from_jagged(flat, bounds, max_seqlen=longest)
assert ragged.size(0) == 5
assert sum(len(piece) for piece in ragged.unbind()) == len(whole)
assert bool(whole["next", "done"][bounds[1:] - 1].all()), "each piece is an episode"
padded = torch.nested.to_padded_tensor(ragged, 0.0)
assert padded.shape == (5, longest, 4), "code that needs padding gets it from the same tensor"

# ## Where what lies
#
# Environments step on `headrace.make(…, device=…)`, where the policy gets its observations. The store lies in CPU
# memory or on disk whatever they are on, and each sampler gives batches on a device of its own. So a GPU holds the
# batches that are learned from, and not the store. `prefetch` copies the next ones while one is used.

device = "cuda" if torch.cuda.is_available() else "cpu"
placed = slices.with_sampler(SliceSampler(8), "placed", device=device)
with placed.prefetch(16) as batches:
    assert next(batches)["observation", "policy"].device.type == device

# ## On-policy, and it learns
#
# PPO over a rollout that keeps every observation once: V(s) and V(s') in one forward over the distinct observations
# instead of two over all, and advantages that bootstrap truncated episodes from their true last observation.

poles = headrace.make("cartpole", num_envs=16, seed=0, threads=1)
actor = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=1e-2)
rollout = RolloutBuffer(
    32,
    16,
    poles.single_observation_space,
    poles.single_action_space,
    extras={"log_prob": ArraySpec((), torch.float32)},
)
evaluated = 0


def value_of(rows: dict[str, Tensor]) -> Tensor:
    """The critic, with a count of the rows that it reads."""
    global evaluated
    evaluated += len(rows["policy"])
    return critic(rows["policy"])


obs, _ = poles.reset(seed=1)
lengths: list[list[int]] = []
for iteration in range(16):
    rollout.clear()
    lengths.append([])
    while not rollout.full:
        with torch.no_grad():
            chosen = torch.distributions.Categorical(logits=actor(obs["policy"]))
        choice, active = chosen.sample(), poles.active
        step = poles.step(moves[choice])
        rollout.extend(obs, moves[choice], step, active, {"log_prob": chosen.log_prob(choice)})
        obs = step.obs
        lengths[-1] += step.info["ends"].lengths.tolist() if "ends" in step.info else []
    data = rollout.rollout()
    evaluated = 0
    with torch.no_grad():
        values = rollout_values(
            value_of,
            data.obs,
            data.last_obs,
            final_obs=data.final_obs,
            final_step=data.final_step,
            final_env=data.final_env,
        )
    found = gae(
        data.reward,
        values.value,
        values.next_value,
        data.terminated,
        data.truncated | data.cut,
        gamma=0.98,
        lam=0.95,
    )
    advantage, target = found.advantage.flatten(), (found.advantage + values.value).flatten()
    advantage = (advantage - advantage.mean()) / advantage.std()
    for epoch in range(4):
        for batch in rollout.minibatches(2, seed=iteration, epoch=epoch):
            logits = torch.distributions.Categorical(logits=actor(batch["observation", "policy"]))
            ratio = (logits.log_prob((batch["action"][:, 0] > 0).long()) - batch["log_prob"]).exp()
            gain = advantage[batch["place"]]
            policy_loss = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
            value_loss = (critic(batch["observation", "policy"])[:, 0] - target[batch["place"]]).pow(2).mean()
            optimizer.zero_grad()
            (policy_loss + 0.5 * value_loss).backward()
            optimizer.step()

# `chunk_size` caps the rows that the network gets at a time, and with them the memory of its activations.

most: list[int] = []


def chunked(rows: dict[str, Tensor]) -> Tensor:
    """The critic, and how many rows it was given."""
    most.append(len(rows["policy"]))
    return critic(rows["policy"])


parts = data.obs, data.last_obs
ends_of = {"final_obs": data.final_obs, "final_step": data.final_step, "final_env": data.final_env}
with torch.no_grad():
    at_once, in_parts = (rollout_values(chunked, *parts, **ends_of, chunk_size=rows) for rows in (None, 100))
assert most[0] == 32 * 16
assert max(most[2:]) <= 100
assert torch.allclose(at_once.value, in_parts.value, atol=1e-5)
assert torch.allclose(at_once.next_value, in_parts.next_value, atol=1e-5)

first, last = (sum(part) / len(part) for part in (lengths[0], [n for part in lengths[-3:] for n in part]))
print(f"on-policy: the critic read {evaluated} observations, two passes would read {2 * 32 * 16}")
print(f"on-policy: poles stood for {first:.0f} steps, {last:.0f} after {len(lengths)} updates")
assert evaluated < 2 * 32 * 16
assert last > 1.8 * first

# ## Off-policy, and it learns
#
# Double DQN with 3-step targets over the same kind of store. `gamma` in the batch is the discount of the steps that
# were there: fewer at ends and at the newest write.

q = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))
slow = copy.deepcopy(q)
optimizer = torch.optim.Adam(q.parameters(), lr=3e-3)
memory = ReplayBuffer(16_000, 16, poles.single_observation_space, poles.single_action_space, n_step=3, gamma=0.98)
obs, _ = poles.reset(seed=0)
lengths = [[] for _ in range(4)]
for count in range(400):
    with torch.no_grad():
        best = q(obs["policy"]).argmax(1)
    choice = torch.where(torch.rand(16) < max(0.05, 1 - count / 150), torch.randint(0, 2, (16,)), best)
    active = poles.active
    step = poles.step(moves[choice])
    memory.extend(obs, moves[choice], step, active)
    obs = step.obs
    lengths[count // 100] += step.info["ends"].lengths.tolist() if "ends" in step.info else []
    for _ in range(2 if count >= 30 else 0):
        batch = memory.sample(128)
        following = batch["next", "observation", "policy"]
        with torch.no_grad():
            ahead = slow(following).gather(1, q(following).argmax(1, keepdim=True))
            target = batch["next", "reward"] + batch["gamma"] * ~batch["next", "terminated"] * ahead
        taken = q(batch["observation", "policy"]).gather(1, (batch["action"] > 0).long())
        loss = (taken - target).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for weight, old in zip(q.parameters(), slow.parameters(), strict=True):
                old.lerp_(weight, 0.02)
first, last = (sum(part) / len(part) for part in (lengths[0], lengths[-1]))
print(f"off-policy: poles stood for {first:.0f} steps, {last:.0f} in the last hundred")
assert last > 2 * first
shutil.rmtree(folder)  # nothing is left behind
for each in (env, state, poles):
    each.close()
