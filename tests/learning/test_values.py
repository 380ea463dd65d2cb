"""One evaluation of each observation gives what two passes give; missing next observations are never silent."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor, nn

from headrace import errors
from headrace.learning import compact_values, gae, repair_next_obs, rollout_values

# the same float64 products, added by the matrix product in another order of rows
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1)).double()


class Counting:
    """A network that remembers how many rows it was asked for, and how many at once."""

    def __init__(self, inner: nn.Module) -> None:
        self.inner = inner
        self.calls: list[int] = []

    def __call__(self, rows: Tensor) -> Tensor:
        self.calls.append(len(rows))
        return self.inner(rows)


@settings(deadline=None, max_examples=50)
@given(
    steps=st.integers(1, 9),
    envs=st.integers(1, 6),
    seed=st.integers(0, 2**31),
    chunk=st.sampled_from([None, 1, 4, 1000]),
)
def test_one_forward_equals_two_passes_at_every_truncation(steps: int, envs: int, seed: int, chunk: int | None) -> None:
    random = torch.Generator().manual_seed(seed)
    ended = torch.rand(steps, envs, generator=random) < 0.3
    # the world: every step has its observation and its own true next observation
    obs = torch.randn(steps + 1, envs, 3, generator=random, dtype=torch.float64)
    next_obs = obs[1:].clone()
    next_obs[ended] = torch.randn(int(ended.sum()), 3, generator=random, dtype=torch.float64)
    final_step, final_env = ended.nonzero(as_tuple=True)

    net = Counting(network())
    value, next_value = rollout_values(
        net,
        obs[:-1],
        obs[-1],
        final_obs=next_obs[final_step, final_env],
        final_step=final_step,
        final_env=final_env,
        chunk_size=chunk,
    )
    assert sum(net.calls) == steps * envs + envs + len(final_step)
    assert chunk is None or max(net.calls) <= chunk
    torch.testing.assert_close(value, net.inner(obs[:-1]).squeeze(-1), **CLOSE)
    torch.testing.assert_close(next_value, net.inner(next_obs).squeeze(-1), **CLOSE)


def test_gradients_equal_those_of_two_passes() -> None:
    obs = torch.randn(6, 4, 3, dtype=torch.float64)
    net = network()
    value, next_value = rollout_values(net, obs[:-1], obs[-1], chunk_size=3)
    (value.square() + next_value).sum().backward()
    once = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    (net(obs[:-1]).square() + net(obs[1:])).sum().backward()
    for ours, theirs in zip(once, net.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.grad, **CLOSE)


def test_suspended_rows_are_not_evaluated_and_stand_for_nothing() -> None:
    """Env 0 sleeps through steps 1 and 2, env 1 through the last: the value that follows skips them."""
    obs = torch.arange(4 * 2, dtype=torch.float64).view(4, 2, 1)
    last = torch.tensor([[100.0], [101.0]], dtype=torch.float64)
    active = torch.tensor([[1, 1], [0, 1], [0, 1], [1, 0]], dtype=torch.bool)
    seen: list[Tensor] = []

    def identity(rows: Tensor) -> Tensor:
        seen.append(rows)
        return rows[:, 0]

    value, next_value = rollout_values(identity, obs, last, active=active)
    assert value.tolist() == [[0, 1], [0, 3], [0, 5], [6, 0]]
    assert next_value.tolist() == [[6, 3], [0, 5], [0, 101], [100, 0]]
    assert sum(map(len, seen)) == int(active.sum()) + 2


def test_groups_of_observations_and_integer_images_pass_as_they_are() -> None:
    obs = {"policy": torch.randn(3, 2, 4), "camera": torch.randint(0, 255, (3, 2, 5, 5), dtype=torch.uint8)}
    last = {name: tensor[0] for name, tensor in obs.items()}

    def net(rows: dict[str, Tensor]) -> Tensor:
        assert rows["camera"].dtype == torch.uint8
        return rows["policy"].sum(-1) + rows["camera"].float().mean((-1, -2))

    value, next_value = rollout_values(
        net, obs, last, final_obs=last, final_step=torch.tensor([0, 1]), final_env=torch.tensor([1, 0])
    )
    torch.testing.assert_close(value, net(obs))
    assert next_value[0, 1] == net(last)[0]
    assert next_value[1, 0] == net(last)[1]


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_empty_rollouts_have_empty_values(shape: tuple[int, int]) -> None:
    value, next_value = rollout_values(network(), torch.zeros(*shape, 3).double(), torch.zeros(shape[1], 3).double())
    assert value.shape == next_value.shape == shape
    sleepy = torch.zeros(shape, dtype=torch.bool)
    value, next_value = rollout_values(
        network(), torch.zeros(*shape, 3).double(), torch.zeros(shape[1], 3).double(), active=sleepy
    )
    assert value.shape == next_value.shape == shape


def test_wrong_arguments_are_refused() -> None:
    obs, last = torch.zeros(4, 2, 3).double(), torch.zeros(2, 3).double()
    where = {"final_step": torch.tensor([0]), "final_env": torch.tensor([0])}
    with pytest.raises(errors.ShapeError, match="last_obs: expected 2 rows"):
        rollout_values(network(), obs, last[:1])
    with pytest.raises(errors.ShapeError, match="expected final_step and final_env"):
        rollout_values(network(), obs, last, final_obs=last)
    with pytest.raises(errors.IdError, match="final_env: expected indices from 0 to 1, got 2"):
        rollout_values(network(), obs, last, final_obs=last[:1], **{**where, "final_env": torch.tensor([2])})
    with pytest.raises(errors.ShapeError, match="final_step: expected int64"):
        rollout_values(network(), obs, last, final_obs=last[:1], **{**where, "final_step": torch.tensor([0.0])})
    with pytest.raises(errors.ShapeError, match=r"expected values \(rows,\) or \(rows, 1\), got \(8, 3\)"):
        rollout_values(lambda rows: rows, obs, last)
    with pytest.raises(errors.ConfigError, match="chunk_size: expected at least 1"):
        rollout_values(network(), obs, last, chunk_size=0)
    with pytest.raises(errors.ShapeError, match="active: expected bool"):
        rollout_values(network(), obs, last, active=torch.ones(4, 2))


def test_missing_next_observations_are_replaced_reported_and_counted() -> None:
    obs = torch.arange(12.0).view(4, 3)
    next_obs = obs + 100
    next_obs[1] = math.nan
    next_obs[2, 1] = math.nan
    terminated = torch.tensor([False, True, False, False])
    repaired = repair_next_obs(obs, next_obs, terminated)
    assert isinstance(repaired.next_obs, Tensor)
    assert torch.equal(repaired.next_obs[[1, 2]], obs[[1, 2]])
    assert torch.equal(repaired.next_obs[[0, 3]], next_obs[[0, 3]])
    assert repaired.replaced.tolist() == [False, True, True, False]
    assert repaired.approximate.tolist() == [False, False, True, False]
    assert repaired.approximate_count == 1
    assert next_obs[1].isnan().all()


def test_terminated_rows_of_a_lossy_store_are_exact_and_nothing_is_nan() -> None:
    torch.manual_seed(1)
    net = network()
    obs = torch.randn(5, 3, 3, dtype=torch.float64)
    true_next = torch.randn(5, 3, 3, dtype=torch.float64)
    reward = torch.randn(5, 3, dtype=torch.float64)
    terminated = torch.rand(5, 3) < 0.4
    truncated = torch.zeros_like(terminated)
    lossy = true_next.masked_fill(terminated[..., None], math.nan)
    repaired = repair_next_obs(obs, lossy, terminated)
    assert repaired.approximate_count == 0

    def estimate(next_obs: Tensor) -> Tensor:
        return gae(
            reward, net(obs).squeeze(-1), net(next_obs).squeeze(-1), terminated, truncated, gamma=0.9, lam=0.8
        ).advantage

    assert torch.equal(estimate(repaired.next_obs), estimate(true_next))


def test_data_without_gaps_is_handed_through_untouched() -> None:
    obs = {"policy": torch.randn(4, 3), "camera": torch.zeros(4, 2, 2, dtype=torch.uint8)}
    repaired = repair_next_obs(obs, obs, torch.zeros(4, dtype=torch.bool))
    assert repaired.next_obs is obs
    assert repaired.approximate_count == 0


def test_a_gap_in_one_group_replaces_the_row_in_every_group() -> None:
    obs = {"policy": torch.zeros(2, 3), "camera": torch.zeros(2, 2, dtype=torch.uint8)}
    next_obs = {"policy": torch.tensor([[1.0, 1, 1], [1, math.nan, 1]]), "camera": torch.ones(2, 2, dtype=torch.uint8)}
    repaired = repair_next_obs(obs, next_obs, torch.zeros(2, dtype=torch.bool))
    assert isinstance(repaired.next_obs, dict)
    assert repaired.next_obs["camera"].tolist() == [[1, 1], [0, 0]]


def test_a_row_whose_own_observation_is_nan_is_refused() -> None:
    gap = torch.full((2, 3), math.nan)
    with pytest.raises(errors.DataError, match="2 rows are not finite"):
        repair_next_obs(gap, gap, torch.ones(2, dtype=torch.bool))
    with pytest.raises(errors.DtypeError, match=r"terminated: expected torch.bool"):
        repair_next_obs(gap, gap, torch.ones(2))
    with pytest.raises(errors.ShapeError, match="next_obs: expected leading axes"):
        repair_next_obs(gap, gap[:1], torch.ones(2, dtype=torch.bool))


def test_next_observations_are_repaired_in_groups_of_a_tensordict_with_flags_of_one_column():
    nan, inf = float("nan"), float("inf")
    obs = TensorDict({"a": torch.zeros(3, 2), "deep": {"b": torch.ones(3, 1)}}, [3])
    following = TensorDict(
        {"a": torch.tensor([[1.0, 1], [nan, 1], [1, inf]]), "deep": {"b": torch.full((3, 1), 5.0)}}, [3]
    )
    repaired = repair_next_obs(obs, following, torch.tensor([[False], [True], [False]]))
    assert repaired.replaced.tolist() == [False, True, True]
    assert repaired.approximate.tolist() == [False, False, True]
    assert repaired.next_obs["a"].tolist() == [[1, 1], [0, 0], [0, 0]]
    assert repaired.next_obs["deep/b"].flatten().tolist() == [5, 1, 1]


def test_values_of_a_compact_batch_come_of_one_shifted_forward():
    rows = torch.arange(8.0).view(2, 4, 1)
    done = torch.tensor([[False, True, False, False], [False, False, False, False]])
    joined = torch.tensor([[True, True, True, True], [True, False, True, True]])
    calls = []

    def network(given):
        calls.append(len(given))
        return given[:, 0] * 10

    values = compact_values(network, rows, done, joined)
    assert calls == [8]
    assert values.value.tolist() == [[0, 10, 20, 30], [40, 50, 60, 70]]
    assert values.next_value.tolist() == [[10, 10, 30, 30], [50, 50, 70, 70]]
