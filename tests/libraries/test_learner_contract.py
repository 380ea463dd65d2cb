"""Every library's learner against the one contract, and against what its own library says of its files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import headrace
from headrace.learning import PPOCfg
from headrace.libraries import make_learner
from headrace.libraries.learner import Learner
from headrace.libraries.registry import library as spec_of
from headrace.libraries.registry import library_names
from headrace.libraries.training import CheckpointMeta, library_run, read_meta, recognize
from headrace.policies.protocol import ChunkContext, EpisodeRows
from headrace.policies.step_policy import RecurrentStepPolicy
from headrace.testing.parts import check_learner

LIBRARIES = library_names()
SHORT = PPOCfg(steps=24, epochs=2, minibatches=2, hidden=(16,))


def meta_of(library: str, settings: PPOCfg = SHORT) -> CheckpointMeta:
    return CheckpointMeta(library=library, task="cartpole", iteration=3, score=12.5, settings=settings)


def cartpole(num_envs: int = 8) -> headrace.BatchEnv:
    return headrace.make("cartpole", num_envs, seed=5, threads=1)


@pytest.mark.parametrize("library", LIBRARIES)
def test_learner_keeps_the_contract(library: str, tmp_path: Path) -> None:
    def make(env: headrace.BatchEnv) -> Learner:
        torch.manual_seed(3)
        return make_learner(library, env, SHORT)

    with library_run(seed=1):
        suffix = spec_of(library).suffix
        results = check_learner(cartpole, make, meta_of(library), tmp_path, suffix=suffix)
    assert [result.check for result in results if result.not_claimed] == []


@pytest.mark.parametrize("library", LIBRARIES)
def test_checkpoint_tells_its_library_task_iteration_and_settings(library: str, tmp_path: Path) -> None:
    with library_run(seed=1):
        learner = make_learner(library, cartpole(), SHORT)
        path = tmp_path / f"file{spec_of(library).suffix}"
        learner.save(path, meta_of(library))
    kind, spec = recognize(path)
    assert kind == "library"
    assert spec is not None
    assert spec.name == library
    assert read_meta(path, spec) == meta_of(library)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]  # nothing half-written is left beside it


@pytest.mark.parametrize("library", LIBRARIES)
def test_pictures_are_learned_from_and_the_policy_plays_them(library: str, tmp_path: Path) -> None:
    settings = PPOCfg(steps=4, epochs=1, minibatches=2)
    with library_run(seed=1):
        env = headrace.make("cartpole-camera", 2, seed=0, threads=1)
        learner = make_learner(library, env, settings)
        learner.iterate()
        actions = learner.policy()(env.observe())
        assert actions.shape == (2, 1)
        path = tmp_path / f"file{spec_of(library).suffix}"
        learner.save(path, meta_of(library, settings))
        other = make_learner(library, env, settings)
        other.load(path)
        assert torch.equal(other.policy()(env.observe()), learner.policy()(env.observe()))


@pytest.mark.parametrize("library", ["headrace", "rl_games", "rsl_rl"])
def test_recurrent_policy_forgets_ended_episodes_only(library: str) -> None:
    settings = PPOCfg(steps=16, epochs=1, minibatches=2, memory="gru", memory_size=8)
    with library_run(seed=1):
        env = cartpole(4)
        learner = make_learner(library, env, settings)
        learner.iterate()
        obs = {name: rows.clone() for name, rows in env.observe().items()}
        assert learner.policy().recurrent
        policy = RecurrentStepPolicy(learner.policy(), 1, "its file")
        ids = torch.arange(4)
        policy.begin(episodes_of(ids))
        first = policy(obs, context_of(ids)).clone()
        second = policy(obs, context_of(ids)).clone()
        assert not torch.equal(first, second)  # it remembers
        policy.end(episodes_of(ids[[0, 2]]))
        policy.begin(episodes_of(torch.tensor([10, 12])))
        third = policy(obs, context_of(torch.tensor([10, 1, 12, 3])))
        # a batch of which some rows begin anew: those rows act as at first, the others go on
        assert torch.allclose(third[[0, 2]], first[[0, 2]], atol=1e-6)
        assert not torch.allclose(third[[1, 3]], first[[1, 3]], atol=1e-6)
        # rows in another order, some padding between, and fewer of them: each has the memory of its own episode
        policy.begin(episodes_of(torch.tensor([20, 21, 22, 23, 24])))
        again = policy(obs, context_of(torch.tensor([-1, 3, -1, 1])))
        other = policy({name: rows[[2, 0]] for name, rows in obs.items()}, context_of(torch.tensor([24, 20])))
        assert torch.allclose(other, first[[2, 0]], atol=1e-6)
        assert torch.allclose(again[[0, 2]], first[[0, 2]], atol=1e-6), "padding has no memory"
        policy.end(episodes_of(torch.tensor([10, 1, 12, 3, 20, 21, 22, 23, 24])))
        assert not policy._row_of


def episodes_of(ids: torch.Tensor) -> EpisodeRows:
    return EpisodeRows(seeds=torch.zeros_like(ids), episode_ids=ids, instructions=("",) * len(ids))


def context_of(ids: torch.Tensor) -> ChunkContext:
    zeros = torch.zeros_like(ids)
    return ChunkContext(
        seeds=zeros,
        env_ids=ids,
        episode_ids=ids,
        chunk_index=zeros,
        instructions=("",) * len(ids),
        left_over=torch.zeros(len(ids), 1, 1),
        left_over_length=zeros,
        delay=zeros,
    )


@pytest.mark.parametrize("library", ["sb3", "skrl"])
def test_library_without_recurrent_ppo_says_so(library: str) -> None:
    from headrace.errors import ConfigError

    with library_run(), pytest.raises(ConfigError, match="no recurrent PPO"):
        make_learner(library, cartpole(), PPOCfg(memory="gru"))


@pytest.mark.parametrize("library", LIBRARIES)
def test_stochastic_policy_samples_and_the_deterministic_one_does_not(library: str) -> None:
    with library_run(seed=1):
        env = cartpole()
        learner = make_learner(library, env, SHORT)
        obs = env.observe()
        steady, sampled = learner.policy(), learner.policy(deterministic=False)
        assert torch.equal(steady(obs), steady(obs))
        assert not torch.equal(sampled(obs), sampled(obs))


@pytest.mark.parametrize("library", LIBRARIES)
def test_short_training_learns(library: str) -> None:
    """Fifteen iterations of cartpole: returns double at least. The whole way up is in the slow tests."""
    with library_run(seed=0):
        env = cartpole(64)
        learner = make_learner(library, env, PPOCfg(epochs=4))
        returns: list[list[float]] = []
        for _ in range(14):
            learner.iterate()
            returns.append(learner.finished().returns.tolist())
    first = sum(returns[0]) / len(returns[0])
    last = [value for found in returns[-4:] for value in found]
    assert sum(last) / len(last) > 2.0 * first


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_training_reaches_95_percent_of_the_best_return(library: str) -> None:
    with library_run(seed=0):
        env = headrace.make("cartpole", 64, seed=0, threads=1)
        learner = make_learner(library, env, PPOCfg())
        recent: list[float] = []
        for _ in range(80):
            learner.iterate()
            recent = (recent + learner.finished().returns.tolist())[-50:]
            if len(recent) == 50 and sum(recent) / 50 >= 0.95 * 300.0:
                return
    pytest.fail(f"mean return of the last 50 episodes: {sum(recent) / len(recent):.1f} of 300")


def test_rsl_rl_loads_our_checkpoint_itself(tmp_path: Path) -> None:
    from headrace.libraries.rsl_rl import RslRlLearner

    _library_loads_it("rsl_rl", tmp_path, lambda learner, path: _as(RslRlLearner, learner).runner.load(str(path)))


def test_skrl_loads_our_checkpoint_itself(tmp_path: Path) -> None:
    from headrace.libraries.skrl import SkrlLearner

    _library_loads_it("skrl", tmp_path, lambda learner, path: _as(SkrlLearner, learner).agent.load(str(path)))


def test_rl_games_loads_our_checkpoint_itself(tmp_path: Path) -> None:
    from headrace.libraries.rl_games import RlGamesLearner

    def load(learner: Learner, path: Path) -> None:
        state = torch.load(path, weights_only=True)  # its own loader reads numpy.core, which numpy 2 warns of
        _as(RlGamesLearner, learner).agent.set_full_state_weights(state)

    _library_loads_it("rl_games", tmp_path, load)


def test_sb3_loads_our_checkpoint_itself(tmp_path: Path) -> None:
    from stable_baselines3 import PPO

    with library_run(seed=2):
        env = cartpole()
        learner = make_learner("sb3", env, SHORT)
        learner.iterate()
        path = tmp_path / "model.zip"
        learner.save(path, meta_of("sb3"))
        model = PPO.load(path, device="cpu")
        obs = env.observe()
        chosen, _ = model.predict(obs["policy"].numpy(), deterministic=True)
        assert torch.equal(torch.from_numpy(chosen), learner.policy()(obs))


def _library_loads_it(library: str, folder: Path, load: Callable[[Learner, Path], object]) -> None:
    with library_run(seed=2):
        env = cartpole()
        learner = make_learner(library, env, SHORT)
        learner.iterate()
        path = folder / f"model{spec_of(library).suffix}"
        learner.save(path, meta_of(library))
        other = make_learner(library, cartpole(), SHORT)
        load(other, path)
        obs = env.observe()
        assert torch.equal(other.policy()(obs), learner.policy()(obs))


def _as(kind: type, learner: Learner):
    assert isinstance(learner, kind)
    return learner
