"""What fits into the policy contract, how batches are formed, and how predictions are blended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from script_env import Planner, ScriptEnv
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import headrace
from flat import ask, evaluate
from headrace.errors import ConfigError, PolicyError
from headrace.evaluation.scheduling import TemporalEnsemble
from headrace.policies import Batching, as_chunk_policy
from headrace.policies.protocol import ChunkContext
from headrace.types import Obs


def _context(episodes: list[int], chunks: list[int] | None = None, seed: int = 5) -> ChunkContext:
    count = len(episodes)
    zeros = torch.zeros(count, dtype=torch.int64)
    return ChunkContext(
        seeds=torch.full((count,), seed),
        env_ids=torch.arange(count) + 100,
        episode_ids=torch.tensor(episodes, dtype=torch.int64),
        chunk_index=zeros if chunks is None else torch.tensor(chunks),
        instructions=tuple(f"task {episode}" for episode in episodes),
        left_over=torch.zeros(count, 3, 2),
        left_over_length=zeros,
        delay=zeros,
    )


class Module(nn.Module):
    horizon = 3

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 6)
        self.dropout = nn.Dropout(0.9)

    def forward(self, obs: Obs) -> Tensor:
        return self.dropout(self.layer(obs["policy"])).view(-1, 3, 2)


class LeRobotLike:
    class config:  # noqa: N801  # as LeRobot names it
        chunk_size = 3
        n_obs_steps = 2

    def predict_action_chunk(self, batch: Obs) -> Tensor:
        return batch["policy"][:, -1, :2][:, None].expand(-1, 3, -1)


def test_modules_functions_and_lerobot_policies_fit_without_subclassing() -> None:
    obs, context = {"policy": torch.randn(4, 5)}, _context([0, 1, 2, 3])
    module = Module().train()
    fitted = as_chunk_policy(module, action_dim=2)
    answer = fitted(obs, context)
    assert answer.shape == (4, 3, 2)
    assert not answer.requires_grad
    assert torch.equal(answer, fitted(obs, context)), "evaluation mode: no dropout"

    plain = as_chunk_policy(lambda o: torch.ones(len(o["policy"]), 3, 2), horizon=3, action_dim=2)
    assert plain(obs, context).sum() == 24

    def told(o: Obs, context: ChunkContext, scale: float = 2.0) -> Tensor:
        return context.noise(3, 2) * scale

    assert torch.equal(as_chunk_policy(told, horizon=3, action_dim=2)(obs, context), context.noise(3, 2) * 2)

    def with_default(o: Obs, scale: float = 3.0) -> Tensor:
        return torch.full((len(o["policy"]), 3, 2), scale)

    assert as_chunk_policy(with_default, horizon=3, action_dim=2)(obs, context)[0, 0, 0] == 3

    lerobot = as_chunk_policy(LeRobotLike(), action_dim=2)
    assert (lerobot.horizon, lerobot.obs_steps) == (3, 2)
    assert lerobot({"policy": torch.randn(4, 2, 5)}, context).shape == (4, 3, 2)
    again = as_chunk_policy(lerobot)
    assert (again.horizon, again.action_dim, again.obs_steps) == (3, 2, 2), "fitting twice changes nothing"


class Told(nn.Module):
    horizon, action_dim = 3, 2

    def forward(self, obs: Obs, context: ChunkContext) -> Tensor:
        return context.noise(3, 2) + obs["policy"][:, :1, None]


# torch.jit is old, and so are many policies
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_compiled_and_traced_modules_fit() -> None:
    obs, context = {"policy": torch.randn(4, 5)}, _context([0, 1, 2, 3])
    compiled = as_chunk_policy(torch.compile(Told()))
    assert (compiled.horizon, compiled.action_dim) == (3, 2)
    with torch.compiler.set_stance("force_eager"):  # no compiler: what matters is that the context gets through
        assert torch.equal(compiled(obs, context), Told()(obs, context))

    module = Module().eval()
    fitted = as_chunk_policy(torch.jit.trace(module, (obs,), strict=False), horizon=3, action_dim=2)
    assert torch.equal(fitted(obs, context), module(obs))


def test_a_policy_that_does_not_say_its_sizes_or_contradicts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"horizon: expected a policy that says it.*as_chunk_policy\(policy, horizon"):
        as_chunk_policy(lambda obs: obs["policy"], action_dim=2)
    with pytest.raises(ConfigError, match="horizon: expected 7, got a policy with horizon 3"):
        as_chunk_policy(Module(), horizon=7, action_dim=2)
    with pytest.raises(ConfigError, match=r"expected a function, an nn\.Module or an object with predict_action_chunk"):
        as_chunk_policy(3, horizon=1, action_dim=1)  # type: ignore[arg-type]  # bad on purpose


@settings(deadline=None, max_examples=40)
@given(order=st.permutations(range(6)), stream=st.sampled_from(["chunk noise", "second"]))
def test_noise_depends_on_seed_episode_and_chunk_and_on_nothing_else(order: list[int], stream: str) -> None:
    episodes, chunks = [3, 3, 9, 0, 9, 14], [0, 1, 1, 5, 2, 0]
    noise = _context(episodes, chunks).noise(2, 3, stream=stream)
    shuffled = _context([episodes[i] for i in order], [chunks[i] for i in order]).noise(2, 3, stream=stream)
    assert torch.equal(shuffled, noise[list(order)])
    assert len(noise.unique()) == noise.numel(), "no two rows, episodes or chunks share a number"
    assert not torch.equal(noise, _context(episodes, chunks, seed=6).noise(2, 3, stream=stream))
    assert torch.equal(noise.flatten(1)[:, :4], _context(episodes, chunks).noise(4, stream=stream)), "of any shape"


class Spy:
    horizon, action_dim, obs_steps = 3, 2, 1

    def __init__(self) -> None:
        self.batches: list[tuple[list[float], list[int]]] = []

    def __call__(self, obs: Obs, context: ChunkContext) -> Tensor:
        self.batches.append((obs["policy"][:, 0].tolist(), context.episode_ids.tolist()))
        return (obs["policy"][:, :1] * 10 + context.episode_ids[:, None])[..., None].expand(-1, 3, 2).float()


def _place(episode: int, batching: Batching) -> int:
    """The place of an episode, written down digit by digit."""
    if batching.places == "modulo":
        return episode % batching.size
    digits = []
    while episode:
        digits.append(episode % batching.size)
        episode //= batching.size
    return sum(digits) % batching.size


@settings(deadline=None, max_examples=80)
@given(
    episodes=st.lists(st.integers(0, 40), min_size=1, max_size=20, unique=True),
    batching=st.sampled_from(
        [
            Batching(mode="fast"),
            Batching(mode="strict", size=8),
            Batching(mode="strict", size=8, places="spread"),
            Batching(mode="strict", size=8, places="modulo"),
            Batching(mode="strict", size=3, places="free"),
            Batching(mode="strict", size=1, places="free"),
        ]
    ),
)
def test_whatever_the_batches_every_row_gets_its_own_answer(episodes: list[int], batching: Batching) -> None:
    spy = Spy()
    seen = torch.arange(len(episodes), dtype=torch.float32)[:, None] + 1
    answer = ask(spy, {"policy": seen}, _context(episodes), batching)
    expected = seen[:, 0] * 10 + torch.tensor(episodes)
    assert torch.equal(answer.actions[:, 1, 1], expected)
    assert answer.calls == len(spy.batches)
    assert answer.padding == sum(len(rows) for rows, _ in spy.batches) - len(episodes)
    sizes = [len(rows) for rows, _ in spy.batches]
    if batching.mode == "strict":
        assert set(sizes) == {batching.size}
        for rows, ids in spy.batches:
            real = [(place, ids[place]) for place, row in enumerate(rows) if row]
            own = batching.places != "free"
            assert all(not own or place == _place(episode, batching) for place, episode in real), "its id's place"
        if batching.places == "free":
            assert answer.calls == -(-len(episodes) // batching.size), "only the last batch is padded"
        else:
            most = max(sum(_place(e, batching) == place for e in episodes) for place in range(batching.size))
            assert answer.calls == most, "rows that collide go into the next call, and nothing else makes one"
    else:
        assert sizes == [len(episodes)]


class CopiedBytes(TorchDispatchMode):
    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.cat.default, torch.ops.aten.index_select.default):
            self.total += out.nbytes
        return out


def test_an_observation_is_copied_as_often_however_many_batches_there_are() -> None:
    images = torch.ones(64, 1000)
    with CopiedBytes() as copied:
        assert ask(Spy(), {"policy": images}, _context(list(range(64))), Batching(size=4)).calls == 16
    assert copied.total < 3 * images.nbytes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "strictly"}, "expected 'fast' or 'strict'"),
        ({"size": 0}, "expected at least 1 row"),
    ],
)
def test_batching_refuses_what_cannot_work(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Batching(**fields)  # type: ignore[arg-type]  # bad on purpose


@settings(deadline=None, max_examples=40)
@given(
    horizon=st.integers(1, 6), steps=st.integers(1, 15), decay=st.sampled_from([0.0, 0.01, 0.5, -0.3]), data=st.data()
)
def test_an_ensemble_is_the_direct_formula_per_environment(
    horizon: int, steps: int, decay: float, data: st.DataObject
) -> None:
    """ACT: weights exp(-m·i) / Σ over the predictions of this step, i = 0 the oldest; a predicted zero counts."""
    count = 3
    ensemble = TemporalEnsemble(count, horizon, 2, decay=decay)
    generator = torch.Generator().manual_seed(0)
    predicted: list[list[Tensor]] = [[] for _ in range(count)]
    for _ in range(steps):
        resets = data.draw(st.lists(st.integers(0, count - 1), unique=True, max_size=1))
        ensemble.begin(torch.tensor(resets, dtype=torch.int64))
        for env in resets:
            predicted[env] = []
        ids = torch.tensor(data.draw(st.lists(st.integers(0, count - 1), unique=True, min_size=1)))
        chunks = torch.randn(len(ids), horizon, 2, generator=generator)
        chunks[:, :, 0] *= torch.randint(0, 2, (len(ids), horizon), generator=generator)  # zeros that are meant
        got = ensemble.blend(ids, chunks)
        for row, env in enumerate(ids.tolist()):
            predicted[env].append(chunks[row])
            now = len(predicted[env]) - 1
            known = [plan[now - at] for at, plan in enumerate(predicted[env]) if now - at < horizon]
            weights = torch.exp(-decay * torch.arange(len(known), dtype=torch.float64))
            direct = (torch.stack(known).double() * weights[:, None]).sum(0) / weights.sum()
            # a running mean in float32 of at most 6 terms: a few roundings of 6e-8
            torch.testing.assert_close(got[row].double(), direct, rtol=1e-5, atol=1e-6)


def test_an_evaluation_with_ensembling_blends_and_forgets_at_the_end_of_an_episode() -> None:
    """The mean of (chunk, row) over the chunks that predicted a step: chunk t - i predicted it in row i."""
    env = ScriptEnv(3, lambda episode: 5 + episode % 3, holds=True)
    seen: dict[int, list[list[float]]] = {}
    step = env.step

    def spy(actions: Tensor, observe: Tensor | None = None) -> object:
        for slot in (~(env.suspended | env.parked)).nonzero().squeeze(1).tolist():
            seen.setdefault(int(env.episode[slot]), []).append(actions[slot].tolist())
        return step(actions, observe)

    env.step = spy  # type: ignore[method-assign]  # to look at what is played
    found = evaluate(env, Planner(4, 1, check=False), episodes=7, execute=1, ensemble_decay=0.0, progress=False)
    assert found.counters.rows_inferred == found.counters.env_steps, "a query every step"
    for episode, actions in seen.items():
        for now, (of, at, chunk, row) in enumerate(actions):
            rows = range(min(now + 1, 4))
            # a running mean in float32 of at most 4 terms: a few roundings of 6e-8, within approx's 1e-6
            assert of == pytest.approx(episode)
            assert at == pytest.approx(now)
            assert chunk == pytest.approx(sum(now - i for i in rows) / len(rows))
            assert row == pytest.approx(sum(rows) / len(rows))


class DatasetPolicy:
    """As LeRobot's policies: sizes and inputs in ``config``, a batch under the names of its datasets."""

    def __init__(self, *inputs: str) -> None:
        self.config = SimpleNamespace(
            chunk_size=4,
            n_obs_steps=1,
            input_features=dict.fromkeys(inputs),
            output_features={"action": SimpleNamespace(shape=(2,))},
        )
        self.seen: dict[str, Tensor] = {}

    def predict_action_chunk(self, batch: dict[str, Tensor]) -> Tensor:
        self.seen = dict(batch)
        return torch.zeros(len(batch["policy"]), 4, 2)


def test_a_lerobot_policy_says_its_sizes_and_reads_the_names_of_its_datasets() -> None:
    own = DatasetPolicy("observation.state", "observation.images.camera", "observation.touch")
    policy = as_chunk_policy(own)
    assert (policy.horizon, policy.action_dim) == (4, 2)
    obs = {
        "policy": torch.rand(3, 5),
        "camera": torch.randint(0, 256, (3, 8, 6, 3), dtype=torch.uint8),
        "touch": torch.rand(3, 1),
    }
    policy(obs, _context([0, 1, 2]))
    assert own.seen["observation.state"] is obs["policy"]
    assert own.seen["observation.touch"] is obs["touch"]
    assert torch.equal(own.seen["observation.images.camera"], obs["camera"].permute(0, 3, 1, 2) / 255)
    with pytest.raises(PolicyError, match=r"reads 'observation.depth', expected a group 'depth'.*got \['camera'"):
        as_chunk_policy(DatasetPolicy("observation.depth"))(obs, _context([0, 1, 2]))


class Moody(nn.Module):
    horizon = 3

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.dropout = nn.Linear(1, 1).eval(), nn.Dropout()
        self.modes: list[bool] = []

    def forward(self, obs: Obs) -> Tensor:
        self.modes.append(self.dropout.training)
        return torch.zeros(len(obs["policy"]), 3, 1)


def test_a_module_is_in_its_own_mode_again_after_an_evaluation() -> None:
    module = Moody()
    env = headrace.make("inverted-pendulum", 2, threads=1, autoreset="disabled", overrides={"episode_length": 3})
    evaluate(env, module, episodes=2, execute=3, progress=False)
    assert not any(module.modes)
    assert (module.training, module.frozen.training, module.dropout.training) == (True, False, True)
    env.close()


class _Pi0Config:
    """As LeRobot's, for what is read of it."""

    type = "pi0"
    chunk_size, n_obs_steps, max_action_dim = 6, 1, 32
    output_features = {"action": SimpleNamespace(shape=(2,))}  # noqa: RUF012  # as LeRobot's


class _Pi0:
    config = _Pi0Config()

    def __init__(self) -> None:
        self.seen: list[dict[str, object]] = []
        self.resets = 0

    def reset(self) -> None:
        self.resets += 1

    def predict_action_chunk(self, batch: Obs, **kwargs: object) -> Tensor:
        self.seen.append(kwargs)
        return torch.zeros(len(batch["policy"]), 6, 2)


def test_a_policy_with_pi0s_signature_gets_noise_of_its_own_width_and_is_reset_before_each_call() -> None:
    pi0 = _Pi0()
    policy = as_chunk_policy(pi0)
    assert (policy.horizon, policy.action_dim, policy.obs_steps) == (6, 2, 1)
    told = _context([1, 2, 3])
    for _ in range(2):
        policy({"policy": torch.zeros(3, 4)}, told)
    assert pi0.resets == 2
    noise = pi0.seen[0]["noise"]
    assert torch.equal(noise, told.noise(6, 32))  # type: ignore[arg-type]
    assert torch.equal(noise, pi0.seen[1]["noise"])  # type: ignore[arg-type]
