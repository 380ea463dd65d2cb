"""What every batch of environments has, whoever steps it: who acts, in which episodes, and who watches."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor

from headrace._device import to_device
from headrace.envs._active_set import ActiveSet
from headrace.envs._episode_state import EpisodeState
from headrace.envs._recipe import Autoreset, EnvRecipe, check_count
from headrace.envs._reset_options import ResetRequest, parse_reset_options
from headrace.errors import ConfigError, LifecycleError, ShapeError
from headrace.ids import check_ids, check_seed
from headrace.timing import StageTimer
from headrace.types import (
    Ids,
    Obs,
    ResetRecord,
    StateDict,
    Step,
    StepInfo,
    StepObserver,
    StepRecord,
    SubstepObserver,
)

AUTORESET_MODES = {"same_step": AutoresetMode.SAME_STEP, "disabled": AutoresetMode.DISABLED}


class EpisodicEnv(VectorEnv[Obs, Tensor, Tensor]):
    """N environments with episodes in them, any subset of which can act; what steps them is the subclass's.

    Owns the bookkeeping of the episodes and of who acts. Properties give copies.
    """

    def __init__(
        self,
        num_envs: int,
        device: torch.device,
        memory: Mapping[str, tuple[int, ...]],
        *,
        seed: int = 0,
        autoreset: Autoreset = "same_step",
        final_obs: bool = True,
        episode_stride: int | None = None,
    ) -> None:
        """Lay out the bookkeeping of ``num_envs`` environments; ``memory`` is what a task keeps per environment."""
        self.num_envs = num_envs
        self.device = device
        self.autoreset: Autoreset = autoreset
        self.recipe: EnvRecipe | None = None
        """How to make this environment again; None where it was made from an object instead of a name."""
        self.timer = StageTimer()
        self.divergences = 0
        """How many episodes ended because their simulation failed or gave numbers that are not finite."""
        self._wants_final_obs = final_obs
        if episode_stride is not None:
            check_count("episode_stride", episode_stride)
        self._episodes = EpisodeState(num_envs, device, memory, episode_stride)
        self._episodes.seed = check_seed(seed)
        self._active_set = ActiveSet(num_envs, device)
        self._observers: list[StepObserver] = []
        self._instructions = [""] * num_envs
        self._ready = False
        self._failure = ""
        """What interrupted the last step or reset halfway, if something did: then only a reset of all helps."""
        self._busy = False
        self.closed = False

    # --- who acts -----------------------------------------------------------------------------------------------

    @property
    def active(self) -> Tensor:
        """bool (N,), a copy: the environments that the next ``step`` will advance."""
        return self._active_set.active

    @property
    def suspended(self) -> Tensor:
        """bool (N,), a copy: suspended by the caller, whether or not their episode has ended."""
        return to_device(self._active_set.suspended.clone(), self.device)

    @property
    def episode_ids(self) -> Tensor:
        """int64 (N,), a copy: the episode each environment is in."""
        return self._episodes.episode_ids.clone()

    @property
    def episode_steps(self) -> Tensor:
        """int64 (N,), a copy: the steps each environment has taken in its episode."""
        return self._episodes.steps.clone()

    @property
    def seed(self) -> int:
        """The seed of the current episodes."""
        return self._episodes.seed

    def suspend(self, ids: Ids) -> None:
        """Freeze environments until ``resume``, as ``fidelity`` says. Suspending one twice is a no-op."""
        self._check_open()
        self._active_set.suspend(ids)

    def resume(self, ids: Ids) -> None:
        """Let suspended environments act again. Resuming one that is active is a no-op."""
        self._check_open()
        self._active_set.resume(ids)

    def instructions(self, ids: Ids | None = None) -> tuple[str, ...]:
        """What each environment (None: all) is told to do in its current episode; "" where there is nothing.

        Texts come in the order of the ids, those of a mask in ascending order, and do not change within an episode.
        """
        self._check_ready("instructions")
        if ids is None:
            return tuple(self._instructions)
        rows = check_ids(ids, self.num_envs, self.device, ascending=False)
        return tuple([self._instructions[row] for row in rows.tolist()])

    suspend_envs = suspend
    resume_envs = resume

    # --- who watches --------------------------------------------------------------------------------------------

    def attach(self, observer: StepObserver) -> None:
        """Let ``observer`` see every step and reset from now on. Attach before ``reset`` to see episodes begin."""
        if "substeps" in observer.needs and not isinstance(observer, SubstepObserver):
            raise ConfigError(
                f"attach: {type(observer).__name__} needs substeps, but has no method after_substep(record); add one"
            )
        self._observers.append(observer)

    def detach(self, observer: StepObserver) -> None:
        """Stop showing steps to ``observer``."""
        self._observers.remove(observer)

    # --- steps --------------------------------------------------------------------------------------------------

    def step(  # pyright: ignore[reportIncompatibleMethodOverride]  # Step is the same five, with names
        self, actions: Tensor, observe: Tensor | None = None
    ) -> Step:
        """Advance the active environments by one step.

        Args:
            actions: one row per environment as the action space says: floats for Box, integers for the others. Rows of
                environments that are not active are ignored.
            observe: bool (N,): whose cameras will be read; None for all. Rows that end are always observed, and a
                bridged environment observes whenever it steps.
        """
        if self._busy or self.closed or not self._ready:
            self._refuse("step")
        self._busy = True
        try:
            return self._step(actions, observe)
        finally:
            self._busy = False

    # --- for subclasses -----------------------------------------------------------------------------------------

    def _step(self, actions: Tensor, observe: Tensor | None) -> Step:
        """:meth:`step`, when it is known that it may be called."""
        raise NotImplementedError(f"{type(self).__name__} must override _step(actions, observe)")

    def _shown(self) -> Obs:
        """The observation that every environment shows, (N, …), fresh."""
        raise NotImplementedError(f"{type(self).__name__} must override _shown()")

    def _bookkeeping(self, name: str) -> dict[str, object]:
        """The part of a snapshot of ``name`` that is kept here, as copies."""
        return {
            "task": name,
            "num_envs": self.num_envs,
            "seed": self._episodes.seed,
            "divergences": self.divergences,
            "episodes": {name: values.clone() for name, values in self._episodes.tensors().items()},
            "suspended": self._active_set.suspended.clone(),
            "parked": self._active_set.parked.clone(),
            "instructions": list(self._instructions),
        }

    def _load_bookkeeping(self, state: StateDict) -> None:
        """Go on from a snapshot that is known to be fine; the environments themselves have been put back."""
        for name, values in self._episodes.tensors().items():
            values.copy_(state["episodes"][name])
        self._episodes.seed = int(state["seed"])
        self.divergences = int(state["divergences"])
        self._active_set.suspended.copy_(state["suspended"])
        self._active_set.parked.copy_(state["parked"])
        self._active_set.refresh()
        self._instructions = list(state["instructions"])
        self._ready, self._failure = True, ""

    def _instruct(self, ids: Tensor, texts: Sequence[str] | None) -> None:
        """Note what the episodes that begin in ``ids`` (m,) are told to do, m texts; None for nothing."""
        if texts is None:
            return
        if len(texts) != len(ids):
            raise ShapeError(f"instructions: expected one text for each of {len(ids)} rows, got {len(texts)}")
        for env_id, text in zip(ids.tolist(), texts, strict=True):
            self._instructions[env_id] = text

    def _reset_request(self, options: dict[str, object] | None) -> ResetRequest:
        """What a reset asks for, when it is known that it may be called."""
        self._check_open()
        request = parse_reset_options(options, self.num_envs, self.device)
        if not self._ready and request.ids is not None:
            if self._failure:
                self._check_ready("reset with reset_mask")
            raise LifecycleError("reset: the first reset must be of all environments; call reset() without reset_mask")
        return request

    def _show_step(self, env_ids: Tensor, actions: Tensor, step: Step, states: Tensor | None) -> None:
        """Let the observers see the step: its observation is the true last one where an episode ended."""
        episode_ids = self._episodes.episode_ids.index_select(0, env_ids)
        record = StepRecord(env_ids=env_ids, episode_ids=episode_ids, actions=actions, step=step, states=states)
        for observer in self._observers:
            observer.after_step(record)

    def _show_reset(self, env_ids: Tensor, host: Tensor, obs: Obs, states: Tensor | None) -> None:
        """Let the observers see episodes that begin in ``env_ids`` (m,), on the host ``host``."""
        record = ResetRecord(
            env_ids=env_ids,
            episode_ids=self._episodes.episode_ids.index_select(0, env_ids),
            seed=self._episodes.seed,
            obs=obs,
            states=states,
            instructions=tuple([self._instructions[env_id] for env_id in host.tolist()]),
        )
        for observer in self._observers:
            observer.after_reset(record)

    def _idle_step(self, wanted: Tensor | None) -> Step:
        """A step in which nobody acts."""
        none = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        reward = torch.zeros(self.num_envs, dtype=torch.float32, device=self.device)
        info: StepInfo = {} if wanted is None else {"observed": none.clone()}
        return Step(self._shown(), reward, none, none.clone(), info)

    def _mask_of(self, ids: Tensor) -> Tensor:
        mask = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        if self.device.type == "cpu":
            mask.numpy()[ids.numpy()] = True  # a third of the time of torch's own
        else:
            mask[ids] = True
        return mask

    @contextmanager
    def _alone(self, call: str) -> Generator[None]:
        """Refuse a call from inside a step or reset (an observer, a task, another thread)."""
        if self._busy:
            self._refuse(call)
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _check_open(self) -> None:
        if self.closed:
            self._refuse("")

    def _check_ready(self, call: str) -> None:
        if self.closed or not self._ready:
            self._refuse(call)

    def _refuse(self, call: str) -> NoReturn:
        """Say why ``call`` cannot be made now."""
        if self.closed:
            raise LifecycleError("the environment is closed; create a new one")
        if self._busy:
            raise LifecycleError(
                f"{call}() called while the environment steps or resets; call it after step() or reset() has returned, "
                "and from one thread at a time"
            )
        if self._failure:
            raise LifecycleError(
                f"{call}() called after a step or reset that failed halfway ({self._failure}); the environments no "
                "longer belong together: call reset() to start all of them again"
            )
        raise LifecycleError(f"{call}() called before reset(); call reset() first")

    def _fail(self, error: BaseException) -> None:
        """Note that a step or reset was interrupted halfway."""
        self._ready = False
        self._failure = f"{type(error).__name__}: {error}"
        self.timer.stop()
