"""FrameStack against lists of frames: partial appends, resets, suspension."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.errors import ConfigError, DataError, DeviceError, DtypeError, IdError, ShapeError
from headrace.history import FrameStack, normalize_image
from headrace.types import StackSpec

NUM_ENVS = 3
SHAPE = (5, 4, 3)


def picture(env: int, step: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    """The frame of one environment at one step; every pixel tells where it is from."""
    generator = torch.Generator().manual_seed(env * 1000 + step)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def pictures(step: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.stack([picture(env, step, shape) for env in range(NUM_ENVS)])


@dataclass
class ListStack:
    """The obvious way: all frames of the episode in a list, normalized frame by frame, then concatenated."""

    spec: StackSpec
    shape: tuple[int, ...]
    channels: str
    normalize: bool
    episodes: list[list[Tensor]] = field(default_factory=lambda: [[] for _ in range(NUM_ENVS)])

    def observe(self, env: int) -> Tensor:
        episode, length = self.episodes[env], self.spec.frames
        blank = torch.zeros(self.shape, dtype=torch.uint8)
        before = blank if not episode or self.spec.reset == "zero" else episode[0]
        frames = ([before] * length + episode)[-length:]
        if self.normalize:
            frames = [normalize_image(frame, channels=self.channels) for frame in frames]  # type: ignore[arg-type]  # a str that is one of the choices
        axis = self.spec.axis(len(self.shape))
        return torch.stack(frames, axis) if self.spec.layout == "new_axis" else torch.cat(frames, axis)


@st.composite
def stack_kinds(draw):
    channels = draw(st.sampled_from(["last", "first", "none"]))
    shape = {"last": (5, 4, 3), "first": (3, 5, 4), "none": (5, 4)}[channels]
    layout = draw(st.sampled_from(["concat", "new_axis"]))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    reset = draw(st.sampled_from(["repeat", "zero"]))
    return StackSpec(frames=draw(st.integers(1, 4)), dim=dim, layout=layout, reset=reset), shape, channels


masks = st.lists(st.booleans(), min_size=NUM_ENVS, max_size=NUM_ENVS)


@settings(deadline=None, max_examples=60)
@given(
    kind=stack_kinds(),
    normalize=st.booleans(),
    operations=st.lists(
        st.tuples(st.sampled_from(["append", "append", "ids", "reset", "observe", "final"]), masks), max_size=16
    ),
)
def test_any_history_equals_a_list_of_frames(kind, normalize, operations) -> None:
    spec, shape, channels = kind
    stack = FrameStack(spec, num_envs=NUM_ENVS, frame_shape=shape, channels=channels, normalize=normalize)
    lists = ListStack(spec, shape, channels, normalize)
    for step, (operation, mask) in enumerate(operations):
        frames = pictures(step, shape)
        chosen = [env for env in range(NUM_ENVS) if mask[env]]
        ids = torch.tensor(chosen, dtype=torch.int64)
        if operation == "append":
            stack.append(frames, torch.tensor(mask))
        elif operation == "ids":
            stack.append(frames[ids], ids)
        elif operation == "reset":
            stack.reset(ids)
        for env in chosen:
            if operation in ("append", "ids"):
                lists.episodes[env].append(frames[env])
            elif operation == "reset":
                lists.episodes[env].clear()
        if operation == "observe":
            expected = [lists.observe(env) for env in chosen]
            assert all(torch.equal(a, b) for a, b in zip(stack.observe(ids), expected, strict=True))
            out = torch.full((NUM_ENVS, *stack.observation_shape), 7, dtype=stack.observation_dtype)
            stack._output.put(stack._frames, ids, out)
            shown = [lists.observe(env) if mask[env] else torch.full_like(out[env], 7) for env in range(NUM_ENVS)]
            assert torch.equal(out, torch.stack(shown))
            everything = stack.observe(torch.tensor(mask))
            assert all(torch.equal(everything[env], lists.observe(env)) for env in chosen)
        if operation == "final":
            before = stack.state_dict()
            peeked = stack.peek(frames[ids], ids)
            assert all(torch.equal(before[name], tensor) for name, tensor in stack.state_dict().items())
            for row, env in enumerate(chosen):
                lists.episodes[env].append(frames[env])
                assert torch.equal(peeked[row], lists.observe(env))
                lists.episodes[env].pop()
    expected = torch.stack([lists.observe(env) for env in range(NUM_ENVS)])
    assert torch.equal(stack.observe(), expected)
    assert stack.stacked.is_contiguous()
    if not normalize:
        assert torch.equal(stack.stacked, expected)


def test_suspended_environments_do_not_change_by_one_bit() -> None:
    stack = FrameStack(StackSpec(frames=2, dim=-1), num_envs=NUM_ENVS, frame_shape=SHAPE, normalize=True)
    for step in range(3):
        stack.append(pictures(step))
    before = stack.observe([1])
    noise = pictures(7)
    for step in range(5):
        stack.append(noise + step, torch.tensor([True, False, True]))
        stack.reset([0])
    assert torch.equal(stack.observe([1]), before)


def test_observations_of_consecutive_steps_do_not_share_memory() -> None:
    for normalize in (True, False):
        stack = FrameStack(
            StackSpec(frames=2, dim=-1), num_envs=NUM_ENVS, frame_shape=(200, 200, 3), normalize=normalize
        )
        held = []
        for step in range(4):
            stack.append(pictures(step, (200, 200, 3)))
            observation = stack.observe()
            held.append((observation, observation.clone()))
        assert all(torch.equal(observation, copy) for observation, copy in held)


def test_a_restored_stack_goes_on_bit_identically() -> None:
    spec = StackSpec(frames=3, dim=0, layout="new_axis")
    first = FrameStack(spec, num_envs=NUM_ENVS, frame_shape=SHAPE)
    first.append(pictures(0))
    first.append(pictures(1)[:1], [0])
    state = first.state_dict()
    second = FrameStack(spec, num_envs=NUM_ENVS, frame_shape=SHAPE)
    second.load_state_dict(state)
    for stack in (first, second):
        stack.append(pictures(2))
    assert torch.equal(first.observe(), second.observe())
    with pytest.raises(DataError, match="frames"):
        second.load_state_dict({**state, "frames": state["frames"][:, :2]})
    with pytest.raises(DataError, match="started"):
        second.load_state_dict({"frames": state["frames"]})
    with pytest.raises(DataError, match="skipped"):
        second.load_state_dict({**state, "valid": torch.tensor([True, False])})
    second.load_state_dict({**state, "valid": torch.ones(NUM_ENVS, 3).bool(), "skipped": torch.zeros(NUM_ENVS).long()})
    first.load_state_dict(state)
    assert torch.equal(first.observe(), second.observe()), "a state of 0.2"


def test_frames_are_held_in_a_quarter_of_the_bytes_of_float32() -> None:
    stack = FrameStack(StackSpec(frames=4, dim=-1), num_envs=NUM_ENVS, frame_shape=SHAPE, normalize=True)
    assert stack.nbytes * 4 == torch.zeros(NUM_ENVS, 4, *SHAPE).nbytes
    assert stack.observation_shape == (5, 4, 12)
    assert stack.observation_dtype == torch.float32


def test_settings_that_cannot_work_are_refused() -> None:
    spec = StackSpec(frames=2, dim=-1)
    with pytest.raises(ConfigError, match="at least 1"):
        StackSpec(frames=0, dim=-1)
    with pytest.raises(ConfigError, match="num_envs"):
        FrameStack(spec, num_envs=0, frame_shape=SHAPE)
    with pytest.raises(ShapeError, match="at least 1"):
        FrameStack(spec, num_envs=2, frame_shape=(0, 4, 3))
    with pytest.raises(ConfigError, match="dim"):
        FrameStack(StackSpec(frames=2, dim=3), num_envs=2, frame_shape=SHAPE)
    with pytest.raises(DtypeError, match="uint8"):
        FrameStack(spec, num_envs=2, frame_shape=SHAPE, dtype=torch.int32, normalize=True)
    with pytest.raises(ShapeError, match="three axes"):
        FrameStack(spec, num_envs=2, frame_shape=(4, 4), normalize=True)


def test_bad_frames_raise_and_change_nothing() -> None:
    stack = FrameStack(StackSpec(frames=2, dim=-1), num_envs=NUM_ENVS, frame_shape=SHAPE)
    stack.append(pictures(0))
    before = stack.state_dict()
    for error, call in [
        (DtypeError, lambda: stack.append(pictures(1).float())),
        (ShapeError, lambda: stack.append(pictures(1)[:, :4])),
        (ShapeError, lambda: stack.append(pictures(1)[:2])),
        (IdError, lambda: stack.append(pictures(1)[:1], [3])),
        (DeviceError, lambda: stack.append(torch.empty(NUM_ENVS, *SHAPE, dtype=torch.uint8, device="meta"))),
    ]:
        with pytest.raises(error):
            call()
        assert all(torch.equal(before[name], tensor) for name, tensor in stack.state_dict().items())


@pytest.mark.parametrize("normalize", [False, True])
def test_each_stack_is_shown_in_the_row_of_its_own_environment(normalize) -> None:
    stack = FrameStack(StackSpec(frames=2, dim=-1), num_envs=NUM_ENVS, frame_shape=SHAPE, normalize=normalize)
    for step in range(2):
        stack.append(pictures(step))
    out = torch.zeros(NUM_ENVS, *stack.observation_shape, dtype=stack.observation_dtype)
    stack._output.put(stack._frames, torch.tensor([2, 0]), out)
    everything = stack.observe()
    assert torch.equal(out[[0, 2]], everything[[0, 2]])
    assert not torch.equal(out[0], out[2])
    assert not out[1].any()


def test_float_frames_are_normalized_as_uint8_ones_are() -> None:
    generator = torch.Generator().manual_seed(0)
    frames = torch.randint(0, 256, (2, 5, 4, 3), dtype=torch.uint8, generator=generator)
    stacks = [
        FrameStack(StackSpec(frames=2, dim=-1), num_envs=2, frame_shape=(5, 4, 3), dtype=dtype, normalize=True)
        for dtype in (torch.uint8, torch.float32, torch.float8_e5m2)
    ]
    for each in (frames, frames.flip(0)):
        for stack in stacks:
            stack.append(each.to(stack.stacked.dtype))
    # whole numbers up to 255 are exact in float32: only the last rounding may differ
    torch.testing.assert_close(stacks[1].observe(), stacks[0].observe(), atol=6e-8, rtol=0)
    rounded = torch.cat([frames, frames.flip(0)], dim=-1).to(torch.float8_e5m2).float()
    torch.testing.assert_close(stacks[2].observe(), normalize_image(rounded), atol=0, rtol=0)


@pytest.mark.parametrize("frames", range(1, 10))
@pytest.mark.parametrize("pixels", [1, 3, 5, 6, 7, 21, 64])
def test_colors_of_any_number_of_frames_are_woven_pixel_by_pixel(frames: int, pixels: int) -> None:
    rng = np.random.default_rng(frames * 100 + pixels)
    pictures = torch.from_numpy(rng.integers(0, 256, (frames + 2, 2, 1, pixels, 3), np.uint8))
    stack = FrameStack(StackSpec(frames=frames, dim=-1), num_envs=2, frame_shape=(1, pixels, 3))
    for picture in pictures:
        stack.append(picture)
    assert torch.equal(stack.observe(), torch.cat(list(pictures[-frames:]), dim=-1))
