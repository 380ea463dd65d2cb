"""The loop of an evaluation: who plays which episode, who waits for a chunk, and what is under way."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from headrace.chunking import Admission, ChunkContext, ChunkPolicy, Engine, EpisodeRows, QueueState, Reply, Request
from headrace.chunking._admission import Greedy, Immediate, Synchronized, WholeBatchOnAny
from headrace.chunking._context import ObsHistory
from headrace.chunking._cursors import ChunkLengths, Cursors, TemporalEnsemble
from headrace.chunking._engines import SECONDS_TO_END
from headrace.chunking._policy import has_memory
from headrace.envs._recipe import AnyEnv
from headrace.errors import HeadraceError, LifecycleError, PolicyError
from headrace.rollout._background_resets import BackgroundResets
from headrace.rollout._episode_plan import EndlessPlan, EpisodePlan
from headrace.rollout._evaluation import Counters, EpisodeResult, Evaluation, finished_rows
from headrace.rollout._hold_action import HoldAction, hold
from headrace.rollout._line_up import LineUp
from headrace.rollout._progress import EpisodeProgress
from headrace.types import Chunk, EpisodeEnds, Step

_RULES_IN_STEP = (Greedy, Immediate, Synchronized, WholeBatchOnAny)
"""Rules that infer everyone where all wait and nobody can act."""


class ChunkLoop:
    """One evaluation. Owns its masks, numpy bool (N,) on the host: scheduling never waits for a device."""

    def __init__(
        self,
        env: AnyEnv,
        policy: ChunkPolicy,
        plan: EpisodePlan | EndlessPlan,
        *,
        lengths: ChunkLengths,
        rule: Admission,
        engine: Engine,
        seed: int,
        ensemble_decay: float | None,
        hold_action: HoldAction = "last",
        instruction: str | None = None,
        clamp: bool = False,
        resets: BackgroundResets | None = None,
        on_step: Callable[[Step, float, int], None] | None = None,
        on_episodes: Callable[[list[EpisodeResult]], None] | None = None,
    ) -> None:
        """Prepare to play ``plan``.

        Args:
            env: with ``autoreset="disabled"``.
            policy: what the engine runs; its sizes are read here.
            plan: the episodes.
            lengths: of chunks.
            rule: when to infer, and whom.
            engine: runs the policy; its owner closes it.
            seed: of the episodes.
            ensemble_decay: of temporal ensembling; None for none.
            hold_action: of environments that wait, under a rule that holds.
            instruction: what the policy is told in every episode; None for the environment's own texts.
            clamp: cut actions to the bounds of the action space before they are played.
            resets: makes the next episodes ready while others are played; None to reset between steps.
            on_step: called after each step of the batch with its result, the seconds of ``env.step`` and how many
                environments acted.
            on_episodes: called in each step in which episodes ended, with their rows.
        """
        self._env, self._plan, self._rule, self._engine, self._seed = env, plan, rule, engine, seed
        count, device = env.num_envs, env.device
        self._first_row = lengths.offset
        self._cursors = Cursors(count, policy.action_dim, lengths, device)
        self._history = ObsHistory(policy.obs_steps) if policy.obs_steps > 1 else None
        self._ensemble: TemporalEnsemble | None = None
        if ensemble_decay is not None:
            rows = policy.horizon - lengths.offset
            self._ensemble = TemporalEnsemble(count, rows, policy.action_dim, decay=ensemble_decay, device=device)
        # one action per chunk: everyone waits at every step, and there is nothing to schedule
        in_step = (
            lengths.horizon == 1
            and not engine.overlaps
            and self._history is None
            and self._ensemble is None
            and type(rule) in _RULES_IN_STEP
            and not rule.holds
        )
        self._nobody = torch.zeros(count, dtype=torch.bool, device=device)
        self._suspended = np.zeros(count, np.bool_)
        self._parked = np.zeros(count, np.bool_)
        """Slots that play no episode, at the end or while their next is made ready; the environment keeps them from
        acting."""
        self._resets, self._step_seconds = resets, 0.0
        self._seeds = torch.full((count,), seed, dtype=torch.int64, device=device)
        self._line = LineUp(self._cursors, self._seeds, policy.action_dim) if in_step else None
        self._instructions = ("" if instruction is None else instruction,) * count
        """Of the episode in each slot."""
        self._own_texts = instruction is None
        self._has_memory = has_memory(policy)
        self._ended: list[tuple[int, str]] = []
        """Episodes whose end a policy with memory has not been told: id and instruction."""
        self._actions = torch.zeros((count, policy.action_dim), device=device)
        """The action of each environment's last step: what a hold form repeats."""
        self._hold_action: HoldAction = hold_action
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
        self._frames_before = _frames_drawn(env)

    def result(self, status: Literal["completed", "interrupted", "failed"]) -> Evaluation:
        """What is finished so far."""
        counters = self._counters
        counters.seconds = time.perf_counter() - self._begun
        counters.frames_drawn = _frames_drawn(self._env) - self._frames_before
        before = self._stages_before
        stages = {name: spent - before.get(name, 0.0) for name, spent in self._env.timer.seconds().items()}
        counters.stages = {**stages, "policy": self._policy_seconds, "wait": self._wait_seconds}
        return Evaluation(
            episodes=sorted(self._results, key=lambda row: row.episode_id),
            plan=tuple(sorted(self._plan.ids)),
            status=status,
            counters=counters,
            strict_size=self._engine.strict_size,
            fidelity=self._env.fidelity,
            seeded=reseeds(self._env),
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
            while (self._cursors.anyone_runs or self._resets) and self._counters.batch_steps != most_steps:
                if self._resets:
                    stuck = not self._able().any() and not self._engine.pending
                    self._begin_ready(self._resets, self._resets.take(wait=stuck))
                if self._line is not None:
                    if self._resets and not self._able().any():
                        continue
                    self._infer_and_step(self._line)
                    continue
                self._take_answer()
                self._infer()
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
            self._forget_all()
        with contextlib.suppress(HeadraceError):
            self._env.resume(self._mask(self._suspended))

    def _start(self) -> None:
        """The first episodes; slots that the plan has none for never act."""
        while self._engine.pending:  # an engine of the caller's own, with what an interrupted evaluation left in it
            with contextlib.suppress(PolicyError):
                self._engine.poll(wait=True)
        count = self._env.num_envs
        taken = self._plan.take(range(count))
        # the first reset is of all: a slot without an episode gets any
        episodes = np.array(taken + [taken[0]] * (count - len(taken)), np.int64)
        self._reset(episodes, {}, seed=self._seed)
        self._env.resume(~self._nobody)
        self._begin(np.arange(len(taken)), episodes[: len(taken)])

    def _reset(self, episode_ids: NDArray[np.int64], which: dict[str, object], seed: int | None = None) -> None:
        """Start these episodes; nobody has asked for their observations yet."""
        options = {**which, "episode_ids": torch.from_numpy(episode_ids), "observe": self._nobody}
        self._env.reset(seed=seed, options=options)

    def _begin(self, slots: NDArray[np.int64], episode_ids: NDArray[np.int64]) -> None:
        self._cursors.begin(slots, episode_ids)
        if self._own_texts:
            self._instructions = self._env.instructions()
        if self._line is not None:
            self._line.begin(slots, self._instructions)
        ids = torch.from_numpy(slots).to(self._env.device)
        if self._rule.holds:
            self._actions.index_fill_(0, ids, 0.0)
        if self._ensemble is not None:
            self._ensemble.begin(ids)
        if self._history is not None:
            self._history.begin(ids, self._env.observe(ids), self._env.num_envs)

    def _infer(self) -> None:
        """Ask the rule; give the rows it names to the engine, with the observation they have now."""
        if self._engine.busy:
            return
        cursors = self._cursors
        waiting = cursors.due
        if not waiting.any():
            return
        can_act = cursors.has_action if self._rule.holds else cursors.has_action & ~waiting
        if self._resets:
            can_act &= ~self._resets.held
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
            return
        context = self._context(slots)
        obs = self._env.observe(self._mask(chosen)) if self._history is None else self._history.rows(context.env_ids)
        asked = np.flatnonzero(waiting & chosen)
        cursors.ask(asked)
        self._counters.rows_inferred += len(slots)
        self._counters.rows_wasted += len(slots) - len(asked)
        request = Request(obs=obs, context=context, ended=self._take_ended())
        self._asked[id(request)] = len(asked)
        self._engine.submit(request)

    def _context(self, slots: NDArray[np.int64]) -> ChunkContext:
        """What the policy is told beside the observations of ``slots`` (n,)."""
        cursors = self._cursors
        env_ids = torch.from_numpy(slots).to(self._env.device)
        left_over, left_over_length = cursors.left_over(slots)
        return ChunkContext(
            seeds=self._seeds.index_select(0, env_ids),
            env_ids=env_ids,
            episode_ids=torch.from_numpy(cursors.episode[slots]).to(self._env.device),
            chunk_index=torch.from_numpy(cursors.chunk_index[slots]).to(self._env.device),
            instructions=tuple([self._instructions[slot] for slot in slots.tolist()]),
            left_over=left_over,
            left_over_length=left_over_length,
            delay=cursors.delay(slots),
        )

    def _infer_and_step(self, line: LineUp) -> None:
        """Chunks of one action: everyone who runs is inferred, and plays the answer as it comes.

        What :meth:`_infer`, :meth:`_load` and :meth:`_step` do, without cursors; nothing here is per environment.
        """
        engine = self._engine
        if line.stale:
            able = self._able()
            self._let_act(able)
            line.gather(self._instructions, able)
        count = len(line.slots)
        obs = self._env.observe(None if line.everyone else line.env_ids)
        self._counters.rows_inferred += count
        engine.submit(Request(obs=obs, context=line.next_context(), ended=self._take_ended()))
        reply = engine.poll(wait=True)
        if reply is None:
            raise LifecycleError("engine: expected a reply from poll(wait=True), got None")
        actions = self._checked_answer(reply).select(1, 0)
        if self._bounds is not None:
            actions.clamp_(*self._bounds)
        if line.everyone:
            self._actions = actions
        else:
            self._actions.index_copy_(0, line.env_ids, actions)
        running = int(np.count_nonzero(self._cursors.running)) if self._resets else count
        self._advance(self._nobody, acted=count, planned=count, running=running)

    def _take_ended(self) -> EpisodeRows | None:
        """Episodes that a policy with memory can forget."""
        if not self._has_memory:
            return None
        ended, self._ended = self._ended, []
        return EpisodeRows(
            seeds=torch.full((len(ended),), self._seed, dtype=torch.int64),
            episode_ids=torch.tensor([episode for episode, _ in ended], dtype=torch.int64),
            instructions=tuple(text for _, text in ended),
        )

    def _forget_all(self) -> None:
        """No episode is played on: a policy with memory keeps nothing of this evaluation."""
        if not self._has_memory or not self._await_interrupted_call():
            return
        # an episode that the policy has not seen must not end in it
        seen = np.flatnonzero((self._cursors if self._line is None else self._line).asked)
        self._ended += [(int(self._cursors.episode[slot]), self._instructions[slot]) for slot in seen]
        nobody = self._nobody.nonzero().squeeze(1)
        empty = self._context(nobody.cpu().numpy())
        obs = self._env.observe(nobody) if self._history is None else self._history.rows(nobody)
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
        """Fetch the answers that are there, waiting for one only if nobody could act otherwise."""
        while self._engine.pending:
            wait = not self._who_acts().any()
            begin = time.perf_counter()
            reply = self._engine.poll(wait=wait)
            self._wait_seconds += time.perf_counter() - begin
            if reply is None:
                return
            self._load(reply)

    def _load(self, reply: Reply) -> None:
        """Give environments their chunks; rows of ended episodes, and rows that nobody waited for, are dropped."""
        context, asked = reply.request.context, self._asked.pop(id(reply.request))
        actions = self._checked_answer(reply)
        chunk = Chunk(
            env_ids=context.env_ids, episode_ids=context.episode_ids, index=context.chunk_index, actions=actions
        )
        if self._ensemble is not None:
            kept = torch.from_numpy(self._cursors.awaits(chunk)).to(self._env.device)
            blended = self._ensemble.blend(context.env_ids[kept], actions[kept][:, self._first_row :])
            actions[kept, self._first_row] = blended
        self._counters.rows_discarded += asked - int(np.count_nonzero(self._cursors.load(chunk)))

    def _checked_answer(self, reply: Reply) -> Tensor:
        """The chunks of a reply, (n, horizon, A) on the environment's device; counts what they cost."""
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
        self._policy_seconds += reply.seconds
        return actions

    def _who_acts(self) -> NDArray[np.bool_]:
        """bool (N,): with an action to play, and their next observation taken if it is due.

        In hold forms everyone who runs.
        """
        cursors = self._cursors
        acting = cursors.running if self._rule.holds else cursors.has_action & ~cursors.due
        return acting & ~self._resets.held if self._resets else acting

    def _able(self) -> NDArray[np.bool_]:
        """bool (N,): slots that play an episode, and that no reset of another keeps from acting."""
        running = self._cursors.running
        return running & ~self._resets.held if self._resets else running

    def _step(self, acting: NDArray[np.bool_]) -> None:
        self._let_act(acting)
        planned = acting & self._cursors.has_action
        slots = np.flatnonzero(planned)
        observe = self._nobody if self._history is None else self._mask(self._will_be_read(acting))
        actions = self._cursors.play(slots)
        if self._bounds is not None:
            actions = actions.clamp_(*self._bounds)
        if len(slots) == len(acting):
            self._actions = actions
        else:
            self._actions.index_copy_(0, torch.from_numpy(slots).to(self._env.device), actions)
        if self._rule.holds and len(slots) < np.count_nonzero(acting):
            hold(self._env, np.flatnonzero(acting & ~planned), self._actions, self._hold_action)
        acted, running = np.count_nonzero(acting), np.count_nonzero(self._cursors.running)
        self._advance(observe, acted=int(acted), planned=len(slots), running=int(running))

    def _advance(self, observe: Tensor, *, acted: int, planned: int, running: int) -> None:
        """Step with ``_actions``: of the ``running`` environments so many act, ``planned`` of them by the policy."""
        env, counters = self._env, self._counters
        begin = time.perf_counter()
        step = env.step(self._actions[:, 0].long() if self._chooses else self._actions, observe=observe)
        self._step_seconds = seconds = time.perf_counter() - begin
        if self._on_step is not None:
            self._on_step(step, seconds, acted)
        counters.batch_steps += 1
        counters.env_steps += planned
        counters.held_steps += acted - planned
        counters.idle_steps += running - acted + len(self._resets or ())
        if self._history is not None:
            ids = torch.from_numpy(np.flatnonzero(~self._suspended & ~self._parked)).to(env.device)
            self._history.push(ids, {name: values.index_select(0, ids) for name, values in step.obs.items()})
        if "ends" in step.info:
            self._finish(step.info["ends"])
        if self._bar is not None:
            self._bar.show(self._results, counters.env_steps)

    def _let_act(self, acting: NDArray[np.bool_]) -> None:
        """Suspend and resume those whose turn changes."""
        suspended = ~(acting | self._parked)
        stop, go = suspended & ~self._suspended, self._suspended & ~suspended
        if stop.any():
            self._env.suspend(self._mask(stop))
        if go.any():
            self._env.resume(self._mask(go))
        self._suspended = suspended

    def _will_be_read(self, acting: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """bool (N,): whose observation after this step will still be in the history when the next chunk is due."""
        if self._rule.holds or self._history is None:
            return acting  # a hold form may ask at any step
        return acting & (self._cursors.steps_to_due <= self._history.steps)

    def _finish(self, ends: EpisodeEnds) -> None:
        """Write the table rows of ended episodes, and give their slots the next of the plan at once."""
        slots = ends.env_ids.cpu().numpy()
        self._results += finished_rows(ends, self._seed, [self._instructions[slot] for slot in slots.tolist()])
        if self._on_episodes is not None:
            self._on_episodes(self._results[-len(ends) :])
        taken = np.array(self._plan.take(slots.tolist()), np.int64)
        if self._has_memory:
            self._ended += [
                (episode, self._instructions[slot])
                for episode, slot in zip(ends.episode_ids.tolist(), slots.tolist(), strict=True)
            ]
        going_on, parked = slots[: len(taken)], slots[len(taken) :]
        if len(parked):
            self._park(parked)
        if not len(going_on):
            return
        if self._resets is None:
            mask = np.zeros_like(self._parked)
            mask[going_on] = True
            self._reset(taken, {"reset_mask": self._mask(mask)})
            self._begin(going_on, taken)
        else:
            self._park(going_on)
            self._begin_ready(self._resets, self._resets.begin(going_on, taken, self._step_seconds))

    def _park(self, slots: NDArray[np.int64]) -> None:
        """These slots play no episode, for good or until their next one is ready."""
        self._parked[slots] = True
        self._cursors.retire(slots)
        if self._line is not None:
            self._line.stale = True

    def _begin_ready(self, resets: BackgroundResets, slots: list[int]) -> None:
        """Begin the episodes that have become ready in the background."""
        if not slots:
            return
        ready = np.array(slots, np.int64)
        self._parked[ready] = False
        self._begin(ready, resets.pop(slots))
        if self._line is not None:
            self._line.stale = True

    def _mask(self, mask: NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(mask).to(self._env.device)


def reseeds(env: AnyEnv) -> bool:
    """Whether an episode is a function of (seed, episode id, actions); an environment that does not say keeps to it."""
    return bool(getattr(env, "reseeds", True))


def _frames_drawn(env: AnyEnv) -> int:
    """Camera frames so far; none of an environment that does not count them."""
    return int(getattr(env, "frames_drawn", 0))
