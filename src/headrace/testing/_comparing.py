"""Comparison bit for bit, or within a tolerance, with failures that read as sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NoReturn, cast

import torch
from torch import Tensor

from headrace.testing._contract import EXACT, Tolerance

_BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def fail(sentence: str) -> NoReturn:
    """Raise the AssertionError of a broken contract."""
    raise AssertionError(sentence)


def require(holds: bool, sentence: str) -> None:
    """Raise an AssertionError with ``sentence`` unless it ``holds``."""
    if not holds:
        fail(sentence)


def differing(got: Tensor, expected: Tensor, tolerance: Tolerance = EXACT) -> Tensor:
    """Return bool, of the common shape: where two tensors differ, by their bits or by more than ``tolerance``."""
    if not expected.is_floating_point():
        return got != expected
    if tolerance.exact:
        bits = _BITS[expected.dtype]
        return got.contiguous().view(bits) != expected.contiguous().view(bits)
    return ~torch.isclose(got, expected, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True)


def require_equal(got: Tensor, expected: Tensor, sentence: str, tolerance: Tolerance = EXACT) -> None:
    """Fail with ``sentence`` and the first difference unless the tensors are equal.

    ``sentence`` says who, when and which field: "env 3, step 12: obs['policy'] of a suspended environment".
    """
    if got.shape != expected.shape or got.dtype != expected.dtype:
        fail(f"{sentence}: expected {expected.dtype} {tuple(expected.shape)}, got {got.dtype} {tuple(got.shape)}")
    wrong = differing(got, expected, tolerance)
    if bool(wrong.any()):
        index = tuple(wrong.nonzero()[0].tolist())
        where = f" at index {index}" if index else ""
        fail(f"{sentence}: expected {expected[index].item()!r}, got {got[index].item()!r}{where}")


def require_rows_equal(
    got: Tensor, expected: Tensor, rows: Tensor, when: str, field: str, tolerance: Tolerance = EXACT
) -> None:
    """Fail, naming the first environment of ``rows`` (int64 (n,)) whose row of two (N, …) tensors differs."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        fail(f"{when}: {field}: expected {expected.dtype} {tuple(expected.shape)}, got {got.dtype} {tuple(got.shape)}")
    if not len(rows):
        return
    wrong = differing(got[rows], expected[rows], tolerance).reshape(len(rows), -1).any(dim=1)
    if bool(wrong.any()):
        env = int(rows[int(wrong.nonzero()[0])])
        require_equal(got[env], expected[env], f"env {env}, {when}: {field}", tolerance)


def tensors_in(value: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor inside nested dicts, sequences and records, with the path that leads to it."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, entry in cast("Mapping[object, object]", value).items():
            yield from tensors_in(entry, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        labels = getattr(value, "_fields", None) or range(len(cast("list[object]", value)))
        for label, entry in zip(labels, cast("list[object]", value), strict=True):
            yield from tensors_in(entry, f"{name}.{label}" if isinstance(label, str) else f"{name}[{label}]")
    else:
        for label in getattr(type(value), "__dataclass_fields__", {}):
            yield from tensors_in(getattr(value, label), f"{name}.{label}")


def require_same_tensors(got: object, expected: object, sentence: str, tolerance: Tolerance = EXACT) -> None:
    """Fail unless two nested structures hold the same tensors under the same names."""
    ours, theirs = dict(tensors_in(got)), dict(tensors_in(expected))
    require(set(ours) == set(theirs), f"{sentence}: expected the entries {sorted(theirs)}, got {sorted(ours)}")
    for name, tensor in theirs.items():
        require_equal(ours[name], tensor, f"{sentence}: {name}", tolerance)
