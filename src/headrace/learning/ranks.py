"""Processes that learn together, as ``torchrun`` starts them: each has some of the environments, all the same weights.

torch is imported where it is used: a command asks which process it is before it imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor, nn

T = TypeVar("T")
_together = False


def read_ranks() -> tuple[int, int]:
    """Return which of how many processes this is, from the variables that ``torchrun`` sets; (0, 1) without it."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def learn_together() -> Generator[None]:
    """Join the other processes for the block; every function below then waits for all of them."""
    global _together  # normalizers are deep inside networks, and a process has one group
    if read_ranks()[1] == 1:
        yield
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    _together = True
    try:
        yield
    finally:
        _together = False
        dist.destroy_process_group()


def sum_ranks(values: Tensor) -> Tensor:
    """Return the sum of (…) tensors over all processes; in place."""
    if _together:
        from torch.distributed import all_reduce  # pyright: ignore[reportUnknownVariableType]  # torch does not type it

        all_reduce(values)
    return values


def gather_ranks(value: T) -> list[T]:
    """Return what each process gave, by rank."""
    if not _together:
        return [value]
    from torch.distributed import all_gather_object  # pyright: ignore[reportUnknownVariableType]  # likewise

    found: list[Any] = [None] * read_ranks()[1]
    all_gather_object(found, value)
    return found


def average_gradients(parameters: Iterable[nn.Parameter], rows: Tensor) -> None:
    """Replace gradients of a mean over that many ``rows`` by those of the mean over the rows of all processes."""
    if not _together:
        return
    import torch

    owned = list(parameters)
    flat = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in owned])
    total = sum_ranks(torch.cat((flat * rows, rows.to(flat).reshape(1))))
    for parameter, part in zip(owned, (total[:-1] / total[-1]).split([p.numel() for p in owned]), strict=True):
        parameter.grad = part.view_as(parameter)


def moments(rows: Tensor) -> tuple[int, Tensor, Tensor]:
    """Return number, mean and variance of rows (n, …), n at least 1, of all processes together."""
    if not _together:
        return len(rows), rows.mean(0), rows.var(0, unbiased=False)
    import torch

    wide = rows.double()
    count, total, squares = sum_ranks(
        torch.stack((torch.full_like(wide[0], len(rows)), wide.sum(0), wide.square().sum(0)))
    )
    mean = total / count
    return int(count.max()), mean.to(rows.dtype), (squares / count - mean.square()).clamp(min=0).to(rows.dtype)
