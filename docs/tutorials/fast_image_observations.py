"""Lesson: fast image observations.

Run it with ``python docs/tutorials/fast_image_observations.py``. Everything it says is asserted.

A pixel policy needs velocity, so it reads the last few frames. Frames are the largest thing in the data path: what is
drawn, converted or copied without need costs more here than anywhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import headrace
from headrace import Rows, Task, TaskCfg, TaskEntry, register_task
from headrace.envs import ImageSpec
from headrace.history import FrameStack, normalize_image
from headrace.sim import CameraSpec, load_model
from headrace.types import StackSpec

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

none = torch.zeros(4, dtype=torch.bool)
reader = headrace.make("cartpole-camera", num_envs=4, seed=0, overrides={"frame_stack": 2, "pixels": 48})
reader.reset()
for _ in range(16):
    actions = torch.rand(4, 1) * 2 - 1
    every_step = env.step(actions)
    reader.step(actions, observe=none)
on_demand = reader.observe([1, 3])["policy"]
assert torch.equal(on_demand, every_step.obs["policy"][[1, 3]])
print(f"frames drawn: {env.frames_drawn} when every step is looked at, {reader.frames_drawn} on demand")
assert reader.frames_drawn < env.frames_drawn / 4

# The same stack is there for pictures that come from elsewhere. It is written once per frame, in the layout of the
# observation: `stacked` is a view, not a copy.

stack = FrameStack(StackSpec(frames=4, dim=-1), num_envs=2, frame_shape=(64, 64, 3), normalize=True)
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

# ## A task of your own with a camera
#
# A class task names the groups that it computes, here `proprioception` with three numbers, and the groups that cameras
# fill: one `ImageSpec` each. Color and depth of the same camera are drawn in one pass; what is not read is not drawn.

REACH_XML = """
<mujoco>
  <option timestep="0.01"/>
  <worldbody>
    <light pos="0 0 3"/>
    <geom type="plane" size="2 2 0.1" rgba="0.3 0.4 0.5 1"/>
    <body name="goal" mocap="true"><geom size="0.1" rgba="0.9 0.2 0.2 1" contype="0" conaffinity="0"/></body>
    <body name="cart" pos="0 0 0.2">
      <joint name="slide" type="slide" axis="1 0 0" range="-1 1" limited="true" damping="1"/>
      <geom type="box" size="0.1 0.1 0.1" rgba="0.2 0.4 0.9 1" contype="0" conaffinity="0"/>
    </body>
    <camera name="front" pos="0 -2.5 1.2" xyaxes="1 0 0 0 0.4 0.9"/>
  </worldbody>
  <actuator><motor name="push" joint="slide" gear="5" ctrllimited="true" ctrlrange="-1 1"/></actuator>
</mujoco>
"""
FRONT = CameraSpec(name="front", width=48, height=36)


@dataclass(frozen=True, kw_only=True)
class ReachCfg(TaskCfg):
    decimation: int = 2
    episode_length: int = 50


class Reach(Task[ReachCfg]):
    """Push the cart to the goal, which only the pictures show."""

    def __init__(self, cfg: ReachCfg) -> None:
        images = {
            "image": ImageSpec(camera=FRONT, frames=2, normalize=True),
            "depth": ImageSpec(camera=FRONT, frames=2, kind="depth", normalize=True, max_depth=4.0),
        }
        super().__init__(cfg, load_model(REACH_XML), {"proprioception": 3}, images)

    def reset(self, rows: Rows) -> None:
        goal = torch.zeros_like(rows.get("mocap_pos"))
        goal[:, 0, 0] = rows.uniform("goal", 1, low=-0.8, high=0.8)[:, 0]
        goal[:, 0, 2] = 0.2
        rows.set("mocap_pos", goal)

    def observe(self, rows: Rows) -> dict[str, Tensor]:
        return {"proprioception": torch.cat((rows.get("qpos"), rows.get("qvel"), rows.get("ctrl")), dim=1)}

    def reward(self, rows: Rows, actions: Tensor) -> Tensor:
        distance = (rows.get("qpos")[:, 0] - rows.get("mocap_pos")[:, 0, 0]).abs()
        return -distance - 0.01 * actions[:, 0].square()


register_task(TaskEntry(name="reach", task=Reach, cfg=ReachCfg, summary="push a cart to a goal that a camera sees"))
reach = headrace.make("reach", num_envs=3, seed=2)
obs, _ = reach.reset()
assert {name: tuple(group.shape[1:]) for name, group in obs.items()} == {
    "proprioception": (3,),
    "image": (36, 48, 6),  # two frames of three channels
    "depth": (36, 48, 2),  # two frames of one channel, 1 for 4 meters and more
}
assert obs["image"].dtype == obs["depth"].dtype == torch.float32
assert 0.0 < float(obs["depth"].min()) < float(obs["depth"].max()) <= 1.0

# Each environment's pictures show its own goal. One frame an environment was drawn, for both groups and both frames of
# the stack, since an episode begins with its first picture in all of them.

assert not torch.equal(obs["image"][0], obs["image"][1])
assert not torch.equal(obs["depth"][0], obs["depth"][1])
assert reach.frames_drawn == 3
assert reach.step(torch.ones(3, 1)).reward.max() < 0

# What the camera sees, to look at: `headrace picture TASK --camera front --kind depth -o depth.png`, or

seen = headrace.viewing.picture("reach", camera="front", kind="depth", seed=2, width=160, height=120)
assert seen.values.shape == (120, 160)  # meters
assert seen.image.shape == (120, 160, 3)  # near is bright
