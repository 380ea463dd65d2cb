"""Model fields that differ between episodes: drawn from the episode's stream, and from nothing else."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from term_examples import eventful_cartpole

from headrace import testing
from headrace.envs.batch_env import BatchEnv
from headrace.envs.registry import make
from headrace.envs.task import Rows
from headrace.envs.tasks.cartpole import cartpole_terms
from headrace.envs.term_task import TermTask
from headrace.envs.terms import LogUniform, Randomization, Uniform
from headrace.errors import ConfigError

_FIELDS = ("body_mass", "body_inertia", "dof_damping", "opt.gravity")


def now(env: BatchEnv) -> Rows:
    return env.rows()


def eventful(num_envs: int, **options) -> BatchEnv:
    return make(TermTask(eventful_cartpole()), num_envs, seed=8, **options)


def with_randomization(term: Randomization) -> TermTask:
    return TermTask(dataclasses.replace(cartpole_terms(), randomization={"it": term}))


def draw_actions(episode_id: int, at: int) -> float:
    """An identifiable action for each step of each episode."""
    return ((episode_id * 37 + at * 101) % 200) / 100 - 1.0


def acted(env: BatchEnv) -> torch.Tensor:
    pairs = zip(env.episode_ids.tolist(), env.episode_steps.tolist(), strict=True)
    return torch.tensor([[draw_actions(*pair)] for pair in pairs])


def trajectories(env: BatchEnv, episodes: int, suspend_with: float = 0.0) -> dict[int, list[torch.Tensor]]:
    """Every observation and reward of the first episodes, by their ids; a fraction is suspended at random."""
    generator = torch.Generator().manual_seed(3)
    seen: dict[int, list[torch.Tensor]] = {}
    obs = env.reset()[0]
    for i, episode in enumerate(env.episode_ids.tolist()):
        seen[episode] = [torch.cat([obs["policy"][i], obs["critic"][i]])]
    finished: set[int] = set()
    while not set(range(episodes)) <= finished:
        if suspend_with:
            env.resume(range(env.num_envs))
            env.suspend(torch.rand(env.num_envs, generator=generator) < suspend_with)
        active, before = env.active, env.episode_ids
        step = env.step(acted(env))
        for i in active.nonzero().squeeze(1).tolist():
            ended = bool(step.terminated[i] | step.truncated[i])
            shown = step.info["final_obs"] if ended else step.obs
            seen[int(before[i])].append(torch.cat([shown["policy"][i], shown["critic"][i], step.reward[i : i + 1]]))
            if ended:
                finished.add(int(before[i]))
                seen[int(env.episode_ids[i])] = [torch.cat([step.obs["policy"][i], step.obs["critic"][i]])]
    return {episode: seen[episode] for episode in range(episodes)}


def assert_equal_trajectories(a: dict[int, list[torch.Tensor]], b: dict[int, list[torch.Tensor]]) -> None:
    assert a.keys() == b.keys()
    for episode in a:
        assert len(a[episode]) == len(b[episode]), episode
        for x, y in zip(a[episode], b[episode], strict=True):
            assert torch.equal(x, y), episode


@pytest.mark.parametrize("num_envs", [1, 7, 64])
def test_fields_are_a_function_of_seed_and_episode_id(num_envs: int) -> None:
    reference = eventful(128)
    reference.reset()
    expected = {name: now(reference).get_model(name) for name in _FIELDS}
    env = eventful(num_envs, threads=1)
    env.reset()
    for first in range(0, 128, num_envs):
        ids = torch.arange(first, first + num_envs) % 128
        env.reset(options={"episode_ids": ids})
        for name in _FIELDS:
            assert torch.equal(now(env).get_model(name), expected[name][ids]), name


@pytest.fixture(scope="module")
def alone() -> dict[int, list[torch.Tensor]]:
    """The first eight episodes, one after another in a single environment."""
    return trajectories(eventful(1), 8)


@pytest.mark.parametrize("num_envs", [7, 64])
def test_episodes_are_bit_identical_for_any_number_of_environments(num_envs: int, alone) -> None:
    assert_equal_trajectories(trajectories(eventful(num_envs, threads=2), 8), alone)


@settings(deadline=None, max_examples=4)
@given(num_envs=st.integers(2, 9), fraction=st.floats(0.2, 0.8))
def test_episodes_are_bit_identical_under_any_suspension(num_envs, fraction) -> None:
    plain = trajectories(eventful(num_envs), 4)
    assert_equal_trajectories(trajectories(eventful(num_envs), 4, suspend_with=fraction), plain)


def test_another_seed_gives_other_fields() -> None:
    env = eventful(4)
    env.reset()
    before = now(env).get_model("body_mass")
    env.reset(seed=9)
    assert not bool((now(env).get_model("body_mass")[:, 1:] == before[:, 1:]).any())
    env.reset(seed=8)
    assert torch.equal(now(env).get_model("body_mass"), before)


def test_each_new_episode_starts_again_from_the_nominal_model() -> None:
    # with scale, a field that was not restored would drift away over resets
    task = with_randomization(Randomization(fields=("body_mass",), distribution=Uniform(low=2.0, high=2.0)))
    env = make(task, 3)
    nominal = torch.from_numpy(task.model.body_mass.copy())
    for _ in range(5):
        env.reset()
        assert torch.equal(now(env).get_model("body_mass"), (2.0 * nominal).expand(3, -1))


def test_a_partial_reset_changes_only_the_fields_of_the_rows_that_are_reset() -> None:
    env = eventful(4)
    env.reset()
    before = {name: now(env).get_model(name) for name in _FIELDS}
    mask = torch.tensor([False, True, False, False])
    env.reset(options={"reset_mask": mask})
    for name in ("body_mass", "opt.gravity"):
        changed = (now(env).get_model(name) != before[name]).flatten(1).any(dim=1)
        assert torch.equal(changed, mask), name


def test_snapshots_carry_the_fields_and_continue_bit_identically(tmp_path) -> None:
    env = eventful(5)
    env.reset()
    for _ in range(9):
        env.step(acted(env))
    env.suspend([2])
    torch.save(env.state_dict(), tmp_path / "snapshot.pt")
    other = eventful(5)
    other.load_state_dict(torch.load(tmp_path / "snapshot.pt", weights_only=False))
    for name in _FIELDS:
        assert torch.equal(now(env).get_model(name), now(other).get_model(name)), name
    for _ in range(40):
        actions = acted(env)
        assert torch.equal(actions, acted(other))
        a, b = env.step(actions), other.step(actions)
        assert torch.equal(a.reward, b.reward)
        assert all(torch.equal(a.obs[group], b.obs[group]) for group in a.obs)
        assert torch.equal(env.sim.states(None), other.sim.states(None))


def test_randomized_fields_change_the_motion() -> None:
    env = make(
        with_randomization(
            Randomization(
                fields=("opt.gravity",), column=2, operation="set", distribution=Uniform(low=-20.0, high=-1.0)
            )
        ),
        16,
    )
    env.reset()
    gravity = now(env).get_model("opt.gravity")
    assert bool((gravity[:, :2] == 0).all())
    assert len(gravity[:, 2].unique()) == 16
    env.sim.field("qpos")[:] = torch.tensor([0.0, 0.3], dtype=torch.float64)
    env.sim.field("qvel")[:] = 0.0
    env.step(torch.zeros(16, 1))
    spin = env.sim.field("qvel")[:, 1]
    assert torch.equal(spin.argsort(), gravity[:, 2].argsort(descending=True))


def test_one_number_per_object_serves_all_fields() -> None:
    env = eventful(32)
    env.reset()
    model, rows = env.task.model, now(env)
    mass = rows.get_model("body_mass")[:, 1:] / torch.from_numpy(model.body_mass[1:])
    inertia = rows.get_model("body_inertia")[:, 1:] / torch.from_numpy(model.body_inertia[1:])
    # a product and a quotient: two roundings
    torch.testing.assert_close(inertia, mass[:, :, None].expand_as(inertia), rtol=4 * 2.0**-52, atol=0.0)
    assert not torch.equal(mass[:, 0], mass[:, 1])


@pytest.mark.parametrize(
    ("distribution", "quantile"),
    [
        (Uniform(low=0.5, high=2.0), lambda x: (x - 0.5) / 1.5),
        (LogUniform(low=0.5, high=2.0), lambda x: (np.log(x) - np.log(0.5)) / np.log(4.0)),
    ],
    ids=["uniform", "log-uniform"],
)
def test_draws_follow_their_distribution(distribution, quantile) -> None:
    count = 4000
    env = make(
        with_randomization(Randomization(fields=("body_mass",), objects=("pole",), distribution=distribution)), count
    )
    env.reset()
    mass = now(env).get_model("body_mass").numpy()
    nominal = env.task.model.body_mass
    assert (mass[:, :2] == nominal[:2]).all()
    unit = np.sort(quantile(mass[:, 2] / nominal[2]))
    assert -1e-12 < unit[0] < 0.01
    assert 0.99 < unit[-1] <= 1.0 + 1e-12
    # Kolmogorov's bound for 4,000 draws at a level of 1e-6
    assert np.abs(unit - (np.arange(count) + 0.5) / count).max() < np.sqrt(-np.log(1e-6 / 2) / 2 / count)


@pytest.mark.parametrize(
    ("operation", "expected"),
    [("scale", lambda own: own * 3.0), ("add", lambda own: own + 3.0), ("set", lambda own: 3.0 + 0 * own)],
)
def test_operations_do_what_they_say_to_the_named_column(operation, expected) -> None:
    term = Randomization(
        fields=("geom_friction",),
        objects=("pole", "floor"),
        column=1,
        operation=operation,
        distribution=Uniform(low=3.0, high=3.0),
    )
    env = make(with_randomization(term), 2)
    env.reset()
    nominal = torch.from_numpy(env.task.model.geom_friction.copy()).expand(2, -1, -1)
    wanted = nominal.clone()
    for geom in (env.task.model.geom("pole").id, env.task.model.geom("floor").id):
        wanted[:, geom, 1] = expected(nominal[:, geom, 1])
    assert torch.equal(now(env).get_model("geom_friction"), wanted)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Uniform(low=1.0, high=0.0), "low ≤ high"),
        (lambda: LogUniform(low=0.0, high=1.0), "0 < low"),
        (lambda: Randomization(fields=(), distribution=Uniform(low=0.0, high=1.0)), "at least one"),
        (
            lambda: Randomization(fields=("a",), distribution=Uniform(low=0.0, high=1.0), operation="mul"),
            "scale, add or set",
        ),
        (lambda: dataclasses.replace(eventful_cartpole(), curriculum={}), "randomization.damping.curriculum"),
    ],
)
def test_impossible_randomization_is_refused(build, words) -> None:
    with pytest.raises(ConfigError, match=words):
        build()


def test_unknown_objects_are_named_with_the_known_ones() -> None:
    term = Randomization(fields=("body_mass",), objects=("pol",), distribution=Uniform(low=1.0, high=2.0))
    with pytest.raises(ConfigError, match=r"body 'pol'.*pole"):
        make(with_randomization(term))


def test_a_table_to_which_everything_happens_keeps_the_whole_contract_of_environments() -> None:
    results = testing.check_env(
        lambda **options: make(TermTask(eventful_cartpole()), **options),
        sizes=(1, 7, 64),
        variants=({"threads": 1}, {"threads": 2}),
    )
    assert [result.check for result in results if result.not_claimed] == []
