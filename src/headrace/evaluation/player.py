"""The player: one policy in one environment, for evaluations, films, workers and measured runs alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray
from rich.progress import MofNCompleteColumn, TimeRemainingColumn
from torch import nn

from headrace._progress import progress as show_progress
from headrace.envs.recipe import check_seed
from headrace.envs.task import count_actions
from headrace.errors import ConfigError, EvaluationError, HeadraceError
from headrace.evaluation._journal import Header, Journal, circumstances, describe_source
from headrace.evaluation._result import Counters, EpisodeResult, Evaluation
from headrace.evaluation.loop import ChunkLoop, OnStep
from headrace.evaluation.scheduling import BackgroundResets, ChunkLengths, EndlessPlan, EpisodePlan, make_admission
from headrace.libraries.training import library_run
from headrace.policies.batching import Batching, choose_batching
from headrace.policies.engines import EnginePolicy, InlineEngine, ThreadEngine, make_engine
from headrace.policies.foreign import ForeignEngine, ForeignPolicy, ProcessEngine
from headrace.policies.load_policy import FoundPolicy, PolicySource, build_policy, find_policy, find_task
from headrace.policies.preflight import PreflightRow, compare_features
from headrace.policies.protocol import ChunkPolicy, PolicyLike, as_chunk_policy
from headrace.policies.serving.links import RemoteCfg
from headrace.policies.step_policy import StepPolicy, policy_hash

if TYPE_CHECKING:
    from headrace.bridges.bridge_env import BridgeEnv
    from headrace.envs.recipe import AnyEnv
    from headrace.evaluation.cfg import JournalCfg, PlayCfg

OnEpisodes: TypeAlias = Callable[[list[EpisodeResult]], None]
"""Receives the rows of episodes as they finish."""


_REFRESH = 0.2
"""Seconds."""


class EpisodeProgress:
    """Episodes done, env-steps per second and the running success rate, on standard error."""

    def __init__(self, total: int, *, shown: bool = True) -> None:
        columns = (MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = show_progress("episodes", total, *columns) if shown else nullcontext()

    def __enter__(self) -> EpisodeProgress:
        self._update, self._begun, self._due = self._bar.__enter__(), time.perf_counter(), 0.0
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.__exit__(*error)

    def show(self, results: Sequence[EpisodeResult], env_steps: int) -> None:
        """Show how far the loop is."""
        now = time.perf_counter()
        if self._update is None or now < self._due:
            return
        self._due = now + _REFRESH
        rate = env_steps / max(now - self._begun, 1e-9)
        known = [result.success for result in results if result.success is not None]
        success = f", {sum(known) / len(known):.0%} success" if known else ""
        self._update(completed=len(results), description=f"{rate:,.0f} env-steps/s{success}")


class Player:
    """Plays episodes of one environment with one policy, as often as it is called. Close it afterwards.

    Args:
        env: made with ``autoreset="disabled"``; ``final_obs=False`` saves the images of last observations.
        policy: what :func:`as_chunk_policy` takes; with an engine of your own, the policy that runs there, or one of
            its sizes.
        cfg: how the policy is played.
        seed: of the episodes and of the policy's noise.
    """

    def __init__(self, env: AnyEnv, policy: PolicyLike, cfg: PlayCfg, seed: int = 0) -> None:
        if env.autoreset != "disabled":
            raise ConfigError(
                f'evaluate: expected an environment with autoreset="disabled", got {env.autoreset!r}; '
                'headrace.make(…, autoreset="disabled") makes one'
            )
        rule = make_admission(cfg.admission)
        for name in ("batching", "timeout"):
            if getattr(cfg, name) is not None and not isinstance(cfg.engine, str):
                raise ConfigError(f"{name}: expected an engine by name with it, got an engine, which has its own")
        formed = Batching.of(cfg.batching)
        strict_size = formed.strict_size if isinstance(cfg.engine, str) else cfg.engine.strict_size
        # an environment that does not state it has episodes that are functions of their ids
        if strict_size is not None and not getattr(env, "reseeds", True):
            raise ConfigError(
                "evaluate: expected environments whose episodes are functions of (seed, episode id), which strict "
                f"batches promise, got a bridge without: {getattr(env, 'no_identity', '') or 'its reseeds is False'}. "
                "Pass batching='fast': the rows are then a sample of episodes, numbered in order, that no other run "
                "repeats"
            )
        self._policy = as_chunk_policy(policy, horizon=cfg.horizon, action_dim=count_actions(env.single_action_space))
        self._lengths = _lengths(cfg, self._policy.horizon)
        self._own_engine, self._places = isinstance(cfg.engine, str), None
        if isinstance(cfg.engine, str):
            formed = choose_batching(self._policy, formed, env, cfg.timeout)
            self._engine, self._places = make_engine(cfg.engine, self._policy, formed, cfg.timeout), formed.places
        else:
            self._engine, self._places = cfg.engine, getattr(cfg.engine, "places", None)
        self._env, self._cfg, self._rule, self._seed = env, cfg, rule, check_seed(seed)
        self.preflight = compare_features(self._policy, env, _chunk_row(self._policy, self._lengths), cfg.mapping)
        """What the policy states, compared with what the environment gives."""
        self.running: NDArray[np.bool_] = np.zeros(env.num_envs, np.bool_)
        """bool (N,): slots whose episode was not finished when the last :meth:`play` ended."""

    @property
    def header(self) -> Header:
        """What decides the rows, and where they are played; ConfigError where nothing tells the policy apart."""
        if not getattr(self._env, "reseeds", True):
            raise ConfigError(
                "journal, policy_id: expected environments whose episodes are functions of (seed, episode id); the "
                "rows of this one cannot be resumed or merged, since no other run repeats them"
            )
        cfg, policy_id = self._cfg, self._cfg.policy_id
        if policy_id is None and isinstance(self._engine, ForeignEngine):
            policy_id = self._engine.policy_hash or None
        if policy_id is None:
            if not isinstance(self._engine, (InlineEngine, ThreadEngine, ProcessEngine)):
                raise ConfigError(
                    f"policy_id (--policy-id): expected a text that names the policy, since "
                    f"{type(self._engine).__name__} runs it where it cannot be seen; "
                    "a journal is resumed and merged for equal policies only"
                )
            policy_id = policy_hash(self._policy)
        identity = (
            describe_source(self._env)
            | ({} if cfg.instruction is None else {"instruction": cfg.instruction})
            | {
                "seed": self._seed,
                "policy": policy_id,
                **asdict(self._lengths),
                "ensemble_decay": cfg.ensemble_decay,
                "strict_size": self._engine.strict_size,
                **({} if self._places in (None, "modulo") else {"places": self._places}),
                "hold": None,  # of rules of 0.2 that stepped who waited
                "fidelity": self._env.fidelity,
                "mapping": None if cfg.mapping is None else cfg.mapping.to_json(),
            }
        )
        return Header(identity=identity, circumstances=circumstances(self._env, type(self._engine).__name__))

    def play(
        self,
        plan: Sequence[int] | EndlessPlan,
        on_episodes: OnEpisodes | None = None,
        *,
        progress: bool = False,
        most_steps: int | None = None,
        clamp: bool = False,
        held: NDArray[np.bool_] | None = None,
        on_step: OnStep | None = None,
    ) -> Evaluation:
        """Play episodes; errors have what was finished in ``error.finished``.

        Args:
            plan: their ids, or a plan without end.
            on_episodes: called in each step in which episodes ended, with their rows.
            progress: show a progress bar.
            most_steps: steps of the batch after which it ends; None for the end of the plan.
            clamp: cut actions to the bounds of the action space before they are played.
            held: bool (N,), slots that do not act now, as ``on_step`` leaves them.
            on_step: called after each step of the batch.
        """
        self.preflight.check()
        resets: BackgroundResets | None = None
        # only where rows are the same whenever a reset is done, so that the rows of a batch must not decide any of them
        if getattr(self._env, "overlaps_resets", False) and self._engine.strict_size:
            resets = BackgroundResets(cast("BridgeEnv", self._env))
        loop = ChunkLoop(
            self._env,
            self._policy,
            plan if isinstance(plan, EndlessPlan) else EpisodePlan(plan),
            self._cfg,
            lengths=self._lengths,
            rule=self._rule,
            engine=self._engine,
            seed=self._seed,
            clamp=clamp,
            resets=resets,
            held=held,
            on_step=on_step,
            on_episodes=on_episodes,
        )
        try:
            with EpisodeProgress(len(plan)) if progress else nullcontext() as bar:
                return loop.play(bar, most_steps=most_steps)
        except HeadraceError as error:
            error.finished = loop.result("failed")
            raise
        # an observer or an environment of another library may raise anything: its episodes are kept all the same
        except Exception as error:
            ended = EvaluationError(
                f"evaluate: {type(error).__name__} after {loop.finished} of {len(plan)} episodes: {error}; "
                "error.finished has them"
            )
            ended.finished = loop.result("failed")
            raise ended from error
        finally:
            self.running = loop.running
            loop.release()

    def close(self) -> None:
        """End an engine that was made here."""
        if self._own_engine:
            self._engine.close()


def _lengths(cfg: PlayCfg, horizon: int) -> ChunkLengths:
    """Return the lengths of chunks with ``horizon`` rows."""
    blended = cfg.ensemble_decay is not None
    execute = cfg.execute
    if execute is None:
        execute = 1 if blended else horizon - cfg.offset - cfg.latency
    if blended and (execute != 1 or cfg.latency):
        raise ConfigError(f"ensemble_decay: expected execute=1 and latency=0, got {execute} and {cfg.latency}")
    return ChunkLengths(horizon=horizon, execute=execute, offset=cfg.offset, latency=cfg.latency)


def _chunk_row(policy: ChunkPolicy, lengths: ChunkLengths) -> PreflightRow:
    """Return the line of a preflight about the lengths of chunks, which were checked when they were made."""
    steps = f"{policy.obs_steps} observation" + ("s" if policy.obs_steps > 1 else "")
    played = f"{lengths.execute} rows from row {lengths.offset} on"
    played += f", {lengths.latency} steps late" if lengths.latency else ""
    return PreflightRow(name="chunk", policy=f"{policy.horizon} rows from {steps}", environment=played, verdict="same")


def play_plan(
    plan: EpisodePlan,
    play: Callable[..., Evaluation],
    *,
    header: Header | None = None,
    journal: JournalCfg | None = None,
    progress: bool | OnEpisodes = False,
    news: Callable[[], list[dict[str, Any]]] | None = None,
) -> Evaluation:
    """Play what a journal lacks of a plan, and join it with what the journal has.

    Args:
        plan: the episodes.
        play: :meth:`Player.play`, or the same over workers.
        header: of the evaluation; None for one that has no identity, and no journal.
        journal: as for :func:`headrace.evaluate`.
        progress: likewise.
        news: gives circumstances, other than the header's, of processes that have joined since it was called last.
    """
    whole, left, note = tuple(sorted(plan.ids)), plan.ids, progress if callable(progress) else None
    known: list[EpisodeResult] = []
    book: Journal | None = None
    if journal is not None and header is not None:
        book = Journal(Path(journal.path), header, plan.ids, resume=journal.resume)
        wanted = set(whole)
        known = [row for row in book.rows if row.episode_id in wanted]
        done = {row.episode_id for row in known}
        left = [episode for episode in plan.ids if episode not in done]

        def add(rows: list[EpisodeResult]) -> None:
            book.add(rows, () if news is None else news())
            if callable(progress):
                progress(rows)

        note = add

    def joined(result: Evaluation) -> Evaluation:
        return replace(
            result,
            episodes=sorted(known + result.episodes),
            plan=whole,
            identity=None if header is None else header.identity,
            circumstances=None if header is None else header.circumstances | (result.circumstances or {}),
        )

    result: Evaluation | None = None
    try:
        with book or nullcontext():
            if left:
                result = joined(play(left, note, progress=progress is True))
            else:
                assert header is not None  # only a journal has episodes before
                result = joined(_nothing_played(header))
    except HeadraceError as error:
        error.finished = joined(error.finished) if isinstance(error.finished, Evaluation) else result
        raise
    return result


def _nothing_played(header: Header) -> Evaluation:
    """Return the result of a plan whose episodes are all in the journal."""
    strict, fidelity = header.identity["strict_size"], header.identity["fidelity"]
    return Evaluation(
        episodes=[], plan=(), status="completed", counters=Counters(), strict_size=strict, fidelity=fidelity
    )


@contextmanager
def open_player(env: AnyEnv, policy: PolicySource | FoundPolicy, cfg: PlayCfg, seed: int) -> Generator[Player]:
    """Load the policy, connect to its server where it has one, and close everything at the end of the block."""
    found = policy if isinstance(policy, FoundPolicy) else find_policy(policy, find_task(env))
    check_engine(found, cfg)
    with ExitStack() as stack:
        stack.enter_context(_restore_modes(found.source))
        if found.kind in ("library", "torchscript", "onnx") or isinstance(found.source, StepPolicy):
            stack.enter_context(library_run(seed=seed))
        if isinstance(found.source, RemoteCfg) and cfg.timeout is not None:
            patience = min(cfg.timeout, found.source.reconnect)
            found = replace(found, source=replace(found.source, timeout=cfg.timeout, reconnect=patience))
        if isinstance(found.source, ForeignPolicy):
            formed = Batching.of(cfg.batching)
            engine = ForeignEngine(
                found.source, env, formed, horizon=cfg.horizon, mapping=cfg.mapping, timeout=cfg.timeout
            )
            stack.enter_context(closing(engine))
            cfg = replace(cfg, engine=engine, batching=None, timeout=None)
            yield stack.enter_context(closing(Player(env, engine.policy, cfg, seed)))
            return
        loaded = build_policy(found, env, horizon=cfg.horizon, mapping=cfg.mapping)
        runs = loaded if found.kind == "remote" else found.source
        if isinstance(runs, EnginePolicy) and cfg.engine == "inline" and cfg.batching is None:
            if cfg.mapping is not None and found.kind != "remote":
                raise ConfigError("mapping: expected none with an engine that is connected; RemoteEngine(…, mapping=…)")
            cfg = replace(cfg, engine=runs.engine, timeout=None)
            if found.kind == "remote":
                stack.callback(runs.engine.close)
        yield stack.enter_context(closing(Player(env, loaded, cfg, seed)))


@contextmanager
def _restore_modes(policy: object) -> Generator[None]:
    """Put the parts of a module back into training mode after the block where :func:`as_chunk_policy` changed it."""
    before = [(part, part.training) for part in policy.modules()] if isinstance(policy, nn.Module) else []
    try:
        yield
    finally:
        for part, training in before:
            part.training = training


def check_engine(found: FoundPolicy, cfg: PlayCfg) -> None:
    """Reject an engine or batches for the policy of a server, which has its own."""
    if isinstance(found.source, RemoteCfg) and (cfg.engine != "inline" or cfg.batching is not None):
        raise ConfigError(f"engine, batching: expected none with {found.source.address}: a server has its own")
    if isinstance(found.source, ForeignPolicy) and cfg.engine != "inline":
        raise ConfigError(f"engine: expected none with {found.source.python}: it runs the policy beside the physics")
