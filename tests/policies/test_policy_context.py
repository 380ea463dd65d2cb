"""What policies get beside the observation: rows with their own seeds and instructions, and episodes to remember."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest
import torch
from script_env import ScriptEnv, length_of
from torch import Tensor

from flat import ask, evaluate
from headrace.errors import ConfigError, StorageError, UnknownNameError
from headrace.evaluation import PlayCfg
from headrace.evaluation.loop import ChunkLoop
from headrace.evaluation.player import EpisodeProgress
from headrace.evaluation.scheduling import (
    Admission,
    ChunkLengths,
    EpisodePlan,
    Greedy,
    Immediate,
    Synchronized,
    WholeBatchOnAny,
    make_admission,
)
from headrace.policies import Batching, as_chunk_policy
from headrace.policies.engines import make_engine
from headrace.policies.protocol import TENSOR_FIELDS, ChunkContext, EpisodeRows
from headrace.types import Obs


def _context(seeds: list[int], episodes: list[int]) -> ChunkContext:
    count = len(seeds)
    numbers = torch.arange(count)
    return ChunkContext(
        seeds=torch.tensor(seeds),
        env_ids=numbers + 50,
        episode_ids=torch.tensor(episodes),
        chunk_index=numbers % 2,
        instructions=tuple(f"seed {seed}, episode {episode}" for seed, episode in zip(seeds, episodes, strict=True)),
        left_over=torch.randn(count, 3, 2),
        left_over_length=numbers,
        delay=numbers,
    )


def test_noise_of_rows_with_different_seeds_is_that_of_each_seed_alone() -> None:
    mixed = _context([7, -3, 7, 2**62], [0, 0, 5, 1])
    noise = mixed.noise(4, 2)
    for row in range(4):
        assert torch.equal(noise[row : row + 1], mixed.rows(torch.tensor([row])).noise(4, 2))
    assert not torch.equal(noise[0], noise[1]), "the same episode id under another seed is another episode"


def test_every_field_crosses_as_an_array() -> None:
    context = _context([1, 2, 3], [4, 5, 6])
    arrays = context.to_arrays()
    assert set(arrays) == set(TENSOR_FIELDS) | {"instructions"} == set(ChunkContext.__dataclass_fields__)
    assert arrays["instructions"] == list(context.instructions)
    for name in TENSOR_FIELDS:
        assert torch.equal(torch.as_tensor(arrays[name]), getattr(context, name))


class Listener:
    """Plans what it reads: the row's seed, episode and the length that its instruction names."""

    horizon, action_dim, obs_steps = 3, 2, 1

    def __init__(self) -> None:
        self.padding = 0

    def __call__(self, obs: Obs, context: ChunkContext) -> Tensor:
        told = torch.tensor([float(text.split()[1].strip(",")) if text else -1.0 for text in context.instructions])
        self.padding += int((context.episode_ids == -1).sum())
        assert ((context.episode_ids == -1) == (context.env_ids == -1)).all()
        return torch.stack((told, context.episode_ids.float()), 1)[:, None].expand(-1, 3, -1)


@pytest.mark.parametrize(
    "batching", [Batching(mode="fast"), Batching(mode="strict", size=8), Batching(mode="strict", size=4)]
)
def test_rows_of_several_seeds_share_a_batch_and_keep_their_instructions(batching: Batching) -> None:
    policy = Listener()
    context = _context([9, 8, 9, 5, 4], [3, 3, 7, 0, 12])
    answer = ask(policy, {"policy": torch.zeros(5, 1)}, context, batching)
    assert answer.actions[:, 0, 0].tolist() == [9, 8, 9, 5, 4]
    assert answer.actions[:, 2, 1].tolist() == [3, 3, 7, 0, 12]
    assert policy.padding == answer.padding, "padding rows have no episode and no environment"


class Counter:
    """Remembers how many chunks it planned in each episode, which must be the chunk's index."""

    horizon, action_dim, obs_steps = 4, 4, 1

    def __init__(self) -> None:
        self.planned: dict[tuple[int, int], int] = {}
        self.begun: list[tuple[int, str]] = []
        self.most = 0

    def begin(self, rows: EpisodeRows) -> None:
        for key, text in zip(rows.keys(), rows.instructions, strict=True):
            assert key not in self.planned, f"{key} began twice"
            self.planned[key] = 0
            self.begun.append((key[1], text))
        self.most = max(self.most, len(self.planned))

    def end(self, rows: EpisodeRows) -> None:
        for key in rows.keys():  # noqa: SIM118  (not a dict)
            del self.planned[key]

    def __call__(self, obs: Obs, context: ChunkContext) -> Tensor:
        plan = torch.zeros(len(context), 4, 4)
        for row, key in enumerate(zip(context.seeds.tolist(), context.episode_ids.tolist(), strict=True)):
            if key[1] == -1:
                continue
            assert self.planned[key] == int(context.chunk_index[row]), "not run for nothing, nor for somebody else"
            plan[row, :, 0] = float(key[1])
            plan[row, :, 1] = obs["policy"][row, 1] + torch.arange(4)
            self.planned[key] += 1
        return plan


@pytest.mark.parametrize("rule", [Greedy(), Immediate(), WholeBatchOnAny(), Synchronized()], ids=str)
@pytest.mark.parametrize("engine", ["inline", "thread"])
@pytest.mark.parametrize("batching", [Batching(mode="fast"), Batching(mode="strict", size=8)], ids=["fast", "strict"])
def test_memory_is_begun_once_per_episode_kept_for_those_that_play_and_released(
    rule: Admission, engine: str, batching: Batching
) -> None:
    policy = Counter()
    env = ScriptEnv(5)
    found = evaluate(
        env, policy, episodes=23, execute=4, seed=11, admission=rule, engine=engine, batching=batching, progress=False
    )  # type: ignore[arg-type]  # a string of the literal
    assert [e.episode_id for e in found.episodes] == list(range(23))
    assert sorted(policy.begun) == [(episode, f"count to {length_of(episode)}") for episode in range(23)]
    assert not policy.planned, "nothing is kept of ended episodes"
    assert policy.most <= 2 * env.num_envs, "what is kept is bounded by those that play"


def test_an_interrupted_evaluation_leaves_nothing_in_memory() -> None:
    policy = Counter()
    env = ScriptEnv(4)
    env.interrupt_after = 9
    assert evaluate(env, policy, episodes=23, execute=4, progress=False).status == "interrupted"
    assert not policy.planned


class Interrupted(Counter):
    """Ctrl-C is pressed in the middle of its first call for a second chunk, which goes on for a while."""

    def __call__(self, obs: Obs, context: ChunkContext) -> Tensor:
        if context.chunk_index.any() and not self.pressed:
            Interrupted.pressed = True  # of the class: a copy of the memory, which is asked again, must not press
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
        return super().__call__(obs, context)

    pressed = False


@pytest.mark.parametrize("how", [{"engine": "thread"}, {"engine": "inline", "timeout": 60.0}], ids=["thread", "inline"])
def test_an_evaluation_interrupted_in_mid_call_leaves_nothing_in_memory(how: dict[str, Any]) -> None:
    policy, Interrupted.pressed = Interrupted(), False
    found = evaluate(ScriptEnv(5), policy, episodes=23, execute=4, progress=False, **how)
    assert (found.status, policy.pressed) == ("interrupted", True)
    assert not policy.planned


def test_an_episode_whose_end_cannot_be_written_down_ends_once_in_the_policys_memory() -> None:
    def full_disk(_rows: object) -> None:
        raise StorageError("no room")

    policy = Counter()
    with pytest.raises(StorageError, match="no room"):
        evaluate(ScriptEnv(5), policy, episodes=23, execute=4, progress=False, on_episodes=full_disk)
    assert policy.begun
    assert not policy.planned, "end() was called with an episode that had ended, and raised"


def test_an_episode_that_the_policy_has_not_seen_does_not_end_in_it() -> None:
    policy = Counter()
    env = ScriptEnv(4)
    lengths = ChunkLengths(horizon=4, execute=4)
    engine = make_engine("inline", policy, Batching())
    plan = EpisodePlan(range(9))
    loop = ChunkLoop(env, policy, plan, PlayCfg(), lengths=lengths, rule=Greedy(), engine=engine, seed=0)
    with EpisodeProgress(9, shown=False) as bar:
        loop.play(bar, most_steps=0)  # episodes have begun in the environment, and in no policy
    seen: list[EpisodeRows] = []
    policy.end = seen.append  # type: ignore[method-assign]  # to look at it
    loop.release()
    assert sum(map(len, seen)) == 0


def test_memory_works_in_another_process_too() -> None:
    env = ScriptEnv(3)
    found = evaluate(env, Counter(), episodes=7, execute=4, engine="process", progress=False)
    assert len(found.episodes) == 7


def test_a_policy_that_begins_but_never_ends_is_refused() -> None:
    class Forgetful(Counter):
        end = None  # type: ignore[assignment]  # bad on purpose

    with pytest.raises(ConfigError, match=r"expected begin\(rows\) and end\(rows\), or neither"):
        as_chunk_policy(Forgetful())


class EveryOther:
    """A rule of a user's own."""

    def __init__(self, count: int = 2) -> None:
        self.count = count

    def infer(self, queue: object) -> np.ndarray:
        return queue.waiting  # type: ignore[attr-defined]  # it is a QueueState


def test_rules_are_made_by_name_and_users_have_their_own() -> None:
    assert make_admission("synchronized") == Synchronized()
    with pytest.raises(UnknownNameError, match="every-other"):
        make_admission("every-other")
    rule = f"{__name__}:EveryOther"
    assert isinstance(make_admission(rule), EveryOther)
    assert len(evaluate(ScriptEnv(3), Counter(), episodes=5, execute=4, admission=rule, progress=False).episodes) == 5
