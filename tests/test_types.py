"""The records: stacks of frames, episode ends, steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigError, DeviceError, ShapeError
from headrace.types import EpisodeEnds, StackSpec, Step, as_device


def test_step_unpacks_as_gymnasiums_five() -> None:
    step = Step({"policy": torch.zeros(2, 3)}, torch.ones(2), torch.zeros(2).bool(), torch.ones(2).bool(), {})
    obs, reward, terminated, truncated, info = step
    assert obs is step.obs
    assert reward is step.reward
    assert (terminated.tolist(), truncated.tolist(), info) == ([False, False], [True, True], {})


def test_episode_ends_have_the_length_of_their_ids() -> None:
    ids = torch.tensor([4, 7])
    gone = torch.tensor([False, True])
    ends = EpisodeEnds(env_ids=ids, episode_ids=ids, returns=ids.double(), lengths=ids, success=None, diverged=gone)
    assert len(ends) == 2


def test_stack_refuses_no_frames_and_axes_that_are_not_there() -> None:
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        StackSpec(frames=0, dim=-1)
    for spec in (StackSpec(frames=2, dim=2), StackSpec(frames=2, dim=-4, layout="new_axis")):
        with pytest.raises(ConfigError, match="expected an axis of a frame of rank 2"):
            spec.axis(2)


def test_stacked_shapes_count_the_axis_without_the_batch() -> None:
    assert StackSpec(frames=4, dim=-1).stacked_shape((3, 8)) == (3, 32)
    assert StackSpec(frames=4, dim=0).stacked_shape((3, 8)) == (12, 8)
    assert StackSpec(frames=4, dim=0, layout="new_axis").stacked_shape((3, 8)) == (4, 3, 8)
    assert StackSpec(frames=4, dim=-1, layout="new_axis").stacked_shape((3, 8)) == (3, 8, 4)


def test_shapes_that_hold_no_whole_frames_are_refused() -> None:
    with pytest.raises(ShapeError, match="multiple of 4 frames on axis 1"):
        StackSpec(frames=4, dim=-1).frame_shape((3, 30))
    with pytest.raises(ShapeError, match="expected 4 frames on axis 0"):
        StackSpec(frames=4, dim=0, layout="new_axis").frame_shape((3, 3, 8))


@settings(deadline=None, max_examples=60)
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    frames=st.integers(1, 5),
    layout=st.sampled_from(["concat", "new_axis"]),
    data=st.data(),
)
def test_stacking_and_taking_frames_apart_are_inverse(shape, frames, layout, data) -> None:
    rank = len(shape) + (layout == "new_axis")
    spec = StackSpec(frames=frames, dim=data.draw(st.integers(-rank, rank - 1)), layout=layout)
    rows = 3
    given_frames = torch.arange(rows * frames * int(torch.tensor(shape).prod())).reshape(rows, frames, *shape)
    stacked = spec.stack(given_frames)
    assert tuple(stacked.shape[1:]) == spec.stacked_shape(tuple(shape))
    assert spec.frame_shape(tuple(stacked.shape[1:])) == tuple(shape)
    for k in range(frames):
        assert torch.equal(spec.frame(stacked, k), given_frames[:, k])
        assert torch.equal(spec.frame(stacked, k - frames), given_frames[:, k])
    assert torch.equal(spec.newest(stacked), given_frames[:, -1])
    # a view: what a store reads of a stack is not copied first
    assert spec.newest(stacked).untyped_storage().data_ptr() == stacked.untyped_storage().data_ptr()


def test_a_device_keeps_its_index() -> None:
    assert as_device("cpu") == torch.device("cpu")
    assert as_device("cuda:1") == torch.device("cuda", 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(DeviceError, match="got 'cuda'; torch sees no GPU"):
        as_device("cuda")
