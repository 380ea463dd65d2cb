"""FrameStackVector around Gymnasium's vector environments in every autoreset mode, and around torch environments."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from headrace.errors import ConfigError, DataError, LifecycleError, UnknownNameError
from headrace.history import FrameStackVector, normalize_image
from headrace.types import StackSpec, Step

SHAPE = (6, 5, 3)


def frame(env: int, episode: int, step: int) -> np.ndarray:
    return np.random.default_rng([env, episode, step]).integers(0, 256, SHAPE, dtype=np.uint8)


class CountingEnv(gymnasium.Env):
    """Shows frame(env, episode, step); the episodes of environment i last 3 + i steps."""

    def __init__(self, index: int, named: bool = False) -> None:
        box = gymnasium.spaces.Box(0, 255, SHAPE, np.uint8)
        self.named = named
        other = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
        self.observation_space = gymnasium.spaces.Dict({"camera": box, "state": other}) if named else box
        self.action_space = gymnasium.spaces.Discrete(2)
        self.index, self.episode, self.count = index, -1, 0

    def _observation(self) -> Any:
        picture = frame(self.index, self.episode, self.count)
        return {"camera": picture, "state": np.zeros(2, np.float32)} if self.named else picture

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.count = self.episode + 1, 0
        return self._observation(), {}

    def step(self, action):
        self.count += 1
        return self._observation(), 1.0, self.count == 3 + self.index, False, {}


def stacked(env: int, episode: int, step: int, spec: StackSpec, normalize: bool = False) -> np.ndarray:
    """The stack that belongs there: frames of this episode only, by the reset rule before its first."""
    frames = []
    for k in range(step - spec.frames + 1, step + 1):
        picture = frame(env, episode, max(k, 0))
        frames.append(np.zeros_like(picture) if k < 0 and spec.reset == "zero" else picture)
    if normalize:
        frames = [normalize_image(torch.from_numpy(picture)).numpy() for picture in frames]
    axis = spec.axis(3)
    return np.stack(frames, axis) if spec.layout == "new_axis" else np.concatenate(frames, axis)


def vector(mode: AutoresetMode, named: bool = False) -> VectorEnv:
    return SyncVectorEnv([lambda i=i: CountingEnv(i, named) for i in range(3)], autoreset_mode=mode)


SPECS = [
    StackSpec(frames=3, dim=-1),
    StackSpec(frames=4, dim=-1, reset="zero"),
    StackSpec(frames=2, dim=0, layout="new_axis"),
    StackSpec(frames=1, dim=-1),
]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("normalize", [False, True])
def test_same_step_autoreset_begins_a_new_stack_and_stacks_the_final_observation(spec, normalize) -> None:
    env = FrameStackVector(vector(AutoresetMode.SAME_STEP), spec, normalize=normalize)
    obs, _ = env.reset(seed=0)
    at = [(0, 0)] * 3
    for step in range(14):
        for i, (episode, count) in enumerate(at):
            np.testing.assert_array_equal(obs[i], stacked(i, episode, count, spec, normalize), err_msg=f"{step} {i}")
        assert env.observation_space.contains(obs)
        obs, _, terminated, _, info = env.step(np.zeros(3, np.int64))
        assert terminated.any() == ("final_obs" in info)
        for i, (episode, count) in enumerate(at):
            at[i] = (episode + 1, 0) if terminated[i] else (episode, count + 1)
            if terminated[i]:
                final = stacked(i, episode, count + 1, spec, normalize)
                np.testing.assert_array_equal(info["final_obs"][i], final)
                assert info["_final_obs"][i]


@pytest.mark.parametrize("spec", SPECS)
def test_next_step_autoreset_begins_a_new_stack_one_step_after_the_end(spec) -> None:
    env = FrameStackVector(vector(AutoresetMode.NEXT_STEP), spec)
    obs, _ = env.reset(seed=0)
    at, ended = [(0, 0)] * 3, [False] * 3
    for _ in range(14):
        for i, (episode, count) in enumerate(at):
            np.testing.assert_array_equal(obs[i], stacked(i, episode, count, spec))
        obs, _, terminated, _, _ = env.step(np.zeros(3, np.int64))
        at = [(e + 1, 0) if ended[i] else (e, c + 1) for i, (e, c) in enumerate(at)]
        ended = terminated.tolist()


@pytest.mark.parametrize("spec", SPECS)
def test_with_autoreset_disabled_a_reset_mask_begins_new_stacks_there_only(spec) -> None:
    env = FrameStackVector(vector(AutoresetMode.DISABLED), spec)
    obs, _ = env.reset(seed=0)
    at = [(0, 0)] * 3
    for _ in range(14):
        for i, (episode, count) in enumerate(at):
            np.testing.assert_array_equal(obs[i], stacked(i, episode, count, spec))
        obs, _, terminated, _, _ = env.step(np.zeros(3, np.int64))
        at = [(e, c + 1) for e, c in at]
        for i, (episode, count) in enumerate(at):
            np.testing.assert_array_equal(obs[i], stacked(i, episode, count, spec))
        if terminated.any():
            obs, _ = env.reset(options={"reset_mask": terminated.copy()})
            at = [(e + 1, 0) if terminated[i] else (e, c) for i, (e, c) in enumerate(at)]


class UpsideDownEnv(CountingEnv):
    """Turns its pictures as programs do that read them from OpenGL: a view that runs backwards."""

    def _observation(self) -> Any:
        return super()._observation()[::-1]


def test_pictures_that_run_backwards_in_memory_are_stacked() -> None:
    inner = SyncVectorEnv([lambda i=i: UpsideDownEnv(i) for i in range(3)], autoreset_mode=AutoresetMode.SAME_STEP)
    spec = StackSpec(frames=2, dim=-1)
    env = FrameStackVector(inner, spec)
    env.reset(seed=0)
    for _ in range(3):
        info = env.step(np.zeros(3, np.int64))[4]
    np.testing.assert_array_equal(info["final_obs"][0], stacked(0, 0, 3, spec)[::-1])


def test_named_groups_are_stacked_and_the_others_pass_through() -> None:
    spec = StackSpec(frames=2, dim=-1)
    env = FrameStackVector(vector(AutoresetMode.SAME_STEP, named=True), {"camera": spec}, normalize=True)
    obs, _ = env.reset(seed=0)
    assert obs["state"].shape == (3, 2)
    for _ in range(3):
        assert env.observation_space.contains(obs)
        obs, _, _, _, info = env.step(np.zeros(3, np.int64))
    np.testing.assert_array_equal(info["final_obs"][0]["camera"], stacked(0, 0, 3, spec, True))
    np.testing.assert_array_equal(info["final_obs"][0]["state"], np.zeros(2, np.float32))
    np.testing.assert_array_equal(obs["camera"][0], stacked(0, 1, 0, spec, True))


def test_observations_that_a_trainer_keeps_are_not_overwritten() -> None:
    env = FrameStackVector(vector(AutoresetMode.NEXT_STEP), StackSpec(frames=2, dim=-1))
    obs, _ = env.reset(seed=0)
    kept = [(obs, obs.copy())]
    for _ in range(6):
        obs = env.step(np.zeros(3, np.int64))[0]
        kept.append((obs, obs.copy()))
    for obs, copy in kept:
        np.testing.assert_array_equal(obs, copy)


class TorchVector(VectorEnv):
    """A torch environment with suspension, an observe mask and full final observations, as ours have."""

    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self) -> None:
        self.num_envs = 3
        self.single_observation_space = gymnasium.spaces.Dict({"camera": gymnasium.spaces.Box(0, 255, SHAPE, np.uint8)})
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, 3)
        self.active = torch.ones(3, dtype=torch.bool)
        self.at = [(0, 0)] * 3
        self.shown = torch.zeros(3, *SHAPE, dtype=torch.uint8)

    def _render(self, observe) -> dict[str, torch.Tensor]:
        for i, (episode, count) in enumerate(self.at):
            if observe[i]:
                self.shown[i] = torch.from_numpy(frame(i, episode, count))
        return {"camera": self.shown.clone()}

    def reset(self, *, seed=None, options=None):
        self.at = [(0, 0)] * 3
        return self._render([True] * 3), {}

    def step(self, actions, observe=None):
        info: dict[str, Any] = {}
        done = torch.zeros(3, dtype=torch.bool)
        final = torch.zeros(3, *SHAPE, dtype=torch.uint8)
        for i, (episode, count) in enumerate(self.at):
            if self.active[i]:
                self.at[i] = (episode, count + 1)
                if count + 1 == 3 + i:
                    done[i], self.at[i] = True, (episode + 1, 0)
                    final[i] = torch.from_numpy(frame(i, episode, count + 1))
        if done.any():
            info |= {"final_obs": {"camera": final}, "_final_obs": done.clone()}
        if observe is not None:
            info["observed"] = (observe | done) & self.active
        obs = self._render(info.get("observed", self.active))
        return Step(obs, torch.zeros(3), done, torch.zeros(3, dtype=torch.bool), info)


def test_suspended_environments_keep_their_stack_and_torch_stays_torch() -> None:
    spec = StackSpec(frames=3, dim=-1)
    inner = TorchVector()
    env = FrameStackVector(inner, {"camera": spec})
    env.reset()
    for step in range(12):
        inner.active = torch.tensor([True, step % 3 != 1, True])
        before = list(inner.at)
        result = env.step(torch.zeros(3))
        assert isinstance(result, Step)
        for i, (episode, count) in enumerate(inner.at):
            expected = torch.from_numpy(stacked(i, episode, count, spec))
            assert torch.equal(result.obs["camera"][i], expected)
            if result.terminated[i]:
                final = torch.from_numpy(stacked(i, before[i][0], before[i][1] + 1, spec))
                assert torch.equal(result.info["final_obs"]["camera"][i], final)


def test_unobserved_environments_keep_their_stack() -> None:
    spec = StackSpec(frames=2, dim=-1)
    env = FrameStackVector(TorchVector(), {"camera": spec})
    env.reset()
    held = env.step(torch.zeros(3)).obs["camera"]
    seen = env.step(torch.zeros(3), observe=torch.tensor([True, False, False])).obs["camera"]
    assert torch.equal(seen[1:], held[1:])
    assert not torch.equal(seen[0], held[0])


def test_mistakes_are_named() -> None:
    spec = StackSpec(frames=2, dim=-1)
    with pytest.raises(LifecycleError, match="reset first"):
        FrameStackVector(vector(AutoresetMode.SAME_STEP), spec).step(np.zeros(3, np.int64))
    with pytest.raises(ConfigError, match="spec per group"):
        FrameStackVector(vector(AutoresetMode.SAME_STEP, named=True), spec)
    with pytest.raises(ConfigError, match="dict of observations"):
        FrameStackVector(vector(AutoresetMode.SAME_STEP), {"camera": spec})
    with pytest.raises(UnknownNameError, match="did you mean 'camera'"):
        FrameStackVector(vector(AutoresetMode.SAME_STEP, named=True), {"camara": spec})
    with pytest.raises(ConfigError, match="none"):
        FrameStackVector(vector(AutoresetMode.SAME_STEP), {})
    env = vector(AutoresetMode.SAME_STEP)
    env.metadata = {}
    with pytest.raises(ConfigError, match="autoreset_mode"):
        FrameStackVector(env, spec)


def test_a_headrace_environment_can_be_wrapped_with_suspended_environments_in_it() -> None:
    import headrace

    spec = StackSpec(frames=3, dim=-1)
    inner = headrace.make("inverted-pendulum", 4, seed=3)
    env = FrameStackVector(inner, {"policy": spec})
    obs, _ = env.reset(seed=3)
    histories = [[row] * 3 for row in inner.observe()["policy"]]
    generator = torch.Generator().manual_seed(0)
    ended = 0
    for step in range(60):
        if step == 10:
            inner.suspend([2])
        if step == 25:
            inner.resume([2])
        acted = inner.active.clone()
        result = env.step(torch.rand(4, 1, generator=generator) * 6 - 3)
        frames = inner.observe()["policy"]
        done = result.terminated | result.truncated
        for i in range(4):
            if done[i]:
                final = result.info["final_obs"]["policy"][i]
                assert torch.equal(final[: -frames.shape[1]], torch.cat(histories[i][1:]))
                histories[i] = [frames[i]] * 3
                ended += 1
            elif acted[i]:
                histories[i] = [*histories[i][1:], frames[i]]
            assert torch.equal(result.obs["policy"][i], torch.cat(histories[i]))
    assert ended > 0
    assert obs["policy"].shape == (4, 3 * frames.shape[1])


def camera_stacks(**changes: Any) -> FrameStackVector:
    import headrace

    inner = headrace.make("cartpole-camera", 3, seed=2, overrides={"frame_stack": 1, "pixels": 16}, threads=1)
    return FrameStackVector(inner, {"policy": StackSpec(frames=3, dim=-1)}, **changes)


def test_a_wrapped_environment_goes_on_from_its_state_bit_for_bit_also_in_a_new_one() -> None:
    one, other = camera_stacks(normalize=True), camera_stacks(normalize=True)
    one.reset(seed=5)
    one.suspend([1])
    for step in range(4):
        one.step(torch.full((3, 1), 0.3 * step))
    other.load_state_dict(one.state_dict())
    assert other.suspended.tolist() == [False, True, False]
    other.resume([1])
    one.resume([1])
    assert one.active.all()
    for step in range(5):
        actions = torch.full((3, 1), -0.2 * step)
        ours, theirs = one.step(actions), other.step(actions)
        assert torch.equal(ours.obs["policy"], theirs.obs["policy"])


def test_a_state_of_other_stacks_is_refused_and_changes_nothing() -> None:
    env = camera_stacks()
    with pytest.raises(LifecycleError, match="reset first"):
        env.state_dict()
    env.reset(seed=5)
    state = env.state_dict()
    env.step(torch.ones(3, 1))
    before = env.observe()["policy"]
    stack = state["stacks"]["policy"]
    for bad in (
        {},
        {**state, "stacks": {}},
        {**state, "stacks": {"policy": {**stack, "frames": stack["frames"][:, :, :, :2]}}},
        {**state, "ended": None},
        {name: value for name, value in state.items() if name != "env"},
    ):
        with pytest.raises(DataError):
            env.load_state_dict(bad)
    assert torch.equal(env.observe()["policy"], before)
    env.load_state_dict(state)
    assert not torch.equal(env.observe()["policy"], before)


def test_observe_adds_a_frame_that_was_not_looked_at_once() -> None:
    seen, late = camera_stacks(), camera_stacks()
    seen.reset(seed=1)
    late.reset(seed=1)
    result = seen.step(torch.ones(3, 1))
    late.step(torch.ones(3, 1), observe=torch.tensor([True, False, False]))
    for _ in range(2):
        rows = late.observe([2, 0])["policy"]
        assert torch.equal(rows, result.obs["policy"][[2, 0]])
    assert torch.equal(late.observe(torch.tensor([False, True, False]))["policy"], result.obs["policy"][[1]])
    again = seen.step(torch.ones(3, 1)).obs["policy"]
    assert torch.equal(late.step(torch.ones(3, 1)).obs["policy"], again)


def test_groups_are_normalized_one_by_one() -> None:
    spec = StackSpec(frames=2, dim=-1)
    env = FrameStackVector(
        vector(AutoresetMode.SAME_STEP, named=True), {"camera": spec, "state": spec}, normalize={"camera": True}
    )
    obs, _ = env.reset(seed=0)
    np.testing.assert_array_equal(obs["camera"][1], stacked(1, 0, 0, spec, normalize=True))
    assert obs["camera"].dtype == np.float32
    assert obs["state"].shape == (3, 4)
    assert obs in env.observation_space
    with pytest.raises(UnknownNameError, match="did you mean 'camera'"):
        FrameStackVector(vector(AutoresetMode.SAME_STEP, named=True), {"camera": spec}, normalize={"camara": True})
    with pytest.raises(ConfigError, match="one value"):
        FrameStackVector(vector(AutoresetMode.SAME_STEP), spec, normalize={"camera": True})


def test_each_group_has_its_channels_where_it_says() -> None:
    class TwoLayouts(gymnasium.Env):
        observation_space = gymnasium.spaces.Dict(
            {
                "last": gymnasium.spaces.Box(0, 255, SHAPE, np.uint8),
                "first": gymnasium.spaces.Box(0, 255, (SHAPE[2], *SHAPE[:2]), np.uint8),
            }
        )
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return {"last": frame(0, 0, 0), "first": np.moveaxis(frame(0, 0, 0), -1, 0)}, {}

    specs = {"last": StackSpec(frames=2, dim=-1), "first": StackSpec(frames=2, dim=0)}
    env = FrameStackVector(
        gymnasium.vector.SyncVectorEnv([TwoLayouts] * 2), specs, channels={"first": "first"}, normalize=True
    )
    obs, _ = env.reset(seed=0)
    np.testing.assert_array_equal(np.moveaxis(obs["first"], 1, -1), obs["last"])
    np.testing.assert_array_equal(obs["last"][1], stacked(0, 0, 0, specs["last"], normalize=True))
    with pytest.raises(UnknownNameError, match="did you mean 'first'"):
        FrameStackVector(gymnasium.vector.SyncVectorEnv([TwoLayouts]), specs, channels={"frist": "first"})


def test_what_the_environment_does_not_have_is_named() -> None:
    env = FrameStackVector(vector(AutoresetMode.SAME_STEP), StackSpec(frames=2, dim=-1))
    env.reset()
    for call in (env.state_dict, env.observe, lambda: env.suspend([0]), lambda: env.active):
        with pytest.raises(ConfigError, match="SyncVectorEnv has no"):
            call()
