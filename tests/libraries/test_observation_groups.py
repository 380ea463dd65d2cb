"""Tasks with several observation groups: every library reads them all, or says by name which one it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from headrace.errors import ConfigError, UnsupportedError
from headrace.learning import PPOCfg
from headrace.libraries import library_run, make_learner
from headrace.libraries.learner import LearnerEnv
from headrace.libraries.registry import library as spec_of
from headrace.libraries.registry import library_names
from headrace.libraries.training import CheckpointMeta
from headrace.testing import check_learner
from libraries.group_envs import reach, seen_cartpole

QUICK = PPOCfg(steps=12, epochs=2, minibatches=2, hidden=(16,), image_features=16)


def settings_for(library: str, **changes: Any) -> PPOCfg:
    import dataclasses

    quick = QUICK if library == "headrace" else dataclasses.replace(QUICK, image_features=PPOCfg().image_features)
    return dataclasses.replace(quick, **changes)


ENVS = {
    "camera": seen_cartpole,
    "camera and critic": lambda: seen_cartpole(critic=True),
    "bridged dict": reach,
}


@pytest.mark.parametrize("library", library_names())
@pytest.mark.parametrize("kind", ENVS)
def test_every_library_reads_every_group_and_keeps_the_contract(library: str, kind: str, tmp_path: Path) -> None:
    settings = settings_for(library)
    meta = CheckpointMeta(library=library, task="seen", iteration=1, score=None, settings=settings)

    def make(env: Any) -> Any:
        torch.manual_seed(3)
        return make_learner(library, env, settings)

    with library_run(seed=1):
        results = check_learner(ENVS[kind], make, meta, tmp_path, suffix=spec_of(library).suffix)
    assert "observation_groups_read" in [result.check for result in results]


@pytest.mark.parametrize("library", library_names())
def test_groups_that_are_not_chosen_are_not_read_and_their_cameras_not_drawn(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = seen_cartpole()
    settings = settings_for(library, actor_groups=("policy",))
    with library_run(seed=1):
        learner = make_learner(library, env, settings)
        drawn: list[int] = []
        draw = type(env._held).draw

        def counted(self: Any, ids: torch.Tensor, *more: Any) -> None:
            drawn.append(len(ids))
            draw(self, ids, *more)

        monkeypatch.setattr(type(env._held), "draw", counted)
        learner.iterate()
        # rows of episodes that end, and first ones, are drawn whatever the mask: at most two per episode
        assert sum(drawn) <= 2 * (len(learner.finished()) + 4)
        assert sum(drawn) < settings.steps * env.num_envs
        monkeypatch.undo()
        obs = env.observe()
        before = learner.policy()(obs).clone()
        assert torch.equal(before, learner.policy()({**obs, "camera": 255 - obs["camera"]}))


@torch.no_grad()
def value(library: str, learner: Any, obs: Any) -> torch.Tensor:
    """What the library's critic says of observations."""
    match library:
        case "headrace":
            policy = learner.ppo.policy
            return policy.critic(policy.features(obs, policy.initial_state(4))[1])
        case "rsl_rl":
            return learner.runner.alg.critic(learner._env.grouped(obs))
        case "rl_games":
            return learner.agent.central_value_net.get_value({"states": learner._env.grouped(obs)["states"]})
        case "skrl":
            states = learner._env._flat(obs, learner.core.read.critic)
            return learner.agent.models["value"].act({"states": states}, role="value")[0]
        case _:
            tensors, _ = learner.model.policy.obs_to_tensor(learner._env.arrays(obs))
            return learner.model.policy.predict_values(tensors)


@pytest.mark.parametrize("library", library_names())
def test_a_critic_of_its_own_groups_learns_from_them_alone(library: str) -> None:
    """The value of a state changes with the critic's group; of the actor's groups it sees nothing."""
    settings = settings_for(library, critic_groups=("critic", "camera"), actor_groups=("policy",))
    with library_run(seed=1):
        env = seen_cartpole(critic=True)
        learner = make_learner(library, env, settings)
        times = learner.iterate()
        assert times.learn > 0.0
        obs = env.observe()
        before = learner.policy()(obs).clone()
        for name in ("critic", "camera"):
            other = {**obs, name: 255 - obs[name] if name == "camera" else obs[name] + 1.0}
            assert torch.equal(before, learner.policy()(other))
            assert not torch.equal(value(library, learner, obs), value(library, learner, other)), name
        same = value(library, learner, {**obs, "policy": obs["policy"] + 1.0})
        assert torch.equal(value(library, learner, obs), same)


def test_a_group_that_is_neither_vector_nor_image_is_refused_by_name() -> None:
    import gymnasium
    from gymnasium import spaces

    class Odd(gymnasium.Env[Any, Any]):
        observation_space = spaces.Dict({"policy": spaces.Box(-1, 1, (2,)), "mode": spaces.Discrete(3)})
        action_space = spaces.Box(-1, 1, (1,))

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return self.observation_space.sample(), {}

    env = headrace.bridge([Odd])
    with library_run(), pytest.raises(ConfigError, match=r"observation group 'mode': expected a vector or an image"):
        make_learner("sb3", env, PPOCfg(minibatches=1))
    assert set(LearnerEnv(env, actor_groups=["policy"]).read.actor) == {"policy"}  # and the way out that it names


def test_images_that_are_too_small_are_refused_by_name() -> None:
    env = headrace.make("cartpole-camera", 2, threads=1, overrides={"pixels": 16})
    with library_run(), pytest.raises(ConfigError, match=r"group 'policy': expected images of at least 20 x 20 pixels"):
        make_learner("headrace", env)


def test_unknown_groups_are_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"actor_groups: expected one or more of .*'camera'.* got \('cam',\)"):
        make_learner("headrace", seen_cartpole(), PPOCfg(actor_groups=("cam",)))


@pytest.mark.parametrize("library", ["rl_games", "rsl_rl"])
def test_memory_with_images_is_refused_where_the_library_would_drop_it(library: str) -> None:
    """rsl_rl's convolutional model has no memory: until now it was left out without a word."""
    with library_run(), pytest.raises(UnsupportedError, match=rf"'camera': {library} cannot read images with memory"):
        make_learner(library, seen_cartpole(), PPOCfg(memory="gru"))


@pytest.mark.parametrize("library", ["headrace", "rl_games", "rsl_rl"])
def test_memory_over_several_vectors_works(library: str) -> None:
    settings = settings_for(library, memory="gru", memory_size=8, actor_groups=("position", "clock"))
    with library_run(seed=1):
        env = reach()
        learner = make_learner(library, env, settings)
        learner.iterate()
        assert learner.policy().recurrent
