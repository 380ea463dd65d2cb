"""The driver against workers that are only pretended: any order of rows and deaths gives every id once."""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError, EvaluationError
from headrace.evaluation import EpisodeResult, Evaluation
from headrace.evaluation._journal import Header, read_journal
from headrace.evaluation._result import Counters
from headrace.evaluation.cfg import JournalCfg, WorkersCfg
from headrace.evaluation.player import play_plan
from headrace.evaluation.scheduling import EpisodePlan

pytest.importorskip("ray")
from ray.exceptions import ActorDiedError

from headrace.evaluation import workers as workers_module
from headrace.evaluation.workers import MOST_KILLS, Driver

IDENTITY = {"source": "pretended", "policy": "x", "strict_size": 16, "fidelity": "native"}


def _row(episode: int) -> EpisodeResult:
    return EpisodeResult(
        episode_id=episode, seed=0, reward=episode / 7, length=5 + episode % 11, success=None, diverged=False
    )


class Call:
    """What a remote call returns: its replies one by one; an exception among them is raised by ``get``."""

    def __init__(self, replies: Sequence[object], worker: Pretended) -> None:
        self._replies, self.worker = iter(replies), worker

    def __next__(self) -> object:
        if self.worker.dead:
            return ActorDiedError()
        return next(self._replies)


class Pretended:
    """A worker: plays rows in any order, and dies where ``dies(ids)`` says, after so many rows; None for never."""

    def __init__(self, number: int, draw: random.Random, dies: Callable[[list[int]], int | None], cpu: str) -> None:
        self.dead, self.played, self.stuck = False, 0, False
        header = Header(identity=IDENTITY, circumstances={"processor": cpu, "numpy": "2"})
        self.open = types.SimpleNamespace(remote=lambda: Call([(header, f"node-{number}")], self))
        self.play = types.SimpleNamespace(options=lambda **_: types.SimpleNamespace(remote=self._play))
        self._draw, self._dies = draw, dies

    def _play(self, ids: list[int]) -> Call:
        order = self._draw.sample(ids, len(ids))
        replies: list[object] = []
        while order:
            some = self._draw.randint(1, len(order))
            replies.append([_row(episode) for episode in order[:some]])
            order = order[some:]
        replies.append(Counters(env_steps=sum(_row(i).length for i in ids), batch_steps=1))
        if (after := self._dies(ids)) is not None:
            replies = [*replies[:after], ActorDiedError()]
        return Call(replies, self)


class PretendedRay:
    """``wait``, ``get`` and ``kill`` of Ray; who is ready is drawn."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw

    def wait(self, calls: list[Call], *, num_returns: int, timeout: float) -> tuple[list[Call], list[Call]]:
        able = [call for call in calls if not call.worker.stuck]
        ready = self._draw.sample(able, min(num_returns, self._draw.randint(0, len(able))))
        return ready, [call for call in calls if call not in ready]

    def get(self, reply: object) -> object:
        found = next(reply) if isinstance(reply, Call) else reply
        if isinstance(found, Exception):
            raise found
        return found

    def kill(self, worker: Pretended) -> None:
        worker.dead = True


def _driver_of(
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    dies: Callable[[random.Random, list[int]], int | None],
    *,
    workers: int = 3,
    block: int | None = None,
    cpus: Iterator[str] | None = None,
    stall_s: float | None = None,
) -> Driver:
    draw = random.Random(seed)
    monkeypatch.setattr(workers_module, "ray", PretendedRay(draw))
    return Driver(
        lambda number: Pretended(number, draw, lambda ids: dies(draw, ids), "a" if cpus is None else next(cpus)),
        workers=workers,
        num_envs=2,
        block=block,
        stall_s=stall_s,
    )


@pytest.mark.parametrize("seed", range(200))
def test_every_id_is_in_the_table_once_whoever_dies_when(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = random.Random(seed)
    ids = choose.sample(range(1000), choose.randint(1, 60))
    share = choose.choice([0.0, 0.2, 0.7])

    def dies(draw: random.Random, ids: list[int]) -> int | None:
        return draw.randint(0, 3) if draw.random() < share else None

    workers, block = choose.randint(1, 8), choose.choice([None, 1, 3, 100])
    driver = _driver_of(monkeypatch, seed, dies, workers=workers, block=block)
    driver.header()
    seen: list[EpisodeResult] = []
    found = driver.play(ids, seen.extend, progress=False)
    finished = [row.episode_id for row in found.episodes]
    assert len(set(finished)) == len(finished)
    assert sorted([*finished, *found.given_up]) == sorted(ids)
    assert sorted(seen) == found.episodes == [_row(episode) for episode in sorted(finished)]
    assert (found.status == "failed") == bool(found.given_up)
    assert (found.mean_reward is None) == bool(found.given_up)


@pytest.mark.parametrize("seed", range(5))
def test_a_worker_that_finishes_nothing_in_time_is_ended_and_its_episodes_are_played_again(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = _driver_of(monkeypatch, seed, lambda *_: None, workers=2, block=3, stall_s=0.05)
    driver.header()
    first = driver._members[0].actor
    play = first._play

    def stick(ids: list[int]) -> Call:
        first.stuck = True
        return play(ids)

    first.play = types.SimpleNamespace(options=lambda **_: types.SimpleNamespace(remote=stick))
    found = driver.play(range(20), None, progress=False)
    assert found.status == "completed"
    assert [row.episode_id for row in found.episodes] == list(range(20))
    assert first.dead == first.stuck


def test_a_limit_of_no_time_is_refused() -> None:
    with pytest.raises(ConfigError, match="stall_s: expected more than 0 seconds"):
        WorkersCfg(count=1, stall_s=0.0)


@pytest.mark.parametrize("block", [1, 2, 5])
def test_a_block_that_kills_three_workers_is_given_up_with_its_ids_and_nothing_else(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = 0

    def dies(draw: random.Random, ids: list[int]) -> int | None:
        nonlocal killed
        killed += 13 in ids
        return 0 if 13 in ids else None

    driver = _driver_of(monkeypatch, 4, dies, block=block)
    driver.header()
    found = driver.play(range(20), None, progress=False)
    assert killed == MOST_KILLS == 3
    first = 13 - 13 % block
    assert found.given_up == tuple(range(first, first + block))
    assert found.unfinished == block
    assert found.mean_reward is None


def test_a_row_that_nobody_asked_for_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = _driver_of(monkeypatch, 0, lambda draw, ids: None, workers=1, block=2)
    monkeypatch.setattr(Pretended, "_play", lambda self, ids: Call([[_row(0)], [_row(0)]], self))
    driver.header()
    with pytest.raises(EvaluationError, match=r"was to play episodes \[1\], each once, and sent rows of \[0\]"):
        driver.play(range(2), None, progress=False)


def test_processors_that_differ_are_warned_about_and_recorded_in_result_and_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = _driver_of(monkeypatch, 1, lambda draw, ids: None, block=1, cpus=iter("abb"))
    plan = EpisodePlan(40)

    with pytest.warns(UserWarning, match="worker . on node-.: played under other circumstances: processor"):
        found = play_plan(
            plan,
            driver.play,
            header=driver.header(),
            journal=JournalCfg(path=tmp_path / "journal"),
            news=driver.take_news,
        )
    assert found.circumstances is not None
    assert sorted(found.circumstances["processor"]) == ["a", "b"]
    assert found.circumstances["numpy"] == "2"
    content = read_journal(tmp_path / "journal")
    assert sorted(content.header.circumstances["processor"]) == ["a", "b"]
    assert sorted(content.rows) == found.episodes
    assert (tmp_path / "journal").read_text().count("circumstances") == 2  # the header's, and the others' once


def test_a_journal_that_goes_on_elsewhere_says_so(tmp_path: Path) -> None:
    path = tmp_path / "journal"

    def evaluate_on(processor: str, episodes: int) -> Evaluation:
        header = Header(identity=IDENTITY, circumstances={"processor": processor})

        def play(ids: Sequence[int], add: Any, *, progress: bool) -> Evaluation:
            add([_row(episode) for episode in ids])
            rows = [_row(episode) for episode in ids]
            return Evaluation(episodes=rows, plan=tuple(ids), status="completed", counters=Counters(), strict_size=16)

        return play_plan(EpisodePlan(episodes), play, header=header, journal=JournalCfg(path=path, resume=True))

    evaluate_on("a", 2)
    with pytest.warns(UserWarning, match="processor 'a' → 'b'"):
        evaluate_on("b", 4)
    evaluate_on("a", 5)  # known by now
    evaluate_on("b", 6)
    assert Evaluation.load(path).circumstances == {"processor": ["a", "b"]}
    assert len(Evaluation.load(path).episodes) == 6
