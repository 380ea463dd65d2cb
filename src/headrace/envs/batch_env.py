"""``BatchEnv``: N environments of one task, any subset of which can act."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray
from torch import Tensor

from headrace.envs.episodes import ends_record, parse_reset_options
from headrace.envs.ids import checked_actions, checked_ids
from headrace.envs.rehearsal import rehearse
from headrace.envs.rows import Rows, Slots
from headrace.envs.snapshot import checked_snapshot
from headrace.envs.task import Task
from headrace.errors import IdError, LifecycleError
from headrace.sim import Simulation
from headrace.timing import StageTimer
from headrace.types import Ids, Obs, ResetRecord, StateDict, Step, StepInfo, StepObserver, StepRecord

if TYPE_CHECKING:
    from headrace.envs.viewer import Viewer

Autoreset = Literal["same_step", "disabled"]
_TILES = 16
_AUTORESET_MODES = {"same_step": AutoresetMode.SAME_STEP, "disabled": AutoresetMode.DISABLED}


class BatchEnv(VectorEnv[Obs, Tensor, Tensor]):
    """N environments of one task as a ``gymnasium.vector.VectorEnv`` of torch tensors on one device.

    Computes in float64 and returns float32. Stages work on the compact rows of the active environments; a suspended one
    costs no physics and no task code, and nothing of it changes by one bit. Every tensor that ``step`` and ``reset``
    return is fresh: the caller owns it. Make one with :func:`headrace.make`.
    """

    def __init__(
        self, task: Task, sim: Simulation, *, seed: int = 0, autoreset: Autoreset = "same_step", final_obs: bool = True
    ) -> None:
        """Put a task on a simulation.

        Args:
            task: what to do; its model is the simulation's.
            sim: where to do it; the environment closes it.
            seed: with an episode's id, all that its randomness depends on; ``reset(seed=…)`` changes it.
            autoreset: ``same_step`` starts the next episode in the step that ended one; ``disabled`` parks the slot.
            final_obs: False for callers that never bootstrap: ``info["final_obs"]`` is left out.
        """
        self.task = task
        self.sim = sim
        self.num_envs = sim.num_envs
        self.device = sim.device
        self.autoreset: Autoreset = autoreset
        self.metadata = {"autoreset_mode": _AUTORESET_MODES[autoreset], "render_modes": ["rgb_array"]}
        self.render_mode = "rgb_array"
        self.single_observation_space = task.observation_space
        self.single_action_space = task.action_space
        self.observation_space = batch_space(task.observation_space, self.num_envs)
        self.action_space = batch_space(task.action_space, self.num_envs)
        self.timer = StageTimer()
        self.divergences = 0
        """How many episodes ended because their simulation failed."""
        self._wants_final_obs = final_obs
        self._slots = Slots(self.num_envs, self.device, task.memory)
        self._slots.seed = seed
        self._suspended = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        self._parked = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        self._active_ids: Tensor | None = None
        self._anyone_parked = True
        self._held: Obs = {
            name: torch.zeros((self.num_envs, *(space.shape or ())), dtype=torch.float32, device=self.device)
            for name, space in task.observation_space.spaces.items()
        }
        self._observers: list[StepObserver] = []
        self._viewer: Viewer | None = None
        self._ready = False
        self.closed = False
        rehearse(task, sim)

    # --- who acts -----------------------------------------------------------------------------------------------

    @property
    def active(self) -> Tensor:
        """bool (N,), a copy: the environments that the next ``step`` will advance."""
        return ~(self._suspended | self._parked)

    @property
    def suspended(self) -> Tensor:
        """bool (N,), a copy: suspended by the caller, whether or not their episode has ended."""
        return self._suspended.clone()

    @property
    def episode_ids(self) -> Tensor:
        """int64 (N,), a copy: the episode each environment is in."""
        return self._slots.episode_ids.clone()

    @property
    def episode_steps(self) -> Tensor:
        """int64 (N,), a copy: the steps each environment has taken in its episode."""
        return self._slots.steps.clone()

    @property
    def seed(self) -> int:
        """The seed of the current episodes."""
        return self._slots.seed

    @property
    def fidelity(self) -> Literal["native"]:
        """How a suspended environment is kept: it is skipped, exactly."""
        return "native"

    def suspend(self, ids: Ids) -> None:
        """Freeze environments until ``resume``. Suspending one twice is a no-op."""
        self._check_open()
        self._suspended[checked_ids(ids, self.num_envs, self.device)] = True
        self._refresh_active()

    def resume(self, ids: Ids) -> None:
        """Let suspended environments act again. Resuming one that is active is a no-op."""
        self._check_open()
        rows = checked_ids(ids, self.num_envs, self.device)
        ended = rows[self._parked[rows]]
        if self._ready and len(ended):
            raise IdError(
                f"resume: environment {int(ended[0])} has ended its episode and cannot act; "
                'start a new one with reset(options={"reset_mask": mask})'
            )
        self._suspended[rows] = False
        self._refresh_active()

    suspend_envs = suspend
    resume_envs = resume

    # --- episodes -----------------------------------------------------------------------------------------------

    def reset(  # pyright: ignore[reportIncompatibleMethodOverride]  # info is typed more narrowly
        self, *, seed: int | None = None, options: dict[str, object] | None = None
    ) -> tuple[Obs, StepInfo]:
        """Start new episodes.

        Args:
            seed: a new seed; the k-th episode of slot i then has the id i + k·N again, from k = 0.
            options: ``reset_mask`` (bool (N,)) resets only some; ``episode_ids`` (int64, one per reset environment or
                (N,)) says which episodes to run. A suspended environment is reset and stays suspended.

        Returns:
            The observation of all N environments, and an info.
        """
        self._check_open()
        request = parse_reset_options(options, self.num_envs, self.device)
        if not self._ready and request.ids is not None:
            raise LifecycleError("reset: the first reset must be of all environments; call reset() without reset_mask")
        if seed is not None:
            self._slots.seed = seed
            self._slots.started.zero_()
        ids = request.ids
        if ids is None or len(ids):
            self._begin(ids, request.episode_ids)
        self._ready = True
        return self._copy_of_held(), {}

    def step(  # pyright: ignore[reportIncompatibleMethodOverride]  # Step is the same five, with names
        self, actions: Tensor, observe: Tensor | None = None
    ) -> Step:
        """Advance the active environments by one step.

        Args:
            actions: (N, A) float32 or float64, or (N,) integers; rows of environments that are not active are ignored.
            observe: bool (N,): whose cameras will be read; None for all. Rows that end are always observed.
        """
        self._check_open()
        if not self._ready:
            raise LifecycleError("step: expected reset() first, got step(); call env.reset()")
        ids = self._active_ids
        actions = checked_actions(actions, self.task.action_space, ids, self.num_envs, self.device)
        wanted = None if observe is None else self._checked_observe(observe)
        if ids is not None and not len(ids):
            return self._idle_step(wanted)
        before = self._copy_of_held() if self._observers else None
        acted_in = self._slots.episode_ids.clone() if self._observers else None

        rows = Rows(self.sim, self._slots, ids)
        chosen = actions if ids is None else actions.index_select(0, ids)
        if chosen.dtype == torch.float32:
            chosen = chosen.to(torch.float64)
        self.timer.start("task")
        self.task.apply_action(rows, chosen)
        self.timer.start("physics")
        failed = self.sim.step(ids, self.task.cfg.decimation)
        self.timer.start("task")
        step = self._evaluate(ids, chosen, failed, wanted, actions, before, acted_in)
        self.timer.stop()
        return step

    def observe(self, ids: Ids | None = None) -> Obs:
        """The current observation of some environments (None: all), (n, …), without advancing; the caller owns it."""
        self._check_ready("observe")
        if ids is None:
            return self._copy_of_held()
        rows = checked_ids(ids, self.num_envs, self.device)
        return {name: held.index_select(0, rows) for name, held in self._held.items()}

    # --- watching, saving, ending -------------------------------------------------------------------------------

    def attach(self, observer: StepObserver) -> None:
        """Let ``observer`` see every step and reset from now on. Attach before ``reset`` to see episodes begin."""
        self._observers.append(observer)

    def detach(self, observer: StepObserver) -> None:
        """Stop showing steps to ``observer``."""
        self._observers.remove(observer)

    def state_dict(self) -> StateDict:
        """Everything needed to go on bit-identically, in this or another process; save it with ``torch.save``."""
        self._check_ready("state_dict")
        return {
            "task": type(self.task).__name__,
            "num_envs": self.num_envs,
            "seed": self._slots.seed,
            "divergences": self.divergences,
            "sim": self.sim.state_dict(),
            "slots": {name: values.clone() for name, values in self._slots.tensors().items()},
            "suspended": self._suspended.clone(),
            "parked": self._parked.clone(),
            "held": self._copy_of_held(),
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from :meth:`state_dict` of an environment of the same task and ``num_envs``."""
        self._check_open()
        checked = checked_snapshot(state, type(self.task).__name__, self.num_envs)
        self.sim.load_state_dict(checked["sim"])
        for name, values in self._slots.tensors().items():
            values.copy_(checked["slots"][name])
        for name, values in self._held.items():
            values.copy_(checked["held"][name])
        self._slots.seed = int(checked["seed"])
        self.divergences = int(checked["divergences"])
        self._suspended.copy_(checked["suspended"])
        self._parked.copy_(checked["parked"])
        self._refresh_active()
        self._ready = True

    def render(self) -> NDArray[np.uint8]:  # pyright: ignore[reportIncompatibleMethodOverride]  # one tiled picture
        """The first 16 environments as one tiled picture, uint8 (height, width, 3); the caller owns it."""
        self._check_ready("render")
        return self._open_viewer().tiled(self.sim.field("qpos")[:_TILES].cpu().numpy())

    def render_each(self) -> tuple[NDArray[np.uint8], ...]:
        """One picture of each environment, uint8 (height, width, 3)."""
        self._check_ready("render_each")
        return tuple(self._open_viewer().pictures(self.sim.field("qpos").cpu().numpy()))

    def close_extras(self, **_: object) -> None:
        """Release the simulation; called by ``close``."""
        self.sim.close()

    # --- inside a step ------------------------------------------------------------------------------------------

    def _evaluate(
        self,
        ids: Tensor | None,
        chosen: Tensor,
        failed: Tensor | None,
        wanted: Tensor | None,
        actions: Tensor,
        before: Obs | None,
        acted_in: Tensor | None,
    ) -> Step:
        """Observe and judge the rows that acted, end and restart episodes, and put the result together."""
        slots = self._slots
        slots.advance(ids)
        rows = Rows(self.sim, slots, ids)
        obs = self.task.observe(rows)
        reward = self.task.reward(rows, chosen)
        terminated = self.task.terminated(rows)
        truncated = rows.steps >= self.task.cfg.episode_length
        diverged = self._diverged_rows(rows, obs, reward, failed)
        if diverged is not None:
            reward = torch.where(diverged, 0.0, reward)
            terminated = terminated & ~diverged
            truncated = truncated | diverged
        self._hold(ids, obs, diverged)
        self._add_returns(ids, reward)

        info: StepInfo = {}
        ended = (terminated | truncated).nonzero().squeeze(1)
        ended_ids = None
        final_states = self.sim.states(ids) if self._observers and self._needs("states") else None
        if len(ended):
            ended_ids = ended if ids is None else ids.index_select(0, ended)
            info = self._end_episodes(ended_ids, None if diverged is None else diverged.index_select(0, ended))
            if self.autoreset == "same_step":
                if self._wants_final_obs:
                    info["final_obs"] = self._copy_of_held()
                    info["_final_obs"] = self._mask_of(ended_ids)
            else:
                self._parked[ended_ids] = True
                self._refresh_active()
        if wanted is not None:
            active = torch.ones_like(wanted) if ids is None else self._mask_of(ids)
            info["observed"] = wanted & active if ended_ids is None else (wanted & active) | self._mask_of(ended_ids)

        restarts = ended_ids is not None and self.autoreset == "same_step"
        if restarts and not self._observers:
            self._begin(ended_ids, None)
        step = Step(
            self._copy_of_held(),
            self._scattered(ids, reward.to(torch.float32)),
            self._scattered(ids, terminated),
            self._scattered(ids, truncated),
            info,
        )
        if before is not None and acted_in is not None:
            step = self._tell_observers(
                ids, step, before, acted_in, actions, final_states, ended_ids if restarts else None
            )
        return step

    def _tell_observers(
        self,
        ids: Tensor | None,
        step: Step,
        before: Obs,
        acted_in: Tensor,
        actions: Tensor,
        states: Tensor | None,
        restarting: Tensor | None,
    ) -> Step:
        """Show the step to the observers, then start the next episodes, whose beginning they see after it."""
        env_ids = Rows(self.sim, self._slots, ids).ids
        record = StepRecord(
            env_ids=env_ids,
            episode_ids=acted_in.index_select(0, env_ids),
            obs=before,
            actions=actions,
            step=step,
            states=states,
        )
        for observer in self._observers:
            observer.after_step(record)
        if restarting is None:
            return step
        self._begin(restarting, None)
        return step._replace(obs=self._copy_of_held())

    def _begin(self, ids: Tensor | None, episode_ids: Tensor | None) -> None:
        """Start an episode in each of ``ids`` (None: all), with the given identities or the slots' next ones."""
        self.timer.start("reset")
        slots = self._slots
        everyone = torch.arange(self.num_envs, device=self.device) if ids is None else ids
        slots.begin(everyone, episode_ids)
        self.sim.reset(ids)
        rows = Rows(self.sim, slots, ids)
        self.task.reset(rows)
        self.sim.forward(ids)
        self._hold(ids, self.task.observe(Rows(self.sim, slots, ids)), None)
        if self._anyone_parked:
            self._parked[everyone] = False
            self._refresh_active()
        if self._observers:
            record = ResetRecord(
                env_ids=everyone,
                episode_ids=slots.episode_ids.index_select(0, everyone),
                seed=slots.seed,
                obs=self._copy_of_held(),
                states=self.sim.states(ids) if self._needs("states") else None,
            )
            for observer in self._observers:
                observer.after_reset(record)
        self.timer.stop()

    def _end_episodes(self, ended_ids: Tensor, diverged: Tensor | None) -> StepInfo:
        success = self.task.success(Rows(self.sim, self._slots, ended_ids))
        ends = ends_record(self._slots, ended_ids, success, diverged)
        self.divergences += 0 if diverged is None else int(diverged.sum())
        ended = self._mask_of(ended_ids)
        totals = {"r": self._slots.returns * ended, "l": self._slots.steps * ended}
        return {"ends": ends, "episode": totals, "_episode": ended}

    def _diverged_rows(self, rows: Rows, obs: Obs, reward: Tensor, failed: Tensor | None) -> Tensor | None:
        """bool (n,): rows whose simulation failed or whose numbers are not finite; None if there are none."""
        # a finite sum has finite terms only; anything else is looked at row by row
        total = reward.sum()
        for values in obs.values():
            total = total + values.sum()
        if failed is None and math.isfinite(float(total)):
            return None
        diverged = ~torch.isfinite(reward)
        for values in obs.values():
            diverged |= ~torch.isfinite(values.flatten(1)).all(dim=1)
        if failed is None and not bool(diverged.any()):
            return None
        return diverged if failed is None else diverged | torch.isin(rows.ids, failed.to(self.device))

    def _hold(self, ids: Tensor | None, obs: Obs, diverged: Tensor | None) -> None:
        """Write the rows' new observation; a diverged row keeps its last finite one."""
        keep = None if diverged is None else (~diverged).nonzero().squeeze(1)
        for name, held in self._held.items():
            values = obs[name]
            if keep is not None:
                targets = keep if ids is None else ids.index_select(0, keep)
                held[targets] = values.index_select(0, keep).to(held.dtype)
            elif ids is None:
                held.copy_(values)
            else:
                held[ids] = values.to(held.dtype)

    def _add_returns(self, ids: Tensor | None, reward: Tensor) -> None:
        if ids is None:
            self._slots.returns += reward
        else:
            self._slots.returns.index_add_(0, ids, reward)

    def _idle_step(self, wanted: Tensor | None) -> Step:
        none = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        reward = torch.zeros(self.num_envs, dtype=torch.float32, device=self.device)
        info: StepInfo = {} if wanted is None else {"observed": none.clone()}
        return Step(self._copy_of_held(), reward, none, none.clone(), info)

    def _scattered(self, ids: Tensor | None, values: Tensor) -> Tensor:
        if ids is None:
            return values
        full = torch.zeros(self.num_envs, dtype=values.dtype, device=self.device)
        full[ids] = values
        return full

    def _mask_of(self, ids: Tensor) -> Tensor:
        mask = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        mask[ids] = True
        return mask

    def _copy_of_held(self) -> Obs:
        return {name: held.clone() for name, held in self._held.items()}

    def _refresh_active(self) -> None:
        active = self.active
        self._active_ids = None if bool(active.all()) else active.nonzero().squeeze(1)
        self._anyone_parked = bool(self._parked.any())

    def _open_viewer(self) -> Viewer:
        if self._viewer is None:
            from headrace.envs.viewer import Viewer  # compiles the ray caster: only for those who look

            self._viewer = Viewer(self.task.model)
        return self._viewer

    def _needs(self, what: Literal["states", "frames"]) -> bool:
        return any(what in observer.needs for observer in self._observers)

    def _checked_observe(self, observe: Tensor) -> Tensor:
        return self._mask_of(checked_ids(observe, self.num_envs, self.device, name="observe"))

    def _check_open(self) -> None:
        if self.closed:
            raise LifecycleError("environment: expected an open one, got one that was closed; make a new one")

    def _check_ready(self, call: str) -> None:
        self._check_open()
        if not self._ready:
            raise LifecycleError(f"{call}: expected reset() first; call env.reset()")
