"""``evaluate``: play a plan of episodes with a chunk policy; results do not depend on the number of environments."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict, Unpack, cast

from gymnasium import spaces
from torch import nn

from headrace.chunking import Admission, Batching, Engine, InlineEngine, ProcessEngine, as_chunk_policy
from headrace.chunking._admission import make_admission
from headrace.chunking._cursors import ChunkLengths
from headrace.chunking._engines import ThreadEngine, make_engine
from headrace.chunking._policy import PolicyLike
from headrace.envs._recipe import AnyEnv
from headrace.envs.bridges._bridge_env import BridgeEnv
from headrace.errors import ConfigError, EvaluationError, HeadraceError
from headrace.rollout._background_resets import BackgroundResets
from headrace.rollout._chunk_loop import ChunkLoop
from headrace.rollout._episode_plan import EpisodePlan
from headrace.rollout._evaluation import Counters, EpisodeResult, Evaluation
from headrace.rollout._hold_action import HoldAction
from headrace.rollout._journal import Header, Journal, circumstances, source_of
from headrace.rollout._policy_id import policy_hash
from headrace.rollout._progress import EpisodeProgress

OnEpisodes: TypeAlias = Callable[[list[EpisodeResult]], None]
"""Gets the rows of episodes as they finish."""


class PlaySettings(TypedDict, total=False):
    """How a policy is played; each as the argument of :func:`headrace.evaluate` of that name."""

    offset: int
    latency: int
    admission: Admission | str
    engine: str | Engine
    batching: Batching | Literal["strict", "fast"] | None
    ensemble_decay: float | None
    hold_action: HoldAction
    allow_hold: bool
    timeout: float | None
    policy_id: str | None
    instruction: str | None


def evaluate(
    env: AnyEnv,
    policy: PolicyLike,
    *,
    episodes: int | Iterable[int],
    execute: int,
    seed: int = 0,
    journal: str | Path | None = None,
    resume: bool = False,
    on_episodes: OnEpisodes | None = None,
    progress: bool = True,
    **settings: Unpack[PlaySettings],
) -> Evaluation:
    """Play every episode of a plan once, to its end.

    An environment whose chunk has run dry is suspended until its next chunk is there; the others go on. Pictures are
    drawn only for the observations that the model reads.

    Args:
        env: made with ``autoreset="disabled"``; ``final_obs=False`` saves the pictures of last observations.
        policy: whatever :func:`as_chunk_policy` takes, if it says its ``horizon``; with an engine of your own, the
            policy that runs there, or one of its sizes. A module is in evaluation mode meanwhile.
        episodes: how many (ids from 0), or the ids.
        execute: steps from chunk to chunk: the actions of each that are played.
        seed: of the episodes and of the policy's noise.
        journal: file that every finished episode is appended to in the step in which it ends; a kill of the process
            loses none, a loss of power those of the last second.
        resume: go on with that journal: only the episodes that it lacks are played. What decides the rows (source,
            overrides, seed, policy, lengths, strict size, …) must be the same.
        on_episodes: called in each step in which episodes ended, with their rows, once they are in the journal.
        progress: show a progress bar with rates and the running success rate.
        **settings: how the policy is played (``offset``, ``latency``, ``admission``, ``engine``, ``batching``, …), by
            the names of :func:`headrace.evaluate`.

    Returns:
        A row per finished episode and what it cost. Ctrl-C gives what is finished, with status ``interrupted``.

    Raises:
        PolicyError: the policy raised or answered badly, or took too long.
        EvaluationError: an observer or the environment raised something that is not ours, which is the cause.
            Every error that ends an evaluation has the episodes that were finished in ``error.finished``.
    """
    plan = EpisodePlan(episodes)
    if resume and journal is None:
        raise ConfigError("resume: expected a journal to go on with; pass journal=")
    named = journal is not None or settings.get("policy_id") is not None
    with kept_modes(policy), closing(Evaluator(env, policy, execute=execute, seed=seed, **settings)) as evaluator:
        return play_plan(
            plan,
            partial(evaluator.play, progress=progress),
            header=evaluator.header if named else None,
            journal=None if journal is None else Path(journal),
            resume=resume,
            on_episodes=on_episodes,
        )


class Evaluator:
    """Plays episodes of one environment with one policy, as often as it is asked. Close it afterwards.

    The arguments are those of :func:`headrace.evaluate`.
    """

    def __init__(
        self,
        env: AnyEnv,
        policy: PolicyLike,
        *,
        execute: int,
        seed: int = 0,
        offset: int = 0,
        latency: int = 0,
        admission: Admission | str = "greedy",
        engine: str | Engine = "inline",
        batching: Batching | Literal["strict", "fast"] | None = None,
        ensemble_decay: float | None = None,
        hold_action: HoldAction = "last",
        allow_hold: bool = False,
        timeout: float | None = None,
        policy_id: str | None = None,
        instruction: str | None = None,
    ) -> None:
        if env.autoreset != "disabled":
            raise ConfigError(
                f'evaluate: expected an environment with autoreset="disabled", got {env.autoreset!r}; '
                'headrace.make(…, autoreset="disabled") makes one'
            )
        if ensemble_decay is not None and (execute != 1 or latency):
            raise ConfigError(f"ensemble_decay: expected execute=1 and no latency, got execute={execute}, {latency=}")
        rule = make_admission(admission) if isinstance(admission, str) else admission
        if ensemble_decay is not None and rule.holds:
            raise ConfigError(
                f"ensemble_decay: expected a rule that suspends, got {rule}; a step with a hold action has no "
                "prediction"
            )
        if batching is not None and not isinstance(engine, str):
            raise ConfigError("batching: expected an engine by name with it, got an engine, which has its own")
        if timeout is not None and not isinstance(engine, str):
            raise ConfigError("timeout: expected an engine by name with it, got an engine, which has its own")
        if env.fidelity == "hold" and not (allow_hold or rule.holds or env.num_envs == 1):
            raise ConfigError(
                "evaluate: expected environments that stand still while suspended, got a bridge with fidelity 'hold': "
                "theirs drift, and a policy would plan from old observations. Bridge single environments, or pass "
                "save= and restore= to the bridge; allow_hold=True takes it as it is"
            )
        formed = Batching(mode=batching) if isinstance(batching, str) else batching or Batching()
        strict_size = formed.strict_size if isinstance(engine, str) else engine.strict_size
        # an environment that does not say keeps to it
        if strict_size is not None and not getattr(env, "reseeds", True):
            raise ConfigError(
                "evaluate: expected environments whose episodes are functions of (seed, episode id), which strict "
                "batches "
                f"promise, got a bridge without: {getattr(env, 'no_identity', '') or 'its reseeds is False'}. Pass "
                "batching='fast': the rows are then a sample of episodes, numbered in order, that no other run repeats"
            )
        if not -(2**63) <= seed < 2**63:
            raise ConfigError(f"seed: expected a number of 64 bits, got {seed}")
        self._policy = as_chunk_policy(policy, action_dim=action_size(env.single_action_space))
        self._lengths = ChunkLengths(horizon=self._policy.horizon, execute=execute, offset=offset, latency=latency)
        self._own_engine = isinstance(engine, str)
        self._engine = make_engine(engine, self._policy, formed, timeout=timeout) if isinstance(engine, str) else engine
        self._env, self._instruction = env, instruction
        self._rule, self._seed, self._policy_id = rule, seed, policy_id
        self._ensemble_decay = ensemble_decay
        self._hold_action: HoldAction = hold_action

    @property
    def header(self) -> Header:
        """What decides the rows, and where they are played; ConfigError where nothing tells the policy apart."""
        if not getattr(self._env, "reseeds", True):
            raise ConfigError(
                "journal, policy_id: expected environments whose episodes are functions of (seed, episode id); the "
                "rows of "
                "this one cannot be resumed or merged, since no other run repeats them"
            )
        if self._policy_id is None:
            if not isinstance(self._engine, (InlineEngine, ThreadEngine, ProcessEngine)):
                raise ConfigError(
                    f"policy_id (--policy-id): expected a text that names the policy, since "
                    f"{type(self._engine).__name__} runs it where it cannot be seen; "
                    "a journal is resumed and merged for equal policies only"
                )
            self._policy_id = policy_hash(self._policy)
        identity = (
            source_of(self._env)
            | ({} if self._instruction is None else {"instruction": self._instruction})
            | {
                "seed": self._seed,
                "policy": self._policy_id,
                **asdict(self._lengths),
                "ensemble_decay": self._ensemble_decay,
                "strict_size": self._engine.strict_size,
                "hold": str(self._rule) if self._rule.holds else None,
                "fidelity": self._env.fidelity,
            }
        )
        return Header(identity=identity, circumstances=circumstances(self._env, type(self._engine).__name__))

    def play(self, ids: Sequence[int], on_episodes: OnEpisodes | None = None, *, progress: bool = False) -> Evaluation:
        """Play these episodes; errors have what was finished in ``error.finished``."""
        resets: BackgroundResets | None = None
        # only where rows are the same whenever a reset is done, so that who is in a batch must not decide any of them
        if getattr(self._env, "overlaps_resets", False) and self._engine.strict_size and not self._rule.holds:
            resets = BackgroundResets(cast("BridgeEnv", self._env))
        loop = ChunkLoop(
            self._env,
            self._policy,
            EpisodePlan(ids),
            lengths=self._lengths,
            rule=self._rule,
            engine=self._engine,
            seed=self._seed,
            ensemble_decay=self._ensemble_decay,
            hold_action=self._hold_action,
            instruction=self._instruction,
            resets=resets,
            on_episodes=on_episodes,
        )
        try:
            with EpisodeProgress(len(ids)) if progress else nullcontext() as bar:
                return loop.play(bar)
        except HeadraceError as error:
            error.finished = loop.result("failed")
            raise
        # an observer or an environment that we did not write may raise anything: its episodes are kept all the same
        except Exception as error:
            ended = EvaluationError(
                f"evaluate: {type(error).__name__} after {loop.finished} of {len(ids)} episodes: {error}; "
                "error.finished has them"
            )
            ended.finished = loop.result("failed")
            raise ended from error
        finally:
            loop.release()

    def close(self) -> None:
        """End an engine that was made here."""
        if self._own_engine:
            self._engine.close()


def play_plan(
    plan: EpisodePlan,
    play: Callable[[Sequence[int], OnEpisodes | None], Evaluation],
    *,
    header: Header | None = None,
    journal: Path | None = None,
    resume: bool = False,
    on_episodes: OnEpisodes | None = None,
    news: Callable[[], list[dict[str, Any]]] | None = None,
) -> Evaluation:
    """Play what a journal lacks of a plan, and join it with what the journal has.

    Args:
        plan: the episodes.
        play: plays ids, calls its second argument with rows as they finish, and returns them all.
        header: of the evaluation; None for one that has no identity, and no journal.
        journal: as for :func:`evaluate`.
        resume: likewise.
        on_episodes: called with rows as they finish, once they are in the journal.
        news: gives circumstances, other than the header's, of processes that have joined since it was called last.
    """
    whole, left, note = tuple(sorted(plan.ids)), plan.ids, on_episodes
    known: list[EpisodeResult] = []
    book: Journal | None = None
    if journal is not None and header is not None:
        book = Journal(journal, header, plan.ids, resume=resume)
        wanted = set(whole)
        known = [row for row in book.rows if row.episode_id in wanted]
        done = {row.episode_id for row in known}
        left = [episode for episode in plan.ids if episode not in done]

        def add(rows: list[EpisodeResult]) -> None:
            book.add(rows, () if news is None else news())
            if on_episodes is not None:
                on_episodes(rows)

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
                result = joined(play(left, note))
            else:
                assert header is not None  # only a journal knows episodes before
                result = joined(_nothing_played(header))
    except HeadraceError as error:
        error.finished = joined(error.finished) if isinstance(error.finished, Evaluation) else result
        raise
    return result


def _nothing_played(header: Header) -> Evaluation:
    """Of a plan whose episodes are all in the journal."""
    strict, fidelity = header.identity["strict_size"], header.identity["fidelity"]
    return Evaluation(
        episodes=[], plan=(), status="completed", counters=Counters(), strict_size=strict, fidelity=fidelity
    )


@contextmanager
def kept_modes(policy: object) -> Generator[None]:
    """After the block, the parts of a module are in training mode again where :func:`as_chunk_policy` changed it."""
    before = [(part, part.training) for part in policy.modules()] if isinstance(policy, nn.Module) else []
    try:
        yield
    finally:
        for part, training in before:
            part.training = training


def action_size(space: spaces.Space[Any]) -> int:
    """Numbers of one action: A of a Box (A,), 1 for a choice."""
    if isinstance(space, spaces.Discrete):
        return 1
    if not isinstance(space, spaces.Box) or len(space.shape) != 1:
        raise ConfigError(f"policy: expected an environment with actions (A,) of real numbers, or choices, got {space}")
    return space.shape[0]
