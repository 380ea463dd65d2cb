"""The contestants of benchmarks/chunking.py: ours, the two restated schedulers, and the closed forms."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import headrace
from headrace import evaluate
from headrace.envs.task import Rows
from headrace.envs.tasks.walking import Ant, AntCfg
from headrace.evaluation import PlayCfg
from headrace.evaluation.scheduling import (
    Admission,
    Greedy,
    Immediate,
    Synchronized,
    WholeBatchOnAny,
)
from headrace.policies import Batching, as_chunk_policy
from headrace.policies.foreign import ProcessEngine
from headrace.policies.protocol import ChunkContext
from headrace.types import Obs, Step

EXECUTE = 16
ENDLESS = 10**6  # episodes in the plan: the clock ends a measurement, not the plan
ANT_OBS, ANT_ACTION = 27, 8
LAYER_WIDTH = 128


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    sizes: tuple[int, ...]
    rounds: int
    seconds: float
    settle: int
    """Steps of the batch before the clock starts."""
    turns: int
    """Turns of model and physics that are measured at least."""
    tries: int
    """Measurements at most, while other programs disturb."""
    every_rule: bool

    @staticmethod
    def quick() -> Effort:
        return Effort((16,), 1, 0.6, 40, turns=2, tries=1, every_rule=False)

    @staticmethod
    def full() -> Effort:
        return Effort((16, 64), 5, 1.2, 40, turns=3, tries=2, every_rule=True)


@dataclass(frozen=True)
class Case:
    """One setting with one number of environments."""

    setting: str
    num_envs: int
    q: float
    model_steps: float
    """What a full-batch call costs, in steps of physics."""
    same_cores: bool
    every_rule: bool
    decimation: int
    """Physics steps an action."""


@dataclass(frozen=True)
class Row:
    """A line of the table; ratios are medians over rounds of the ratio within a round."""

    setting: str
    num_envs: int
    scheduler: str
    rate: float
    times_any: float | None = None
    times_synced: float | None = None
    of_bound: float | None = None
    wasted: int | None = None
    held: int | None = None
    note: str = ""


@dataclass(frozen=True)
class Measured:
    """One window of one contestant."""

    rate: float
    wasted: int = 0
    held: int = 0
    others: float = 0.0
    """Share of the machine that other programs took meanwhile."""
    p: float = 0.0
    """Seconds of a full step, measured just before and just after."""


# --- environments whose episodes end at random -----------------------------------------------------------------------


class RandomEnds:
    """Ends an episode after each step with probability ``q``, from the episode's own stream."""

    q = 1 / 50

    def terminated(self, rows: Rows) -> Tensor:
        return rows.uniform("end", 1, draw=rows.steps)[:, 0] < self.q


class EndingAnt(RandomEnds, Ant):
    """``ant`` that ends at random only."""


def make_ants(case: Case, autoreset: str) -> Any:
    task = EndingAnt(AntCfg(episode_length=10_000, decimation=case.decimation))
    task.q = case.q
    return headrace.make(task, case.num_envs, threads=2, autoreset=autoreset, final_obs=False)  # type: ignore[arg-type]  # a literal


# --- models ----------------------------------------------------------------------------------------------------------


class Transformer(nn.Module):
    """Tokens of the observation, one per action of the chunk, through ``depth`` layers."""

    horizon, action_dim, obs_steps = EXECUTE, ANT_ACTION, 1

    def __init__(self, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(ANT_OBS, LAYER_WIDTH)
        self.steps = nn.Parameter(torch.randn(EXECUTE, LAYER_WIDTH))
        layer = nn.TransformerEncoderLayer(LAYER_WIDTH, 4, 4 * LAYER_WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.leave = nn.Linear(LAYER_WIDTH, ANT_ACTION)

    def forward(self, obs: Obs, context: ChunkContext) -> Tensor:
        tokens = self.enter(obs["policy"].clamp(-5.0, 5.0))[:, None] + self.steps
        return torch.tanh(0.01 * self.leave(self.layers(tokens)) + context.noise(EXECUTE, ANT_ACTION))


@dataclass(frozen=True)
class ElsewhereModel:
    """Takes ``fixed + per_row · k`` seconds off the CPU for k rows."""

    fixed: float
    per_row: float
    horizon: int = EXECUTE
    action_dim: int = ANT_ACTION
    obs_steps: int = 1

    def __call__(self, obs: Obs, context: ChunkContext) -> Tensor:
        del obs
        begin = time.perf_counter()
        plan = torch.tanh(context.noise(EXECUTE, ANT_ACTION))
        until = begin + self.fixed + self.per_row * len(context.env_ids)
        time.sleep(max(0.0, until - time.perf_counter()))
        return plan


def context_of(num_envs: int, calls: int) -> ChunkContext:
    ids, zeros = torch.arange(num_envs), torch.zeros(num_envs, dtype=torch.int64)
    return ChunkContext(
        seeds=zeros,
        env_ids=ids,
        episode_ids=ids,
        chunk_index=zeros + calls,
        instructions=("",) * num_envs,
        left_over=torch.zeros(num_envs, EXECUTE, ANT_ACTION),
        left_over_length=zeros,
        delay=zeros,
    )


def seconds_per_call(policy: Any, env: Any, rows: int, repeats: int = 5) -> float:
    obs = {name: values[:rows] for name, values in env.observe().items()}
    times = []
    for call in range(repeats + 1):
        begin = time.perf_counter()
        policy(obs, context_of(rows, call))
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def fitting_model(case: Case, p: float, env: Any) -> Any:
    """A model whose full-batch call takes ``model_steps`` times p."""
    target = case.model_steps * p
    if not case.same_cores:
        return as_chunk_policy(ElsewhereModel(target / 2, target / 2 / case.num_envs))
    few, many = (seconds_per_call(as_chunk_policy(Transformer(d)), env, case.num_envs) for d in (1, 5))
    per_layer = (many - few) / 4
    return as_chunk_policy(Transformer(max(1, round((target - few) / per_layer) + 1)))


# --- measuring -------------------------------------------------------------------------------------------------------


class Window:
    """An environment that lets an evaluation settle, times it, and ends it as Ctrl-C would."""

    def __init__(self, env: Any, effort: Effort) -> None:
        self._env = env
        self._effort = effort
        self._steps = 0
        self._begin = 0.0
        self.useful = 0
        self.seconds = 0.0
        self.on_begin: Callable[[], None] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def step(self, actions: Tensor, observe: Tensor | None = None) -> Step:
        if self._steps == self._effort.settle:
            self.on_begin()
            self._begin = time.perf_counter()
        timed = self._steps >= self._effort.settle
        if timed and (spent := time.perf_counter() - self._begin) > self._effort.seconds:
            self.seconds = spent
            raise KeyboardInterrupt
        self._steps += 1
        ids = self._env._active_set.ids
        acting = self._env.num_envs if ids is None else len(ids)
        self.useful += acting if timed else 0
        return self._env.step(actions, observe=observe)


def ours(env: Any, policy: Any, rule: Admission, engine: Any, effort: Effort) -> Measured:
    window = Window(env, effort)
    found = evaluate(
        window,
        policy,
        episodes=range(ENDLESS),
        play=PlayCfg(
            execute=EXECUTE, admission=rule, engine=engine, batching="fast" if isinstance(engine, str) else None
        ),
        progress=False,
    )
    assert found.status == "interrupted"
    return Measured(window.useful / window.seconds, found.counters.rows_wasted)


def restated(env: Any, policy: Any, effort: Effort, *, synced: bool) -> Measured:
    """The schedulers of others: a full batch whenever any needs a chunk, or whenever all do, with hold actions."""
    count = env.num_envs
    obs, _ = env.reset(seed=0)
    chunk = torch.zeros(count, EXECUTE, ANT_ACTION)
    # any: out of phase, as after a long run; it would take hundreds of steps to get there
    # environments meet by chance: evenly spread phases would share no call, and cost it 1.1 to 1.2 times too many
    phases = torch.randint(EXECUTE, (count,), generator=torch.Generator().manual_seed(0))
    row = torch.full((count,), EXECUTE) if synced else phases
    action = torch.zeros(count, ANT_ACTION)
    everyone = torch.arange(count)
    useful = wasted = held = calls = 0
    begin, steps = 0.0, 0
    while True:
        if steps == effort.settle:
            begin = time.perf_counter()
            useful = wasted = held = 0
        if steps > effort.settle and (spent := time.perf_counter() - begin) > effort.seconds:
            return Measured(useful / spent, wasted, held)
        needs = row >= EXECUTE
        if bool(needs.all() if synced else needs.any()):
            # until the clock starts only the physics has to settle: plans of the same kind, without the model
            fresh = policy(obs, context_of(count, calls)) if steps >= effort.settle else noise_plan(count, calls)
            calls += 1
            chunk = torch.where(needs[:, None, None], fresh, chunk)
            row = torch.where(needs, 0, row)
            wasted += count - int(needs.sum())
            needs = row >= EXECUTE
        action = torch.where(needs[:, None], action, chunk[everyone, row.clamp(max=EXECUTE - 1)])
        obs, _, terminated, truncated, _ = env.step(action)
        row = torch.where(needs, row, row + 1)
        row[terminated | truncated] = EXECUTE
        idle = int(needs.sum())
        held += idle
        useful += count - idle
        steps += 1


def noise_plan(count: int, calls: int) -> Tensor:
    return torch.tanh(context_of(count, calls).noise(EXECUTE, ANT_ACTION))


class Probe:
    """Measures p, a full step of settled environments with actions as the policies plan them, again and again."""

    def __init__(self, env: Any, effort: Effort) -> None:
        self.env = env
        self._plans = [noise_plan(env.num_envs, call) for call in range(8)]
        self._steps = 0
        env.reset(seed=0)
        for _ in range(2 * effort.settle):
            self._step()

    def _step(self) -> None:
        self.env.step(self._plans[self._steps // EXECUTE % 8][:, self._steps % EXECUTE])
        self._steps += 1

    def seconds(self) -> float:
        steps, begin = 0, time.perf_counter()
        while (spent := time.perf_counter() - begin) < 0.5 or steps < EXECUTE:
            self._step()
            steps += 1
        return spent / steps


def cpu_seconds() -> float:
    """What all processes of the machine have used so far."""
    with open("/proc/stat") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # without idle and waiting for disks


def undisturbed(measure: Callable[[], Measured], tries: int) -> Measured:
    """Measure, and again while other programs take more than a tenth of the machine; gives the quietest."""
    found: list[Measured] = []
    for _ in range(tries):
        everyone, mine, begin = cpu_seconds(), time.process_time(), time.perf_counter()
        one = measure()
        others = (cpu_seconds() - everyone) - (time.process_time() - mine)
        share = max(0.0, others / (time.perf_counter() - begin) / (os.cpu_count() or 1))
        found.append(replace(one, others=share))
        if share < 0.1:
            break
    return min(found, key=lambda one: one.others)


def case_rows(case: Case, effort: Effort) -> list[Row]:
    """Measure every contestant of a setting, interleaved."""
    free, parking, spare = (make_ants(case, mode) for mode in ("same_step", "disabled", "same_step"))
    free.reset(seed=0)
    probe = Probe(spare, effort)
    p = statistics.median(probe.seconds() for _ in range(5 if effort.rounds > 1 else 1))
    policy = fitting_model(case, p, free)
    whole, quarter = (seconds_per_call(policy, free, rows) for rows in (case.num_envs, case.num_envs // 4))
    # a few turns of model and physics at least
    effort = replace(effort, seconds=max(effort.seconds, effort.turns * (EXECUTE * p + whole)))
    contestants = _contestants(case, effort, free, parking, policy)
    barred = {"any, full batch (restated)", "synced, hold (restated)", "Greedy, inline", "Greedy, thread"}
    found: dict[str, list[Measured]] = {name: [] for name in contestants}
    # model and physics take turns on the same cores: slow, and far from the bars
    for index in range(min(3, effort.rounds) if case.same_cores else effort.rounds):
        order = list(contestants) if index % 2 == 0 else list(reversed(contestants))
        for name in order:
            if index == 0 or name in barred:
                before = probe.seconds()
                one = undisturbed(contestants[name], effort.tries if name in barred else 1)
                found[name].append(replace(one, p=(before + probe.seconds()) / 2))
    p = statistics.median(one.p for name in barred for one in found[name])
    bounds = closed_forms(case, p, whole)
    others = statistics.median(one.others for name in barred for one in found[name])
    per_row = max(0.0, (whole - quarter) / (case.num_envs * 0.75))
    note = (
        f"{case.setting}, N = {case.num_envs}: p = {p * 1e3:.2f} ms, I(N) = {whole * 1e3:.1f} ms "
        f"= {whole / p:.1f} p (meant: {case.model_steps:.1f} p; a = {(whole - per_row * case.num_envs) * 1e3:.1f} ms, "
        f"b = {per_row * 1e3:.3f} ms); bounds: "
        + ", ".join(f"{name} {bounds[name]:,.0f}" for name in bounds)
        + f"; other programs took {others:.0%} of the machine"
    )
    for env in (free, parking, spare):
        env.close()
    return [_row(case, name, found, whole, note) for name in contestants]


def _contestants(case: Case, effort: Effort, free: Any, parking: Any, policy: Any) -> dict[str, Callable[[], Measured]]:
    rules: list[tuple[str, Admission, str]] = [
        ("Greedy, inline", Greedy(), "inline"),
        ("Greedy, thread", Greedy(), "thread"),
    ]
    if case.every_rule:
        for engine in ("inline", "thread"):
            rules += [
                (f"WholeBatchOnAny, {engine}", WholeBatchOnAny(), engine),
                (f"Immediate, {engine}", Immediate(), engine),
                (f"Synchronized, {engine}", Synchronized(), engine),
            ]
    contestants: dict[str, Callable[[], Measured]] = {
        "any, full batch (restated)": lambda: restated(free, policy, effort, synced=False),
        "synced, hold (restated)": lambda: restated(free, policy, effort, synced=True),
    }
    for name, rule, engine in rules:
        contestants[name] = lambda rule=rule, engine=engine: ours(parking, policy, rule, engine, effort)
    if case.every_rule:
        contestants["Greedy, process"] = lambda: _in_process(parking, policy, effort)
    return contestants


def _in_process(env: Any, policy: Any, effort: Effort) -> Measured:
    import functools
    import pickle

    engine = ProcessEngine(functools.partial(pickle.loads, pickle.dumps(policy)), Batching(mode="fast"))
    try:
        # the process loads torch during a first, short evaluation
        ours(env, policy, Greedy(), engine, Effort((), 1, 0.0, 1, turns=0, tries=1, every_rule=False))
        return ours(env, policy, Greedy(), engine, effort)
    finally:
        engine.close()


def closed_forms(case: Case, p: float, whole: float) -> dict[str, float]:
    """Useful steps per second that each scheduler can reach."""
    n, useful = case.num_envs, (1 - (1 - case.q) ** EXECUTE) / case.q
    overlapped = min(n / p, useful * n / whole)
    return {
        "any": n / (p + whole * (1 - (1 - 1 / useful) ** n)),
        "synced": n * useful / (EXECUTE * p + whole),
        "suspended": n / (p + whole / useful),
        **({} if case.same_cores else {"overlapped": overlapped}),
    }


def _row(case: Case, name: str, found: dict[str, list[Measured]], whole: float, note: str) -> Row:
    mine = found[name]
    form: str | None = "suspended"
    if name.startswith("WholeBatchOnAny"):
        form = None  # the closed form is that of a long run out of phase, which only the restated one begins with
    elif name.startswith("any"):
        form = "any"
    elif "hold" in name:
        form = "synced"
    elif not name.endswith("inline") and not case.same_cores:
        form = "overlapped"

    def over(other: str) -> float:
        return statistics.median(a.rate / b.rate for a, b in zip(mine, found[other], strict=False))

    return Row(
        setting=case.setting,
        num_envs=case.num_envs,
        scheduler=name,
        rate=statistics.median(one.rate for one in mine),
        times_any=over("any, full batch (restated)"),
        times_synced=over("synced, hold (restated)"),
        of_bound=None
        if form is None
        else statistics.median(one.rate / closed_forms(case, one.p, whole)[form] for one in mine),
        wasted=max(one.wasted for one in mine),
        held=max(one.held for one in mine),
        note=note,
    )
