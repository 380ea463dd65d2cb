"""The replay buffer's manners: refusals, aliasing, threads, priorities, identities."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_reference import NaiveStore, Stream

from headrace.errors import ConfigError, DtypeError, IdError, LifecycleError, ShapeError
from headrace.replay import ArraySpec, PrioritizedSampler, ReplayBuffer, SliceSampler, TrajectorySampler
from headrace.replay._blocks import Allocator
from headrace.replay._priorities import SumTree
from headrace.types import StackSpec, Step

INT = ArraySpec((), torch.int64)


def counting(num_envs: int, at: int) -> torch.Tensor:
    """The value of environment e at step t is 1000·e + t."""
    return torch.arange(num_envs) * 1000 + at


def step_to(obs, *, done=None, final=None, reward=None):
    n = obs.shape[0]
    no = torch.zeros(n, dtype=torch.bool)
    info = {} if done is None else {"final_obs": final, "_final_obs": done}
    reward = torch.arange(n, dtype=torch.float32) if reward is None else reward
    return Step({"policy": obs}, reward, no if done is None else done, no, info)


def filled(steps=6, num_envs=2, capacity=20, **settings) -> ReplayBuffer:
    buffer = ReplayBuffer(capacity, num_envs, INT, INT, **settings)
    for t in range(steps):
        buffer.extend(counting(num_envs, t), counting(num_envs, t), step_to(counting(num_envs, t + 1)))
    return buffer


def test_keys_and_shapes_are_those_known_from_torchrl():
    space = spaces.Dict({"policy": spaces.Box(-1, 1, (3,), np.float32), "image": spaces.Box(0, 255, (2, 5), np.uint8)})
    buffer = ReplayBuffer(20, 2, space, spaces.Box(-1, 1, (4,), np.float32), n_step=2)
    obs = {"policy": torch.zeros(2, 3), "image": torch.zeros(2, 2, 5, dtype=torch.uint8)}
    no = torch.zeros(2, dtype=torch.bool)
    for _ in range(4):
        buffer.extend(obs, torch.zeros(2, 4), Step(obs, torch.zeros(2), no, no, {}))
    batch = buffer.sample(5)
    assert {key: tuple(batch[key].shape) for key in batch.keys(True, True)} == {
        ("observation", "policy"): (5, 3),
        ("observation", "image"): (5, 2, 5),
        "action": (5, 4),
        ("next", "observation", "policy"): (5, 3),
        ("next", "observation", "image"): (5, 2, 5),
        ("next", "reward"): (5, 1),
        ("next", "done"): (5, 1),
        ("next", "terminated"): (5, 1),
        ("next", "truncated"): (5, 1),
        ("next", "cut"): (5, 1),
        ("collector", "traj_ids"): (5,),
        "index": (5,),
        "step_count": (5, 1),
        "steps_to_next_obs": (5, 1),
        "gamma": (5, 1),
    }
    assert batch[1:3].clone().batch_size == (2,)


def test_observation_and_next_share_memory_and_a_clone_does_not():
    stack = StackSpec(frames=3, dim=0)
    buffer = ReplayBuffer(20, 1, ArraySpec((3,), torch.int64), INT, stack=stack)
    obs = torch.zeros(1, 3, dtype=torch.int64)
    for t in range(8):
        following = torch.cat([obs[:, 1:], torch.tensor([[t + 1]])], 1)
        buffer.extend(obs, torch.zeros(1, dtype=torch.int64), step_to(following))
        obs = following
    batch = buffer.get(torch.tensor([4]))
    copy = batch.clone()
    assert batch["observation"].tolist() == [[2, 3, 4]]
    batch["observation"][0, 1] = -7
    assert batch["next", "observation"].tolist() == [[-7, 4, 5]]
    assert copy["next", "observation"].tolist() == [[3, 4, 5]]
    # the store itself is never aliased
    assert buffer.get(torch.tensor([4]))["observation"].tolist() == [[2, 3, 4]]


def test_a_held_sample_is_never_overwritten_and_a_dropped_one_gives_its_memory_back():
    buffer = ReplayBuffer(2000, 2, ArraySpec((50, 50), torch.float32), INT)
    obs = torch.zeros(2, 50, 50)
    for t in range(100):
        following = torch.full_like(obs, t + 1)
        buffer.extend(obs, torch.zeros(2, dtype=torch.int64), step_to(following))
        obs = following
    held = buffer.sample(64)["observation"][3]
    before = held.clone()
    addresses = {buffer.sample(64)["observation"].data_ptr() for _ in range(50)}
    assert torch.equal(held, before)
    assert held.untyped_storage().data_ptr() not in addresses
    assert len(addresses) == 1


def test_the_k_th_sample_is_a_function_of_seed_and_content():
    one, two, other = filled(seed=1), filled(seed=1), filled(seed=2)
    first = [one.sample(8)["index"].tolist() for _ in range(5)]
    assert first == [two.sample(8)["index"].tolist() for _ in range(5)]
    assert first != [other.sample(8)["index"].tolist() for _ in range(5)]


def unchanged(buffer: ReplayBuffer, call, error, match: str) -> None:
    before = buffer.get(buffer.indices()).clone() if len(buffer) else None
    with pytest.raises(error, match=match):
        call()
    if before is None:
        assert len(buffer) == 0
    else:
        assert (buffer.get(buffer.indices()) == before).all()
    buffer.extend(counting(2, 6), counting(2, 6), step_to(counting(2, 7)))


def test_bad_input_is_refused_and_changes_nothing():
    at, to = counting(2, 6), counting(2, 7)
    done = torch.tensor([True, False])
    cases = [
        (lambda b: b.extend(at[:1], at, step_to(to)), ShapeError, r"obs: expected \(2,\), got \(1,\)"),
        (lambda b: b.extend(at.int(), at, step_to(to)), DtypeError, "expected torch.int64, got torch.int32"),
        (lambda b: b.extend({"a": at, "b": at}, at, step_to(to)), DtypeError, "expected a torch tensor"),
        (lambda b: b.extend(at.numpy(), at, step_to(to)), DtypeError, "expected a torch tensor"),
        (lambda b: b.extend(at, at.float(), step_to(to)), DtypeError, "action: expected"),
        (lambda b: b.extend(at, at, step_to(to, reward=torch.zeros(2, 1))), ShapeError, r"step\.reward"),
        (lambda b: b.extend(at, at, step_to(to), active=torch.ones(3, dtype=torch.bool)), ShapeError, "active"),
        (lambda b: b.extend(at, at, step_to(to)._replace(terminated=done)), LifecycleError, "final_obs"),
        (
            lambda b: b.extend(at, at, step_to(to, done=done, final=to)._replace(truncated=~done)),
            ShapeError,
            r"missing \[1\]",
        ),
        (lambda b: b.extend(torch.stack([at, at], 1)[:, 0], at, step_to(to)), ShapeError, "contiguous"),
        (lambda b: b.sample(0), ShapeError, "at least 1"),
        (lambda b: b.get(torch.tensor([99])), IdError, "not stored"),
        (lambda b: b.at(torch.tensor([12])), IdError, "between 0 and 11"),
        (lambda b: b.update_priorities(torch.tensor([1]), torch.tensor([1.0])), ConfigError, "PrioritizedSampler"),
    ]
    for call, error, match in cases:
        buffer = filled()
        unchanged(buffer, lambda buffer=buffer, call=call: call(buffer), error, match)


def test_settings_that_cannot_work_are_refused():
    for build, match in [
        (lambda: ReplayBuffer(0, 2, INT, INT), "positive multiple"),
        (lambda: ReplayBuffer(7, 2, INT, INT), "use for example 6"),
        (lambda: ReplayBuffer(4, 0, INT, INT), "num_envs"),
        (lambda: ReplayBuffer(4, 2, INT, INT, n_step=0), "n_step"),
        (lambda: ReplayBuffer(4, 2, INT, INT, gamma=1.5), "gamma"),
        (lambda: ReplayBuffer(4, 2, ArraySpec((0,), torch.int64), INT), "at least one element"),
        (lambda: ReplayBuffer(4, 2, INT, ArraySpec((0,), torch.int64)), "action: expected at least one element"),
        (lambda: ReplayBuffer(4, 2, INT, INT, extras={"x": ArraySpec((3, 0), torch.int64)}), "'x'.*at least one"),
        (
            lambda: ReplayBuffer(4, 2, {"a": INT}, INT, stack={"b": StackSpec(frames=2, dim=-1)}),
            "no observation named 'b'",
        ),
        (lambda: ReplayBuffer(4, 2, INT, INT, sampler=SliceSampler(3)), "do not fit"),
        (lambda: ReplayBuffer(4, 2, spaces.Text(3), INT), "expected a Box"),
        (lambda: ReplayBuffer(4, 2, INT, INT, autoreset="next_step"), "same_step"),
        (lambda: SliceSampler(0), "length >= 1"),
        (lambda: PrioritizedSampler(eps=0), "eps > 0"),
    ]:
        with pytest.raises(ConfigError, match=match):
            build()
    sampler = SliceSampler(2)
    ReplayBuffer(4, 2, INT, INT, sampler=sampler)
    with pytest.raises(ConfigError, match="another buffer"):
        ReplayBuffer(4, 2, INT, INT, sampler=sampler)


def test_empty_buffers_and_slices_that_are_too_long_say_so():
    for sampler in (None, PrioritizedSampler(), SliceSampler(2), TrajectorySampler()):
        buffer = ReplayBuffer(20, 2, INT, INT, sampler=sampler)
        with pytest.raises(LifecycleError, match="got none"):
            buffer.sample(1)
    with pytest.raises(LifecycleError, match="no stored trajectory is that long"):
        filled(steps=4, sampler=SliceSampler(5)).sample(1)
    with pytest.raises(LifecycleError, match="first and its last"):
        filled(steps=4, sampler=TrajectorySampler()).sample(1)


def test_terminated_truncated_and_cut_are_told_apart():
    buffer = ReplayBuffer(20, 1, INT, INT)
    action, yes = torch.zeros(1, dtype=torch.int64), torch.tensor([True])

    def extend(at, to, **flags):
        final = torch.tensor([to])
        step = step_to(torch.tensor([to if not flags else 500]))
        info = {"final_obs": final, "_final_obs": yes} if flags else {}
        buffer.extend(torch.tensor([at]), action, step._replace(info=info, **flags))

    extend(0, 1)
    extend(1, 2, terminated=yes)
    extend(500, 501, truncated=yes)
    extend(500, 502)
    extend(900, 901)  # the caller went on from elsewhere
    batch = buffer.get(torch.arange(5))
    following = {
        name: batch["next", name].flatten().int().tolist() for name in ("terminated", "truncated", "cut", "done")
    }
    assert following == {
        "terminated": [0, 1, 0, 0, 0],
        "truncated": [0, 0, 1, 0, 0],
        "cut": [0, 0, 0, 1, 1],
        "done": [0, 1, 1, 0, 0],
    }
    assert batch["next", "observation"].tolist() == [1, 2, 501, 502, 901]
    assert batch["collector", "traj_ids"].tolist() == [0, 0, 1, 2, 3]


def test_suspended_environments_write_nothing_and_their_rows_are_not_read():
    buffer = ReplayBuffer(20, 2, ArraySpec((2,), torch.float32), INT)
    obs = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    bad = torch.tensor([[5.0, 6.0], [float("nan"), float("nan")]])
    no = torch.zeros(2, dtype=torch.bool)
    buffer.extend(
        obs, torch.zeros(2, dtype=torch.int64), Step(bad, torch.zeros(2), no, no, {}), torch.tensor([True, False])
    )
    assert buffer.lengths.tolist() == [1, 0]
    batch = buffer.get(buffer.indices())
    assert not batch["observation"].isnan().any()
    assert not batch["next", "observation"].isnan().any()


def test_clear_forgets_transitions_but_not_identities():
    buffer = filled()
    buffer.clear()
    assert len(buffer) == 0
    buffer.extend(counting(2, 50), counting(2, 50), step_to(counting(2, 51)))
    batch = buffer.get(buffer.indices())
    assert batch["observation"].tolist() == [50, 1050]
    assert batch["collector", "traj_ids"].tolist() == [2, 3]


@settings(deadline=None, max_examples=40)
@given(size=st.integers(1, 700), seed=st.integers(0, 100))
def test_sum_tree_equals_a_plain_sum(size, seed):
    rng = np.random.default_rng(seed)
    tree = SumTree(size, Allocator())
    plain = np.zeros(size)
    for _ in range(5):
        index = rng.choice(size, rng.integers(1, size + 1), replace=False)
        plain[index] = rng.random(index.shape[0]) * (rng.random(index.shape[0]) > 0.3)
        tree.assign(index, plain[index])
    assert np.array_equal(tree.leaves[:size], plain)
    if plain.sum() > 0:
        # sums of 700 numbers in another order: a few units in the last place
        assert tree.total == pytest.approx(plain.sum(), rel=1e-12)
        assert tree.lowest == plain[plain > 0].min()
        tickets = rng.random(200)
        tickets[:2] = 0.0, np.nextafter(1.0, 0.0)
        found = tree.find(tickets)
        assert (plain[found] > 0).all()
        edges = np.cumsum(plain)
        # a ticket within rounding of an edge may fall on either side of it
        low, high = edges[found] - plain[found], edges[found]
        at = tickets * edges[-1]
        assert ((at >= low - 1e-9) & (at <= high + 1e-9)).all()


def test_priorities_set_the_odds_and_the_weights():
    buffer = filled(steps=5, sampler=PrioritizedSampler(alpha=1.0, beta=0.5, eps=1e-12))
    index = buffer.indices()
    priority = torch.arange(1.0, 11.0)
    buffer.update_priorities(index, priority)
    seen = torch.zeros(10)
    place = {int(i): k for k, i in enumerate(index)}
    for _ in range(2000):
        batch = buffer.sample(10)
        for i, weight in zip(batch["index"].tolist(), batch["_weight"].tolist(), strict=True):
            seen[place[i]] += 1
            assert weight == pytest.approx((1.0 / float(priority[place[i]])) ** 0.5, rel=1e-6)
    expected = 20_000 * priority / priority.sum()
    # binomial: standard deviation below sqrt(expected); six of them
    assert ((seen - expected).abs() < 6 * expected.sqrt()).all()


def test_priorities_of_overwritten_transitions_are_passed_over():
    buffer = filled(steps=5, capacity=6, sampler=PrioritizedSampler())
    buffer.update_priorities(torch.tensor([0, 1, 9]), torch.tensor([100.0, 100.0, 1.0]))
    leaves = buffer.sampler._tree.leaves
    assert (leaves > 0).sum() == 6
    assert leaves.max() < 2
    with pytest.raises(ConfigError, match="finite"):
        buffer.update_priorities(torch.tensor([9]), torch.tensor([float("nan")]))


def test_a_reader_never_sees_a_torn_transition():
    """Frames are constant pictures: one that is half of two moments would show."""
    n, size = 4, 64
    stack = StackSpec(frames=3, dim=0)
    buffer = ReplayBuffer(
        n * 40, n, ArraySpec((3, size, size), torch.int32), ArraySpec((), torch.int32), stack=stack, n_step=2
    )
    stop, failures = threading.Event(), []

    def write() -> None:
        at = torch.zeros(n, dtype=torch.int32)
        obs = at[:, None, None, None].repeat(1, 3, size, size)
        no = torch.zeros(n, dtype=torch.bool)
        while not stop.is_set():
            following = torch.cat([obs[:, 1:], (at + 1)[:, None, None, None].expand(-1, 1, size, size)], 1).contiguous()
            buffer.extend(obs, at, Step(following, at.float(), no, no, {}))
            obs, at = following, at + 1

    def read() -> None:
        checked = 0
        while checked < 300:
            if len(buffer) < 64:
                continue
            batch = buffer.sample(64)
            at = batch["action"].view(-1, 1, 1, 1)
            ages = torch.tensor([2, 1, 0]).view(1, 3, 1, 1)
            m = batch["steps_to_next_obs"].view(-1, 1, 1, 1)
            right = (batch["observation"] == (at - ages).clamp(min=0)).all()
            right &= (batch["next", "observation"] == (at + m - ages).clamp(min=0)).all()
            if not right:
                failures.append(batch.clone())
            checked += 1
        stop.set()

    threads = [threading.Thread(target=write), threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_stream_of_noise_stays_exact_and_only_costs_memory():
    """A caller whose every observation differs from the one before it: all trajectories are cut."""
    spaces_, n = {"": ArraySpec((4,), torch.float32)}, 2
    buffer, store = ReplayBuffer(20, n, spaces_[""], INT), NaiveStore(n, 10)
    stream = Stream(0, n, spaces_, {}, "same_step")
    stream.jump_rate = 1.0

    def feed() -> None:
        for _ in range(100):
            obs, action, step, active = stream.step(INT)
            store.extend(obs, action, step, active, "same_step")
            info = {k: v[""] if k == "final_obs" else v for k, v in step.info.items()}
            buffer.extend(obs[""], action, step._replace(obs=step.obs[""], info=info), active)

    with pytest.warns(UserWarning, match="did not go on from the observation stored before"):
        feed()
    batch = buffer.get(buffer.indices())
    rows = [store.rows[e][p] for e, p in (store.index()[int(i)] for i in batch["index"])]
    assert torch.equal(batch["next", "observation"], torch.stack([row.next_obs[""] for row in rows]))
    # side rows are used again: never more than the ring, its history and one write can refer to
    assert buffer.store.pool.side.high <= 2 * (10 + 2)
