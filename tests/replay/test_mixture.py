"""Batches of several stores in given shares."""

from __future__ import annotations

import pytest
import torch

from headrace.errors import ConfigError, DataError, LifecycleError, ShapeError
from headrace.replay import ArraySpec, Mixture, PrioritizedSampler, ReplayBuffer, SliceSampler
from headrace.types import Step


def filled(offset: float, steps: int = 60, **settings) -> ReplayBuffer:
    """A store whose observations are ``offset`` + step, the next ones one more."""
    buffer = ReplayBuffer(64, 1, ArraySpec((2,), torch.float32), ArraySpec((1,), torch.float32), **settings)
    flag = torch.zeros(1, dtype=torch.bool)
    for t in range(steps):
        obs, following = (torch.full((1, 2), offset + t + k) for k in (0, 1))
        buffer.extend(obs, obs[:, :1].clone(), Step(following, torch.tensor([offset]), flag, flag, {}))
    return buffer


def test_rows_say_their_part_and_are_the_transitions_of_it() -> None:
    parts = [filled(0.0), filled(1000.0, n_step=1, seed=3)]
    batch = Mixture(parts).sample(32)
    assert batch["origin"].tolist() == [0] * 16 + [1] * 16
    for number, part in enumerate(parts):
        rows = batch[batch["origin"] == number]
        stored = part.get(rows["index"])
        for key in stored.keys(include_nested=True, leaves_only=True):
            assert torch.equal(rows[key], stored[key]), key


@pytest.mark.parametrize("weights", [(1, 2), (0.5, 0.5), (1, 0), (0.05, 0.95), (1, 1)])
def test_numbers_of_rows_are_exact_over_time(weights: tuple[float, float]) -> None:
    mixture = Mixture([filled(0.0), filled(1000.0)], weights)
    share, drawn = weights[1] / sum(weights), 0
    for draw in range(1, 60):
        batch = mixture.sample(7)
        assert batch.batch_size == (7,)
        drawn += int(batch["origin"].sum())
        assert abs(drawn - share * 7 * draw) < 1


def test_annealed_weights_move_linearly_and_stay() -> None:
    mixture = Mixture([filled(0.0), filled(1000.0)], (1, 0), anneal=((0, 3), 10))
    shares = []
    for _ in range(14):
        shares.append(mixture.weights[1])
        assert abs(int(mixture.sample(40)["origin"].sum()) - 40 * shares[-1]) < 2
    assert shares[:11] == pytest.approx([k / 10 for k in range(11)])
    assert shares[11:] == [1.0] * 3


def test_three_parts_that_fade_give_full_batches() -> None:
    mixture = Mixture([filled(0.0), filled(10.0), filled(20.0)], (3, 2, 1), anneal=((0, 0, 1), 5))
    for _ in range(12):
        assert mixture.sample(5).batch_size == (5,)
    assert mixture.sample(5)["origin"].tolist() == [2] * 5


def test_a_mixture_goes_on_from_its_state() -> None:
    one, other = (Mixture([filled(0.0), filled(9.0)], (1, 2), anneal=((1, 0), 20)) for _ in range(2))
    for _ in range(7):
        one.sample(5)
    other.load_state_dict(one.state_dict())
    assert other.weights == one.weights
    assert torch.equal(other.sample(5)["origin"], one.sample(5)["origin"])
    with pytest.raises(DataError, match="2 parts"):
        other.load_state_dict({"draws": 1, "owed": [0.0]})


def test_priorities_reach_the_part_they_belong_to() -> None:
    uniform, favored = filled(0.0), filled(1000.0, sampler=PrioritizedSampler(alpha=1.0))
    mixture = Mixture([uniform, favored])
    batch = mixture.sample(20)
    assert batch["_weight"].tolist() == [1.0] * 20  # uniform rows, and priorities that are all the same
    index = favored.indices()
    mixture.update_priorities(index, torch.where(index == 5, 1e6, 1e-6), torch.ones_like(index))
    drawn = mixture.sample(40)
    assert set(drawn["index"][drawn["origin"] == 1].tolist()) == {5}
    assert len(set(drawn["index"][drawn["origin"] == 0].tolist())) > 5
    with pytest.raises(ShapeError, match="origin"):
        mixture.update_priorities(index, torch.ones(index.shape))


def test_what_does_not_fit_together_is_refused() -> None:
    plain = filled(0.0)
    with pytest.raises(ShapeError, match=r"differ in .*gamma"):
        Mixture([plain, filled(0.0, n_step=3)]).sample(4)
    slices = [filled(0.0, sampler=SliceSampler(length)) for length in (2, 3)]
    with pytest.raises(ShapeError, match=r"differ in .*2.*3"):
        Mixture(slices).sample(4)
    with pytest.raises(LifecycleError, match=r"part 1 of the mixture: .*extend"):
        Mixture([plain, filled(0.0, steps=0)]).sample(4)
    assert Mixture([plain, filled(0.0, steps=0)], (1, 0)).sample(4).batch_size == (4,)
    for weights in [(1,), (1, -1), (0, 0), (1, float("nan"))]:
        with pytest.raises(ConfigError, match="weights: expected 2"):
            Mixture([plain, plain], weights)
    with pytest.raises(ConfigError, match="at least one part"):
        Mixture([])


def test_runs_of_equal_length_are_mixed() -> None:
    mixture = Mixture([filled(0.0, sampler=SliceSampler(4)), filled(500.0, sampler=SliceSampler(4))])
    batch = mixture.sample(6)
    assert batch.batch_size == (6, 4)
    assert batch["origin"].tolist() == [[0] * 4] * 3 + [[1] * 4] * 3
