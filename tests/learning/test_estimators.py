"""Every estimator against a per-trajectory loop written from its definition, not from its recursion."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace import errors
from headrace.learning import Estimate, gae, n_step, td_lambda, vtrace

GAMMA, LAM = 0.9, 0.7
# float64 sums of at most a dozen terms of size 1, added in another order
EXACT = {"rtol": 0.0, "atol": 1e-12}


@dataclass(frozen=True)
class Rollout:
    reward: Tensor
    value: Tensor
    next_value: Tensor
    terminated: Tensor
    truncated: Tensor
    active: Tensor
    log_ratio: Tensor

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.reward, self.value, self.next_value, self.terminated, self.truncated

    def transposed(self) -> Rollout:
        return Rollout(**{name: tensor.T.contiguous() for name, tensor in vars(self).items()})

    def to(self, dtype: torch.dtype) -> Rollout:
        moved = {name: t.to(dtype) if t.is_floating_point() else t for name, t in vars(self).items()}
        return Rollout(**moved)


def make(
    steps: int, envs: int, seed: int, *, terminated: float = 0.2, truncated: float = 0.2, active: float = 0.7
) -> Rollout:
    """Random numbers, next values unrelated to values, NaN wherever nobody may read."""
    random = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(steps, envs, generator=random, dtype=torch.float64)

    def chance(p: float) -> Tensor:
        return torch.rand(steps, envs, generator=random) < p

    live = chance(active)
    ends = chance(terminated)
    cuts = chance(truncated)
    reward, value, next_value, log_ratio = normal(), normal(), normal(), normal()
    next_value[ends] = math.nan
    for tensor in (reward, value, next_value, log_ratio):
        tensor[~live] = math.nan
    return Rollout(reward, value, next_value, ends & live, cuts & live, live, log_ratio)


def trajectories(rollout: Rollout) -> Iterator[tuple[int, list[int]]]:
    """(environment, the active steps of one episode within the rollout, in order)."""
    steps, envs = rollout.reward.shape
    for env in range(envs):
        episode: list[int] = []
        for t in range(steps):
            if not rollout.active[t, env]:
                continue
            episode.append(t)
            if rollout.terminated[t, env] or rollout.truncated[t, env]:
                yield env, episode
                episode = []
        if episode:
            yield env, episode


Lists = list[float]
Definition = Callable[[Lists, Lists, Lists, Lists], tuple[Lists, Lists]]


def oracle(rollout: Rollout, definition: Definition) -> tuple[Tensor, Tensor]:
    """Apply ``definition(r, v, v_next, ratio) -> (advantage, target)`` to every trajectory; v_next is 0 at its end."""
    advantage, target = torch.zeros_like(rollout.reward), torch.zeros_like(rollout.reward)
    for env, ts in trajectories(rollout):
        v_next = [0.0 if rollout.terminated[t, env] else rollout.next_value[t, env].item() for t in ts]
        rows = [rollout.reward[ts, env].tolist(), rollout.value[ts, env].tolist(), v_next]
        a, g = definition(*rows, rollout.log_ratio[ts, env].exp().tolist())
        advantage[ts, env], target[ts, env] = torch.tensor(a, dtype=torch.float64), torch.tensor(g, dtype=torch.float64)
    return advantage, target


def defined_gae(r: Lists, v: Lists, v_next: Lists, _ratio: Lists) -> tuple[Lists, Lists]:
    delta = [r[i] + GAMMA * v_next[i] - v[i] for i in range(len(r))]
    advantage = [math.fsum((GAMMA * LAM) ** (j - i) * delta[j] for j in range(i, len(r))) for i in range(len(r))]
    return advantage, [a + b for a, b in zip(advantage, v, strict=True)]


def n_step_return(r: Lists, v_next: Lists, i: int, n: int) -> float:
    n = min(n, len(r) - i)
    return math.fsum(GAMMA**k * r[i + k] for k in range(n)) + GAMMA**n * v_next[i + n - 1]


def defined_returns(n: int) -> Definition:
    def definition(r: Lists, v: Lists, v_next: Lists, _ratio: Lists) -> tuple[Lists, Lists]:
        target = [n_step_return(r, v_next, i, n) for i in range(len(r))]
        return [g - b for g, b in zip(target, v, strict=True)], target

    return definition


def defined_td_lambda(r: Lists, v: Lists, v_next: Lists, _ratio: Lists) -> tuple[Lists, Lists]:
    target: Lists = []
    for i in range(len(r)):
        longest = len(r) - i
        mixture = [(1 - LAM) * LAM ** (n - 1) * n_step_return(r, v_next, i, n) for n in range(1, longest)]
        target.append(math.fsum(mixture) + LAM ** (longest - 1) * n_step_return(r, v_next, i, longest))
    return [g - b for g, b in zip(target, v, strict=True)], target


def defined_vtrace(r: Lists, v: Lists, v_next: Lists, ratio: Lists) -> tuple[Lists, Lists]:
    rho, c = [min(1.3, x) for x in ratio], [min(0.8, x) for x in ratio]
    steps = len(r)
    target = [
        v[s]
        + math.fsum(
            GAMMA ** (t - s) * math.prod(c[s:t]) * rho[t] * (r[t] + GAMMA * v_next[t] - v[t]) for t in range(s, steps)
        )
        for s in range(steps)
    ]
    # the corrected value of the next state: within an episode its target, with V' in the place of V
    after = [v_next[s] + (target[s + 1] - v[s + 1] if s + 1 < steps else 0.0) for s in range(steps)]
    return [rho[s] * (r[s] + GAMMA * after[s] - v[s]) for s in range(steps)], target


def run(
    name: str, rollout: Rollout, *, active: bool = True, batch_first: bool = False, gamma: float | Tensor = GAMMA
) -> Estimate:
    common = {"gamma": gamma, "active": rollout.active if active else None, "batch_first": batch_first}
    if name == "gae":
        return gae(*rollout.inputs, lam=LAM, **common)
    if name == "td0":
        return n_step(*rollout.inputs, n=1, **common)
    if name == "td_lambda":
        return td_lambda(*rollout.inputs, lam=LAM, **common)
    if name == "monte_carlo":
        return td_lambda(*rollout.inputs, lam=1.0, **common)
    if name == "n_step":
        return n_step(*rollout.inputs, n=3, **common)
    assert name == "vtrace"
    return vtrace(*rollout.inputs, rollout.log_ratio, rho_clip=1.3, c_clip=0.8, **common)


DEFINITIONS: dict[str, Definition] = {
    "gae": defined_gae,
    "td0": defined_returns(1),
    "td_lambda": defined_td_lambda,
    "monte_carlo": defined_returns(10**6),
    "n_step": defined_returns(3),
    "vtrace": defined_vtrace,
}
every_estimator = pytest.mark.parametrize("name", sorted(DEFINITIONS))


def compare(estimate: Estimate, expected: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(estimate.advantage, expected[0], **EXACT)
    torch.testing.assert_close(estimate.value_target, expected[1], **EXACT)


@every_estimator
@settings(deadline=None, max_examples=40)
@given(
    steps=st.integers(0, 12),
    envs=st.integers(0, 70),
    seed=st.integers(0, 2**31),
    chances=st.tuples(*[st.sampled_from([0.0, 0.2, 1.0])] * 2, st.sampled_from([0.0, 0.7, 1.0])),
)
def test_estimator_follows_its_definition(
    name: str, steps: int, envs: int, seed: int, chances: tuple[float, float, float]
) -> None:
    rollout = make(steps, envs, seed, terminated=chances[0], truncated=chances[1], active=chances[2])
    compare(run(name, rollout), oracle(rollout, DEFINITIONS[name]))


@every_estimator
def test_batch_major_is_time_major_transposed(name: str) -> None:
    rollout = make(9, 37, 1)
    time_major = run(name, rollout)
    batch_major = run(name, rollout.transposed(), batch_first=True)
    assert torch.equal(batch_major.advantage, time_major.advantage.T)
    assert torch.equal(batch_major.value_target, time_major.value_target.T)
    assert batch_major.advantage.is_contiguous()


@every_estimator
def test_float32_stays_float32_and_close_to_float64(name: str) -> None:
    rollout = make(12, 300, 2)
    single = run(name, rollout.to(torch.float32))
    assert single.advantage.dtype == single.value_target.dtype == torch.float32
    double = run(name, rollout)
    # a dozen float32 operations on numbers of size up to ten, exp of the ratio among them
    torch.testing.assert_close(single.advantage.double(), double.advantage, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(single.value_target.double(), double.value_target, rtol=1e-5, atol=2e-5)


@every_estimator
def test_ten_suspended_steps_change_nothing(name: str) -> None:
    """An environment that slept gets bit for bit what it would get without the sleep."""
    awake = make(14, 3, 3, active=1.0)
    sleeping = make(24, 3, 4, active=0.0)
    rows = torch.tensor([*range(6), *range(16, 24)])
    for field in vars(awake):
        vars(sleeping)[field][rows] = vars(awake)[field]
    expected, got = run(name, awake), run(name, sleeping)
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours[rows], theirs)
        assert torch.equal(ours[6:16], torch.zeros(10, 3, dtype=torch.float64))


@every_estimator
def test_the_next_episode_never_leaks_over_an_end(name: str) -> None:
    """Whatever follows a termination or truncation, even infinity, leaves the steps before it as they were."""
    rollout = make(10, 2, 5, terminated=0.0, truncated=0.0, active=1.0)
    rollout.terminated[4, 0] = True
    rollout.truncated[4, 1] = True
    before = run(name, rollout)
    rollout.reward[5:] = math.inf
    rollout.value[5:] = -7.0
    after = run(name, rollout)
    assert torch.equal(before.advantage[:5], after.advantage[:5])
    assert torch.equal(before.value_target[:5], after.value_target[:5])


@every_estimator
def test_strided_views_give_what_contiguous_tensors_give(name: str) -> None:
    wide = make(8, 40, 6)
    view = Rollout(**{field: tensor[:, ::4] for field, tensor in vars(wide).items()})
    dense = Rollout(**{field: tensor[:, ::4].contiguous() for field, tensor in vars(wide).items()})
    for ours, theirs in zip(run(name, view), run(name, dense), strict=True):
        assert torch.equal(ours, theirs)


@every_estimator
@pytest.mark.parametrize("gamma", [GAMMA, torch.full((6, 4), GAMMA)])
def test_inputs_are_left_alone_and_results_carry_no_gradient(name: str, gamma: float | Tensor) -> None:
    rollout = make(6, 4, 7)
    rollout.value.requires_grad_()
    kept = {field: tensor.detach().clone() for field, tensor in vars(rollout).items()}
    estimate = run(name, rollout, gamma=gamma)
    assert not estimate.advantage.requires_grad
    assert not estimate.value_target.requires_grad
    for field, tensor in vars(rollout).items():
        torch.testing.assert_close(tensor.detach(), kept[field], rtol=0, atol=0, equal_nan=True)


@every_estimator
def test_a_single_terminated_step_is_its_reward(name: str) -> None:
    rollout = make(1, 1, 8, terminated=1.0, truncated=0.0, active=1.0)
    estimate = run(name, rollout)
    rho = min(1.3, rollout.log_ratio.exp().item()) if name == "vtrace" else 1.0
    advantage = rho * (rollout.reward - rollout.value).item()
    assert estimate.advantage.item() == pytest.approx(advantage, abs=1e-12)
    assert estimate.value_target.item() == pytest.approx(rollout.value.item() + advantage, abs=1e-12)


@every_estimator
@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0)])
def test_empty_rollouts_give_empty_estimates(name: str, shape: tuple[int, int]) -> None:
    estimate = run(name, make(*shape, 9))
    assert estimate.advantage.shape == estimate.value_target.shape == shape


def test_n_step_longer_than_the_rollout_is_monte_carlo() -> None:
    rollout = make(9, 5, 10)
    long = n_step(*rollout.inputs, gamma=GAMMA, n=1000, active=rollout.active)
    compare(td_lambda(*rollout.inputs, lam=1.0, gamma=GAMMA, active=rollout.active), long)


def test_gae_and_td_lambda_agree_where_next_values_are_the_values_that_follow() -> None:
    rollout = make(9, 5, 11, active=1.0)
    within = ~(rollout.terminated | rollout.truncated)[:-1]
    rollout.next_value[:-1][within] = rollout.value[1:][within]
    one = gae(*rollout.inputs, gamma=GAMMA, lam=LAM)
    other = td_lambda(*rollout.inputs, gamma=GAMMA, lam=LAM)
    compare(one, other)


def test_monte_carlo_reads_next_values_only_where_a_trajectory_is_cut() -> None:
    rollout = make(9, 5, 12, active=1.0)
    expected = td_lambda(*rollout.inputs, lam=1.0, gamma=GAMMA)
    rollout.next_value[:-1][~rollout.truncated[:-1]] = math.nan
    compare(td_lambda(*rollout.inputs, lam=1.0, gamma=GAMMA), expected)


@every_estimator
@pytest.mark.parametrize("active", [True, False])
def test_a_missing_next_value_of_a_cut_trajectory_is_the_value_of_the_step_and_reaches_nothing_else(
    name: str, active: bool
) -> None:
    """As in a compact store, which has no observation after the last step of a trajectory."""
    rollout = make(12, 40, 17, active=0.7 if active else 1.0)
    repaired = make(12, 40, 17, active=0.7 if active else 1.0)
    for env, steps in trajectories(rollout):
        rollout.next_value[steps[-1], env] = math.nan
        repaired.next_value[steps[-1], env] = repaired.value[steps[-1], env]
    estimate = run(name, rollout, active=active)
    assert estimate.advantage.isfinite().all()
    compare(estimate, run(name, repaired, active=active))


def test_vtrace_on_policy_is_monte_carlo() -> None:
    rollout = make(9, 5, 13, active=1.0)
    within = ~(rollout.terminated | rollout.truncated)[:-1]
    rollout.next_value[:-1][within] = rollout.value[1:][within]
    estimate = vtrace(*rollout.inputs, torch.zeros_like(rollout.reward), gamma=GAMMA)
    expected = td_lambda(*rollout.inputs, lam=1.0, gamma=GAMMA)
    torch.testing.assert_close(estimate.value_target, expected.value_target, **EXACT)


@pytest.mark.parametrize("field", ["value", "next_value", "terminated", "truncated", "active", "log_ratio"])
def test_a_stray_trailing_dimension_is_refused_with_the_cure(field: str) -> None:
    rollout = make(4, 3, 14)
    vars(rollout)[field] = vars(rollout)[field].unsqueeze(-1)
    with pytest.raises(errors.ShapeError, match=rf"{field}: expected \(4, 3\).*got \(4, 3, 1\).*squeeze"):
        run("vtrace", rollout)


@pytest.mark.parametrize("field", ["terminated", "truncated", "active"])
def test_flags_that_are_not_bool_are_refused(field: str) -> None:
    rollout = make(4, 3, 15)
    vars(rollout)[field] = vars(rollout)[field].long()
    with pytest.raises(errors.DtypeError, match=rf"{field}: expected torch.bool, got torch.int64"):
        run("gae", rollout)


def test_mismatched_inputs_are_refused() -> None:
    rollout = make(4, 3, 16, active=1.0)
    r, v, v_next, terminated, truncated = rollout.inputs
    with pytest.raises(errors.ShapeError, match=r"reward: expected \(T, N\), got \(4, 3, 1\)"):
        gae(r[..., None], v, v_next, terminated, truncated, gamma=0.9, lam=0.9)
    with pytest.raises(errors.ShapeError, match=r"value: expected \(4, 3\).*got \(3, 4\)"):
        gae(r, v.T, v_next, terminated, truncated, gamma=0.9, lam=0.9)
    with pytest.raises(errors.DtypeError, match=r"value: expected torch.float64.*got torch.float32"):
        gae(r, v.float(), v_next, terminated, truncated, gamma=0.9, lam=0.9)
    with pytest.raises(errors.DtypeError, match=r"reward: expected float32 or float64, got torch.int64"):
        gae(terminated.long(), v, v_next, terminated, truncated, gamma=0.9, lam=0.9)


def test_numbers_out_of_range_are_refused() -> None:
    rollout = make(4, 3, 17)
    with pytest.raises(errors.ConfigError, match=r"gamma: expected a number from 0 to 1, got 1.5"):
        gae(*rollout.inputs, gamma=1.5, lam=0.9)
    with pytest.raises(errors.ConfigError, match=r"lam: expected a number from 0 to 1, got -0.1"):
        td_lambda(*rollout.inputs, gamma=0.9, lam=-0.1)
    with pytest.raises(errors.ConfigError, match=r"n: expected at least 1"):
        n_step(*rollout.inputs, gamma=0.9, n=0)
    with pytest.raises(errors.ConfigError, match=r"rho_clip"):
        vtrace(*rollout.inputs, rollout.log_ratio, gamma=0.9, rho_clip=0.0)


@every_estimator
@pytest.mark.parametrize("batch_first", [False, True])
def test_equal_discounts_of_all_steps_are_one_discount_whatever_suspended_steps_hold(
    name: str, batch_first: bool
) -> None:
    rollout = make(9, 5, 19)
    gamma = torch.full((9, 5), GAMMA).masked_fill(~rollout.active, math.nan).double()
    gamma[rollout.active] = GAMMA
    given = rollout.transposed() if batch_first else rollout
    estimate = run(name, given, batch_first=batch_first, gamma=gamma.T if batch_first else gamma)
    expected = run(name, given, batch_first=batch_first)
    compare(estimate, (expected.advantage, expected.value_target))


@pytest.mark.parametrize("n", [1, 2, 3, 9])
def test_every_step_is_discounted_by_its_own_number(n: int) -> None:
    r, v, v_next, gamma = torch.rand(4, 6, 1, generator=torch.Generator().manual_seed(20), dtype=torch.float64)
    terminated, truncated = torch.zeros(2, 6, 1, dtype=torch.bool)
    terminated[3], truncated[1] = True, True
    expected = []
    for t in range(6):
        last = min(t + n - 1, next(end for end in (1, 3, 5) if end >= t))
        total = 0.0 if last == 3 else v_next[last].item()
        for step in range(last, t - 1, -1):
            total = r[step].item() + gamma[step].item() * total
        expected.append(total)
    target = n_step(r, v, v_next, terminated, truncated, gamma=gamma, n=n).value_target
    assert target.flatten().tolist() == pytest.approx(expected, abs=1e-12)
    if n == 9:
        whole = td_lambda(r, v, v_next, terminated, truncated, gamma=gamma, lam=1.0)
        assert torch.allclose(whole.value_target, target)
    ratio = torch.zeros_like(r)
    corrected = vtrace(r, v, v_next, terminated, truncated, ratio, gamma=gamma)
    plain = gae(r, v, v_next, terminated, truncated, gamma=gamma, lam=1.0)
    assert torch.allclose(corrected.value_target, plain.value_target), "on policy V-trace is GAE with λ = 1"


@pytest.mark.parametrize("batch_first", [False, True])
def test_every_step_has_a_lambda_of_its_own(batch_first: bool) -> None:
    """Against the recursions as they are written, an environment at a time, over its active steps."""
    rollout = make(9, 5, 21)
    lam = torch.rand(9, 5, generator=torch.Generator().manual_seed(22), dtype=torch.float64).round(decimals=1)
    lam[2:5] = 1.0  # V' is not read there within an episode
    given = rollout.transposed() if batch_first else rollout
    lam_given = lam.masked_fill(~rollout.active, math.nan)
    common = {"gamma": GAMMA, "active": given.active, "batch_first": batch_first}
    lam_given = lam_given.T if batch_first else lam_given
    for base, estimator in ((1, gae), (0, td_lambda)):
        target = estimator(*given.inputs, lam=lam_given, **common).value_target
        expected = torch.zeros_like(rollout.reward)
        for e in range(5):
            carry, last = 0.0, True
            for t in rollout.active[:, e].nonzero().flatten().flip(0).tolist():
                r, v, after = (float(x[t, e]) for x in rollout.inputs[:3])
                ended, cut = bool(rollout.inputs[3][t, e]), bool(rollout.inputs[4][t, e]) or last
                following, after = (0.0 if ended or cut else carry), (0.0 if ended else after)
                weight = 1.0 if base or cut else 1 - float(lam[t, e])
                ahead = r + (GAMMA * weight * after if weight else 0.0) - base * v
                carry, last = ahead + GAMMA * float(lam[t, e]) * following, False
                expected[t, e] = carry + base * v
        torch.testing.assert_close(target.T if batch_first else target, expected)


def test_discounts_of_another_shape_or_out_of_range_are_refused() -> None:
    rollout = make(4, 3, 17, active=1.0)
    with pytest.raises(errors.ShapeError, match=r"gamma: expected \(4, 3\)"):
        gae(*rollout.inputs, gamma=torch.full((3,), 0.9), lam=0.9)
    with pytest.raises(errors.ShapeError, match=r"lam: expected \(4, 3\)"):
        gae(*rollout.inputs, gamma=0.9, lam=torch.full((3, 4), 0.9))
    with pytest.raises(errors.ConfigError, match="lam: expected numbers from 0 to 1, got 12 that are not"):
        td_lambda(*rollout.inputs, gamma=0.9, lam=torch.full((4, 3), 1.1))
    for wrong in (1.5, -0.1, math.nan):
        gamma = torch.full((4, 3), 0.9).index_put((torch.tensor(2), torch.tensor(1)), torch.tensor(wrong))
        with pytest.raises(errors.ConfigError, match="gamma: expected numbers from 0 to 1, got 1 that are not"):
            gae(*rollout.inputs, gamma=gamma, lam=0.9)
    one, other = (gae(*rollout.inputs, gamma=gamma, lam=0.9) for gamma in (0.5, torch.tensor(0.5)))
    assert torch.equal(one.advantage, other.advantage)
