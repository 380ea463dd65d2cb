"""Lesson: write a task of your own, in both ways.

Run it with ``python docs/tutorials/writing_a_task.py``. Everything it says is asserted.

A task is a MuJoCo model, a few settings, and a few functions over *rows*: the environments that a stage works on,
already picked out. Row i of every tensor belongs to one environment; a suspended environment is not among the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import headrace
from headrace import Rows, Task, TaskCfg, TaskEntry, TermTask, TermTaskCfg, register_task
from headrace.envs.terms import (
    ActionL2,
    Effort,
    IntervalEvent,
    JointVelocities,
    ObservationTerm,
    PushJoints,
    Ramp,
    Randomization,
    ResetEvent,
    RewardTerm,
    SuccessTerm,
    Uniform,
    Upright,
)
from headrace.sim import load_model

# The model: a pole on a hinge, and a motor too weak to lift it in one go. Any MJCF does, as text or as a file.

SWING_UP_XML = """
<mujoco>
  <option timestep="0.01" integrator="RK4"/>
  <worldbody>
    <body name="pole"><joint name="hinge" axis="0 1 0" damping="0.02"/><geom type="capsule" fromto="0 0 0 0 0 0.5" size="0.03" mass="0.5"/></body>
  </worldbody>
  <actuator><motor name="torque" joint="hinge" gear="0.6" ctrllimited="true" ctrlrange="-1 1"/></actuator>
</mujoco>
"""  # noqa: E501  # MJCF reads better in one line

# ## The first way: a class
#
# The settings are a frozen dataclass. Each field can be changed by name: ``overrides={"effort_weight": 0.1}`` from
# Python, ``--set effort_weight=0.1`` on the command line.


@dataclass(frozen=True, kw_only=True)
class SwingUpCfg(TaskCfg):
    decimation: int = 2
    episode_length: int = 200
    effort_weight: float = -0.01


class SwingUp(Task[SwingUpCfg]):
    success_measure = "the pole points up at the end"

    def __init__(self, cfg: SwingUpCfg) -> None:
        super().__init__(cfg, load_model(SWING_UP_XML), {"policy": 3})
        self._pole = self.model.body("pole").id

    def reset(self, rows: Rows) -> None:
        # hanging down, pushed a little; the numbers come from the episode's own stream
        rows.set("qpos", torch.pi + rows.uniform("angle", 1, low=-0.2, high=0.2))

    def observe(self, rows: Rows) -> dict[str, Tensor]:
        angle = rows.get("qpos")
        return {"policy": torch.cat((angle.cos(), angle.sin(), rows.get("qvel")), dim=1)}

    def reward(self, rows: Rows, actions: Tensor) -> Tensor:
        return self._upright(rows) + self.cfg.effort_weight * (actions * actions).sum(dim=1)

    def success(self, rows: Rows) -> Tensor:
        return self._upright(rows) > 0.9

    def _upright(self, rows: Rows) -> Tensor:
        return rows.get("xmat", self._pole)[:, 8]


# That is all. Hand the task to ``headrace.make``, or give it a name first, so that every command knows it.

register_task(TaskEntry(name="swing-up", task=SwingUp, cfg=SwingUpCfg, summary="swing a pole up with a weak motor"))
env = headrace.make("swing-up", num_envs=4, seed=1, overrides={"effort_weight": -0.1})
obs, _ = env.reset()
assert obs["policy"].shape == (4, 3)


def swing(rows: Tensor) -> Tensor:
    """Push the way it goes: a policy that pumps energy into the pole."""
    return rows[:, 2:].sign()


for _ in range(100):
    obs, reward, terminated, truncated, info = env.step(swing(obs["policy"]))
assert float(obs["policy"][:, 0].max()) > 0.0  # some pole is above the horizontal by now

# ## The second way: terms
#
# The same task, without a class. A term is a function of rows; the common ones are ready-made, in
# ``headrace.envs.terms``, as small records whose fields are settings. Your own can be plain functions.


def cos_and_sin(rows: Rows) -> Tensor:
    angle = rows.get("qpos")
    return torch.cat((angle.cos(), angle.sin()), dim=1)


def hang_down(rows: Rows, stream: str) -> None:
    rows.set("qpos", torch.pi + rows.uniform(stream, 1, low=-0.2, high=0.2))


@dataclass(frozen=True, kw_only=True)
class PointsUp:
    """A term with a setting: ``--set success.condition.least=0.8``."""

    body: str
    least: float = 0.9

    def __call__(self, rows: Rows) -> Tensor:
        return Upright(body=self.body)(rows) > self.least


def swing_up_terms() -> TermTaskCfg:
    return TermTaskCfg(
        model=SWING_UP_XML,
        decimation=2,
        episode_length=200,
        actions={"torque": Effort()},
        observations={
            "policy": {
                "direction": ObservationTerm(function=cos_and_sin),
                "speed": ObservationTerm(function=JointVelocities()),
            }
        },
        rewards={
            "upright": RewardTerm(function=Upright(body="pole")),
            "effort": RewardTerm(function=ActionL2(), weight=-0.01),
        },
        success=SuccessTerm(measure="the pole points up at the end", condition=PointsUp(body="pole")),
        events={"angle": ResetEvent(function=hang_down)},
    )


# An event draws from the stream of its name. Ours is called ``angle``, as the stream of the class is, so both ways give
# the same numbers, bit for bit.

by_class = headrace.make("swing-up", num_envs=4, seed=1)
by_terms = headrace.make(TermTask(swing_up_terms()), num_envs=4, seed=1)
first, second = by_class.reset()[0]["policy"], by_terms.reset()[0]["policy"]
for _ in range(250):
    assert torch.equal(first, second)
    a, b = by_class.step(swing(first)), by_terms.step(swing(second))
    assert torch.equal(a.reward, b.reward)
    first, second = a.obs["policy"], b.obs["policy"]

# ## What a term adds in a line
#
# Noise on an observation, a push now and then, a mass that differs between episodes, and a curriculum: the mass is
# nominal in episode 0 and has its whole range from episode 1,000 on.


def harder_swing_up() -> TermTaskCfg:
    plain = swing_up_terms()
    return TermTaskCfg(
        model=plain.model,
        decimation=plain.decimation,
        episode_length=plain.episode_length,
        actions=plain.actions,
        observations={
            "policy": {
                "direction": ObservationTerm(function=cos_and_sin, noise_std=0.01),
                "speed": ObservationTerm(function=JointVelocities(), scale=0.1),
            },
            "critic": plain.observations["policy"],
        },
        rewards=plain.rewards,
        success=plain.success,
        events={
            **plain.events,
            "push": IntervalEvent(function=PushJoints(joints=("hinge",), velocities=(1.0,)), interval=(20, 40)),
        },
        randomization={
            "mass": Randomization(
                fields=("body_mass", "body_inertia"),
                objects=("pole",),
                distribution=Uniform(low=0.7, high=1.3),
                curriculum="difficulty",
            )
        },
        curriculum={"difficulty": Ramp(last=1000)},
    )


register_task(TaskEntry(name="swing-up-terms", task=TermTask, cfg=harder_swing_up, summary="swing up, disturbed"))
env = headrace.make(
    "swing-up-terms",
    num_envs=3,
    overrides={"rewards.effort.weight": -0.1, "events.push.interval": (10, 15), "success.condition.least": 0.8},
)
obs, _ = env.reset()
assert {group: tuple(values.shape) for group, values in obs.items()} == {"policy": (3, 3), "critic": (3, 3)}

# ## Episodes are pure
#
# An episode is a function of (task, seed, episode id, actions). So episode 5 is the same whether it runs alone or
# beside others, while neighbors are suspended or not.


def episode_five(num_envs: int) -> list[Tensor]:
    envs = headrace.make("swing-up-terms", num_envs=num_envs, seed=7)
    seen, _ = envs.reset(options={"episode_ids": torch.arange(5, 5 + num_envs)})
    return [seen["policy"][0], *(envs.step(torch.ones(num_envs, 1)).obs["policy"][0] for _ in range(50))]


assert all(torch.equal(a, b) for a, b in zip(episode_five(1), episode_five(9), strict=True))

if __name__ == "__main__":
    print("All that the lesson says holds.")
