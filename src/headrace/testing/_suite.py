"""Every check of an environment, one after the other."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

from headrace.errors import UnknownNameError
from headrace.testing._boundaries import (
    check_bad_input_changes_nothing,
    check_gymnasium_spaces,
    check_returned_tensors_are_owned,
)
from headrace.testing._contract import EXACT, NO_VARIANTS, CheckResult, MakeEnv, Tolerance
from headrace.testing._episodes import check_autoreset, check_episodes_do_not_depend_on_the_batch
from headrace.testing._suspension import (
    check_resume_continues_exactly,
    check_snapshot_round_trip,
    check_suspend_is_exact,
)


def check_env(
    make_env: MakeEnv,
    *,
    sizes: Sequence[int] = (1, 7, 64),
    steps: int = 20,
    variants: Sequence[Mapping[str, object]] = NO_VARIANTS,
    tolerance: Tolerance = EXACT,
    skip: Collection[str] = (),
    only: Collection[str] | None = None,
) -> list[CheckResult]:
    """Run every check; the first broken claim raises an AssertionError that names environment, step and field.

    Args:
        make_env: ``make_env(num_envs=…, seed=…, autoreset=…, **variant)`` gives a new environment.
        sizes: the batch sizes in which an episode must be the same.
        steps: how long to watch each episode; the end of an episode is waited for as long as it takes, up to 300 steps.
        variants: further keywords of ``make_env`` that must not change an episode, for example thread counts.
        tolerance: for physics whose bits depend on the size of the batch.
        skip: names of checks to leave out (``gymnasium_spaces``, ``returned_tensors_are_owned``,
            ``bad_input_changes_nothing``, ``suspend_is_exact``, ``resume_continues_exactly``,
            ``episodes_do_not_depend_on_the_batch``, ``autoreset``, ``snapshot_round_trip``); the results say that they
            were.
        only: names of the checks to run; None for all.

    Returns:
        One result per check, in order; ``not_claimed`` says what was left out and why.
    """
    checks = {
        "gymnasium_spaces": partial(check_gymnasium_spaces, make_env),
        "returned_tensors_are_owned": partial(check_returned_tensors_are_owned, make_env),
        "bad_input_changes_nothing": partial(check_bad_input_changes_nothing, make_env),
        "suspend_is_exact": partial(check_suspend_is_exact, make_env, steps=steps),
        "resume_continues_exactly": partial(check_resume_continues_exactly, make_env, steps=steps, tolerance=tolerance),
        "episodes_do_not_depend_on_the_batch": partial(
            check_episodes_do_not_depend_on_the_batch,
            make_env,
            sizes=sizes,
            steps=steps,
            variants=variants,
            tolerance=tolerance,
        ),
        "autoreset": partial(check_autoreset, make_env, tolerance=tolerance),
        "snapshot_round_trip": partial(check_snapshot_round_trip, make_env, tolerance=tolerance),
    }
    for name in (*skip, *(only or ())):
        if name not in checks:
            raise UnknownNameError("check", name, checks)
    left_out = "left out by the caller"
    return [
        CheckResult(check=name, not_claimed=left_out) if name in skip else run()
        for name, run in checks.items()
        if only is None or name in only
    ]
