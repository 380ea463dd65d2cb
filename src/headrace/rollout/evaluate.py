"""``evaluate``: play a plan of episodes with a chunk policy; results do not depend on the number of environments."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Literal, Protocol

import torch
from gymnasium import spaces
from torch import Tensor

from headrace.chunking import (
    Admission,
    Batching,
    ChunkContext,
    ChunkLengths,
    ChunkPolicy,
    Cursors,
    Engine,
    Greedy,
    InlineEngine,
    ObsHistory,
    Queue,
    Reply,
    Request,
    TemporalEnsemble,
    ThreadEngine,
)
from headrace.errors import ConfigError, LifecycleError, PolicyError, UnknownNameError
from headrace.rollout.episode_plan import EpisodePlan
from headrace.rollout.evaluation import Counters, EpisodeResult, Evaluation
from headrace.rollout.progress import EpisodeProgress
from headrace.timing import StageTimer
from headrace.types import Chunk, EpisodeEnds, Ids, Obs, Step


class EvaluatedEnv(Protocol):
    """What an evaluation uses of an environment: a ``BatchEnv``, or a bridge."""

    num_envs: int
    device: torch.device
    timer: StageTimer

    @property
    def autoreset(self) -> str:
        """As given to ``make``."""
        ...

    @property
    def frames_drawn(self) -> int:
        """Camera frames rendered so far."""
        ...

    @property
    def single_action_space(self) -> spaces.Space[object]:
        """Of one environment."""
        ...

    def reset(self, *, seed: int | None = None, options: dict[str, object] | None = None) -> object:
        """As ``BatchEnv.reset``."""
        ...

    def step(self, actions: Tensor, observe: Tensor | None = None) -> Step:
        """As ``BatchEnv.step``."""
        ...

    def observe(self, ids: Ids | None = None) -> Obs:
        """As ``BatchEnv.observe``."""
        ...

    def suspend(self, ids: Ids) -> None:
        """As ``BatchEnv.suspend``."""
        ...

    def resume(self, ids: Ids) -> None:
        """As ``BatchEnv.resume``."""
        ...


def evaluate(
    env: EvaluatedEnv,
    policy: ChunkPolicy,
    *,
    episodes: int | Iterable[int],
    execute: int,
    seed: int = 0,
    offset: int = 0,
    latency: int = 0,
    admission: Admission | None = None,
    engine: Literal["inline", "thread"] | Engine = "inline",
    batching: Batching | None = None,
    ensemble_decay: float | None = None,
    progress: bool = True,
) -> Evaluation:
    """Play every episode of a plan once, to its end.

    An environment whose chunk has run dry is suspended until its next chunk is there; the others go on. Pictures are
    drawn only for the observations that the model reads.

    Args:
        env: made with ``autoreset="disabled"``; ``final_obs=False`` saves the pictures of last observations.
        policy: see :class:`ChunkPolicy` and :func:`as_chunk_policy`.
        episodes: how many (ids from 0), or the ids.
        execute: actions of each chunk that are played.
        seed: of the episodes and of the policy's noise.
        offset: first row of a chunk that is played.
        latency: simulated steps between an observation and the moment its chunk takes over.
        admission: when to infer, and whom; :class:`Greedy` by default.
        engine: ``inline``, ``thread`` (the model beside the physics), or an engine of your own, which you close.
        batching: ``strict`` for results that are equal bit for bit whatever the batch; ``fast`` by default.
        ensemble_decay: ACT's temporal ensembling with this decay; needs ``execute=1``.
        progress: show a progress bar with rates and the running success rate.

    Returns:
        A row per finished episode and what it cost. Ctrl-C gives what is finished, with status ``interrupted``.

    Raises:
        PolicyError: the policy raised or answered badly; ``error.finished`` has the episodes that were finished.
    """
    if env.autoreset != "disabled":
        raise ConfigError(f'evaluate: expected an environment with autoreset="disabled", got {env.autoreset!r}')
    space = env.single_action_space
    if not isinstance(space, spaces.Box) or space.shape != (policy.action_dim,):
        raise ConfigError(f"evaluate: expected actions {space}, got a policy with action_dim {policy.action_dim}")
    if ensemble_decay is not None and (execute != 1 or latency):
        raise ConfigError(f"ensemble_decay: expected execute=1 and no latency, got execute={execute}, {latency=}")
    lengths = ChunkLengths(horizon=policy.horizon, execute=execute, offset=offset, latency=latency)
    plan = EpisodePlan(episodes)
    batching = batching or Batching()
    runs = _named_engine(engine, policy, batching) if isinstance(engine, str) else engine
    loop = _Loop(env, policy, plan, lengths, admission or Greedy(), runs, seed, ensemble_decay)
    try:
        with EpisodeProgress(len(plan), shown=progress) as bar:
            return loop.play(bar)
    except PolicyError as error:
        error.finished = loop.result("failed")
        raise
    finally:
        if isinstance(engine, str):
            runs.close()


def _named_engine(name: str, policy: ChunkPolicy, batching: Batching) -> Engine:
    if name == "thread":
        return ThreadEngine(policy, batching)
    if name == "inline":
        return InlineEngine(policy, batching)
    raise UnknownNameError("engine", name, ("inline", "thread"))


class _Loop:
    """The state of one evaluation: who plays which episode, who waits, what is under way."""

    def __init__(
        self,
        env: EvaluatedEnv,
        policy: ChunkPolicy,
        plan: EpisodePlan,
        lengths: ChunkLengths,
        rule: Admission,
        engine: Engine,
        seed: int,
        ensemble_decay: float | None,
    ) -> None:
        self._env, self._policy, self._plan = env, policy, plan
        self._rule, self._engine, self._seed = rule, engine, seed
        count, device = env.num_envs, env.device
        self._cursors = Cursors(count, policy.action_dim, lengths, device)
        self._lengths = lengths
        self._history = ObsHistory(policy.obs_steps) if policy.obs_steps > 1 else None
        self._ensemble = (
            None
            if ensemble_decay is None
            else TemporalEnsemble(count, policy.horizon - lengths.offset, policy.action_dim, decay=ensemble_decay)
        )
        self._episode = torch.full((count,), -1, dtype=torch.int64, device=device)
        self._running = torch.zeros(count, dtype=torch.bool, device=device)
        self._in_flight = torch.zeros(count, dtype=torch.bool, device=device)
        self._acting = torch.ones(count, dtype=torch.bool, device=device)
        self._nobody = torch.zeros(count, dtype=torch.bool, device=device)
        self._last_action = torch.zeros((count, policy.action_dim), device=device)
        self._asked = self._nobody
        self._results: list[EpisodeResult] = []
        self._counters = Counters()
        self._policy_seconds = self._wait_seconds = 0.0
        self._begun = time.perf_counter()
        self._frames_before = env.frames_drawn

    def result(self, status: Literal["completed", "interrupted", "failed"]) -> Evaluation:
        """What is finished so far."""
        counters = self._counters
        counters.seconds = time.perf_counter() - self._begun
        counters.frames_drawn = self._env.frames_drawn - self._frames_before
        counters.stages = {
            **self._env.timer.seconds(),
            "policy": self._policy_seconds,
            "wait": self._wait_seconds,
        }
        return Evaluation(episodes=sorted(self._results), planned=len(self._plan), status=status, counters=counters)

    def play(self, bar: EpisodeProgress) -> Evaluation:
        """Until the plan is used up and every slot has finished."""
        try:
            self._start()
            while bool(self._running.any()):
                self._take_answers()
                self._infer()
                self._take_answers()
                acting = self._who_acts()
                if bool(acting.any()):
                    self._step(acting)
                    bar.update(self._results, self._counters.env_steps)
                elif not self._engine.busy:
                    raise LifecycleError(
                        f"admission {self._rule}: nobody can act, and the rule does not let the model run; "
                        "a rule must infer when no environment can act"
                    )
        except KeyboardInterrupt:
            return self.result("interrupted")
        return self.result("completed")

    def _start(self) -> None:
        """The first episodes; slots that the plan has none for are suspended at once."""
        self._env.timer.clear()
        taken = self._plan.take(self._env.num_envs)
        # the first reset is of all: a slot without an episode gets any, and never acts
        ids = torch.tensor(taken + [taken[0]] * (self._env.num_envs - len(taken)), dtype=torch.int64)
        self._env.reset(seed=self._seed, options={"episode_ids": ids})
        slots = torch.arange(len(taken), device=self._env.device)
        self._begin(slots, ids[: len(taken)].to(self._env.device))

    def _begin(self, slots: Tensor, episode_ids: Tensor) -> None:
        self._episode[slots] = episode_ids
        self._running[slots] = True
        self._in_flight[slots] = False
        self._cursors.begin(slots, episode_ids)
        self._last_action[slots] = 0.0
        if self._ensemble is not None:
            self._ensemble.begin(slots)
        if self._history is not None:
            self._history.begin(slots, self._env.observe(slots), self._env.num_envs)

    def _infer(self) -> None:
        """Ask the rule; give the rows it names to the engine, with the observation they have now."""
        if self._engine.busy:
            return
        waiting = self._cursors.wants_chunk & self._running & ~self._in_flight
        if not bool(waiting.any()):
            return
        queue = Queue(
            running=self._running,
            waiting=waiting,
            can_act=self._cursors.can_act,
            engine_overlaps=self._engine.overlaps,
            steps=self._counters.batch_steps,
        )
        chosen = self._rule.infer(queue) & self._running
        ids = chosen.nonzero().squeeze(1)
        if not len(ids):
            return
        rest, rest_length = self._cursors.rest(ids)
        context = ChunkContext(
            seed=self._seed,
            env_ids=ids,
            episode_ids=self._episode.index_select(0, ids),
            chunk_index=self._cursors.chunk_index.index_select(0, ids),
            rest=rest,
            rest_length=rest_length,
            delay=self._cursors.delay(ids),
        )
        obs = self._env.observe(ids) if self._history is None else self._history.rows(ids)
        self._asked = waiting & chosen
        self._in_flight = self._in_flight | self._asked
        self._counters.rows_inferred += len(ids)
        self._counters.rows_wasted += len(ids) - int(self._asked.sum())
        self._engine.submit(Request(obs=obs, context=context))

    def _take_answers(self) -> None:
        """Fetch the answer, waiting for it only if nobody could act otherwise."""
        if not self._engine.busy:
            return
        wait = not bool(self._who_acts().any())
        begin = time.perf_counter()
        reply = self._engine.poll(wait=wait)
        self._wait_seconds += time.perf_counter() - begin
        if reply is not None:
            self._load(reply)

    def _load(self, reply: Reply) -> None:
        context, actions = reply.request.context, reply.answer.actions.to(self._env.device)
        # rows that did not wait when they were inferred are dropped: their chunk goes on
        asked = self._asked.index_select(0, context.env_ids)
        current = asked & (self._episode.index_select(0, context.env_ids) == context.episode_ids)
        if self._ensemble is not None:
            ids = context.env_ids[current]
            first = self._lengths.offset
            actions[current, first] = self._ensemble.blend(ids, actions[current][:, first:])
        chunk = Chunk(
            env_ids=context.env_ids[asked],
            episode_ids=context.episode_ids[asked],
            index=context.chunk_index[asked],
            actions=actions[asked],
        )
        kept = self._cursors.load(chunk)
        self._in_flight[context.env_ids[current]] = False
        self._counters.rows_discarded += int((~kept).sum())
        self._counters.model_calls += reply.answer.calls
        self._counters.rows_padded += reply.answer.padding
        self._policy_seconds += reply.seconds

    def _who_acts(self) -> Tensor:
        """bool (N,): with an action to play; in hold forms everyone who runs."""
        return self._running if self._rule.holds else self._running & self._cursors.can_act

    def _step(self, acting: Tensor) -> None:
        if not torch.equal(acting, self._acting):
            self._env.suspend(~acting)
            self._env.resume(acting)
            self._acting = acting.clone()
        planned = acting & self._cursors.can_act if self._rule.holds else acting
        ids = planned.nonzero().squeeze(1)
        self._last_action[ids] = self._cursors.play(ids)
        observe = self._nobody if self._history is None else acting
        step = self._env.step(self._last_action, observe=observe)
        counters = self._counters
        counters.batch_steps += 1
        counters.env_steps += len(ids)
        counters.held_steps += int(acting.sum()) - len(ids)
        counters.idle_steps += int((self._running & ~acting).sum())
        if self._history is not None:
            acted = acting.nonzero().squeeze(1)
            self._history.push(acted, {name: values.index_select(0, acted) for name, values in step.obs.items()})
        if "ends" in step.info:
            self._finish(step.info["ends"])

    def _finish(self, ends: EpisodeEnds) -> None:
        """Write the table rows of ended episodes, and give their slots the next of the plan at once."""
        success = [None] * len(ends) if ends.success is None else ends.success.tolist()
        columns = (ends.episode_ids, ends.returns, ends.lengths, ends.diverged)
        for row, (episode, total, length, diverged) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
            self._results.append(
                EpisodeResult(
                    episode_id=episode,
                    seed=self._seed,
                    reward=total,
                    length=length,
                    success=success[row],
                    diverged=diverged,
                )
            )
        taken = torch.tensor(self._plan.take(len(ends)), dtype=torch.int64, device=self._env.device)
        going_on, retired = ends.env_ids[: len(taken)], ends.env_ids[len(taken) :]
        if len(going_on):
            mask = self._nobody.clone()
            mask[going_on] = True
            self._env.reset(options={"reset_mask": mask, "episode_ids": taken})
            self._begin(going_on, taken)
        if len(retired):
            self._running[retired] = False
            self._cursors.retire(retired)
