"""``evaluate``: play a plan of episodes with a chunk policy; results do not depend on the number of environments."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

from torch import nn

from headrace.chunking import (
    Admission,
    Batching,
    ChunkLengths,
    Engine,
    PolicyLike,
    as_chunk_policy,
    make_admission,
    make_engine,
)
from headrace.errors import ConfigError, EvaluationError, HeadraceError
from headrace.rollout._chunk_loop import ChunkLoop, HoldAction
from headrace.rollout._episode_plan import EpisodePlan
from headrace.rollout._evaluated_env import EvaluatedEnv, action_size
from headrace.rollout._evaluation import Counters, EpisodeResult, Evaluation
from headrace.rollout._journal import Header, Journal, circumstances, policy_hash, source_of
from headrace.rollout._progress import EpisodeProgress


def evaluate(
    env: EvaluatedEnv,
    policy: PolicyLike,
    *,
    episodes: int | Iterable[int],
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
    journal: str | Path | None = None,
    resume: bool = False,
    policy_id: str | None = None,
    progress: bool = True,
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
        offset: first row of a chunk that is played.
        latency: simulated steps between an observation and the moment its chunk takes over.
        admission: when to infer, and whom: a rule, or its name as in :func:`headrace.chunking.make_admission`.
        engine: ``inline``, ``thread`` (the model beside the physics), ``process`` (for policies that hold the GIL), the
            name of a registered engine, or an engine of your own, which you close.
        batching: ``strict`` (the default) gives the model batches of one fixed size, 16 rows, in which an episode
            always has the same row: results are equal bit for bit whatever ``num_envs``, at the price of padding rows.
            ``fast`` gives it whoever waits; results then differ in their last bits with the batch. A
            :class:`Batching` says the size or buckets. An engine of your own has its own.
        ensemble_decay: ACT's temporal ensembling with this decay; needs ``execute=1``. Negative favors new predictions.
        hold_action: what waiting environments play under a rule that holds: ``last``, ``zero`` or a function.
        allow_hold: take a bridged environment with fidelity ``hold``, too, whose suspended environments drift; the
            result says so.
        timeout: seconds that one call of the model may take, with an engine by name; None for any.
        journal: file that every finished episode is appended to, and synced, in the step in which it ends.
        resume: go on with that journal: only the episodes that it lacks are played. What decides the rows (source,
            overrides, seed, policy, lengths, strict size, …) must be the same.
        policy_id: what journals and saved evaluations call the policy; None for a hash of a module's weights, which is
            taken for a journal only.
        progress: show a progress bar with rates and the running success rate.

    Returns:
        A row per finished episode and what it cost. Ctrl-C gives what is finished, with status ``interrupted``.

    Raises:
        PolicyError: the policy raised or answered badly, or took too long.
        EvaluationError: an observer or the environment raised something that is not ours, which is the cause.
            Every error that ends an evaluation has the episodes that were finished in ``error.finished``.
    """
    if env.autoreset != "disabled":
        raise ConfigError(
            f'evaluate: expected an environment with autoreset="disabled", got {env.autoreset!r}; '
            'headrace.make(…, autoreset="disabled") makes one'
        )
    formed = Batching(mode=batching) if isinstance(batching, str) else batching
    modes = training_modes(policy)
    fitted = as_chunk_policy(policy, action_dim=action_size(env.single_action_space))
    if ensemble_decay is not None and (execute != 1 or latency):
        raise ConfigError(f"ensemble_decay: expected execute=1 and no latency, got execute={execute}, {latency=}")
    rule = make_admission(admission) if isinstance(admission, str) else admission
    if ensemble_decay is not None and rule.holds:
        raise ConfigError(
            f"ensemble_decay: expected a rule that suspends, got {rule}; a step with a hold action has no prediction"
        )
    if batching is not None and not isinstance(engine, str):
        raise ConfigError("batching: expected an engine by name with it, got an engine, which has its own")
    if timeout is not None and not isinstance(engine, str):
        raise ConfigError("timeout: expected an engine by name with it, got an engine, which has its own")
    if env.fidelity == "hold" and not (allow_hold or rule.holds or env.num_envs == 1):
        raise ConfigError(
            "evaluate: expected environments that stand still while suspended, got a bridge with fidelity 'hold': "
            "theirs drift, and a policy would plan from old observations. Bridge single environments, or pass save= "
            "and restore= to the bridge; allow_hold=True takes it as it is"
        )
    lengths = ChunkLengths(horizon=fitted.horizon, execute=execute, offset=offset, latency=latency)
    if not -(2**63) <= seed < 2**63:
        raise ConfigError(f"seed: expected a number of 64 bits, got {seed}")
    plan = EpisodePlan(episodes)
    strict = (formed or Batching()).strict_size if isinstance(engine, str) else engine.strict_size
    header: Header | None = None
    if journal is not None or policy_id is not None:
        identity = source_of(env) | {
            "seed": seed,
            "policy": policy_hash(policy) if policy_id is None else policy_id,
            **asdict(lengths),
            "ensemble_decay": ensemble_decay,
            "strict_size": strict,
            "hold": str(rule) if rule.holds else None,
            "fidelity": env.fidelity,
        }
        where = circumstances(env, engine if isinstance(engine, str) else type(engine).__name__)
        header = Header(identity=identity, circumstances=where)
    book: Journal | None = None
    if journal is not None and header is not None:
        book = Journal(Path(journal), header, plan.ids, resume=resume)
    elif resume:
        raise ConfigError("resume: expected a journal to go on with; pass journal=")
    whole, known = tuple(sorted(plan.ids)), list[EpisodeResult]()

    def joined(result: Evaluation) -> Evaluation:
        return replace(
            result,
            episodes=sorted(known + result.episodes),
            plan=whole,
            identity=None if header is None else header.identity,
            circumstances=None if header is None else header.circumstances,
        )

    if book is not None and book.rows:
        wanted = set(whole)
        known = [row for row in book.rows if row.episode_id in wanted]
        left = wanted - {row.episode_id for row in known}
        if not left:
            return joined(
                Evaluation(
                    episodes=[],
                    plan=whole,
                    status="completed",
                    counters=Counters(),
                    strict_size=strict,
                    fidelity=env.fidelity,
                )
            )
        plan = EpisodePlan([episode for episode in plan.ids if episode in left])

    runs = make_engine(engine, fitted, formed or Batching(), timeout=timeout) if isinstance(engine, str) else engine
    try:
        loop = ChunkLoop(
            env,
            fitted,
            plan,
            lengths=lengths,
            rule=rule,
            engine=runs,
            seed=seed,
            ensemble_decay=ensemble_decay,
            hold_action=hold_action,
            on_episodes=None if book is None else book.add,
        )
        try:
            with EpisodeProgress(len(plan), shown=progress) as bar:
                return joined(loop.play(bar))
        except HeadraceError as error:
            error.finished = joined(loop.result("failed"))
            raise
        # an observer or an environment that we did not write may raise anything: its episodes are kept all the same
        except Exception as error:
            ended = EvaluationError(
                f"evaluate: {type(error).__name__} after {loop.finished} of {len(plan)} episodes: {error}; "
                "error.finished has them"
            )
            ended.finished = joined(loop.result("failed"))
            raise ended from error
        finally:
            loop.release()
    finally:
        if isinstance(engine, str):
            runs.close()
        restore_modes(modes)


def training_modes(policy: object) -> list[tuple[nn.Module, bool]]:
    """Which parts of a module are in training mode, before :func:`as_chunk_policy` puts all into evaluation mode."""
    return [(part, part.training) for part in policy.modules()] if isinstance(policy, nn.Module) else []


def restore_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    """Put the parts of a module back into the modes that they had."""
    for part, training in modes:
        part.training = training
