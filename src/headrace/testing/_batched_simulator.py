"""The row protocol of batched simulators, checked on the simulator itself, without a bridge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from headrace.bridges.child import RowSimulation, to_numpy
from headrace.testing._contract import CheckResult, require

MakeRows: TypeAlias = Callable[[int], Any]
"""``make_rows(num_envs)`` gives a new batched simulator."""
Result: TypeAlias = "dict[str, np.ndarray[Any, Any]]"


def check_row_simulator(make_rows: MakeRows, *, num_envs: int = 5, steps: int = 6) -> list[CheckResult]:
    """Check a batched simulator before it is bridged; the first broken claim raises an AssertionError that names it.

    - ``reset_rows``: the first observation of a row depends on its seed alone, with any others, and neighbors
      do not notice (only where ``reseeds``).
    - ``restore_rows``: steps after a restore repeat those before bit for bit, for some rows and for all, also when the
      same ``saved`` is put back twice, after other rows were reset, and rows outside of the mask are not written.
    - ``step_rows``: rows of the mask do as in ``step``, the others do not change.

    Args:
        make_rows: ``make_rows(num_envs)`` gives a new simulator.
        num_envs: rows of the batch.
        steps: how far to follow.
    """
    return [_check_reset(make_rows, num_envs), *_check_stillness(make_rows, num_envs, steps)]


def _check_reset(make_rows: MakeRows, n: int) -> CheckResult:
    sim, alone = make_rows(n), make_rows(1)
    try:
        if not RowSimulation(sim).reseeds:
            return CheckResult(check="reset_rows", not_claimed="the simulator says reseeds is False")
        seeds = 1000 + np.arange(n)
        together = _first(sim, np.arange(n), seeds)
        for row in range(n):
            single = _first(alone, np.array([0]), seeds[row : row + 1])
            for name, values in single.items():
                what = f"reset_rows, seed {seeds[row]}: {name}: expected the same in row {row} of {n} as alone"
                require(_same(together[name][row], values[0]), what)
        some = np.array([0, n - 1])
        again = _first(sim, some, seeds[some])
        for name, values in again.items():
            require(_same(values[some], together[name][some]), f"reset_rows of {some.tolist()}: {name} differs")
    finally:
        _close(sim, alone)
    return CheckResult(check="reset_rows")


def _check_stillness(make_rows: MakeRows, n: int, steps: int) -> list[CheckResult]:
    sim = make_rows(n)
    try:
        rows = RowSimulation(sim)
        results: list[CheckResult] = []
        all_rows = np.ones(n, np.bool_)
        _first(sim, np.arange(n), 1000 + np.arange(n))
        if not rows.saves:
            reason = "the simulator has no save_rows and restore_rows"
            return [CheckResult(check=name, not_claimed=reason) for name in ("restore_rows", "step_rows")]
        start = sim.save_rows(all_rows)
        expected = _walk(sim, n, steps)
        sim.restore_rows(all_rows, start)
        _require_walk(_walk(sim, n, steps), expected, all_rows, "restore_rows of all rows")
        mask = np.arange(n) % 2 == 0
        for turn in range(2):
            sim.restore_rows(all_rows, start)
            saved = sim.save_rows(mask)
            _walk(sim, n, 2)
            _first(sim, np.flatnonzero(~mask), 7 + np.flatnonzero(~mask))
            for _ in range(turn + 1):
                sim.restore_rows(mask, saved)
            _require_walk(_walk(sim, n, steps), expected, mask, f"restore_rows of some rows, put back {turn + 1} times")
        sim.restore_rows(all_rows, start)
        saved = sim.save_rows(mask)
        sim.restore_rows(mask, saved)
        _require_walk(_walk(sim, n, steps), expected, ~mask, "restore_rows, seen from the other rows")
        results.append(CheckResult(check="restore_rows"))
        if rows.fidelity != "native":
            return [*results, CheckResult(check="step_rows", not_claimed="the simulator has no step_rows")]
        sim.restore_rows(all_rows, start)
        _require_walk(_walk(sim, n, steps, mask), expected, mask, "step_rows")
        _require_walk(_walk(sim, n, steps, ~mask), expected, ~mask, "step_rows after other rows had acted")
        return [*results, CheckResult(check="step_rows")]
    finally:
        _close(sim)


def _first(sim: Any, ids: Any, seeds: Any) -> Result:
    obs, _ = sim.reset_rows(ids, seeds)
    return _flat("obs", obs)


def _walk(sim: Any, n: int, steps: int, mask: Any = None) -> list[Result]:
    """Step with actions that are a function of row and step; stops in the step in which an episode ends."""
    shape = sim.action_space["shape"] if isinstance(sim.action_space, Mapping) else sim.action_space.shape
    seen: list[Result] = []
    for step in range(steps):
        count = int(np.prod(shape))
        numbers = np.sin(1.3 * np.arange(n)[:, None] + 0.7 * step + np.arange(count)[None]).reshape(n, *shape)
        actions: Any = numbers.astype(np.float32)
        if hasattr(sim, "device"):
            actions = torch.from_numpy(actions).to(sim.device)
        answer = sim.step(actions) if mask is None else sim.step_rows(actions, mask)
        seen.append(_flat("obs", answer[0]) | {"reward": np.array(to_numpy(answer[1]))})
        if (to_numpy(answer[2]) | to_numpy(answer[3])).any():
            break
    return seen


def _require_walk(got: list[Result], expected: list[Result], rows: Any, what: str) -> None:
    for step, (ours, theirs) in enumerate(zip(got, expected, strict=False)):
        for name, values in theirs.items():
            wrong = [int(row) for row in np.flatnonzero(rows) if not _same(ours[name][row], values[row])]
            require(not wrong, f"{what}: rows {wrong}, step {step}: {name} differs from the first time")


def _flat(name: str, value: Any) -> Result:
    if isinstance(value, Mapping):
        return {key: part for entry in value for key, part in _flat(f"{name}[{entry!r}]", value[entry]).items()}
    return {name: np.array(to_numpy(value))}


def _same(a: Any, b: Any) -> bool:
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


def _close(*sims: Any) -> None:
    for sim in sims:
        if hasattr(sim, "close"):
            sim.close()
