"""Lesson: fast image observations.

Run it with ``python docs/tutorials/fast_image_observations.py``. Everything it says is asserted.

A pixel policy needs velocity, so it reads the last few frames. Frames are the largest thing in the data path: what is
drawn, converted or copied without need costs more here than anywhere else.
"""

from __future__ import annotations

import torch

import headrace
from headrace.types import StackSpec
from headrace.vision import FrameStack, normalize_image

# A camera task has its pictures in the group `policy`, as uint8, and the exact state in `critic`. Two frames of 48 ×
# 48 are stacked along the channels.

env = headrace.make("cartpole-camera", num_envs=4, seed=0, overrides={"frame_stack": 2, "pixels": 48})
obs, _ = env.reset()
assert obs["policy"].shape == (4, 48, 48, 6)
assert obs["policy"].dtype == torch.uint8

# Pictures stay uint8 until they are read. Normalizing is one fused pass after the stack: x/255 minus each picture's
# mean per channel. Channels do not mix, so that normalizing a stack is stacking normalized frames, bit for bit.

observation = normalize_image(obs["policy"])
halves = torch.cat([normalize_image(obs["policy"][..., :3]), normalize_image(obs["policy"][..., 3:])], dim=-1)
assert torch.equal(observation, halves)

# Draw only what will be looked at. A chunk policy reads a picture once in 16 steps: the other steps draw none.
# History is kept as poses, a hundred numbers each, so the older frame of the stack is drawn when it is read.

nobody = torch.zeros(4, dtype=torch.bool)
reader = headrace.make("cartpole-camera", num_envs=4, seed=0, overrides={"frame_stack": 2, "pixels": 48})
reader.reset()
for _ in range(16):
    actions = torch.rand(4, 1) * 2 - 1
    every_step = env.step(actions)
    reader.step(actions, observe=nobody)
on_demand = reader.observe([1, 3])["policy"]
assert torch.equal(on_demand, every_step.obs["policy"][[1, 3]])
print(f"frames drawn: {env.frames_drawn} when every step is looked at, {reader.frames_drawn} on demand")
assert reader.frames_drawn < env.frames_drawn / 4

# The same stack is there for pictures that come from elsewhere. It is written once per frame, in the layout of the
# observation: `stacked` is a view, not a copy.

stack = FrameStack(StackSpec(frames=4), num_envs=2, frame_shape=(64, 64, 3), normalize=True)
for shade in (10, 20, 30, 40, 50):
    stack.append(torch.full((2, 64, 64, 3), shade, dtype=torch.uint8))
assert stack.stacked[0, 0, 0].tolist() == [20] * 3 + [30] * 3 + [40] * 3 + [50] * 3
assert stack.observe().dtype == torch.float32

# A new episode never sees frames of the old one, and only environments that end are reset.

stack.reset([1])
stack.append(torch.full((1, 64, 64, 3), 90, dtype=torch.uint8), [1])
assert stack.stacked[1].unique().tolist() == [90]
assert stack.stacked[0].unique().tolist() == [20, 30, 40, 50]

# What this saves: a float32 stack of four takes 16 bytes a pixel and channel and is rolled at every step; this one
# takes 4, and a step writes 1.

naive, ours = 4 * 4 * 64 * 64 * 3, 4 * 64 * 64 * 3
print(f"a stack of four 64 × 64 frames: {naive:,} bytes as float32, {ours:,} here")
