"""Ids and masks: one check for environments, buffers and stacks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.errors import ShapeError
from headrace.ids import check_ids, env_rows

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "given",
    [
        [2, 0],
        (2, 0),
        range(2, -1, -2),
        np.array([2, 0], np.uint8),
        torch.tensor([2, 0], dtype=torch.int32),
    ],
)
def test_ids_of_every_kind_are_the_same_environments(given) -> None:
    assert check_ids(given, 4, CPU).tolist() == [0, 2]
    assert check_ids(given, 4, CPU, ascending=False).tolist() == [2, 0]


@pytest.mark.parametrize(
    "mask", [[True, False, True], np.array([True, False, True]), torch.tensor([True, False, True])]
)
def test_masks_of_every_kind_are_the_same_environments(mask) -> None:
    assert check_ids(mask, 3, CPU).tolist() == [0, 2]
    rows = env_rows(mask, num_envs=3, device=CPU)
    assert rows.ids is not None
    assert rows.ids.tolist() == [0, 2]
    assert rows.row_count == 3
    with pytest.raises(ShapeError, match=r"mask of shape \(4,\), got \(3,\)"):
        check_ids(mask, 4, CPU)


def test_no_ids_is_nobody_and_not_an_error() -> None:
    assert check_ids([], 3, CPU).tolist() == []
    assert check_ids([], 3, CPU).dtype == torch.int64


def test_ids_in_the_memory_of_the_caller_are_not_written() -> None:
    mine = torch.tensor([2, 0, 1])
    check_ids(mine, 3, CPU)
    assert mine.tolist() == [2, 0, 1]
