"""DelayBuffer: data arrives late by whole steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigError, DtypeError, IdError, ShapeError
from headrace.history import DelayBuffer

NUM_ENVS = 3


def rows(step: int) -> torch.Tensor:
    return torch.arange(NUM_ENVS)[:, None] * 1000.0 + step + torch.zeros(NUM_ENVS, 2)


@settings(deadline=None, max_examples=60)
@given(
    lags=st.lists(st.integers(0, 4), min_size=NUM_ENVS, max_size=NUM_ENVS),
    resets=st.lists(st.sampled_from([(), (0,), (1, 2), (0, 1, 2)]), min_size=1, max_size=12),
)
def test_each_environment_sees_its_data_its_own_lag_late_and_never_from_before_a_reset(lags, resets) -> None:
    delay = DelayBuffer(4, NUM_ENVS)
    delay.set_lag(torch.tensor(lags))
    start = [0] * NUM_ENVS
    for step, ended in enumerate(resets):
        delay.reset(list(ended))
        for env in ended:
            start[env] = step
        delayed = delay.compute(rows(step))
        expected = [env * 1000.0 + max(step - lags[env], start[env]) for env in range(NUM_ENVS)]
        assert delayed[:, 0].tolist() == expected


def test_the_result_is_a_copy_that_later_steps_do_not_change() -> None:
    delay = DelayBuffer(1, NUM_ENVS)
    first = delay.compute(rows(0))
    kept = first.clone()
    for step in range(1, 5):
        delay.compute(rows(step))
    assert torch.equal(first, kept)
    first.zero_()
    assert delay.compute(rows(5))[0, 0] == 5


def test_suspended_environments_keep_their_history_and_their_output() -> None:
    delay = DelayBuffer(2, NUM_ENVS)
    delay.set_lag(1)
    delay.compute(rows(0))
    before = delay.compute(rows(1))
    after = delay.compute(rows(2), torch.tensor([True, False, True]))
    assert torch.equal(after[1], before[1])
    assert delay.compute(rows(3))[:, 0].tolist() == [2.0, 1001.0, 2002.0]


@pytest.mark.parametrize(
    ("lag", "error"),
    [
        (-1, IdError),
        (3, IdError),
        (1.0, DtypeError),
        (True, DtypeError),
        (torch.tensor([0, 1, 3]), IdError),
        (torch.tensor([0, -1, 2]), IdError),
        (torch.tensor([0.0, 1.0, 2.0]), DtypeError),
        (torch.tensor([0, 1]), ShapeError),
        (torch.tensor([0, 1, 3], dtype=torch.int32), IdError),
        (torch.tensor([0, 1, 2], dtype=torch.int16), DtypeError),
    ],
)
def test_an_invalid_lag_raises_and_changes_nothing(lag, error) -> None:
    delay = DelayBuffer(2, NUM_ENVS)
    delay.set_lag(torch.tensor([2, 1, 0]))
    with pytest.raises(error):
        delay.set_lag(lag)
    assert delay.lags.tolist() == [2, 1, 0]


def test_lags_of_some_environments_can_be_set() -> None:
    delay = DelayBuffer(2, NUM_ENVS)
    delay.set_lag(2, [1])
    delay.set_lag(torch.tensor([1]), [2])
    assert delay.lags.tolist() == [0, 2, 1]
    delay.set_lag(torch.tensor([2, 0, 0]), torch.tensor([True, False, False]))
    assert delay.lags.tolist() == [2, 2, 1]
    delay.set_lag(torch.tensor([0, 1], dtype=torch.int32), [0, 2])
    assert delay.lags.tolist() == [0, 2, 1]


def test_sizes_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="0 or more"):
        DelayBuffer(-1, NUM_ENVS)
    with pytest.raises(ConfigError, match="at least 1"):
        DelayBuffer(1, 0)


def test_bad_data_raises_and_changes_nothing() -> None:
    delay = DelayBuffer(1, NUM_ENVS)
    with pytest.raises(ShapeError, match="at least one element"):
        delay.compute(torch.zeros(NUM_ENVS, 0))
    delay.set_lag(1)
    delay.compute(rows(0))
    for bad, ids, error in [
        (rows(1).double(), None, DtypeError),
        (rows(1)[:, :1], None, ShapeError),
        (rows(1)[:2], None, ShapeError),
        (rows(1)[:2], [0, 3], IdError),
    ]:
        with pytest.raises(error):
            delay.compute(bad, ids)
    assert torch.equal(delay.compute(rows(2)), rows(0))


def test_a_reset_zeroes_the_storage_of_that_environment_only() -> None:
    delay = DelayBuffer(2, NUM_ENVS)
    for step in range(3):
        delay.compute(rows(step) + 1)
    before = delay._frames.data.clone()
    delay.reset([1])
    assert not delay._frames.data[1].any()
    assert torch.equal(delay._frames.data[[0, 2]], before[[0, 2]])
