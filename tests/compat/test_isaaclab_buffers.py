"""The buffers under Isaac Lab's names: each behavior that its own tests of them check."""

from __future__ import annotations

import pytest
import torch

from headrace.compat.isaaclab import CircularBuffer, DelayBuffer

N = 3
IMAGE = (N, 4, 5, 3)


def rows(value: float) -> torch.Tensor:
    return torch.full((N, 2), float(value))


def filled(count: int, max_len: int = 5) -> CircularBuffer:
    buffer = CircularBuffer(max_len, N, "cpu")
    for value in range(count):
        buffer.append(rows(value))
    return buffer


def lag(value: int) -> torch.Tensor:
    return torch.full((N,), value)


def test_a_new_buffer_is_empty_and_has_isaac_labs_properties() -> None:
    buffer = CircularBuffer(max_len=5, batch_size=N, device="cpu")
    assert (buffer.max_length, buffer.batch_size, buffer.device) == (5, N, "cpu")
    assert buffer.current_length.tolist() == [0] * N
    with pytest.raises(RuntimeError):
        _ = buffer[lag(0)]
    with pytest.raises(ValueError, match="at least 1"):
        CircularBuffer(0, N, "cpu")


def test_a_key_counts_back_from_the_newest_and_ends_at_the_oldest() -> None:
    two = filled(2)
    assert two.current_length.tolist() == [2] * N
    assert torch.equal(two[lag(0)], rows(1))
    for back in (1, 2, 5, 50):
        assert torch.equal(two[lag(back)], rows(0))
    seven = filled(7)
    assert seven.current_length.tolist() == [5] * N
    assert torch.equal(seven[lag(0)], rows(6))
    assert torch.equal(seven[lag(4)], rows(2))
    assert seven[torch.tensor([0, 1, 9], dtype=torch.int32)][:, 0].tolist() == [6.0, 5.0, 2.0]


def test_the_whole_buffer_has_the_batch_first_and_the_oldest_frame_next() -> None:
    buffer = filled(7).buffer
    assert buffer.shape == (N, 5, 2)
    assert buffer[:, :, 0].tolist() == [[2.0, 3.0, 4.0, 5.0, 6.0]] * N


@pytest.mark.parametrize("batch_ids", [[1], slice(1, 2), torch.tensor([1]), (-2,), torch.tensor([False, True, False])])
def test_a_reset_of_some_zeroes_them_and_their_next_frame_fills_all_slots(batch_ids) -> None:
    for stack_dim in (None, -1):
        buffer = CircularBuffer(3, N, "cpu", stack_dim)
        buffer.append(rows(5))
        buffer.append(rows(6))
        buffer.reset(batch_ids)
        assert buffer.current_length.tolist() == [2, 0, 2]
        assert not buffer.buffer[1].any()
        assert buffer.buffer[0, :, 0].tolist() == [5.0, 5.0, 6.0]
        buffer.append(rows(9))
        assert buffer.current_length.tolist() == [3, 1, 3]
        assert buffer.buffer[:, :, 0].tolist() == [[5.0, 6.0, 9.0], [9.0] * 3, [5.0, 6.0, 9.0]]


def test_a_reset_of_all_and_of_none() -> None:
    for everything in (None, slice(None)):
        buffer = filled(3)
        buffer.reset([])
        assert buffer.current_length.tolist() == [3] * N
        buffer.reset(everything)
        assert buffer.current_length.tolist() == [0] * N
        assert not buffer[lag(0)].any(), "what was reset reads as zero"


def test_a_batch_of_another_size_is_a_value_error() -> None:
    buffer = filled(1)
    with pytest.raises(ValueError, match="batch of 3"):
        buffer.append(torch.ones(N + 1, 2))
    with pytest.raises(ValueError, match="3 lags"):
        _ = buffer[torch.tensor([0, 0])]


def test_later_data_is_cast_to_the_dtype_of_the_first() -> None:
    buffer = filled(1)
    buffer.append(torch.full((N, 2), 3))
    assert buffer.buffer.dtype == torch.float32
    assert torch.equal(buffer[lag(0)], rows(3))


def test_stacks_merge_the_frames_into_the_axis_oldest_first() -> None:
    frames = [torch.full(IMAGE, float(value)) for value in range(3)]
    last, same, tall = (CircularBuffer(2, N, "cpu", stack_dim=dim) for dim in (-1, 3, -3))
    for buffer in (last, same, tall):
        buffer.append(frames[0])
    assert torch.equal(last.stacked, torch.zeros(N, 4, 5, 6))
    assert last.buffer.shape == (N, 2, *IMAGE[1:])
    for buffer in (last, same, tall):
        buffer.append(frames[1])
        buffer.append(frames[2])
    assert torch.equal(last.stacked, torch.cat(frames[1:], dim=-1))
    assert torch.equal(same.stacked, last.stacked)
    assert torch.equal(tall.stacked, torch.cat(frames[1:], dim=1))
    assert last.stacked.is_contiguous()
    last.reset()
    last.append(torch.full(IMAGE, 9.0))
    assert torch.equal(last.stacked, torch.full((N, 4, 5, 6), 9.0))


def test_mistakes_with_stack_dim_have_isaac_labs_errors() -> None:
    with pytest.raises(ValueError, match="stack_dim must not be 0"):
        CircularBuffer(2, N, "cpu", stack_dim=0)
    with pytest.raises(IndexError, match="stack_dim=-5"):
        CircularBuffer(2, N, "cpu", stack_dim=-5).append(torch.zeros(IMAGE))
    with pytest.raises(RuntimeError, match="stack_dim"):
        _ = filled(1).stacked
    stacking = CircularBuffer(2, N, "cpu", stack_dim=-1)
    with pytest.raises(RuntimeError):
        _ = stacking.stacked
    stacking.append(torch.zeros(IMAGE))
    with pytest.raises(NotImplementedError, match="stacked-output mode"):
        _ = stacking[lag(0)]


def steps(count: int) -> list[torch.Tensor]:
    return [torch.full((N, 1), step, dtype=torch.int32) for step in range(count)]


def test_a_delay_of_a_constant_lag() -> None:
    delay = DelayBuffer(4, batch_size=N, device="cpu")
    assert (delay.history_length, delay.batch_size, delay.device) == (4, N, "cpu")
    delay.set_time_lag(3)
    assert (delay.min_time_lag, delay.max_time_lag) == (3, 3)
    data = steps(12)
    for step, now in enumerate(data):
        assert torch.equal(delay.compute(now), data[max(0, step - 3)])


def test_a_delay_of_a_lag_per_element_in_int32() -> None:
    delay = DelayBuffer(4, N, "cpu")
    lags = torch.tensor([0, 3, 1], dtype=torch.int32)
    delay.set_time_lag(lags)
    assert torch.equal(delay.time_lags, lags)
    assert delay.time_lags.dtype == torch.int32
    for step, now in enumerate(steps(9)):
        assert delay.compute(now)[:, 0].tolist() == [max(0, step - wait) for wait in (0, 3, 1)]
    delay.set_time_lag(2, [-1])
    delay.set_time_lag(torch.tensor([1]), slice(0, 1))
    assert delay.time_lags.tolist() == [1, 3, 2]


def test_a_reset_delay_has_nothing_from_before_and_the_others_go_on() -> None:
    delay = DelayBuffer(4, N, "cpu")
    delay.set_time_lag(2)
    for step, now in enumerate(steps(12)):
        if step == 6:
            delay.reset([-2, -1])
        assert delay.compute(now)[:, 0].tolist() == [max(0, step - 2)] + [max(0 if step < 6 else 6, step - 2)] * 2


def test_without_a_lag_or_a_history_data_comes_at_once() -> None:
    for history in (3, 0, -2):
        delay = DelayBuffer(history, N, "cpu")
        assert delay.history_length == max(0, history)
        assert all(torch.equal(delay.compute(now), now) for now in steps(4))


@pytest.mark.parametrize(
    ("bad", "error"),
    [(-1, ValueError), (5, ValueError), (torch.tensor([0, 9, 0]), ValueError), (1.5, TypeError), (rows(1), TypeError)],
)
def test_a_lag_that_cannot_be_is_refused_and_changes_nothing(bad, error) -> None:
    delay = DelayBuffer(4, N, "cpu")
    delay.set_time_lag(1)
    with pytest.raises(error):
        delay.set_time_lag(bad)
    assert delay.time_lags.tolist() == [1] * N
    assert (delay.min_time_lag, delay.max_time_lag) == (1, 1)


def test_lags_written_in_place_hold_from_the_next_step_on() -> None:
    delay = DelayBuffer(4, N, "cpu")
    data = steps(8)
    for now in data[:6]:
        assert torch.equal(delay.compute(now), now)
    delay.time_lags.copy_(torch.tensor([0, 2, 4]))
    assert (delay.min_time_lag, delay.max_time_lag) == (0, 4)
    assert delay.compute(data[6]).flatten().tolist() == [6, 4, 2]
    delay.time_lags[1] = 1
    assert delay.compute(data[7]).flatten().tolist() == [7, 6, 3]


def test_a_read_without_history_appends_nothing() -> None:
    delay = DelayBuffer(3, N, "cpu")
    data = steps(6)
    assert torch.equal(delay.compute(data[5], update_history=False), data[5]), "nothing appended: what it is given"
    delay.set_time_lag(1)
    delay.compute(data[0])
    delay.compute(data[1])
    for _ in range(3):
        assert torch.equal(delay.compute(data[5], update_history=False), data[0])
    assert delay.num_pushes.tolist() == [2] * N
    delay.reset([1])
    assert delay.num_pushes.tolist() == [2, 0, 2]
    assert delay.compute(data[5], update_history=False).flatten().tolist() == [0, 5, 0]


def test_masks_choose_elements_on_the_device() -> None:
    delay, mask = DelayBuffer(4, N, "cpu"), torch.tensor([True, False, True])
    delay.set_time_lag(torch.tensor([3, 4, 1]), batch_mask=mask)
    assert delay.time_lags.tolist() == [3, 0, 1]
    delay.set_time_lag(2, [1], batch_mask=mask)
    assert delay.time_lags.tolist() == [2, 0, 2], "the mask goes first"
    delay.compute(steps(1)[0])
    delay.reset([1], batch_mask=mask)
    assert delay.num_pushes.tolist() == [0, 1, 0]


@pytest.mark.parametrize("hold_prob", [0.0, 0.5, 1.0])
def test_drawn_lags_stay_with_their_probability(hold_prob: float) -> None:
    torch.manual_seed(0)
    many = 400
    delay = DelayBuffer(6, many, "cpu", min_lag=2, hold_prob=hold_prob)
    before = delay.time_lags.clone()
    assert (delay.min_time_lag, delay.max_time_lag) == (2, 6)
    delay.compute(torch.zeros(many, 1))
    kept = (delay.time_lags == before).float().mean()
    assert kept == 1 if hold_prob == 1 else abs(kept - (hold_prob + (1 - hold_prob) / 5)) < 0.08
    now = delay.time_lags.clone()
    delay.compute(torch.zeros(many, 1), update_history=False)
    assert torch.equal(delay.time_lags, now)
    delay.reset(range(0, many, 2))
    assert torch.equal(delay.time_lags[1::2], now[1::2])
    assert not torch.equal(delay.time_lags[::2], now[::2])
    for arguments in ({"min_lag": 7}, {"min_lag": -1}, {"hold_prob": 1.5}):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            DelayBuffer(6, 2, "cpu", **arguments)
