"""Single environments behind the contract: genuine numbers, exact suspension, the same in every executor."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_envs import CountingPainter, DictEnv, PlainEnv, SpacesEnv

from flat import evaluate
from headrace.bridges import BridgeEnv
from headrace.bridges.bridge_env import episode_seeds
from headrace.bridges.make import bridge
from headrace.errors import ActionError, DtypeError, EnvError, LifecycleError, ShapeError, UnsupportedError
from headrace.policies import as_chunk_policy
from headrace.types import ResetRecord, Step, StepRecord


def _actions(env: BridgeEnv, rng: np.random.Generator) -> torch.Tensor:
    space = env.single_action_space
    if isinstance(space, spaces.Discrete):
        return torch.from_numpy(rng.integers(space.start, space.start + space.n, env.num_envs))
    assert isinstance(space, spaces.Box)
    return torch.from_numpy(rng.uniform(-1, 1, (env.num_envs, *space.shape)).astype(np.float32))


@pytest.mark.parametrize(
    ("env_id", "steps"), [("InvertedPendulum-v5", 150), ("CartPole-v1", 80), ("Pendulum-v1", 210), ("Ant-v5", 12)]
)
def test_bridged_steps_equal_the_genuine_environment_bit_for_bit(env_id: str, steps: int) -> None:
    env = bridge(env_id, 2, seed=11)
    genuine = [gymnasium.make(env_id) for _ in range(2)]
    obs, _ = env.reset()
    by_hand = [one.reset(seed=s)[0] for one, s in zip(genuine, episode_seeds(11, torch.arange(2)), strict=True)]
    rng = np.random.default_rng(0)
    episodes = torch.arange(2)
    ends = 0
    for _ in range(steps):
        for i in range(2):
            assert obs["policy"][i].numpy().tobytes() == by_hand[i].astype(np.float32).tobytes()
        actions = _actions(env, rng)
        step = env.step(actions)
        obs = step.obs
        for i, one in enumerate(genuine):
            by_hand[i], reward, terminated, truncated, _ = one.step(actions[i].numpy()[()])
            assert step.reward[i].item() == np.float32(reward)
            assert step.terminated[i].item() == terminated
            assert step.truncated[i].item() == truncated
            if terminated or truncated:
                ends += 1
                assert step.info["_final_obs"][i]
                assert np.array_equal(step.info["final_obs"]["policy"][i], by_hand[i].astype(np.float32))
                episodes[i] += 2
                by_hand[i], _ = one.reset(seed=episode_seeds(11, episodes[i : i + 1])[0])
    assert torch.equal(env.episode_ids, episodes)
    assert ends or env_id == "Ant-v5"
    env.close()
    for one in genuine:
        one.close()


def test_observations_keep_their_groups_and_dtypes() -> None:
    env = bridge([DictEnv] * 3)
    obs, info = env.reset()
    assert info == {}
    assert {name: (values.dtype, tuple(values.shape)) for name, values in obs.items()} == {
        "camera": (torch.uint8, (3, 2, 2, 3)),
        "extra/pair/0": (torch.int8, (3, 2)),
        "extra/pair/1": (torch.int8, (3, 2)),
        "extra/phase": (torch.int64, (3,)),
        "policy": (torch.float32, (3, 3)),
    }
    step = env.step(torch.zeros(3, 2))
    assert step.obs["extra/phase"].tolist() == [1, 1, 1]
    assert step.obs["extra/pair/1"].tolist() == [[0, 1]] * 3
    for name, space in env.observation_space.spaces.items():
        assert space.contains(step.obs[name].numpy())


@pytest.mark.parametrize(
    ("space", "groups"),
    [
        (spaces.Box(0, 255, (4, 4), np.uint8), {"policy": torch.uint8}),
        (spaces.Box(-5, 5, (2,), np.int32), {"policy": torch.int32}),
        (spaces.Box(0, 65535, (2,), np.uint16), {"policy": torch.uint16}),
        (spaces.Box(-1, 1, (2,), np.float16), {"policy": torch.float32}),
        (spaces.Discrete(7), {"policy": torch.int64}),
        (spaces.MultiDiscrete([3, 4]), {"policy": torch.int64}),
        (
            spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float64)]),
            {"policy/0": torch.int64, "policy/1": torch.float32},
        ),
    ],
)
@pytest.mark.parametrize("executor", ["inline", "threads"])
def test_every_observation_space_has_its_groups(space: Any, groups: dict[str, torch.dtype], executor: Any) -> None:
    env = bridge([lambda: SpacesEnv(space)] * 3, executor=executor)
    obs, _ = env.reset()
    assert {name: values.dtype for name, values in obs.items()} == groups
    step = env.step(torch.tensor([5, 6, 5]))
    alone = SpacesEnv(space)
    alone.reset(seed=episode_seeds(0, torch.tensor([1]))[0])
    expected = alone.step(6)[0]
    parts = list(expected) if isinstance(expected, tuple) else [expected]
    for values, part in zip(step.obs.values(), parts, strict=True):
        assert np.array_equal(values[1].numpy(), np.asarray(part).astype(values.numpy().dtype))
    env.close()


@pytest.mark.parametrize(
    ("space", "good", "bad", "error"),
    [
        (spaces.MultiDiscrete([3, 4]), [[2, 3], [0, 0]], [[0, 4], [0, 0]], ActionError),
        (spaces.MultiBinary(2), [[1, 0], [0, 1]], [[2, 0], [0, 0]], ActionError),
        (spaces.Box(-2, 2, (2,), np.int32), [[-2, 2], [0, 0]], [[-3, 0], [0, 0]], ActionError),
        (spaces.Discrete(3), [2, 0], [3, 0], ActionError),
        (spaces.Box(-2, 2, (2,), np.float64), [[-2.0, 2.5], [0.0, 0.0]], [[float("nan"), 0], [0, 0]], ActionError),
        (spaces.MultiDiscrete([3, 4]), [[2, 3], [0, 0]], [[0.0, 1.0], [0.0, 0.0]], DtypeError),
        (spaces.MultiDiscrete([3, 4]), [[2, 3], [0, 0]], [[0, 1, 2], [0, 0, 0]], ShapeError),
    ],
)
def test_bad_actions_are_refused_before_anything_steps(space: Any, good: Any, bad: Any, error: Any) -> None:
    env = bridge([lambda: PlainEnv(space)] * 2)
    env.reset()
    with pytest.raises(error):
        env.step(torch.tensor(bad))
    assert env.episode_steps.tolist() == [0, 0]
    if error is ActionError:
        with pytest.raises(ActionError, match="environment 0"):
            env.step(torch.tensor(bad))
        env.suspend([0])
        env.step(torch.tensor(bad))
        env.resume([0])
        assert env.episode_steps.tolist() == [0, 1]
    step = env.step(torch.tensor(good))
    assert step.obs["policy"][0].item() == pytest.approx(100 + np.sum(good[0]))


def test_actions_reach_the_environment_in_the_dtype_of_their_space_and_stay_as_they_were() -> None:
    envs: list[PlainEnv] = []

    def make() -> PlainEnv:
        envs.append(PlainEnv(spaces.Box(-1, 1, (2,), np.float32)))
        return envs[-1]

    env = bridge([make])
    env.reset()
    for k in range(3):
        env.step(torch.full((1, 2), 0.1 * k, dtype=torch.float64))
    assert [a.dtype for a in envs[0].actions] == [np.float32] * 3
    assert [float(a[0]) for a in envs[0].actions] == [float(np.float32(0.1 * k)) for k in range(3)]


def test_suspended_environments_are_not_stepped_at_all() -> None:
    inner = [PlainEnv() for _ in range(3)]
    env = bridge([lambda one=one: one for one in inner])
    assert env.fidelity == "native"
    env.reset()
    env.suspend([1])
    held = env.observe([1])["policy"]
    for _ in range(12):
        step = env.step(torch.tensor([1, 99, 2]))
        assert (step.reward[1].item(), step.terminated[1].item(), step.truncated[1].item()) == (0.0, False, False)
        assert torch.equal(step.obs["policy"][1:2], held)
    assert [one.steps_ever for one in inner] == [12, 0, 12]
    env.resume([1])
    assert env.step(torch.tensor([1, 2, 1])).obs["policy"][1].item() == 102.0
    env.close()


def _episodes(
    env: BridgeEnv, wanted: set[int], rest: np.random.Generator | None, calls: int = 400
) -> dict[int, list[tuple[bytes, float, bool, bool]]]:
    """What happened in each wanted episode, with actions that depend on (episode, step) alone."""
    env.reset()
    seen: dict[int, list[tuple[bytes, float, bool, bool]]] = {}
    ended: set[int] = set()
    for _ in range(calls):
        if wanted <= ended:
            break
        if rest is not None:
            mask = torch.from_numpy(rest.random(env.num_envs) < 0.4)
            env.suspend(mask)
            env.resume(~mask)
        ids, counts, active = env.episode_ids.tolist(), env.episode_steps.tolist(), env.active
        actions = torch.stack(
            [torch.tensor([np.sin(e + 7 * k), np.cos(e * k)]) for e, k in zip(ids, counts, strict=True)]
        )
        step = env.step(actions.float())
        final = step.info.get("_final_obs", torch.zeros(env.num_envs, dtype=torch.bool))
        for i in active.nonzero()[:, 0].tolist():
            obs = step.info["final_obs"] if final[i] else step.obs
            row = b"".join(values[i].numpy().tobytes() for values in obs.values())
            flags = step.terminated[i].item(), step.truncated[i].item()
            seen.setdefault(ids[i], []).append((row, step.reward[i].item(), *flags))
            if any(flags):
                ended.add(ids[i])
    env.close()
    assert wanted <= ended
    return {episode: seen[episode] for episode in wanted}


@settings(deadline=None, max_examples=15)
@given(num_envs=st.sampled_from([1, 3, 7]), executor=st.sampled_from(["inline", "threads"]), pattern=st.integers(0, 99))
def test_an_episode_is_the_same_whoever_steps_it_wherever_and_with_whatever_pauses(
    num_envs: int, executor: Any, pattern: int
) -> None:
    wanted = set(range(7))
    reference = _episodes(bridge([DictEnv] * 7, seed=5), wanted, None)
    rest = np.random.default_rng(pattern) if pattern % 3 else None
    assert _episodes(bridge([DictEnv] * num_envs, seed=5, executor=executor), wanted, rest) == reference


def test_ends_know_return_length_success_and_episode() -> None:
    env = bridge([DictEnv] * 4, seed=3)
    env.reset()
    returns = torch.zeros(4, dtype=torch.float64)
    successes = set()
    for _ in range(60):
        ids, steps = env.episode_ids, env.episode_steps
        step: Step = env.step(torch.zeros(4, 2))
        returns += step.reward
        assert ("ends" in step.info) == bool((step.terminated | step.truncated).any())
        if "ends" in step.info:
            ends = step.info["ends"]
            rows = ends.env_ids
            assert ends.episode_ids.tolist() == ids[rows].tolist()
            assert ends.lengths.tolist() == (steps[rows] + 1).tolist()
            # the rewards added here are float32, those of the environment float64
            torch.testing.assert_close(ends.returns, returns[rows], rtol=1e-5, atol=1e-5)
            assert ends.success is not None
            assert ends.success.tolist() == step.terminated[rows].tolist()
            assert not ends.diverged.any()
            assert step.info["episode"]["l"][rows].tolist() == ends.lengths.tolist()
            assert step.info["_episode"].nonzero()[:, 0].tolist() == rows.tolist()
            successes |= set(ends.success.tolist())
            returns[rows] = 0
    assert successes == {True, False}


def test_disabled_autoreset_parks_until_a_partial_reset() -> None:
    lengths = [2, 5, 5]
    env = bridge([lambda n=n: PlainEnv(length=n) for n in lengths], autoreset="disabled")
    env.reset()
    for _ in range(2):
        step = env.step(torch.zeros(3, dtype=torch.int64))
    assert step.terminated.tolist() == [True, False, False]
    assert "final_obs" not in step.info
    assert step.obs["policy"][0].item() == 200.0
    assert env.active.tolist() == [False, True, True]
    step = env.step(torch.tensor([77, 0, 0]))
    assert step.obs["policy"][:, 0].tolist() == [200.0, 300.0, 300.0]
    obs, _ = env.reset(options={"reset_mask": torch.tensor([True, False, False]), "episode_ids": torch.tensor([42])})
    assert obs["policy"][:, 0].tolist() == [0.0, 300.0, 300.0]
    assert env.episode_ids.tolist() == [42, 1, 2]
    assert env.active.all()


def test_an_environment_that_gives_nan_ends_alone_and_is_reported() -> None:
    env = bridge([lambda: PlainEnv(nan_at=3), lambda: PlainEnv(length=9)])
    env.reset()
    for _ in range(3):
        step = env.step(torch.zeros(2, dtype=torch.int64))
    assert step.truncated.tolist() == [True, False]
    assert step.reward.tolist() == [0.0, 1.0]
    assert step.info["final_obs"]["policy"][0].item() == 200.0
    assert step.info["ends"].diverged.tolist() == [True]
    assert step.info["ends"].success is None
    assert env.divergences == 1
    assert step.obs["policy"][:, 0].tolist() == [0.0, 300.0]


def test_an_observation_that_is_one_number_alone_may_be_nan() -> None:
    def make() -> gymnasium.Env[Any, Any]:
        one_number = spaces.Box(-np.inf, np.inf, (), np.float32)
        return gymnasium.wrappers.TransformObservation(PlainEnv(nan_at=2), lambda obs: obs[0], one_number)

    env = bridge([make, make])
    env.reset()
    env.suspend([1])
    for _ in range(2):
        step = env.step(torch.zeros(2, dtype=torch.int64))
    assert step.info["ends"].diverged.tolist() == [True]
    assert step.info["final_obs"]["policy"].tolist() == [100.0, 0.0]
    env.close()


@pytest.mark.parametrize("executor", ["inline", "threads"])
def test_an_environment_that_raises_is_named_and_a_full_reset_goes_on(executor: Any) -> None:
    env = bridge([PlainEnv, PlainEnv, lambda: PlainEnv(raise_at=2)], executor=executor)
    env.reset()
    env.step(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(EnvError, match=r"environment 2 raised ValueError in step: the gripper is stuck") as caught:
        env.step(torch.zeros(3, dtype=torch.int64))
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(LifecycleError, match="reset"):
        env.step(torch.zeros(3, dtype=torch.int64))
    env.reset()
    env.step(torch.zeros(3, dtype=torch.int64))
    env.close()


@pytest.mark.parametrize("executor", ["inline", "threads"])
def test_an_interrupt_in_the_middle_of_a_step_asks_for_a_full_reset(executor: Any) -> None:
    class Interrupted(PlainEnv):
        def step(self, action: Any) -> Any:
            if self.steps_ever == 1:
                self.steps_ever += 1
                raise KeyboardInterrupt
            return super().step(action)

    env = bridge([PlainEnv, Interrupted], executor=executor)
    env.reset()
    env.step(torch.zeros(2, dtype=torch.int64))
    with pytest.raises(KeyboardInterrupt):
        env.step(torch.zeros(2, dtype=torch.int64))
    with pytest.raises(LifecycleError):
        env.step(torch.zeros(2, dtype=torch.int64))
    env.reset()
    assert env.step(torch.zeros(2, dtype=torch.int64)).obs["policy"][:, 0].tolist() == [100.0, 100.0]
    env.close()


class _Watcher:
    needs: frozenset[Any] = frozenset()

    def __init__(self) -> None:
        self.seen: list[tuple[str, list[int], list[int]]] = []
        self.shown: list[float] = []

    def after_reset(self, record: ResetRecord) -> None:
        self.seen.append(("reset", record.env_ids.tolist(), record.episode_ids.tolist()))
        self.shown.append(record.obs["policy"][0, 0].item())

    def after_step(self, record: StepRecord) -> None:
        self.seen.append(("step", record.env_ids.tolist(), record.episode_ids.tolist()))
        self.shown.append(record.step.obs["policy"][0, 0].item())


def test_observers_see_the_steps_of_active_environments_then_the_resets() -> None:
    env = bridge([lambda: PlainEnv(length=2), PlainEnv])
    watcher = _Watcher()
    env.attach(watcher)
    env.reset()
    env.step(torch.zeros(2, dtype=torch.int64))
    env.suspend([1])
    step = env.step(torch.zeros(2, dtype=torch.int64))
    assert watcher.seen == [
        ("reset", [0, 1], [0, 1]),
        ("step", [0, 1], [0, 1]),
        ("step", [0], [0]),
        ("reset", [0], [2]),
    ]
    assert watcher.shown == [0.0, 100.0, 200.0, 0.0]
    assert step.obs["policy"][0].item() == 0.0
    env.detach(watcher)
    env.step(torch.zeros(2, dtype=torch.int64))
    assert len(watcher.seen) == 4
    watcher.needs = frozenset({"states"})
    with pytest.raises(UnsupportedError, match="states"):
        env.attach(watcher)


@pytest.mark.parametrize("executor", ["inline", "threads"])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "InvertedPendulum-v5", "Ant-v5"])
def test_a_snapshot_goes_on_bit_identically_in_a_new_bridge(env_id: str, executor: Any, tmp_path: Any) -> None:
    env = bridge(env_id, 2, seed=4, executor=executor)
    env.reset()
    rng = np.random.default_rng(1)
    for _ in range(7):
        env.step(_actions(env, rng))
    env.suspend([1])
    torch.save(env.state_dict(), tmp_path / "snapshot.pt")
    other = bridge(env_id, 2, seed=99)
    other.load_state_dict(torch.load(tmp_path / "snapshot.pt", weights_only=True))
    assert other.active.tolist() == [True, False]
    for k in range(40):
        if k == 5:
            env.resume([1])
            other.resume([1])
        actions = _actions(env, rng)
        ours, theirs = env.step(actions), other.step(actions)
        assert torch.equal(ours.obs["policy"], theirs.obs["policy"])
        assert torch.equal(ours.reward, theirs.reward)
        assert torch.equal(ours.terminated, theirs.terminated)
    assert torch.equal(env.episode_ids, other.episode_ids)
    env.close()
    other.close()


def test_rendering_tiles_the_pictures() -> None:
    class Painter(PlainEnv):
        render_mode = "rgb_array"

        def render(self) -> Any:
            return np.full((2, 3, 3), self.count, dtype=np.uint8)

    env = bridge([Painter] * 3)
    env.reset()
    env.suspend([1])
    env.step(torch.zeros(3, dtype=torch.int64))
    picture = env.render()
    assert picture is not None
    assert picture[::2, ::3, 0].tolist() == [[1, 0], [1, 0]]
    assert picture.shape == (4, 6, 3)
    assert bridge([PlainEnv]).reset()


@pytest.mark.parametrize("executor", ["inline", "processes"])
def test_only_the_environments_that_are_asked_for_are_drawn(executor: Any) -> None:
    env = bridge([CountingPainter] * 3, executor=executor, workers=2 if executor == "processes" else None)
    env.reset()
    assert [int(picture[0, 0, 0]) for picture in env.render_each([2, 0])] == [1, 1]
    assert [int(picture[0, 0, 0]) for picture in env.render_each()] == [2, 1, 2], "the second was not drawn before"
    env.close()


def test_a_reward_that_no_float32_can_hold_ends_that_episode_only() -> None:
    class Rich(PlainEnv):
        def step(self, action: Any) -> Any:
            obs, _, *rest = super().step(action)
            return obs, 1e60 if action == 1 else 0.5, *rest

    env = bridge([Rich] * 2)
    env.reset()
    step = env.step(torch.tensor([0, 1]))
    assert step.reward.tolist() == [0.5, 0.0]
    assert step.truncated.tolist() == [False, True]
    assert step.info["ends"].diverged.tolist() == [True]
    assert step.info["ends"].returns.tolist() == [0.0]


class DepthEnv(PlainEnv):
    """Its camera counts millimeters, as depth cameras do."""

    def __init__(self, dtype: Any) -> None:
        super().__init__(spaces.Box(-1, 1, (1,)), length=5)
        self.observation_space = spaces.Dict({"depth": spaces.Box(0, np.iinfo(dtype).max, (2, 2, 1), dtype)})

    def reset(self, **settings: Any) -> Any:
        info = super().reset(**settings)[1]
        return self._depth(), info

    def step(self, action: Any) -> Any:
        results = super().step(action)[1:]
        return self._depth(), *results

    def _depth(self) -> Any:
        limits = self.observation_space["depth"]  # pyright: ignore[reportIndexIssue]  # a Dict
        return {"depth": limits.high - limits.high.dtype.type(self.count)}


@pytest.mark.parametrize("batching", ["strict", "fast"])
@pytest.mark.parametrize("obs_steps", [1, 2])
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64])
def test_a_chunk_policy_sees_every_unsigned_type(dtype: Any, obs_steps: int, batching: Any) -> None:
    seen: list[tuple[int, int]] = []

    def plan(obs: dict[str, torch.Tensor]) -> torch.Tensor:
        assert obs["depth"].dtype == getattr(torch, np.dtype(dtype).name)
        rows = obs["depth"].numpy().reshape(len(obs["depth"]), -1)
        seen.extend((int(np.iinfo(dtype).max - row[0]), int(np.iinfo(dtype).max - row[-1])) for row in rows)
        return torch.zeros((len(obs["depth"]), 2, 1))

    env = bridge([lambda: DepthEnv(dtype)] * 2, autoreset="disabled")
    policy = as_chunk_policy(plan, horizon=2, action_dim=1, obs_steps=obs_steps)
    evaluate(env, policy, episodes=2, execute=2, batching=batching, progress=False)
    oldest = [0, 1, 3] if obs_steps == 2 else [0, 2, 4]
    expected = list(zip(oldest, [0, 2, 4], strict=True))
    # strict batches have padding rows, and some rows are asked again
    assert [pair for pair in expected if seen.count(pair) < 2] == []
    assert batching == "strict" or sorted(seen) == sorted(expected * 2)
    env.close()
