"""Estimators beside TorchRL's, where both mean the same: truncations included, but for V-trace."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.learning import gae, n_step, td_lambda, vtrace

functional = pytest.importorskip("torchrl.objectives.value.functional")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")

GAMMA, LAM = 0.93, 0.8
# TorchRL rounds discounts to float32 on the way: 1e-7 of numbers of size 1, summed over 17 steps
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def rollout(truncated: float = 0.15) -> dict[str, Tensor]:
    """(T, N) = (17, 6); next values are those that follow within an episode, others at its end."""
    random = torch.Generator().manual_seed(5)

    def chance(p: float) -> Tensor:
        return torch.rand(17, 6, generator=random) < p

    ended, cut = chance(0.1), chance(truncated)
    reward, value, final, log_ratio = (torch.randn(17, 6, generator=random, dtype=torch.float64) for _ in range(4))
    following = torch.cat((value[1:], final[-1:]))
    next_value = torch.where(ended | cut, final, following)
    return {
        "reward": reward,
        "value": value,
        "next_value": next_value,
        "terminated": ended,
        "truncated": cut & ~ended,
        "log_ratio": log_ratio,
    }


def theirs(data: dict[str, Tensor]) -> dict[str, Tensor]:
    """TorchRL's layout and names: (N, T, 1), ``done`` for either end."""
    there = {name: tensor.T.unsqueeze(-1) for name, tensor in data.items()}
    return {
        "state_value": there["value"],
        "next_state_value": there["next_value"],
        "reward": there["reward"],
        "done": there["terminated"] | there["truncated"],
        "terminated": there["terminated"],
    }


def back(tensor: Tensor) -> Tensor:
    return tensor.squeeze(-1).T


def inputs(data: dict[str, Tensor]) -> list[Tensor]:
    return [data[name] for name in ("reward", "value", "next_value", "terminated", "truncated")]


@pytest.mark.parametrize("form", ["generalized_advantage_estimate", "vec_generalized_advantage_estimate"])
def test_gae_is_torchrls(form: str) -> None:
    data = rollout()
    advantage, target = getattr(functional, form)(GAMMA, LAM, **theirs(data))
    ours = gae(*inputs(data), gamma=GAMMA, lam=LAM)
    torch.testing.assert_close(ours.advantage, back(advantage), **CLOSE)
    torch.testing.assert_close(ours.value_target, back(target), **CLOSE)


def test_td0_is_torchrls() -> None:
    data, peer = rollout(), theirs(rollout())
    target = functional.td0_return_estimate(
        GAMMA, peer["next_state_value"], peer["reward"], terminated=peer["terminated"]
    )
    torch.testing.assert_close(n_step(*inputs(data), gamma=GAMMA, n=1).value_target, back(target), **CLOSE)


@pytest.mark.parametrize("lam", [0.0, LAM, 1.0])
def test_td_lambda_and_monte_carlo_are_torchrls(lam: float) -> None:
    data, peer = rollout(), theirs(rollout())
    target = functional.td_lambda_return_estimate(
        GAMMA, lam, peer["next_state_value"], peer["reward"], done=peer["done"], terminated=peer["terminated"]
    )
    torch.testing.assert_close(td_lambda(*inputs(data), gamma=GAMMA, lam=lam).value_target, back(target), **CLOSE)
    if lam == 1.0:
        torch.testing.assert_close(td_lambda(*inputs(data), gamma=GAMMA, lam=1.0).value_target, back(target), **CLOSE)


def test_vtrace_is_torchrls_without_truncations() -> None:
    """At a truncation TorchRL's advantage bootstraps with the next episode's first value; ours with the true one."""
    data = rollout(truncated=0.0)
    log_pi = data["log_ratio"].T.unsqueeze(-1)
    advantage, target = functional.vtrace_advantage_estimate(
        GAMMA, log_pi, torch.zeros_like(log_pi), **theirs(data), rho_thresh=1.2, c_thresh=0.9
    )
    ours = vtrace(*inputs(data), data["log_ratio"], gamma=GAMMA, rho_clip=1.2, c_clip=0.9)
    torch.testing.assert_close(ours.value_target, back(target), **CLOSE)
    torch.testing.assert_close(ours.advantage, back(advantage), **CLOSE)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("lam", [0.0, LAM, 1.0])
def test_discounts_that_differ_by_step_are_torchrls(lam: float, batch_first: bool) -> None:
    """Both recursions of TorchRL that take a tensor; its own give float64 where the discounts are float64."""
    data, peer = rollout(), theirs(rollout())
    gamma = torch.rand(17, 6, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    there = gamma.T.unsqueeze(-1)
    rows = [tensor.T if batch_first else tensor for tensor in (*inputs(data), gamma)]
    settings = {"gamma": rows[-1], "lam": lam, "batch_first": batch_first}

    def ours(estimate: Tensor) -> Tensor:
        return estimate.T if batch_first else estimate

    advantage, _ = functional.vec_generalized_advantage_estimate(there, lam, **peer)
    torch.testing.assert_close(ours(gae(*rows[:-1], **settings).advantage), back(advantage), **CLOSE)
    ends = {"done": peer["done"], "terminated": peer["terminated"]}
    target = functional.td_lambda_return_estimate(there, lam, peer["next_state_value"], peer["reward"], **ends)
    torch.testing.assert_close(ours(td_lambda(*rows[:-1], **settings).value_target), back(target), **CLOSE)


def test_garbage_that_nobody_may_read_changes_nothing() -> None:
    """TorchRL's GAE of NaN next values at terminated steps is NaN from there on; ours is its result without NaN."""
    data = rollout()
    garbage = {**data, "next_value": data["next_value"].masked_fill(data["terminated"], float("nan"))}
    advantage, target = functional.vec_generalized_advantage_estimate(GAMMA, LAM, **theirs(data))
    ours = gae(*inputs(garbage), gamma=GAMMA, lam=LAM)
    torch.testing.assert_close(ours.advantage, back(advantage), **CLOSE)
    torch.testing.assert_close(ours.value_target, back(target), **CLOSE)
    peer = theirs(data)
    expected = functional.td_lambda_return_estimate(
        GAMMA, LAM, peer["next_state_value"], peer["reward"], done=peer["done"], terminated=peer["terminated"]
    )
    found = td_lambda(*inputs(garbage), gamma=GAMMA, lam=LAM).value_target
    torch.testing.assert_close(found, back(expected), **CLOSE)
