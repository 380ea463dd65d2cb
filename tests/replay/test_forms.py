"""The compact and delta forms: what they keep, what they lose, what they refuse."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from headrace.errors import ConfigError, DataError, DtypeError
from headrace.replay.forms import drop_next, from_delta, reconstruct_next, to_delta


def batch_of(ids, counts, done=None, dtype=torch.float32) -> TensorDict:
    """Observations are 100 · trajectory + step; the next observation is one more."""
    ids, counts = torch.tensor(ids), torch.tensor(counts)
    obs = (100 * ids + counts)[..., None].to(dtype)
    flags = torch.zeros(*ids.shape, 1, dtype=torch.bool) if done is None else torch.tensor(done)[..., None]
    return TensorDict(
        {
            "observation": obs,
            "action": torch.zeros(*ids.shape, 2),
            "step_count": counts[..., None],
            "collector": {"traj_ids": ids},
            "next": {
                "observation": obs + 1,
                "reward": torch.ones(*ids.shape, 1),
                "done": flags,
                "terminated": flags,
                "truncated": torch.zeros_like(flags),
            },
        },
        batch_size=ids.shape,
    )


def nexts(batch):
    return [None if math.isnan(x) else x for x in batch["next", "observation"].flatten().tolist()]


def test_dropping_keeps_reward_and_flags():
    full = batch_of([0, 0], [0, 1])
    small = drop_next(full)
    assert set(small["next"].keys()) == {"reward", "done", "terminated", "truncated"}
    assert ("next", "observation") in full.keys(True)
    assert small["observation"] is full["observation"]


def test_next_observations_come_back_where_the_next_entry_is_the_next_step():
    small = drop_next(batch_of([1, 1, 1, 2, 2], [0, 1, 2, 0, 1]))
    assert nexts(reconstruct_next(small)) == [101, 102, None, 201, None]


def test_done_ends_a_trajectory_even_where_the_id_goes_on():
    small = drop_next(batch_of([1, 1, 1], [0, 1, 2], done=[False, True, False]))
    assert nexts(reconstruct_next(small)) == [101, None, None]


def test_adjacent_slices_of_one_trajectory_are_not_joined():
    small = drop_next(batch_of([1, 1, 1, 1], [0, 1, 5, 6]))
    assert nexts(reconstruct_next(small)) == [101, None, 106, None]
    # nor are two that overlap
    assert nexts(reconstruct_next(drop_next(batch_of([1, 1, 1, 1], [0, 1, 1, 2])))) == [101, None, 102, None]


def test_time_is_the_last_batch_axis():
    small = drop_next(batch_of([[1, 1], [2, 2]], [[0, 1], [4, 5]]))
    assert nexts(reconstruct_next(small)) == [101, None, 205, None]


def test_pictures_need_a_fill_value():
    small = drop_next(batch_of([1, 1], [0, 1], dtype=torch.uint8))
    with pytest.raises(DtypeError, match="whole number"):
        reconstruct_next(small)
    assert reconstruct_next(small, fill_value=7)["next", "observation"].flatten().tolist() == [101, 7]


def test_groups_are_filled_each():
    small = drop_next(batch_of([1, 1], [0, 1]))
    small["observation"] = TensorDict({"a": small["observation"], "b": small["observation"] * 2}, [2])
    back = reconstruct_next(small, fill_value=-1)
    assert back["next", "observation", "a"].flatten().tolist() == [101, -1]
    assert back["next", "observation", "b"].flatten().tolist() == [202, -1]


def test_forms_that_cannot_give_n_steps_refuse_with_the_reason():
    full = batch_of([1, 1], [0, 1])
    with pytest.raises(ConfigError, match="rarely in the batch"):
        reconstruct_next(drop_next(full), n_step=3)
    with pytest.raises(ConfigError, match="steps between"):
        from_delta(to_delta(full), n_step=2)
    with pytest.raises(DataError, match="step_count"):
        reconstruct_next(drop_next(full).exclude("step_count"))
    with pytest.raises(DataError, match="to_delta"):
        from_delta(drop_next(full))


floats = st.floats(-1000, 1000, width=32)


def spacing(value: torch.Tensor) -> torch.Tensor:
    """Distance between numbers of this dtype at |value|, float64: 2^exponent · eps."""
    info = torch.finfo(value.dtype)
    _, exponent = torch.frexp(value.abs().double().clamp(min=info.smallest_normal))
    return torch.ldexp(torch.full(value.shape, info.eps, dtype=torch.float64), exponent - 1)


def error_bound(obs: torch.Tensor, following: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Three roundings to nearest, each by at most half a unit in the last place: of the difference, small, the sum."""
    difference = following - obs
    small = difference.to(dtype)
    return 0.5 * (spacing(difference) + spacing(small) + spacing(obs + small.to(obs.dtype)))


@settings(deadline=None, max_examples=200)
@given(
    pairs=st.lists(st.tuples(floats, floats), min_size=1, max_size=20),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
)
def test_the_error_of_a_delta_never_passes_its_bound(pairs, dtype):
    obs, following = (torch.tensor([pair[k] for pair in pairs])[:, None] for k in (0, 1))
    full = batch_of([1] * len(pairs), [0] * len(pairs))
    full["observation"], full["next", "observation"] = obs, following
    restored = from_delta(to_delta(full, delta_dtype=dtype))["next", "observation"]
    error = (restored.double() - following.double()).abs()
    bound = error_bound(obs, following, dtype)
    assert (error <= bound).all()
    # and the bound is no idle one: below a thousandth (2⁻¹⁰ and 2⁻⁷ are the steps of the two) of the numbers involved
    scale = (following - obs).double().abs() + restored.double().abs() * 2**-10 + 2.0**-14
    assert (bound <= scale * torch.finfo(dtype).eps).all()


def test_pictures_are_exact_in_int16_and_refused_in_anything_else():
    full = batch_of([0] * 4, [0, 1, 2, 3], dtype=torch.uint8)
    full["observation"] = torch.tensor([[0], [255], [7], [200]], dtype=torch.uint8)
    full["next", "observation"] = torch.tensor([[255], [0], [7], [199]], dtype=torch.uint8)
    small = to_delta(full, delta_dtype=torch.int16)
    assert small["next", "delta"].flatten().tolist() == [255, -255, 0, -1]
    assert ("next", "observation") not in small.keys(True)
    assert torch.equal(from_delta(small)["next", "observation"], full["next", "observation"])
    with pytest.raises(DtypeError, match="int16"):
        to_delta(full)


def test_groups_may_have_deltas_of_their_own_dtype():
    full = batch_of([0, 0], [0, 1])
    picture = torch.tensor([[3], [4]], dtype=torch.uint8)
    full["observation"] = TensorDict({"state": full["observation"], "cam": picture}, [2])
    full["next", "observation"] = TensorDict({"state": full["next", "observation"], "cam": picture + 9}, [2])
    small = to_delta(full, delta_dtype={"cam": torch.int16})
    assert small["next", "delta", "state"].dtype == torch.float16
    assert (from_delta(small)["next", "observation"] == full["next", "observation"]).all()


def test_what_is_nested_in_a_group_has_the_dtype_of_the_group():
    full = batch_of([0, 0], [0, 1])
    pictures = {"left": torch.tensor([[3], [4]], dtype=torch.uint8), "right": torch.zeros((2, 1), dtype=torch.uint8)}
    full["observation"] = TensorDict({"state": full["observation"], "cam": pictures}, [2])
    full["next", "observation"] = full["observation"].apply(lambda values: values + 9)
    small = to_delta(full, delta_dtype={"cam": torch.int16})
    assert small["next", "delta", "cam", "left"].dtype == torch.int16
    assert (from_delta(small)["next", "observation"] == full["next", "observation"]).all()
    with pytest.raises(DtypeError, match="'cam/left' is uint8"):
        to_delta(full, delta_dtype={"left": torch.int16})


def test_changes_too_large_for_the_delta_are_refused():
    full = batch_of([0], [0])
    full["next", "observation"] = torch.tensor([[1e6]])
    with pytest.raises(DtypeError, match="more than"):
        to_delta(full)
