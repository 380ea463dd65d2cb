"""One table, whatever plays it: any number of environments, engine, server, subset or shard; nothing is padded."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from foreign_policies import Seeing

import headrace
from headrace.evaluation import Evaluation, PlayCfg
from headrace.policies import Batching, PolicyServer, RemoteEngine, ServeCfg

PLAN = range(20)


def play(policy: object, num_envs: int, episodes: Iterable[int] = PLAN, **how: object) -> Evaluation:
    return headrace.evaluate(
        "cartpole-camera",
        policy,  # type: ignore[arg-type]  # anything
        episodes=episodes,
        num_envs=num_envs,
        overrides={"episode_length": 24},
        play=PlayCfg(**how),  # type: ignore[arg-type]  # fields by name
        progress=False,
    )


@pytest.fixture(scope="module")
def table() -> Evaluation:
    return play(Seeing(), 1)


@pytest.mark.parametrize("num_envs", [3, 16, 64])
@pytest.mark.parametrize("engine", ["inline", "thread", "process"])
def test_environments_and_engines_do_not_change_a_bit(table: Evaluation, num_envs: int, engine: str) -> None:
    found = play(Seeing(), num_envs, engine=engine)
    assert found.episodes == table.episodes
    assert found.counters.rows_padded == 0
    assert found.counters.rows_verified >= 8


@pytest.mark.parametrize("num_envs", [3, 16])
def test_a_server_does_not_change_a_bit(table: Evaluation, num_envs: int) -> None:
    cfg = ServeCfg(port=0, batching=Batching(size=1))
    with PolicyServer(Seeing(), cfg) as server, RemoteEngine(server.address) as engine:
        assert play(engine.policy, num_envs, engine=engine).episodes == table.episodes


def test_subsets_and_shards_are_rows_of_the_table_and_pad_nothing(table: Evaluation) -> None:
    for ids in (range(0, 20, 16), range(1, 20, 4), [19, 2, 7]):
        part = play(Seeing(), 4, ids)
        assert part.episodes == [row for row in table.episodes if row.episode_id in set(ids)]
        assert part.counters.rows_padded == 0
