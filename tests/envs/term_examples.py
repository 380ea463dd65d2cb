"""Table tasks for the tests: a cartpole to which everything happens that a table can say."""

from __future__ import annotations

import dataclasses

from headrace.envs.tasks.cartpole import cartpole_terms
from headrace.envs.term_task import TermTaskCfg
from headrace.envs.terms import (
    ActionL2,
    ActionRateL2,
    BodyPosition,
    IntervalEvent,
    LastAction,
    LogUniform,
    ObservationTerm,
    PushJoints,
    Ramp,
    Randomization,
    RewardTerm,
    Time,
    Uniform,
    Upright,
)


def eventful_cartpole() -> TermTaskCfg:
    """Noise, pushes, random masses, friction-like damping, gravity, and a curriculum over 100 episodes."""
    cfg = cartpole_terms()
    policy = {
        name: dataclasses.replace(term, noise_std=0.01, scale=2.0) for name, term in cfg.observations["policy"].items()
    }
    return dataclasses.replace(
        cfg,
        episode_length=25,
        observations={
            "policy": policy | {"last": ObservationTerm(function=LastAction())},
            "critic": {
                **cfg.observations["policy"],
                "time": ObservationTerm(function=Time()),
                "upright": ObservationTerm(function=Upright(body="pole")),
                "cart": ObservationTerm(function=BodyPosition(body="cart")),
            },
        },
        rewards={
            **cfg.rewards,
            "effort": RewardTerm(function=ActionL2(), weight=-0.01),
            "jerk": RewardTerm(function=ActionRateL2(), weight=-0.01),
        },
        events={
            **cfg.events,
            "push": IntervalEvent(function=PushJoints(joints=("hinge",), velocities=(1.5,)), interval=(3, 7)),
        },
        randomization={
            "mass": Randomization(
                fields=("body_mass", "body_inertia"),
                objects=("cart", "pole"),
                distribution=LogUniform(low=0.5, high=2.0),
            ),
            "damping": Randomization(
                fields=("dof_damping",),
                objects=("hinge",),
                distribution=Uniform(low=0.0, high=0.1),
                operation="add",
                curriculum="difficulty",
            ),
            "gravity": Randomization(
                fields=("opt.gravity",), column=2, distribution=Uniform(low=-12.0, high=-8.0), operation="set"
            ),
        },
        curriculum={"difficulty": Ramp(last=100)},
    )
