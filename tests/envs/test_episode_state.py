"""The fused bookkeeping of a step against its reference in torch operations."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.envs._episode_state import EpisodeState

CPU = torch.device("cpu")


def _episodes(num_envs: int, seed: int, *, fused: bool = True) -> EpisodeState:
    generator = torch.Generator().manual_seed(seed)
    slots = EpisodeState(num_envs, CPU, {"x": (2,)})
    slots.episode_ids.copy_(torch.randint(0, 1000, (num_envs,), generator=generator))
    slots.next_ids.copy_(torch.randint(0, 1000, (num_envs,), generator=generator))
    slots.steps.copy_(torch.randint(0, 6, (num_envs,), generator=generator))
    slots.returns.copy_(torch.rand(num_envs, generator=generator, dtype=torch.float64))
    slots.memory["x"].fill_(7.0)
    slots._fused = fused
    return slots


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_a_step_is_judged_as_in_plain_torch(data: st.DataObject) -> None:
    num_envs = data.draw(st.integers(1, 9))
    seed = data.draw(st.integers(0, 1000))
    ids = torch.tensor(sorted(data.draw(st.sets(st.integers(0, num_envs - 1)))), dtype=torch.int64)
    everyone = len(ids) == num_envs
    generator = torch.Generator().manual_seed(seed)
    reward = torch.rand(len(ids), generator=generator, dtype=torch.float64)
    terminated = torch.rand(len(ids), generator=generator) < 0.4
    diverged = (torch.rand(len(ids), generator=generator) < 0.3) if data.draw(st.booleans()) else None
    truncated = (torch.rand(len(ids), generator=generator) < 0.3) if data.draw(st.booleans()) else None

    fused, plain = _episodes(num_envs, seed), _episodes(num_envs, seed, fused=False)
    got = fused.finish(None if everyone else ids, reward, terminated, diverged, limit=4, truncated=truncated)
    expected = plain.finish(ids, reward, terminated, diverged, limit=4, truncated=truncated)
    for name in ("reward", "terminated", "truncated", "ended"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    assert torch.equal(fused.returns, plain.returns)


@settings(deadline=None, max_examples=50)
@given(num_envs=st.integers(1, 9), seed=st.integers(0, 1000), explicit=st.booleans())
def test_episodes_begin_as_in_plain_torch_and_memory_is_cleared(num_envs: int, seed: int, explicit: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = (torch.rand(num_envs, generator=generator) < 0.5).nonzero().squeeze(1)
    chosen = torch.randint(0, 99, (len(ids),), generator=generator) if explicit else None
    if not len(ids):
        chosen = None
    fused, plain = _episodes(num_envs, seed), _episodes(num_envs, seed, fused=False)
    fused.begin(ids, chosen)
    plain.begin(ids, chosen)
    for name in ("episode_ids", "next_ids", "steps", "returns"):
        assert torch.equal(fused.tensors()[name], plain.tensors()[name]), name
    assert bool((fused.memory["x"][ids] == 0).all())
    assert torch.equal(fused.memory["x"], plain.memory["x"])


def test_the_record_of_ended_episodes_matches_the_scattered_totals() -> None:
    slots = _episodes(5, 3)
    ids = torch.tensor([1, 4])
    ends, totals, mask = slots.ends(ids, torch.tensor([True, True]), torch.tensor([False, True]))
    assert mask.tolist() == [False, True, False, False, True]
    assert torch.equal(totals["r"][ids], ends.returns)
    assert torch.equal(totals["l"][ids], ends.lengths)
    assert totals["r"][0] == 0
    assert ends.success is not None
    assert ends.success.tolist() == [True, False], "a diverged episode is never a success"
    plain, all_totals, same_mask = _episodes(5, 3, fused=False).ends(ids, None, None)
    assert torch.equal(plain.returns, ends.returns)
    assert torch.equal(plain.lengths, ends.lengths)
    assert torch.equal(plain.episode_ids, ends.episode_ids)
    assert torch.equal(all_totals["r"], totals["r"])
    assert torch.equal(all_totals["l"], totals["l"])
    assert torch.equal(same_mask, mask)
