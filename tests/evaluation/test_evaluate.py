"""Evaluations of real tasks: equal tables whatever the batch, and nothing drawn or inferred that nobody reads."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator

import pytest
import torch
from chunk_policies import AtLeast, Attention, Every
from torch import Tensor

import headrace
from flat import evaluate
from headrace.envs.task import Rows
from headrace.envs.tasks.walking import Ant, AntCfg
from headrace.evaluation import EpisodeResult, Evaluation
from headrace.evaluation._result import Counters
from headrace.evaluation.scheduling import (
    Admission,
    Greedy,
    Immediate,
    Synchronized,
    WholeBatchOnAny,
)
from headrace.policies import Batching, as_chunk_policy
from headrace.policies.protocol import ChunkContext
from headrace.types import Obs

EPISODES = 20
STRICT = Batching(mode="strict", size=8)


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class RestlessAnt(Ant):
    """``ant`` that ends at random, from the episode's own stream, so that a batch falls out of phase."""

    success_measure = "it ends within 10 steps"

    def terminated(self, rows: Rows) -> Tensor:
        return rows.uniform("end", 1, draw=rows.steps)[:, 0] < 1 / 15

    def success(self, rows: Rows) -> Tensor:
        return rows.steps <= 10


def _evaluated(num_envs: int, *, threads: int = 1, **more: object) -> Evaluation:
    task = RestlessAnt(AntCfg(episode_length=40))
    env = headrace.make(task, num_envs, seed=9, threads=threads, autoreset="disabled", final_obs=False)
    size = int(env.single_observation_space["policy"].shape[0])
    policy = Attention(size, int(env.single_action_space.shape[0]))
    settings = {"episodes": EPISODES, "execute": 8, "seed": 4, "batching": STRICT, "progress": False, **more}
    found = evaluate(env, policy, **settings)  # type: ignore[arg-type]  # one of many settings
    env.close()
    return found


@pytest.fixture(scope="module")
def alone() -> list[EpisodeResult]:
    """One environment, everything in its plainest form."""
    return _evaluated(1).episodes


def test_the_reference_has_episodes_that_differ(alone: list[EpisodeResult]) -> None:
    assert len({episode.reward for episode in alone}) == EPISODES
    assert len({episode.length for episode in alone}) > 8


@pytest.mark.parametrize("num_envs", [1, 3, 16, 64])
@pytest.mark.parametrize("engine", ["inline", "thread"])
def test_strict_tables_do_not_depend_on_the_batch_or_the_engine(
    num_envs: int, engine: str, alone: list[EpisodeResult]
) -> None:
    assert _evaluated(num_envs, engine=engine).episodes == alone


@pytest.mark.parametrize("rule", [Immediate(), WholeBatchOnAny(), Synchronized(), Every(3), AtLeast(4)], ids=str)
@pytest.mark.parametrize(("num_envs", "engine"), [(3, "inline"), (16, "thread")])
def test_strict_tables_do_not_depend_on_the_rule(
    rule: Admission, num_envs: int, engine: str, alone: list[EpisodeResult]
) -> None:
    assert _evaluated(num_envs, engine=engine, admission=rule).episodes == alone


def test_strict_tables_do_not_depend_on_the_process(alone: list[EpisodeResult]) -> None:
    assert _evaluated(16, engine="process").episodes == alone


@pytest.mark.parametrize(("physics", "model"), [(2, 1), (1, 2), (3, 4)])
def test_strict_tables_do_not_depend_on_the_thread_counts(physics: int, model: int, alone: list[EpisodeResult]) -> None:
    torch.set_num_threads(model)
    assert _evaluated(16, threads=physics, engine="thread").episodes == alone


def test_latency_changes_the_episodes_but_not_their_independence(alone: list[EpisodeResult]) -> None:
    late = _evaluated(3, latency=3).episodes
    assert late != alone
    for num_envs, rule, engine in ((1, Greedy(), "inline"), (16, Greedy(), "thread"), (16, Synchronized(), "inline")):
        assert _evaluated(num_envs, latency=3, admission=rule, engine=engine).episodes == late


def test_ensembling_changes_the_episodes_but_not_their_independence(alone: list[EpisodeResult]) -> None:
    blended = _evaluated(3, execute=1, ensemble_decay=0.01).episodes
    assert blended != alone
    for num_envs, rule, engine in (
        (1, Greedy(), "inline"),
        (16, Greedy(), "thread"),
        (16, WholeBatchOnAny(), "inline"),
    ):
        assert _evaluated(num_envs, execute=1, ensemble_decay=0.01, admission=rule, engine=engine).episodes == blended


def test_fast_tables_are_close(alone: list[EpisodeResult]) -> None:
    """A row of a matrix product changes by about 1e-7 with the batch; ants amplify it, so only the means agree."""
    fast = _evaluated(16, batching="fast")
    assert fast.episodes != alone, "bits do change with the batch: strict is there for a reason"
    reference = Evaluation(
        episodes=alone, plan=tuple(range(EPISODES)), status="completed", counters=fast.counters, strict_size=16
    )
    interval = reference.mean_reward
    assert interval is not None
    assert fast.mean_reward is not None
    assert interval.low <= fast.mean_reward.value <= interval.high


def _nothing(obs: Obs, context: ChunkContext) -> Tensor:
    return context.noise(16, 1) * 0.3


@pytest.mark.parametrize("frames", [1, 2, 3])
@pytest.mark.parametrize("num_envs", [1, 5, 40])
@pytest.mark.parametrize("final_obs", [True, False])
def test_only_frames_that_the_model_reads_are_drawn(frames: int, num_envs: int, final_obs: bool) -> None:
    """K a row inferred; the first frame of an episode fills its stack and is drawn once; final ones where asked for."""
    overrides = {"frame_stack": frames, "pixels": 12, "episode_length": 40, "max_angle": 0.3}
    env = headrace.make(
        "cartpole-camera", num_envs, threads=1, autoreset="disabled", final_obs=final_obs, overrides=overrides
    )
    policy = as_chunk_policy(_nothing, horizon=16, action_dim=1)
    found = evaluate(env, policy, episodes=24, execute=16, progress=False)
    counters = found.counters
    lengths = [episode.length for episode in found.episodes]
    assert len(set(lengths)) > 5, "episodes end at different times"
    assert counters.rows_inferred == sum(math.ceil(length / 16) for length in lengths)
    later = counters.rows_inferred - len(lengths)
    # a last observation shares its older frames with the last read, if that was less than K steps ago
    final = sum(min(frames, (length - 1) % 16 + 1) for length in lengths) if final_obs else 0
    assert counters.frames_drawn == len(lengths) + frames * later + final
    assert counters.stages["render"] > 0


def test_a_history_of_pictures_draws_only_what_it_will_hold() -> None:
    overrides = {"frame_stack": 1, "pixels": 12, "episode_length": 33, "max_angle": 3.0}
    env = headrace.make("cartpole-camera", 3, threads=1, autoreset="disabled", final_obs=False, overrides=overrides)

    def plan(obs: Obs, context: ChunkContext) -> Tensor:
        assert obs["policy"].shape == (len(context.env_ids), 2, 12, 12, 3)
        return context.noise(8, 1) * 0.1

    policy = as_chunk_policy(plan, horizon=8, action_dim=1, obs_steps=2)
    found = evaluate(env, policy, episodes=6, execute=8, progress=False)
    assert [episode.length for episode in found.episodes] == [33] * 6
    # asked at 0, 8, 16, 24 and 32: the first reads one frame, the others two
    assert found.counters.frames_drawn == 6 * (1 + 4 * 2)


def test_the_summary_has_every_figure() -> None:
    from rich.console import Console

    found = _evaluated(3)
    console = Console(record=True, width=100)
    console.print(found.summary())
    shown = console.export_text()
    for words in (
        "20 of 20 episodes, completed",
        "success rate",
        "interquartile mean reward",
        "model calls",
        "rows inferred",
        "camera frames drawn",
        "env-steps per second",
        "idle share",
        "in physics",
        "in policy",
        "in wait",
    ):
        assert words in shown
    assert found.success_rate is not None
    assert found.success_rate.low <= found.success_rate.value <= found.success_rate.high
    spent = found.counters.stages
    assert sum(spent.values()) <= found.counters.seconds, "inline, stages follow each other"
    assert 0.0 <= found.idle_share < 1.0


def test_the_summary_of_nothing_has_dashes() -> None:
    from rich.console import Console

    nothing = Evaluation(episodes=[], plan=(0, 1, 2), status="interrupted", counters=Counters(), strict_size=None)
    assert nothing.success_rate is None
    assert nothing.mean_reward is nothing.iqm_reward is nothing.mean_length is None
    console = Console(record=True, width=100)
    console.print(nothing.summary())
    shown = console.export_text()
    assert "0 of 3 episodes, interrupted" in shown
    assert shown.count("–") == 4


def test_the_progress_bar_shows_rate_and_running_success(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.evaluation import player

    shown: list[str] = []
    monkeypatch.setattr(player, "_REFRESH", 0.0)

    def show(*_: object) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext(lambda **now: shown.append(f"{now['completed']}: {now['description']}"))

    monkeypatch.setattr(player, "show_progress", show)
    found = _evaluated(4, progress=True)
    rate = sum(bool(episode.success) for episode in found.episodes) / EPISODES
    assert re.fullmatch(rf"20: [\d,]+ env-steps/s, {rate:.0%} success", shown[-1])
    assert any(re.fullmatch(r"0: [\d,]+ env-steps/s", line) for line in shown), "no rate before the first end"


def test_a_second_evaluation_counts_from_zero() -> None:
    env = headrace.make("cartpole", 4, threads=1, autoreset="disabled")
    policy = as_chunk_policy(_nothing, horizon=16, action_dim=1)
    first = evaluate(env, policy, episodes=8, execute=16, progress=False)
    before = env.timer.seconds()["physics"]
    second = evaluate(env, policy, episodes=8, execute=16, progress=False)
    assert second.episodes == first.episodes
    assert second.counters.env_steps == first.counters.env_steps
    assert second.counters.stages["physics"] == env.timer.seconds()["physics"] - before


def test_a_bridged_environment_can_be_evaluated() -> None:
    from headrace.bridges.make import bridge

    env = bridge("Pendulum-v1", 3, autoreset="disabled")
    policy = as_chunk_policy(lambda obs, context: context.noise(10, 1), horizon=10, action_dim=1)
    found = evaluate(env, policy, episodes=4, execute=10, progress=False)
    assert [episode.length for episode in found.episodes] == [200] * 4
    env.close()
