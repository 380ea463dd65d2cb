"""The loop of an evaluation: who plays which episode, who waits for a chunk, and what is under way."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from headrace.envs.batch_env import BatchEnv
from headrace.envs.recipe import AnyEnv
from headrace.errors import HeadraceError, LifecycleError, PolicyError
from headrace.evaluation._result import Counters, EpisodeResult, Evaluation
from headrace.evaluation.cfg import PlayCfg
from headrace.evaluation.scheduling import (
    Admission,
    BackgroundResets,
    ChunkLengths,
    Cursors,
    EndlessPlan,
    EpisodePlan,
    Greedy,
    Immediate,
    QueueState,
    Synchronized,
    TemporalEnsemble,
    WholeBatchOnAny,
)
from headrace.history.obs_history import ObsHistory
from headrace.policies.engines import SECONDS_TO_END, Engine, Reply, Request
from headrace.policies.protocol import ChunkContext, ChunkPolicy, EpisodeRows, has_memory
from headrace.types import Chunk, EpisodeEnds, Obs, Step

if TYPE_CHECKING:
    from headrace.evaluation.player import EpisodeProgress


_RULES_IN_STEP = (Greedy, Immediate, Synchronized, WholeBatchOnAny)
"""Rules that infer all rows where all wait and none can act."""
OnStep: TypeAlias = "Callable[[Step, float, int], None]"
"""Receives the result of a step of the batch, the seconds of ``env.step`` and how many environments acted."""


class ChunkLoop:
    """One evaluation. Owns its masks, numpy bool (N,) on the host: scheduling never waits for a device."""

    def __init__(
        self,
        env: AnyEnv,
        policy: ChunkPolicy,
        plan: EpisodePlan | EndlessPlan,
        cfg: PlayCfg,
        *,
        lengths: ChunkLengths,
        rule: Admission,
        engine: Engine,
        seed: int,
        clamp: bool = False,
        resets: BackgroundResets | None = None,
        held: NDArray[np.bool_] | None = None,
        on_step: OnStep | None = None,
        on_episodes: Callable[[list[EpisodeResult]], None] | None = None,
    ) -> None:
        """Prepare to play ``plan``.

        Args:
            env: with ``autoreset="disabled"``.
            policy: what the engine runs; its sizes are read here.
            plan: the episodes.
            cfg: how the policy is played.
            lengths: of chunks, checked.
            rule: of admission, which ``cfg`` may name.
            engine: runs the policy; its owner closes it.
            seed: of the episodes.
            clamp: cut actions to the bounds of the action space before they are played.
            resets: makes the next episodes ready while others are played; None to reset between steps.
            held: bool (N,), slots that do not act now; ``on_step`` may change it, and must leave one that acts.
            on_step: called after each step of the batch.
            on_episodes: called in each step in which episodes ended, with their rows.
        """
        self._env, self._plan, self._rule, self._engine, self._seed = env, plan, rule, engine, seed
        count, device = env.num_envs, env.device
        ensemble: TemporalEnsemble | None = None
        if cfg.ensemble_decay is not None:
            rows = policy.horizon - lengths.offset
            ensemble = TemporalEnsemble(count, rows, policy.action_dim, decay=cfg.ensemble_decay, device=device)
        self._cursors = Cursors(count, policy.action_dim, lengths, device, ensemble)
        self._history = ObsHistory(policy.obs_steps) if policy.obs_steps > 1 else None
        # one action per chunk: all wait at every step, and there is nothing to schedule
        self._in_step = (
            lengths.horizon == 1
            and not engine.overlaps
            and self._history is None
            and ensemble is None
            and type(rule) in _RULES_IN_STEP
        )
        self._last_resort = type(rule) is Greedy and not engine.overlaps
        self._line: tuple[NDArray[np.int64], ChunkContext] | None = None
        """The slots (n,) that play in step, and the context of their policy; None where that has changed."""
        self._nobody = torch.zeros(count, dtype=torch.bool, device=device)
        # an environment without cameras observes nothing, whatever the mask
        self._unread = None if isinstance(env, BatchEnv) and not env.task.images else self._nobody
        self._obs: Obs | None = None
        """Of all environments, current; None where only ``env.observe`` has it."""
        self._suspended = np.zeros(count, np.bool_)
        self._parked = np.zeros(count, np.bool_)
        """Slots that play no episode, at the end or while their next is made ready; the environment keeps them from
        acting."""
        self._resets, self._held, self._step_seconds = resets, held, 0.0
        self._instructions = ("" if cfg.instruction is None else cfg.instruction,) * count
        """Of the episode in each slot."""
        self._own_texts = cfg.instruction is None
        self._has_memory = has_memory(policy)
        self._ended: list[tuple[int, str]] = []
        """Episodes whose end a policy with memory has not seen: id and instruction."""
        self._actions = torch.zeros((count, policy.action_dim), device=device)
        """The action of each environment's last step."""
        self._on_step, self._on_episodes = on_step, on_episodes
        space = env.single_action_space
        self._chooses = isinstance(space, spaces.Discrete)
        self._bounds: tuple[Tensor, Tensor] | None = None
        if clamp and isinstance(space, spaces.Box):
            self._bounds = torch.as_tensor(space.low, device=device), torch.as_tensor(space.high, device=device)
        self._bar: EpisodeProgress | None = None
        self._asked: dict[int, int] = {}
        """Requests under way, by identity: how many environments wait for each."""
        self._results: list[EpisodeResult] = []
        self._interrupt: KeyboardInterrupt | None = None
        self._counters = Counters()
        self._policy_seconds = self._wait_seconds = 0.0
        self._begun = time.perf_counter()
        self._stages_before = env.timer.seconds()
        self._frames_before: int = getattr(env, "frames_drawn", 0)

    def result(self, status: Literal["completed", "interrupted", "failed"]) -> Evaluation:
        """Return what is finished so far."""
        counters = self._counters
        counters.seconds = time.perf_counter() - self._begun
        counters.frames_drawn = getattr(self._env, "frames_drawn", 0) - self._frames_before
        before = self._stages_before
        stages = {name: spent - before.get(name, 0.0) for name, spent in self._env.timer.seconds().items()}
        counters.stages = {**stages, "policy": self._policy_seconds, "wait": self._wait_seconds}
        return Evaluation(
            episodes=sorted(self._results),
            plan=tuple(sorted(self._plan.ids)),
            status=status,
            counters=counters,
            strict_size=self._engine.strict_size,
            fidelity=self._env.fidelity,
            seeded=getattr(self._env, "reseeds", True),
            interrupt=self._interrupt,
        )

    @property
    def finished(self) -> int:
        """Episodes so far."""
        return len(self._results)

    @property
    def running(self) -> NDArray[np.bool_]:
        """bool (N,): slots that play an episode."""
        return self._cursors.running

    def play(self, bar: EpisodeProgress | None = None, *, most_steps: int | None = None) -> Evaluation:
        """Until the plan is used up and every slot has finished, or ``most_steps`` steps of the batch are done."""
        self._bar = bar
        try:
            self._start()
            while (self._resets or self._cursors.running.any()) and self._counters.batch_steps != most_steps:
                if self._resets:
                    stuck = not self._able().any() and not self._engine.pending
                    self._begin_ready(self._resets, self._resets.take(wait=stuck))
                if self._in_step:
                    if not self._resets or self._able().any():
                        self._infer_and_step()
                    continue
                self._take_answer()
                acting = self._infer()
                if acting is None:
                    self._take_answer()
                    acting = self._who_acts()
                if acting.any():
                    self._step(acting)
                elif not self._engine.pending and not self._resets:
                    raise LifecycleError(
                        f"admission {self._rule}: nobody can act, and the rule does not let the model run; "
                        "a rule must infer when no environment can act"
                    )
            # answers under way for episodes that have ended: waited for, so that what they cost is counted
            while self._engine.pending:
                self._take_answer()
        except KeyboardInterrupt as error:
            self._interrupt = error
            return self.result("interrupted")
        return self.result("completed")

    def release(self) -> None:
        """Leave no environment suspended, and nothing of these episodes in a policy's memory."""
        # whatever has failed before, a policy or an environment, may fail again here; the first error counts
        with contextlib.suppress(HeadraceError):
            if self._has_memory and self._await_interrupted_call():
                self._forget_all()
        with contextlib.suppress(HeadraceError):
            self._env.resume(torch.from_numpy(self._suspended).to(self._env.device))

    def _start(self) -> None:
        """Start the first episodes; slots that the plan has none for never act."""
        while self._engine.pending:  # an engine of the caller's own, with what an interrupted evaluation left in it
            with contextlib.suppress(PolicyError):
                self._engine.poll(wait=True)
        count = self._env.num_envs
        taken = self._plan.take(range(count))
        # the first reset is of all: a slot without an episode gets any
        episodes = np.array(taken + [taken[0]] * (count - len(taken)), np.int64)
        options: dict[str, object] = {"episode_ids": torch.from_numpy(episodes), "observe": self._unread}
        obs, _ = self._env.reset(seed=self._seed, options=options)
        self._obs = obs if self._unread is None else None
        self._env.resume(~self._nobody)
        self._begin(np.arange(len(taken)), episodes[: len(taken)])

    def _begin(self, slots: NDArray[np.int64], episode_ids: NDArray[np.int64]) -> None:
        self._cursors.begin(slots, episode_ids)
        if self._own_texts:
            self._instructions = self._env.instructions()
        self._line = None
        ids = torch.from_numpy(slots).to(self._env.device)
        if self._history is not None:
            self._history.begin(ids, self._env.observe(ids), self._env.num_envs)

    def _infer(self) -> NDArray[np.bool_] | None:
        """Ask the rule; give the rows it names to the engine, with the observation they have now.

        Returns bool (N,), who acts, where the engine got nothing, and None where it did.
        """
        cursors = self._cursors
        waiting = cursors.due
        can_act = self._able() & cursors.has_action & ~waiting
        # inline, the default rule lets the model run when no one can act
        if self._engine.busy or not waiting.any() or (self._last_resort and can_act.any()):
            return can_act
        queue = QueueState(
            running=cursors.running,
            waiting=waiting,
            can_act=can_act,
            due_next=can_act & (cursors.steps_to_due <= 1),
            engine_overlaps=self._engine.overlaps,
            steps=self._counters.batch_steps,
        )
        # a policy with memory must not be run for nothing: it would remember a chunk that was never played
        chosen = self._rule.infer(queue) & (waiting if self._has_memory else cursors.running)
        slots = np.flatnonzero(chosen)
        if not len(slots):
            return can_act
        context = cursors.context(slots, self._seed, self._instructions)
        obs = (self._env.observe if self._history is None else self._history.rows)(context.env_ids)
        asked = np.flatnonzero(waiting & chosen)
        cursors.ask(asked)
        self._counters.rows_inferred += len(slots)
        self._counters.rows_wasted += len(slots) - len(asked)
        request = Request(obs=obs, context=context, ended=self._take_ended() if self._has_memory else None)
        self._asked[id(request)] = len(asked)
        self._engine.submit(request)
        return None

    def _infer_and_step(self) -> None:
        """Chunks of one action: all that run are inferred, and play the answer as it comes.

        What :meth:`_infer`, :meth:`_take_answer` and :meth:`_step` do; nothing is loaded into the cursors, which only
        count chunks, and nothing here is per environment.
        """
        engine, env, cursors = self._engine, self._env, self._cursors
        if self._line is None:
            able = self._able()
            self._let_act(able)
            slots = np.flatnonzero(able)
            self._line = slots, cursors.context(slots, self._seed, self._instructions)
        slots, known = self._line
        count, whole = len(slots), len(slots) == env.num_envs
        obs = self._obs if whole else None
        if obs is None:
            obs = env.observe(None if whole else known.env_ids)
        index = cursors.chunk_index[slots]
        cursors.chunk_index[slots] = index + 1
        context = replace(known, chunk_index=torch.from_numpy(index).to(env.device))
        self._counters.rows_inferred += count
        engine.submit(Request(obs=obs, context=context, ended=self._take_ended() if self._has_memory else None))
        reply = engine.poll(wait=True)
        if reply is None:
            raise LifecycleError("engine: expected a reply from poll(wait=True), got None")
        actions = self._check_answer(reply).select(1, 0)
        if self._bounds is not None:
            actions.clamp_(*self._bounds)
        if whole:
            self._actions = actions
        else:
            self._actions.index_copy_(0, known.env_ids, actions)
        running = int(np.count_nonzero(cursors.running)) if self._resets else count
        self._advance(self._unread, acted=count, running=running)

    def _take_ended(self) -> EpisodeRows:
        """Episodes that a policy with memory can forget."""
        ended, self._ended = self._ended, []
        return EpisodeRows(
            seeds=torch.full((len(ended),), self._seed, dtype=torch.int64),
            episode_ids=torch.tensor([episode for episode, _ in ended], dtype=torch.int64),
            instructions=tuple(text for _, text in ended),
        )

    def _forget_all(self) -> None:
        """No episode is played on: a policy with memory keeps nothing of this evaluation."""
        # an episode that the policy has not seen must not end in it
        seen = np.flatnonzero(self._cursors.asked)
        played = [(int(self._cursors.episode[slot]), self._instructions[slot]) for slot in seen]
        # where an episode's end was what failed, its slot plays it still
        self._ended = list(dict.fromkeys(self._ended + played))
        empty = self._cursors.context(np.empty(0, np.int64), self._seed, self._instructions)
        obs = (self._env.observe if self._history is None else self._history.rows)(empty.env_ids)
        self._engine.submit(Request(obs=obs, context=empty, ended=self._take_ended()))
        self._engine.poll(wait=True)

    def _await_interrupted_call(self) -> bool:
        """Whether the engine is free: a call that Ctrl-C left under way is waited for, but a stuck one not for ever."""
        deadline = time.monotonic() + SECONDS_TO_END
        while self._engine.pending and time.monotonic() < deadline:
            with contextlib.suppress(PolicyError):
                if self._engine.poll(wait=False) is None:
                    time.sleep(0.01)
        return not self._engine.pending

    def _take_answer(self) -> None:
        """Fetch the answers that are there, waiting for one only if none could act otherwise.

        Rows of ended episodes, and rows that no environment waited for, are dropped.
        """
        while self._engine.pending:
            wait = not self._who_acts().any()
            begin = time.perf_counter()
            reply = self._engine.poll(wait=wait)
            self._wait_seconds += time.perf_counter() - begin
            if reply is None:
                return
            context, asked = reply.request.context, self._asked.pop(id(reply.request))
            chunk = Chunk(
                env_ids=context.env_ids,
                episode_ids=context.episode_ids,
                index=context.chunk_index,
                actions=self._check_answer(reply),
            )
            self._counters.rows_discarded += asked - int(np.count_nonzero(self._cursors.load(chunk)))

    def _check_answer(self, reply: Reply) -> Tensor:
        """Return the chunks of a reply, (n, horizon, A) on the environment's device; counts what they cost."""
        answer, expected = reply.answer, reply.request.context.left_over.shape
        actions = answer.actions.to(self._env.device)
        if actions.shape != expected:  # an engine of the caller's own runs another policy
            raise PolicyError(
                f"engine: expected chunks {tuple(expected)} (rows, horizon, size), as its policy says, "
                f"got {tuple(actions.shape)}; give evaluate the policy that the engine runs"
            )
        counters = self._counters
        counters.model_calls += answer.calls
        counters.rows_padded += answer.padding
        counters.rows_verified += answer.verified
        counters.rows_checking += answer.checking
        self._policy_seconds += reply.seconds
        return actions

    def _who_acts(self) -> NDArray[np.bool_]:
        """bool (N,): with an action to play, and their next observation taken if it is due."""
        return self._able() & self._cursors.has_action & ~self._cursors.due

    def _able(self) -> NDArray[np.bool_]:
        """bool (N,): slots that play an episode, and that no reset of another keeps from acting."""
        able = self._cursors.running
        if self._resets:
            able = able & ~self._resets.held
        return able if self._held is None else able & ~self._held

    def _step(self, acting: NDArray[np.bool_]) -> None:
        self._let_act(acting)
        slots = np.flatnonzero(acting)
        observe = self._unread
        if observe is not None and self._history is not None:
            observe = torch.from_numpy(self._will_be_read(acting, self._history.steps)).to(self._env.device)
        actions = self._cursors.play(slots)
        if self._bounds is not None:
            actions = actions.clamp_(*self._bounds)
        if len(slots) == len(acting):
            self._actions = actions
        else:
            self._actions.index_copy_(0, torch.from_numpy(slots).to(self._env.device), actions)
        self._advance(observe, acted=len(slots), running=int(np.count_nonzero(self._cursors.running)))

    def _advance(self, observe: Tensor | None, *, acted: int, running: int) -> None:
        """Step with ``_actions``: of the ``running`` environments so many act."""
        env, counters = self._env, self._counters
        begin = time.perf_counter()
        step = env.step(self._actions[:, 0].long() if self._chooses else self._actions, observe=observe)
        self._step_seconds = seconds = time.perf_counter() - begin
        if self._on_step is not None:
            self._on_step(step, seconds, acted)
            if self._held is not None:
                self._line = None
        counters.batch_steps += 1
        counters.env_steps += acted
        counters.idle_steps += running - acted + len(self._resets or ())
        if self._history is not None:
            ids = torch.from_numpy(np.flatnonzero(~self._suspended & ~self._parked)).to(env.device)
            self._history.push(ids, {name: values.index_select(0, ids) for name, values in step.obs.items()})
        self._obs = step.obs if self._unread is None else None
        if "ends" in step.info:
            self._finish(step.info["ends"])
        if self._bar is not None:
            self._bar.show(self._results, counters.env_steps)

    def _let_act(self, acting: NDArray[np.bool_]) -> None:
        """Suspend and resume those whose turn changes."""
        suspended = ~(acting | self._parked)
        changed = suspended != self._suspended
        if not changed.any():
            return
        stop, go = changed & suspended, changed & self._suspended
        if stop.any():
            self._env.suspend(torch.from_numpy(stop).to(self._env.device))
        if go.any():
            self._env.resume(torch.from_numpy(go).to(self._env.device))
        self._suspended = suspended

    def _will_be_read(self, acting: NDArray[np.bool_], steps: int) -> NDArray[np.bool_]:
        """bool (N,): whose observation after this step will still be in a history of ``steps`` when a chunk is due."""
        return acting & (self._cursors.steps_to_due <= steps)

    def _finish(self, ends: EpisodeEnds) -> None:
        """Write the table rows of ended episodes, and give their slots the next of the plan at once."""
        slots, count = ends.env_ids.cpu().numpy(), len(ends.env_ids)
        success = [None] * count if ends.success is None else ends.success.tolist()
        columns = ends.episode_ids.tolist(), ends.returns.tolist(), ends.lengths.tolist(), ends.diverged.tolist()
        for slot, reached, episode, total, length, diverged in zip(slots.tolist(), success, *columns, strict=True):
            self._results.append(
                EpisodeResult(
                    episode_id=episode,
                    seed=self._seed,
                    reward=total,
                    length=length,
                    success=reached,
                    diverged=diverged,
                    instruction=self._instructions[slot],
                )
            )
            if self._has_memory:
                self._ended.append((episode, self._instructions[slot]))
        if self._on_episodes is not None:
            self._on_episodes(self._results[-count:])
        taken = np.array(self._plan.take(slots.tolist()), np.int64)
        going_on = slots[: len(taken)]
        parked = slots[len(taken) :] if self._resets is None else slots
        if len(parked):
            self._parked[parked] = True
            self._cursors.begin(parked, -1)
            self._line = None
        if not len(going_on):
            return
        if self._resets is not None:
            self._begin_ready(self._resets, self._resets.begin(going_on, taken, self._step_seconds))
            return
        mask = np.zeros_like(self._parked)
        mask[going_on] = True
        options = {"reset_mask": torch.from_numpy(mask).to(self._env.device), "episode_ids": torch.from_numpy(taken)}
        obs, _ = self._env.reset(options={**options, "observe": self._unread})
        self._obs = obs if self._unread is None else None
        self._begin(going_on, taken)

    def _begin_ready(self, resets: BackgroundResets, slots: list[int]) -> None:
        """Begin the episodes that have become ready in the background."""
        if not slots:
            return
        ready = np.array(slots, np.int64)
        self._parked[ready] = False
        self._begin(ready, resets.pop(slots))
