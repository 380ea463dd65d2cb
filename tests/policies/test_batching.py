"""Strict batches: tables are equal for any batch, nothing is padded where that costs, and other policies are caught."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import headrace
from flat import ask
from headrace.errors import PolicyError
from headrace.evaluation import Evaluation, JournalCfg, PlayCfg
from headrace.policies import Batching
from headrace.policies.batching import choose_batching, count_uses
from headrace.policies.protocol import ChunkContext, EpisodeRows, as_chunk_policy
from headrace.types import Obs

TASK, SETTINGS = "cartpole-camera", {"episode_length": 24}
HORIZON = 6


class Seeing(nn.Module):
    """Convolutions over pictures, attention over their patches, and noise: its bits change with the size of a batch."""

    horizon, action_dim, obs_steps = HORIZON, 1, 1

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.look = nn.Sequential(nn.Conv2d(6, 8, 5, 4), nn.ReLU(), nn.Conv2d(8, 16, 3, 2), nn.ReLU())
            layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
            self.think = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.act = nn.Linear(16 + HORIZON, HORIZON)

    def forward(self, obs: Obs, context: ChunkContext) -> Tensor:
        seen = self.look(obs["policy"].movedim(-1, 1).float() / 255).flatten(2).transpose(1, 2)
        return torch.tanh(self.act(torch.cat((self.think(seen).mean(1), context.noise(HORIZON)), dim=1)))[..., None]


class Mlp(nn.Module):
    horizon, action_dim, obs_steps = 1, 1, 1

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.layers = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
            self.leave = nn.Linear(width, 1)

    def forward(self, obs: Obs) -> Tensor:
        return torch.tanh(self.leave(self.layers(obs["policy"])))[:, None]


def _play(policy: Callable[..., Tensor], num_envs: int, episodes: object = 10, **play: object) -> Evaluation:
    journal = play.pop("journal", None)
    return headrace.evaluate(
        TASK,
        policy,
        episodes=episodes,  # type: ignore[arg-type]  # a number or ids
        num_envs=num_envs,
        overrides=SETTINGS,
        play=PlayCfg(**play),  # type: ignore[arg-type]  # fields by name
        journal=journal,  # type: ignore[arg-type]  # a path
        progress=False,
    )


@pytest.fixture(scope="module")
def alone() -> Evaluation:
    return _play(Seeing(), 1)


@pytest.mark.parametrize(
    ("num_envs", "engine"), [(3, "inline"), (16, "thread"), (64, "inline"), (3, "process")], ids=str
)
def test_convolutions_and_attention_give_one_table_without_padding(
    alone: Evaluation, num_envs: int, engine: str
) -> None:
    found = _play(Seeing(), num_envs, engine=engine)
    assert found.episodes == alone.episodes
    assert found.strict_size == alone.strict_size == 1
    assert found.counters.rows_padded == 0
    assert found.counters.rows_verified >= 8
    assert found.rows_per_row == pytest.approx(1 + 8 / found.counters.rows_inferred)


@pytest.mark.filterwarnings("ignore:.*played under other circumstances")  # of num_envs
def test_subsets_shards_kills_and_resumes_give_the_rows_of_the_whole(alone: Evaluation, tmp_path: Path) -> None:
    parts = [_play(Seeing(), 4, range(first, 10, 2), journal=tmp_path / f"{first}.jsonl") for first in (0, 1)]
    assert headrace.evaluation.merge(*(tmp_path / f"{first}.jsonl" for first in (0, 1))).episodes == alone.episodes
    assert parts[1].episodes == alone.episodes[1::2]
    half = tmp_path / "half.jsonl"
    _play(Seeing(), 3, 5, journal=half)
    half.write_text(half.read_text()[:-20])  # the last line was cut off by a kill
    assert _play(Seeing(), 5, 10, journal=JournalCfg(path=half, resume=True)).episodes == alone.episodes


def test_the_size_follows_from_how_often_a_row_uses_a_weight() -> None:
    with closing(headrace.make(TASK, 2, threads=1, overrides=SETTINGS)) as env:
        assert choose_batching(as_chunk_policy(Seeing()), Batching(), env).size == 1
    with closing(headrace.make("cartpole", 2, threads=1)) as env:
        assert choose_batching(as_chunk_policy(Mlp()), Batching(), env) == Batching(size=16, places="free")
        # 17 columns do not fill a register: these products round by the place of a row
        assert choose_batching(as_chunk_policy(Mlp(17)), Batching(), env).size == 16
        assert choose_batching(as_chunk_policy(Mlp()), Batching(size=4), env).size == 4
    layers = nn.Sequential(nn.Conv1d(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(6 * 8, 5))
    with torch.no_grad(), count_uses() as uses:
        layers(torch.zeros(1, 4, 10))
    assert uses.weights == 6 * 2 * 3 + 48 * 5
    assert uses.multiply_adds == 8 * 6 * 2 * 3 + 48 * 5


def test_a_transformer_layer_is_counted_though_torch_fuses_it() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with torch.no_grad(), count_uses() as uses:
        layer(torch.zeros(1, 7, 8))
    assert uses.per_weight == 7
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("num_envs", [1, 3, 16, 64])
def test_an_mlp_gives_one_table_at_any_width_and_ids_in_steps_of_the_tile_pad_no_more(num_envs: int) -> None:
    for width in (64, 17):
        policy, ids = Mlp(width), range(0, 16 * 16, 16)
        found = headrace.evaluate("cartpole", policy, episodes=ids, num_envs=num_envs, progress=False)
        whole = headrace.evaluate("cartpole", policy, episodes=16, num_envs=num_envs, progress=False)
        assert found.strict_size == 16
        assert found.episodes[0] == whole.episodes[0]
        assert found.counters.model_calls == found.counters.batch_steps, "one tile holds all rows of a step"


def _draw(source: str) -> Tensor | float:
    return {"torch": lambda: torch.randn(1), "numpy": np.random.rand, "Python": random.random}[source]()


@pytest.mark.parametrize("engine", ["inline", "thread", "process"])
@pytest.mark.parametrize("source", ["torch", "numpy", "Python"])
def test_a_policy_that_draws_from_a_global_generator_is_caught(source: str, engine: str) -> None:
    with pytest.raises(PolicyError, match=f"draws from {source}'s global random generator"):
        _evaluate(Drawing(source), engine=engine)


class Drawing:
    horizon, action_dim, obs_steps = 1, 1, 1

    def __init__(self, source: str) -> None:
        self.source = source

    def __call__(self, obs: Obs) -> Tensor:
        return torch.zeros(len(obs["policy"]), 1, 1) + _draw(self.source)


class Counting:
    """Keeps something between calls, and does not say so."""

    horizon, action_dim, obs_steps = 1, 1, 1
    calls = 0

    def __call__(self, obs: Obs) -> Tensor:
        self.calls += 1
        return torch.full((len(obs["policy"]), 1, 1), 1e-3 * self.calls)


class Mixing(Counting):
    def __call__(self, obs: Obs) -> Tensor:
        rows = obs["policy"]
        return (rows - rows.mean(0))[:, :1, None]


class Normalizing(Counting):
    """A module in training mode that no one sees from outside."""

    def __init__(self) -> None:
        self.layers = [nn.BatchNorm1d(4)]

    def __call__(self, obs: Obs) -> Tensor:
        return self.layers[0](obs["policy"])[:, :1, None]


def _evaluate(policy: object, **play: object) -> Evaluation:
    settings = PlayCfg(**play)  # type: ignore[arg-type]  # fields by name
    return headrace.evaluate("cartpole", policy, episodes=8, num_envs=4, play=settings, progress=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ["inline", "thread", "process"])
def test_hidden_state_and_rows_that_mix_are_caught(engine: str) -> None:
    with pytest.raises(PolicyError, match=r"another one for environments \d \(episode \d\), chunk 0, when it was"):
        _evaluate(Counting(), engine=engine)
    with pytest.raises(PolicyError, match="answered again alone"):
        _evaluate(Mixing(), engine=engine)
    with pytest.raises(PolicyError, match="a BatchNorm1d in training mode"):
        _evaluate(Normalizing(), engine=engine)
    assert _evaluate(Counting(), engine=engine, batching="fast").counters.rows_verified == 0


class Remembering:
    """Adds up what it has seen of each episode; its memory can be copied, or is out of reach."""

    horizon, action_dim, obs_steps = 1, 1, 1

    def __init__(self, *, lock: object = None, leak: bool = False) -> None:
        self.sums: dict[tuple[int, int], float] = {}
        self.lock, self.leak, self.calls = lock, leak, 0

    def begin(self, rows: EpisodeRows) -> None:
        self.sums |= dict.fromkeys(rows.keys(), 0.0)

    def end(self, rows: EpisodeRows) -> None:
        for key in rows.keys():  # noqa: SIM118  # not a dict
            del self.sums[key]

    def __call__(self, obs: Obs, context: ChunkContext) -> Tensor:
        self.calls += self.leak
        plan = torch.zeros(len(context), 1, 1)
        for row, key in enumerate(zip(context.seeds.tolist(), context.episode_ids.tolist(), strict=True)):
            if key[1] >= 0:
                self.sums[key] += float(obs["policy"][row, 1])
                plan[row] = 0.1 * self.sums[key] + 0.01 * (self.calls if len(context) > 16 or row % 2 else 0)
        return plan


def test_a_policy_with_memory_is_asked_on_a_copy_of_it() -> None:
    import threading

    found = _evaluate(Remembering())
    assert found.counters.rows_verified >= 8
    hidden = _evaluate(Remembering(lock=threading.Lock()))  # a lock cannot be copied, nor pickled
    assert hidden.counters.rows_verified == 0
    assert hidden.episodes == found.episodes
    assert "not verified" in _text(hidden)
    assert f"verified: {found.counters.rows_verified} rows" in _text(found)
    with pytest.raises(PolicyError, match="answers that are functions of their rows"):
        _evaluate(Remembering(leak=True))


def _text(found: Evaluation) -> str:
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as taken:
        console.print(found.summary())
    return taken.get()


def test_at_most_two_of_a_hundred_rows_are_computed_again_beyond_the_first_eight() -> None:
    from headrace.policies.batching import Asker
    from headrace.policies.protocol import one_row

    policy = as_chunk_policy(Mlp())
    asker, total = Asker(policy, Batching(size=1)), 0
    for chunk in range(2_000):
        obs = {"policy": torch.full((1, 4), float(chunk))}
        row = one_row("", chunk_index=chunk)
        answer = asker(obs, row)
        total += answer.checking
        assert torch.equal(answer.actions, ask(policy, obs, row, Batching(size=1)).actions)
    assert 36 <= total <= 40


def test_check_policy_verifies_before_a_long_run() -> None:
    from headrace.testing import check_policy

    with closing(headrace.make("cartpole", 4, threads=1, autoreset="disabled")) as env:
        found = check_policy(Mlp(), env)
        assert (found.verified >= 8, found.strict_size) == (True, 16)
        with pytest.raises(PolicyError, match="draws from numpy's global random generator"):
            check_policy(Drawing("numpy"), env)


def test_settings_of_other_kinds_are_refused_with_what_to_pass() -> None:
    from types import SimpleNamespace

    from headrace.errors import ConfigError

    with pytest.raises(ConfigError, match="instruction: expected one text for every episode"):
        PlayCfg(instruction=["left", "right"])  # type: ignore[arg-type]  # bad on purpose
    with pytest.raises(ConfigError, match="batching: expected 'strict', 'fast' or a headrace"):
        _evaluate(Mlp(), batching=4)
    with pytest.raises(ConfigError, match="expected a number of 64 bits"):
        headrace.evaluate("cartpole", Mlp(), episodes=1, seed=[0, 1])  # type: ignore[arg-type]  # bad on purpose
    with pytest.raises(ConfigError, match="select_action only"):
        _evaluate(SimpleNamespace(select_action=lambda batch: None))
    with pytest.raises(ConfigError, match="did you mean 'gym:CartPole-v1'"):
        headrace.evaluate("CartPole-v1", Mlp(), episodes=1)
    for name, value in (("timeout", -1), ("timeout", float("nan")), ("timeout", "3"), ("ensemble_decay", "x")):
        with pytest.raises(ConfigError, match=f"{name}: expected a number"):
            PlayCfg(**{name: value})  # type: ignore[arg-type]  # bad on purpose
    with pytest.raises(ConfigError, match=r"mapping: expected a headrace\.policies\.ObservationMap"):
        PlayCfg(mapping={"a": "b"})  # type: ignore[arg-type]  # bad on purpose


@pytest.mark.parametrize("answer", [None, [[0.0]]])
def test_an_answer_that_is_no_array_is_refused_with_what_was_expected(answer: object) -> None:
    with pytest.raises(PolicyError, match="expected a tensor or array"):
        headrace.evaluate("cartpole", lambda obs: answer, episodes=1, num_envs=1, progress=False)  # type: ignore[arg-type, return-value]  # bad on purpose


def test_a_policy_that_reads_its_environment_is_found() -> None:
    class Placed(Mlp):
        def forward(self, obs: Obs, context: ChunkContext) -> Tensor:  # type: ignore[override]
            return super().forward(obs) + context.env_ids[:, None, None] * 0.01

    with pytest.raises(PolicyError, match="reads env_ids"):
        _evaluate(Placed(), policy_id="x")


def test_a_policy_of_one_action_per_chunk_may_leave_the_axis_of_the_chunk_out() -> None:
    flat = Mlp()
    flat.forward = lambda obs: Mlp.forward(flat, obs)[:, 0]  # type: ignore[method-assign]  # (n, A)
    assert _evaluate(flat, policy_id="x").episodes == _evaluate(Mlp(), policy_id="x").episodes
