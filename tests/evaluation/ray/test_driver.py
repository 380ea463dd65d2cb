"""The driver against workers that are only pretended: any order of rows and deaths gives every id once."""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import EvaluationError
from headrace.evaluation import EpisodeResult, Evaluation
from headrace.evaluation._journal import Header, read_journal
from headrace.evaluation._result import Counters
from headrace.evaluation.cfg import JournalCfg
from headrace.evaluation.cursors import EpisodePlan
from headrace.evaluation.player import play_plan

pytest.importorskip("ray")
from ray.exceptions import ActorDiedError

from headrace.evaluation.ray import _driver
from headrace.evaluation.ray._driver import MOST_KILLS, Driver
from headrace.evaluation.ray._worker import Opened

IDENTITY = {"source": "pretended", "policy": "x", "strict_size": 16, "fidelity": "native"}


def _row(episode: int) -> EpisodeResult:
    return EpisodeResult(
        episode_id=episode, seed=0, reward=episode / 7, length=5 + episode % 11, success=None, diverged=False
    )


class Call:
    """What a remote call returns: its replies one by one; an exception among them is raised by ``get``."""

    def __init__(self, replies: Sequence[object], worker: Pretended) -> None:
        self._replies, self._worker = iter(replies), worker

    def __next__(self) -> object:
        if self._worker.dead:
            return ActorDiedError()
        return next(self._replies)


class Pretended:
    """A worker: plays rows in any order, and dies where ``dies(ids)`` says, after so many rows; None for never."""

    def __init__(self, number: int, draw: random.Random, dies: Callable[[list[int]], int | None], cpu: str) -> None:
        self.dead, self.played = False, 0
        header = Header(identity=IDENTITY, circumstances={"processor": cpu, "numpy": "2"})
        self.open = types.SimpleNamespace(
            remote=lambda: Call([Opened(header=header, host=f"node-{number}", pid=number)], self)
        )
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
        ready = self._draw.sample(calls, min(num_returns, self._draw.randint(0, len(calls))))
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
) -> Driver:
    draw = random.Random(seed)
    monkeypatch.setattr(_driver, "ray", PretendedRay(draw))
    return Driver(
        lambda number: Pretended(number, draw, lambda ids: dies(draw, ids), "a" if cpus is None else next(cpus)),
        workers=workers,
        num_envs=2,
        block=block,
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


def test_the_progress_bar_has_the_rate_of_every_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []

    class Bar:
        def __init__(self, total: int, *, shown: bool) -> None: ...

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None: ...

        def show(self, rows: Sequence[object], steps: int, note: Callable[[], str]) -> None:
            assert steps == sum(_row(index).length for index in (row.episode_id for row in rows))
            notes.append(note())

    monkeypatch.setattr(_driver, "EpisodeProgress", Bar)
    for workers, pattern in ((2, "workers "), (12, "12 workers, ")):
        driver = _driver_of(monkeypatch, 3, lambda draw, ids: None, workers=workers, block=1)
        driver.header()
        driver.play(range(60), None, progress=True)
        assert notes[-1].startswith(pattern)
        assert any(
            rate.strip().replace(",", "").isdigit() and int(rate.replace(",", "")) > 0
            for rate in notes[-1].removeprefix(pattern).replace("each", "").replace("to", ", ").split(", ")
        )
