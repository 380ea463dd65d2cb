"""One table, whatever plays it: any number of environments, engine, server, subset or shard; nothing is padded."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
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


@pytest.mark.parametrize("num_envs", [1, 3])
def test_threads_of_torch_do_not_change_a_bit_where_products_are_short(table: Evaluation, num_envs: int) -> None:
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert play(Seeing(), num_envs).episodes == table.episodes
    finally:
        torch.set_num_threads(before)


def test_short_products_convolutions_and_attention_have_the_same_bits_with_two_threads() -> None:
    """What docs/threads.md says of one thread and of two."""
    generator, before = torch.Generator().manual_seed(0), torch.get_num_threads()

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        image, row = draw(2, 3, 96, 96), draw(5, 7, 64)
        parts = [
            (torch.nn.Sequential(torch.nn.Conv2d(3, 16, 7, 2), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 3)), image),
            (torch.nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True).eval(), row),
            *((torch.nn.Linear(size, 33), draw(count, size)) for size in (3, 64, 131) for count in (1, 16, 300)),
        ]

    def answer() -> list[torch.Tensor]:
        with torch.no_grad():
            return [part(given) for part, given in parts] + [torch.tanh(image).exp()]

    try:
        torch.set_num_threads(1)
        alone = answer()
        torch.set_num_threads(2)
        assert all(torch.equal(a, b) for a, b in zip(alone, answer(), strict=True))
    finally:
        torch.set_num_threads(before)
