"""Lenses, lights and materials that differ between episodes: as terms of a task, and as looks of an image."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import headrace
from headrace.envs import ImageSpec
from headrace.envs.batch_env import BatchEnv
from headrace.envs.term_task import TermTask, TermTaskCfg
from headrace.envs.terms import Alive, Choice, Effort, Randomization, RewardTerm, Uniform
from headrace.errors import ConfigError
from headrace.sim import CameraSpec, MujocoSim
from headrace.sim.camera.appearance import AppearanceSpec
from headrace.sim.camera.camera import ROW_LOOKS

MODEL = """<mujoco><asset>
<texture name="checks" type="2d" builtin="checker" width="16" height="16" rgb1=".9 .2 .1" rgb2=".1 .8 .3"/>
<texture name="stripes" type="2d" builtin="gradient" width="32" height="8" rgb1="0 0 1" rgb2="1 1 0"/>
<material name="wood" texture="checks" texrepeat="3 3" emission=".1"/>
<material name="steel" texture="stripes" specular=".9" emission=".1"/></asset>
<worldbody><light name="lamp" pos="0 -1 3" dir="0 .3 -1" cutoff="50" ambient=".1 .1 .1" attenuation="1 .1 0"/>
<geom name="table" type="plane" size="2 2 .1" material="wood"/>
<body pos="0 0 .5"><joint name="slide" type="slide" axis="1 0 0"/><geom name="ball" size=".3" material="steel"/></body>
<camera name="eye" pos="0 -2.5 1.2" xyaxes="1 0 0 0 .4 1"/></worldbody>
<actuator><motor joint="slide" ctrlrange="-1 1"/></actuator></mujoco>"""


def env_of(n: int = 3, looks: AppearanceSpec | None = None, **parts: object) -> BatchEnv:
    image = ImageSpec(camera=CameraSpec(name="eye", width=32, height=24, specular=True), frames=2, delay=1)
    if looks is not None:
        image = ImageSpec(camera=image.camera, frames=2, delay=1, looks=looks)
    cfg = TermTaskCfg(
        model=MODEL,
        decimation=2,
        episode_length=5,
        actions={"force": Effort()},
        images={"policy": image},
        rewards={"alive": RewardTerm(function=Alive())},
        **parts,  # type: ignore[arg-type]  # parts of the settings
    )
    return BatchEnv(TermTask(cfg), MujocoSim(TermTask(cfg).model, n), seed=5)


RANDOM = {
    "zoom": Randomization(fields=("cam_fovy",), distribution=Uniform(low=0.7, high=1.3)),
    "lamp": Randomization(
        fields=("light_ambient", "light_specular", "light_attenuation", "light_cutoff"),
        distribution=Uniform(low=0.5, high=1.5),
        objects=("lamp",),
    ),
    "gloss": Randomization(
        fields=("mat_emission", "mat_specular", "mat_shininess", "mat_texrepeat"),
        distribution=Uniform(low=0.5, high=2.0),
        objects=("wood",),
    ),
    "table": Randomization(
        fields=("geom_matid",), distribution=Choice(values=("wood", "steel")), operation="set", objects=("table",)
    ),
    "texture": Randomization(
        fields=("mat_texid",), distribution=Choice(values=("checks", "stripes")), operation="set", column=1
    ),
}


def play(env: BatchEnv, steps: int = 7) -> list[torch.Tensor]:
    obs, _ = env.reset()
    seen = [obs["policy"]]
    for _ in range(steps):
        seen.append(env.step(torch.zeros(env.num_envs, 1)).obs["policy"])
    env.close()
    return seen


@pytest.mark.parametrize("term", RANDOM)
def test_each_term_changes_the_picture_and_an_episode_does_not_depend_on_the_batch(term: str) -> None:
    terms = {term: RANDOM[term]}
    three, plain = play(env_of(3, randomization=terms)), play(env_of(3))
    assert any((a != b).any() for a, b in zip(three, plain, strict=True))
    alone = env_of(1, randomization=terms)
    obs, _ = alone.reset(options={"episode_ids": [2]})
    assert torch.equal(obs["policy"][0], three[0][2])
    alone.close()


def test_pictures_with_looks_are_the_same_drawn_late_and_after_a_pause() -> None:
    whole = env_of(3, randomization=RANDOM)
    first = play(whole, 4)
    late = env_of(3, randomization=RANDOM)
    late.reset(options={"observe": []})
    nobody = torch.zeros(3, dtype=torch.bool)
    for step in range(1, 5):
        if step == 2:
            late.suspend([1])
            late.step(torch.zeros(3, 1), observe=nobody)
            late.suspend([0, 2])
            late.resume([1])
            late.step(torch.zeros(3, 1), observe=nobody)
            late.resume([0, 2])
            state = late.state_dict()
            late.close()
            late = env_of(3, randomization=RANDOM)
            late.load_state_dict(state)
        else:
            late.step(torch.zeros(3, 1), observe=nobody)
    assert torch.equal(late.observe()["policy"], first[4])
    late.close()


STRAYING = [name for name in ROW_LOOKS if name not in ("mat_texid", "geom_matid", "light_exponent", "cam_intrinsic")]


@pytest.mark.parametrize("name", [*STRAYING, "materials", "textures"])
def test_each_look_changes_the_picture_by_episode(name: str) -> None:
    value = {"materials": ("wood", "steel"), "textures": ("checks", "stripes")}.get(name, 0.5)
    three = play(env_of(3, looks=AppearanceSpec(**{name: value})))
    plain = play(env_of(3))
    assert any((a != b).any() for a, b in zip(three, plain, strict=True))
    alone = env_of(1, looks=AppearanceSpec(**{name: value}))
    obs, _ = alone.reset(options={"episode_ids": [2]})
    assert torch.equal(obs["policy"][0], three[0][2])
    alone.close()


def test_looks_are_settings_of_a_task() -> None:
    env = headrace.make("cartpole-camera", 2, threads=1, overrides={"looks.cam_fovy": 0.3, "pixels": 16})
    plain = headrace.make("cartpole-camera", 2, threads=1, overrides={"pixels": 16})
    (image,), (other,) = (
        [value.numpy() for name, value in each.reset()[0].items() if value.dim() == 4] for each in (env, plain)
    )
    assert not np.array_equal(image, other)
    env.close()
    plain.close()


def test_wrong_choices_are_named() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        Choice(values=())
    with pytest.raises(ConfigError, match="expected numbers for 'mat_emission'"):
        Choice(values=("wood",)).number(env_of().sim.model, "mat_emission")
    with pytest.raises(ConfigError, match="material 'gold'"):
        Choice(values=("gold",)).number(env_of().sim.model, "geom_matid")
    with pytest.raises(ConfigError, match="mat_emission: expected a finite number"):
        AppearanceSpec(mat_emission=-1.0)
